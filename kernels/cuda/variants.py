"""The compiled forms of the kernels that models ask for, as data: what is compiled ahead, tabled and checked.

`builds(architecture, shared_limit)` is what the launch layer would choose for usual models on such a device, so that
docs/cuda-resources.md and the bench's compile checks speak of the kernels as they are launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupaged.errors import KernelError
from cupaged.kernels.cuda.attention import STORAGE, TENSOR_ROWS, Variant, plain_variant, tensor_variant
from cupaged.kernels.cuda.dense import ACTIVATIONS
from cupaged.kernels.cuda.packing import FORMATS

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
    for name in ("rope", "add", "take_rows"):
        yield Build("elementwise.cu", name, "", {}, 256)
    for activation, number in ACTIVATIONS.items():
        yield Build("elementwise.cu", "gated_activation", activation, {"ACTIVATION": number}, 256)
    for kind, number in FORMATS.items():
        for tokens in (1, 8):
            yield Build("matmul.cu", "matmul", f"{kind}, {tokens} rows", {"FORMAT": number, "TOKENS": tokens}, 128)
        yield Build("dequantise.cu", "embed", kind, {"FORMAT": number}, 128)
        yield Build("dequantise.cu", "dequantise", kind, {"FORMAT": number, "STORAGE": 1}, 128)
    for name in ("sample_max", "sample_broken", "sample_weights", "sample_select"):
        yield Build("sample.cu", name, "", {}, 256)


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
                yield Build(
                    variant.source, variant.kernel, f"{head_dim} {dtype}, {variant.rows} rows",
                    layout | variant.defines, variant.threads, variant.shared_bytes, variant.in_flight,
                )  # fmt: skip
        yield Build("merge_parts.cu", "merge_parts", f"{head_dim}", {"HEAD_DIM": head_dim}, 128)


def _fitting(make: object, head_dim: int, dtype: str, rows: int, shared_limit: int) -> Variant | None:
    try:
        return make(head_dim, dtype, BLOCK_SIZE, rows, shared_limit)  # type: ignore[operator,no-any-return]
    except KernelError:
        return None
