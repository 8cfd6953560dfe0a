"""The compiled forms of the kernels that models ask for, as data: what is compiled ahead, tabled and checked.

`builds(architecture, shared_limit)` is what the launch layer would choose for usual models on such a device, so that
docs/cuda-resources.md and the bench's compile checks speak of the kernels as they are launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from cupaged.errors import KernelError
from cupaged.kernels.cuda.attention import (
    ROW_VARIANTS,
    STORAGE,
    TENSOR_ROWS,
    Variant,
    plain_variant,
    tensor_variant,
    uses_tensor_cores,
)
from cupaged.kernels.cuda.dense import ACTIVATIONS
from cupaged.kernels.cuda.packing import FORMATS
from cupaged.kernels.cuda.products import TOKENS
from cupaged.kernels.interface import STORAGE_BYTES, Activation, StorageType

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Build:
    """One compiled kernel. `label`: what sets it apart, for people. shared_bytes: dynamic shared memory. in_flight:
    bytes that a block has on their way from global memory at once, 0 where no ring is kept."""

    source: str
    kernel: str
    label: str
    defines: dict[str, int]
    threads: int
    shared_bytes: int = 0
    in_flight: int = 0


class Shape(Protocol):
    """What of a model decides between variants. group: query heads of a KV head."""

    @property
    def head_dim(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def activation(self) -> Activation: ...


def builds(architecture: int, shared_limit: int) -> Iterator[Build]:
    """What is launched on a device of this compute capability whose blocks may have so much shared memory.

    A variant of attention that such a device cannot hold is left out; the launch layer refuses it by name.
    """
    yield from _attention(architecture, shared_limit)
    for dtype in STORAGE:
        yield Build("write_kv.cu", "write_kv", dtype, {"STORAGE": STORAGE[dtype]}, 256)
    yield Build("copy_blocks.cu", "copy_blocks", "", {"UNIT_BYTES": 16}, 256)
    for name in ("rms_norm", "layer_norm", "head_norm"):
        yield Build("norms.cu", name, "", {}, 256)
    for name in ("rope", "add", "take_rows", "finish_rows"):
        yield Build("elementwise.cu", name, "", {}, 256)
    for dtype in STORAGE:
        yield Build("elementwise.cu", "narrow_rows", dtype, {"STORAGE": STORAGE[dtype]}, 256)
    for activation, number in ACTIVATIONS.items():
        yield Build("elementwise.cu", "gated_activation", activation, {"ACTIVATION": number}, 256)
    for kind, number in FORMATS.items():
        for tokens in (1, 8):
            yield Build("matmul.cu", "matmul", f"{kind}, {tokens} rows", {"FORMAT": number, "TOKENS": tokens}, 128)
        yield Build("dequantise.cu", "embed", kind, {"FORMAT": number}, 128)
        yield Build("dequantise.cu", "dequantise", kind, {"FORMAT": number, "STORAGE": 1}, 128)
    for name in ("sample_max", "sample_broken", "sample_weights", "sample_select"):
        yield Build("sample.cu", name, "", {}, 256)


def builds_for(
    architecture: int, shared_limit: int, weights: Iterable[str], cache: StorageType, shape: Shape | None
) -> Iterator[Build]:
    """What a model launches. weights: what its matrices are kept as (`interface.kept_type`); cache: the type of K/V;
    shape: see `cupaged.device.base.ModelShape`, None leaves out what depends on it."""
    for name in ("rms_norm", "head_norm"):
        yield Build("norms.cu", name, "", {}, 256)
    for name in ("rope", "add", "take_rows", "finish_rows"):
        yield Build("elementwise.cu", name, "", {}, 256)
    for name in ("sample_max", "sample_broken", "sample_weights", "sample_select"):
        yield Build("sample.cu", name, "", {}, 256)
    yield Build("write_kv.cu", "write_kv", cache, {"STORAGE": STORAGE[cache]}, 256)
    yield Build("copy_blocks.cu", "copy_blocks", "", {"UNIT_BYTES": 16}, 256)
    for kind in dict.fromkeys(kind if kind in FORMATS else "float16" for kind in weights):
        number = FORMATS[kind]
        for tokens in TOKENS:
            yield Build("matmul.cu", "matmul", f"{kind}, {tokens} rows", {"FORMAT": number, "TOKENS": tokens}, 128)
        yield Build("dequantise.cu", "embed", kind, {"FORMAT": number}, 128)
        narrow = kind if kind in STORAGE else "float16"
        if kind not in STORAGE:
            yield Build("dequantise.cu", "dequantise", kind, {"FORMAT": number, "STORAGE": STORAGE[narrow]}, 128)
        yield Build("elementwise.cu", "narrow_rows", narrow, {"STORAGE": STORAGE[narrow]}, 256)
    if shape is not None:
        number = ACTIVATIONS[shape.activation]
        yield Build("elementwise.cu", "gated_activation", shape.activation, {"ACTIVATION": number}, 256)
        yield from _attention_for(architecture, shared_limit, cache, shape)


def _attention_for(architecture: int, shared_limit: int, cache: str, shape: Shape) -> Iterator[Build]:
    tensor = uses_tensor_cores(architecture, cache, shape.group, None)
    make = tensor_variant if tensor else plain_variant
    layout = {"HEAD_DIM": shape.head_dim, "STORAGE": STORAGE[cache], "BLOCK_SIZE": shape.block_size}
    layout |= {"WIDE_LOADS": int(shape.head_dim * STORAGE_BYTES[cache] % 16 == 0), "K_TRANSPOSED": 0}
    for rows in TENSOR_ROWS if tensor else ROW_VARIANTS:
        if rows < min(shape.group, ROW_VARIANTS[-1]):
            continue  # a decoding token brings more
        variant = _fitting(make, shape.head_dim, cache, rows, shared_limit, shape.block_size)
        if variant is not None:
            yield _build(variant, f"{shape.head_dim} {cache}, {rows} rows", layout)
    yield Build("merge_parts.cu", "merge_parts", f"{shape.head_dim}", {"HEAD_DIM": shape.head_dim}, 128)


def _build(variant: Variant, label: str, layout: dict[str, int]) -> Build:
    return Build(
        variant.source, variant.kernel, label, layout | variant.defines, variant.threads, variant.shared_bytes,
        variant.in_flight,
    )  # fmt: skip


def _attention(architecture: int, shared_limit: int) -> Iterator[Build]:
    for head_dim in (64, 80, 96, 128, 256):
        for dtype in ("float16", "bfloat16", "float32"):
            layout = {"HEAD_DIM": head_dim, "STORAGE": STORAGE[dtype], "BLOCK_SIZE": BLOCK_SIZE}
            layout |= {"WIDE_LOADS": 1, "K_TRANSPOSED": 0}
            chosen: list[Variant] = []
            for rows in (1, 4, 8):
                if (variant := _fitting(plain_variant, head_dim, dtype, rows, shared_limit)) is not None:
                    chosen.append(variant)
            if architecture >= 80 and dtype != "float32":
                for rows in TENSOR_ROWS:
                    if (variant := _fitting(tensor_variant, head_dim, dtype, rows, shared_limit)) is not None:
                        chosen.append(variant)
            for variant in chosen:
                yield _build(variant, f"{head_dim} {dtype}, {variant.rows} rows", layout)
        yield Build("merge_parts.cu", "merge_parts", f"{head_dim}", {"HEAD_DIM": head_dim}, 128)


def _fitting(
    make: Callable[[int, str, int, int, int], Variant], head_dim: int, dtype: str, rows: int, shared_limit: int,
    block_size: int = BLOCK_SIZE,
) -> Variant | None:  # fmt: skip
    try:
        return make(head_dim, dtype, block_size, rows, shared_limit)
    except KernelError:
        return None
