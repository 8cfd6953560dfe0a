"""From a weights option to a running engine: files, device, parameters, K/V pools. Shared by `LLM` and tests."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupaged.errors import OptionError, shown

if TYPE_CHECKING:
    from cupaged.device.base import Device
    from cupaged.engine import Engine
    from cupaged.kernels.interface import StorageType, WeightSource, WeightType
    from cupaged.memory_plan import MemoryPlan
    from cupaged.model.checkpoint import Checkpoint
    from cupaged.model.parameters import Parameters
    from cupaged.model.tokenizer import Tokenizer

DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTISATIONS = {"q8_0": "Q8_0", "q4_0": "Q4_0"}
MAX_BLOCK_SIZE = 256
DEFAULT_BATCH_TOKENS = 512
DEFAULT_SEQUENCES = 64
DEFAULT_PACE = 2.0
NO_PACE = 1000  # no limit
_NAMED = 3  # tensors in a warning; the rest is counted


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
    quantize: str | None = None
    prefix_cache: bool = True
    tokenizer: bool = True
    pace: float | None = None
    deterministic: bool = False
    graphs: bool = True

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
        if self.quantize is not None:
            if self.quantize not in QUANTISATIONS:
                raise OptionError(f"quantize: {shown(self.quantize)} is not one of {', '.join(QUANTISATIONS)}")
            if self.dtype != "auto":
                raise OptionError(f"quantize: {self.quantize} and dtype {self.dtype} exclude each other")
        for name in ("prefix_cache", "tokenizer", "deterministic", "graphs"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}: {shown(getattr(self, name))} is not True or False")
        pace = DEFAULT_PACE if self.pace is None else self.pace
        if isinstance(pace, bool) or not isinstance(pace, int | float) or not 1 <= pace <= NO_PACE:
            raise OptionError(f"pace: {shown(self.pace)} is not a number in 1..{NO_PACE}")
        for name in ("kv_memory", "swap_memory"):
            if getattr(self, name) is not None:
                parse_bytes(name, getattr(self, name), 1 << 62)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's files, checked but not loaded, and how its weights and K/V will be kept. kept: bytes by format."""

    path: Path
    checkpoint: Checkpoint
    tensors: Mapping[str, WeightSource]
    dtype: WeightType
    kept: dict[str, int]
    kv_dtype: StorageType

    def prepare(self, device: Device, block_size: int) -> None:
        """Have the kernels at hand that the model needs on a device."""
        from cupaged.device.base import ModelShape

        config = self.checkpoint.config
        group = config.num_heads // config.num_kv_heads
        shape = ModelShape(config.head_dim, group, block_size, config.activation)
        device.prepare(self.kept, self.kv_dtype, shape, self.dtype == "float32")


@dataclass(slots=True)
class LoadedModel:
    """Everything behind an `LLM`. kept: bytes of the matrices in memory, by what they are kept as (Q4_1, float16)."""

    checkpoint: Checkpoint
    device: Device
    tokenizer: Tokenizer | None
    parameters: Parameters
    dtype: WeightType
    kept: dict[str, int]
    memory: MemoryPlan
    engine: Engine


class Reports:
    """Calls that turn (done, total) into events for the sink; None where there is none."""

    def __init__(self, sink: ProgressSink | None) -> None:
        self._sink = sink

    def of(self, stage: str, unit: str) -> Callable[..., None] | None:
        sink = self._sink
        return None if sink is None else lambda done, total=None: sink(ProgressEvent(stage, done, total, unit))

    def say(self, line: str) -> None:
        if self._sink is not None:
            self._sink(ProgressEvent(line, 0, None, ""))


def open_model(weights: str | Path, options: LoadOptions, reports: Reports, device: Device) -> OpenedModel:
    """Resolve (and fetch, if need be), open and check, for a device; nothing big is read yet."""
    from cupaged.model.checkpoint import open_checkpoint
    from cupaged.model.parameters import kept_bytes, weight_type
    from cupaged.model.source import resolve_weights

    path = resolve_weights(str(weights), reports.say)
    checkpoint = open_checkpoint(path)
    tensors = _as_asked(checkpoint, options.quantize)
    stored = checkpoint.config.stored_dtype
    dtype: Any = weight_type(tensors, stored) if options.dtype == "auto" else options.dtype
    kv_dtype: Any = _kv_dtype(dtype, device.kind) if options.kv_dtype == "auto" else options.kv_dtype
    kept = kept_bytes(tensors, dtype, device.as_stored)
    return OpenedModel(path, checkpoint, tensors, dtype, kept, kv_dtype)


def chosen_device(options: LoadOptions, reports: Reports) -> Device:
    """The device that was asked for: before the files, so that one that is not there is told before a download."""
    from cupaged.device import make_device

    device = make_device(
        options.device, options.threads, reports.of("kernels", "kernels"),
        deterministic=options.deterministic, graphs=options.graphs,
    )  # fmt: skip
    if not options.graphs and device.kind == "cpu":
        device.close()
        raise OptionError("graphs: False is for device cuda; device cpu has no graphs to leave out")
    return device


def load_model(weights: str | Path, options: LoadOptions, progress: ProgressSink | None = None) -> LoadedModel:
    """Resolve, open, check, and only then load: what can be refused is refused before anything big is read."""
    from cupaged.background import Background
    from cupaged.cache import PagedKVCache
    from cupaged.engine import Engine
    from cupaged.memory import BlockManager, GroupSpec, blocks_for
    from cupaged.memory_plan import plan_memory
    from cupaged.model.decoder import Decoder, scratch_shapes
    from cupaged.model.parameters import load_parameters
    from cupaged.model.tokenizer import load_tokenizer
    from cupaged.step_plan import PROMPT_ROWS

    reports = Reports(progress)
    device = chosen_device(options, reports)
    try:
        opened = open_model(weights, options, reports, device)
        checkpoint, dtype, kept, kv_dtype = opened.checkpoint, opened.dtype, opened.kept, opened.kv_dtype
        config, path = checkpoint.config, opened.path
        metadata = checkpoint.metadata if checkpoint.kind == "gguf" else checkpoint.metadata["config.json"]
        # Its part of a start is Python's alone, while weights are packed by native code.
        read = partial(load_tokenizer, path, checkpoint.kind, metadata)
        reading = Background(read) if options.tokenizer else None
        opened.prepare(device, options.block_size)
        max_tokens = options.max_batch_tokens or DEFAULT_BATCH_TOKENS
        max_sequences = min(options.max_sequences or DEFAULT_SEQUENCES, max_tokens)
        rows = max_sequences + PROMPT_ROWS
        weight_bytes = device.weight_bytes(kept)
        scratch_bytes = sum(4 * math.prod(shape) for shape in scratch_shapes(config, max_tokens, rows).values())
        available = device.memory().available - weight_bytes - scratch_bytes
        memory = plan_memory(
            config, kv_dtype, options.block_size, options.kv_memory, options.max_model_len, available, weight_bytes,
            options.swap_memory, None if device.unified else device.host_memory().available,
        )  # fmt: skip
        parameters = load_parameters(config, opened.tensors, device.ops, dtype, reports.of("weights", "parts"))
        decoder = Decoder(config, parameters, device.ops, device.empty, device.upload, max_tokens, rows)
        shape = (memory.num_blocks, memory.block_size, config.num_kv_heads, config.head_dim)
        caches = [
            PagedKVCache(*shape, len(group.layers), kv_dtype, device, host_blocks=memory.host_blocks)
            for group in config.kv_groups
        ]
        row = blocks_for(memory.max_model_len, memory.block_size)
        specs = [
            GroupSpec(memory.num_blocks, memory.block_size, row, memory.host_blocks, group.window)
            for group in config.kv_groups
        ]
        manager = BlockManager(specs, memory.host_blocks > 0, options.prefix_cache)
        tokenizer = None if reading is None else reading.result()
        eos = frozenset(config.eos_token_ids) | (frozenset() if tokenizer is None else tokenizer.eos_token_ids)
        engine = Engine(
            config, decoder, caches, manager, device,
            max_model_len=memory.max_model_len, max_tokens=max_tokens, max_sequences=max_sequences, eos_ids=eos,
            make_detokenizer=None if tokenizer is None else tokenizer.detokenizer,
            encode=None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False),
            pace=math.inf if options.pace == NO_PACE else options.pace or DEFAULT_PACE,
        )  # fmt: skip
    except BaseException:
        device.close()
        raise
    return LoadedModel(checkpoint, device, tokenizer, parameters, dtype, kept, memory, engine)


def _as_asked(checkpoint: Checkpoint, quantize: str | None) -> Mapping[str, WeightSource]:
    """The weights, narrowed if that is asked for; a warning names matrices that cannot be."""
    from cupaged.model.weights import quantised_tensors

    if quantize is None:
        return checkpoint.tensors
    tensors, left = quantised_tensors(checkpoint.tensors, QUANTISATIONS[quantize], str(checkpoint.path))
    if left:
        named = ", ".join(left[:_NAMED]) + (f" and {len(left) - _NAMED} more" if len(left) > _NAMED else "")
        warnings.warn(
            f"{checkpoint.path}: not quantised but kept as stored: {named}; rows of {tensors[left[0]].shape[1]} values "
            "are no whole blocks of 32",
            stacklevel=2,
        )
    return tensors


def _kv_dtype(dtype: WeightType, device: str) -> StorageType:
    """K/V follow the weights; beside quantised ones they are what the device multiplies fastest in 16 bits."""
    if dtype == "quantised":
        return "bfloat16" if device == "cpu" else "float16"
    return dtype
