"""From a weights option to a running engine: files, device, parameters, K/V pools. Shared by `LLM` and tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupaged.errors import OptionError, shown

if TYPE_CHECKING:
    from cupaged.device.base import Device
    from cupaged.engine import Engine
    from cupaged.kernels.interface import StorageType
    from cupaged.memory_plan import MemoryPlan
    from cupaged.model.checkpoint import Checkpoint
    from cupaged.model.parameters import Parameters
    from cupaged.model.tokenizer import Tokenizer

DTYPES = ("auto", "float32", "float16", "bfloat16")
MAX_BLOCK_SIZE = 256
DEFAULT_BATCH_TOKENS = 512
DEFAULT_SEQUENCES = 64
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Something that takes time has got so far. `total` None: not known."""

    stage: str  # "kernels" (compiling), "weights", or a line about a download
    done: int
    total: int | None
    unit: str


ProgressSink = Callable[[ProgressEvent], None]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of `LLM`, checked when made; OptionError names option, value and what is allowed."""

    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    kv_memory: int | str | None = None
    max_model_len: int | None = None
    threads: int | None = None
    max_batch_tokens: int | None = None
    max_sequences: int | None = None
    swap_memory: int | str | None = None

    def __post_init__(self) -> None:
        from cupaged.device import DEVICE_NAMES
        from cupaged.memory_plan import parse_bytes

        for name, allowed in (("device", DEVICE_NAMES), ("dtype", DTYPES), ("kv_dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise OptionError(f"{name}: {shown(getattr(self, name))} is not one of {', '.join(allowed)}")
        limits = {
            "block_size": MAX_BLOCK_SIZE,
            "max_model_len": 2**31 - 1,
            "threads": 256,
            "max_batch_tokens": 1 << 16,
            "max_sequences": 4096,
        }
        for name, high in limits.items():
            value = getattr(self, name)
            if value is None and name != "block_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise OptionError(f"{name}: {shown(value)} is not a whole number in 1..{high}")
        for name in ("kv_memory", "swap_memory"):
            if getattr(self, name) is not None:
                parse_bytes(name, getattr(self, name), 1 << 62)


@dataclass(slots=True)
class LoadedModel:
    """Everything behind an `LLM`."""

    checkpoint: Checkpoint
    device: Device
    tokenizer: Tokenizer | None
    parameters: Parameters
    dtype: StorageType
    memory: MemoryPlan
    engine: Engine


def load_model(weights: str | Path, options: LoadOptions, progress: ProgressSink | None = None) -> LoadedModel:
    """Resolve, open, check, and only then load: what can be refused is refused before anything big is read."""
    from cupaged.cache import PagedKVCache
    from cupaged.device import make_device
    from cupaged.engine import Engine
    from cupaged.kernels.interface import STORAGE_BYTES
    from cupaged.memory import BlockManager, GroupSpec, blocks_for
    from cupaged.memory_plan import plan_memory
    from cupaged.model.checkpoint import open_checkpoint
    from cupaged.model.decoder import Decoder, scratch_shapes
    from cupaged.model.parameters import load_parameters
    from cupaged.model.source import resolve_weights
    from cupaged.model.tokenizer import load_tokenizer
    from cupaged.scheduler import PROMPT_ROWS

    def report(stage: str, unit: str) -> Callable[..., None]:
        def call(done: int, total: int | None = None) -> None:
            if progress is not None:
                progress(ProgressEvent(stage, done, total, unit))

        return call

    def say(line: str) -> None:
        if progress is not None:
            progress(ProgressEvent(line, 0, None, ""))

    path = resolve_weights(str(weights), say)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    metadata = checkpoint.metadata if checkpoint.kind == "gguf" else checkpoint.metadata["config.json"]
    tokenizer = load_tokenizer(path, checkpoint.kind, metadata)
    dtype: Any = _STORED.get(config.stored_dtype, "float16") if options.dtype == "auto" else options.dtype
    kv_dtype: Any = dtype if options.kv_dtype == "auto" else options.kv_dtype

    device = make_device(options.device, options.threads, report("kernels", "kernels"))
    try:
        max_tokens = options.max_batch_tokens or DEFAULT_BATCH_TOKENS
        max_sequences = min(options.max_sequences or DEFAULT_SEQUENCES, max_tokens)
        rows = max_sequences + PROMPT_ROWS
        weight_bytes = sum(math.prod(source.shape) * STORAGE_BYTES[dtype] for source in checkpoint.tensors.values())
        scratch_bytes = sum(4 * math.prod(shape) for shape in scratch_shapes(config, max_tokens, rows).values())
        available = device.memory().available - weight_bytes - scratch_bytes
        memory = plan_memory(
            config, kv_dtype, options.block_size, options.kv_memory, options.max_model_len, available, weight_bytes,
            options.swap_memory, None if device.unified else device.host_memory().available,
        )  # fmt: skip
        parameters = load_parameters(config, checkpoint.tensors, device.ops, dtype, report("weights", "parts"))
        decoder = Decoder(config, parameters, device.ops, device.empty, device.upload, max_tokens, rows)
        shape = (memory.num_blocks, memory.block_size, config.num_kv_heads, config.head_dim)
        caches = [
            PagedKVCache(*shape, len(group.layers), kv_dtype, device, host_blocks=memory.host_blocks)
            for group in config.kv_groups
        ]
        row = blocks_for(memory.max_model_len, memory.block_size)
        spec = GroupSpec(memory.num_blocks, memory.block_size, row, memory.host_blocks)
        manager = BlockManager([spec for _ in config.kv_groups], in_place=memory.host_blocks > 0)
        eos = frozenset(config.eos_token_ids) | (frozenset() if tokenizer is None else tokenizer.eos_token_ids)
        engine = Engine(
            config, decoder, caches, manager, device,
            max_model_len=memory.max_model_len, max_tokens=max_tokens, max_sequences=max_sequences, eos_ids=eos,
            make_detokenizer=None if tokenizer is None else tokenizer.detokenizer,
            encode=None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False),
        )  # fmt: skip
    except BaseException:
        device.close()
        raise
    return LoadedModel(checkpoint, device, tokenizer, parameters, dtype, memory, engine)
