"""The CPU kernels against this machine's roofs, measured in the same rounds. `cupaged bench kernels`, and its parts.

A kernel bound by memory is compared with the read bandwidth that the same threads reach, one bound by arithmetic with
the multiply-adds, or the dot products of bytes, that they reach (against.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cupaged.bench.against import Measurement, measure
from cupaged.bench.cases import AttentionShape, Case, attention_case, matmul_case
from cupaged.bench.roofs import Roofs
from cupaged.device.cpu import CpuDevice
from cupaged.loading import ProgressSink, Reports

# Outputs x inputs of SmolLM2-135M's matrices (q, k and v together; gate and up together) and of one like a 7B model's.
SMOLLM2 = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
SHAPES = (*SMOLLM2, (4096, 4096))
HEADS = ((9, 3, 64), (32, 8, 128))


def matmul_cases(
    device: CpuDevice, dtypes: Sequence[str], shapes: Sequence[tuple[int, int]], counts: Sequence[int]
) -> Iterator[Case]:
    """Each type with each shape (outputs, inputs) and number of rows."""
    for dtype in dtypes:
        for outputs, inputs in shapes:
            for count in counts:
                yield matmul_case(device, dtype, outputs, inputs, count)


def attention_cases(device: CpuDevice, dtypes: Sequence[str], shapes: Sequence[AttentionShape]) -> Iterator[Case]:
    """Each type with each shape."""
    for dtype in dtypes:
        for shape in shapes:
            yield attention_case(device, dtype, shape)


def _usual_cases(device: CpuDevice, only: str | None) -> Iterator[tuple[str, Case]]:
    """(kernel, case): decode, batches and prompts; float kernels on fewer shapes."""
    if only in (None, "matmul"):
        for dtypes, shapes, counts in (
            (("Q4_1", "Q4_0", "Q8_0"), SHAPES, (1, 4, 32, 512)),
            (("float32", "float16"), ((3072, 576), (576, 1536), (4096, 4096)), (1, 4, 16, 64, 512)),
            (("bfloat16",), ((3072, 576), (4096, 4096)), (1,)),
        ):
            for case in matmul_cases(device, dtypes, shapes, counts):
                yield "matmul", case
    if only in (None, "attention"):
        decode = [AttentionShape(*heads, context, 1, 8) for heads in HEADS for context in (256, 1024, 4096)]
        prompts = [AttentionShape(*heads, 1024, 512) for heads in HEADS]
        for case in attention_cases(device, ("float32", "float16", "bfloat16"), decode):
            yield "decode", case
        for case in attention_cases(device, ("float32", "float16", "bfloat16"), prompts):
            yield "prefill", case


def run_all(
    threads: int | None, seconds: float, only: str | None = None, progress: ProgressSink | None = None
) -> Iterator[tuple[str, Measurement]]:
    """(kernel, its figures), as they are measured; `only` "matmul" or "attention". `seconds` for each row."""
    device = CpuDevice(threads, Reports(progress).of("kernels", "kernels"))
    try:
        roofs = Roofs(device.team)
        for kernel, case in _usual_cases(device, only):
            yield kernel, measure(case, roofs, seconds)
    finally:
        device.close()
