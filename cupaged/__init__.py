"""cupaged: an LLM inference runtime without PyTorch. `from cupaged import LLM, SamplingParams`.

Names are imported when first used, so that `import cupaged` costs next to nothing and creates no device context.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout that is not installed, kernels/, model/, cli/ and bench/ lie beside this folder; installed, in it.
_root = Path(__file__).resolve().parent.parent
if all((_root / room).is_dir() for room in ("cupaged", "kernels", "model", "cli")):
    __path__.append(str(_root))

_HOMES = {
    "AsyncEngine": "cupaged.async_engine",
    "LLM": "cupaged.llm",
    "Engine": "cupaged.engine",
    "SamplingParams": "cupaged.sampling",
    "RequestOutput": "cupaged.outputs",
    "CompletionOutput": "cupaged.outputs",
    "StreamPiece": "cupaged.outputs",
    "RequestMetrics": "cupaged.outputs",
    "PieceStream": "cupaged.piece_stream",
    "ProgressEvent": "cupaged.loading",
    "Usage": "cupaged.outputs",
    "BlockPool": "cupaged.memory",
    "BlockTable": "cupaged.memory",
    "PagedKVCache": "cupaged.cache",
    "write_kv": "cupaged.attention",
    "paged_attention": "cupaged.attention",
    "CapacityError": "cupaged.errors",
    "CupagedError": "cupaged.errors",
    "DeviceError": "cupaged.errors",
    "DownloadError": "cupaged.errors",
    "KernelError": "cupaged.errors",
    "ModelFileError": "cupaged.errors",
    "OptionError": "cupaged.errors",
    "QueueFullError": "cupaged.errors",
    "RequestError": "cupaged.errors",
    "TemplateError": "cupaged.errors",
    "TokenizerError": "cupaged.errors",
    "UnsupportedModelError": "cupaged.errors",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BlockPool",
    "BlockTable",
    "CapacityError",
    "CompletionOutput",
    "CupagedError",
    "DeviceError",
    "DownloadError",
    "Engine",
    "KernelError",
    "ModelFileError",
    "OptionError",
    "PagedKVCache",
    "PieceStream",
    "ProgressEvent",
    "QueueFullError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamPiece",
    "TemplateError",
    "TokenizerError",
    "UnsupportedModelError",
    "Usage",
    "__version__",
    "paged_attention",
    "write_kv",
]

if TYPE_CHECKING:
    from cupaged.async_engine import AsyncEngine as AsyncEngine
    from cupaged.attention import paged_attention as paged_attention
    from cupaged.attention import write_kv as write_kv
    from cupaged.cache import PagedKVCache as PagedKVCache
    from cupaged.engine import Engine as Engine
    from cupaged.errors import CapacityError as CapacityError
    from cupaged.errors import CupagedError as CupagedError
    from cupaged.errors import DeviceError as DeviceError
    from cupaged.errors import DownloadError as DownloadError
    from cupaged.errors import KernelError as KernelError
    from cupaged.errors import ModelFileError as ModelFileError
    from cupaged.errors import OptionError as OptionError
    from cupaged.errors import QueueFullError as QueueFullError
    from cupaged.errors import RequestError as RequestError
    from cupaged.errors import TemplateError as TemplateError
    from cupaged.errors import TokenizerError as TokenizerError
    from cupaged.errors import UnsupportedModelError as UnsupportedModelError
    from cupaged.llm import LLM as LLM
    from cupaged.loading import ProgressEvent as ProgressEvent
    from cupaged.memory import BlockPool as BlockPool
    from cupaged.memory import BlockTable as BlockTable
    from cupaged.outputs import CompletionOutput as CompletionOutput
    from cupaged.outputs import RequestMetrics as RequestMetrics
    from cupaged.outputs import RequestOutput as RequestOutput
    from cupaged.outputs import StreamPiece as StreamPiece
    from cupaged.outputs import Usage as Usage
    from cupaged.piece_stream import PieceStream as PieceStream
    from cupaged.sampling import SamplingParams as SamplingParams


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cupaged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
