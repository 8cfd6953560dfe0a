"""Matrix products of a prompt's chunk, beside cuBLAS on the same shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupaged.bench.cases import RandomWeights
from cupaged.bench.gpu_check.clock import Clock, filled
from cupaged.bench.gpu_check.report import Row
from cupaged.bench.gpu_check.sizes import Sizes
from cupaged.device.cuda import CudaDevice
from cupaged.kernels.interface import STORAGE_BYTES

KINDS = ("float16", "bfloat16", "Q8_0", "Q4_0", "Q4_K")


class Kept:
    """A WeightSource whose numbers are made once and packed often."""

    def __init__(self, source: RandomWeights) -> None:
        self.shape, self.dtype = source.shape, source.dtype
        self._blocks = source.blocks(0, source.shape[0])
        self._values = source.float32(0, source.shape[0]) if self._blocks is None else None

    def float32(self, start: int, stop: int) -> Any:
        return None if self._values is None else self._values[start:stop]

    def blocks(self, start: int, stop: int) -> Any:
        return None if self._blocks is None else self._blocks[start:stop]

    @property
    def parts(self) -> tuple[Kept]:
        return (self,)


def library_rate(device: CudaDevice, sizes: Sizes) -> float | None:
    """Operations a second of cuBLAS on float16 numbers: a chunk's rows by a square matrix. None without cuBLAS."""
    if not device.runtime.has_gemm:
        return None
    outputs, inputs = sizes.product
    x = filled(device, sizes.prefill * inputs, np.float16).reshape(sizes.prefill, inputs)
    weight = filled(device, outputs * inputs, np.float16).reshape(outputs, inputs)
    out = device.empty((sizes.prefill, outputs), np.float32)
    stream = device.backend.stream
    seconds = Clock(device, sizes.seconds).median(lambda: device.runtime.gemm(x, weight, out, "float16", stream))
    return 2 * sizes.prefill * outputs * inputs / seconds


def product_rows(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    """`matmul` as the decoder calls it, float32 in and out, for weights as they are kept; then a single row's GB/s."""
    clock = Clock(device, sizes.seconds)
    rate = library_rate(device, sizes)
    if rate is not None:
        yield Row(f"cuBLAS, {sizes.prefill} rows of float16", rate / 1e12, "TFLOP/s")
    outputs, inputs = sizes.product
    operations = 2 * sizes.prefill * outputs * inputs
    x = filled(device, sizes.prefill * inputs, np.float32).reshape(sizes.prefill, inputs)
    out = device.empty((sizes.prefill, outputs), np.float32)
    for kind in KINDS:
        if inputs % 256 and kind == "Q4_K":
            continue
        quantised = kind not in STORAGE_BYTES
        kept: Any = "quantised" if quantised else kind
        source = Kept(RandomWeights((outputs, inputs), kind if quantised else "F32"))
        weights = [device.ops.matrix(source, kept)]
        copies = max(1, min(16, sizes.far // weights[0].nbytes))
        weights += [device.ops.matrix(source, kept) for _ in range(copies - 1)]

        def many(weight: Any = weights[0]) -> None:
            device.ops.matmul(x, weight, out)

        def one(weights: Any = weights) -> None:
            for weight in weights:
                device.ops.matmul(x[:1], weight, out[:1])

        whole, single = clock.median(many), clock.median(clock.captured(one)) / len(weights)
        beside = None if rate is None else rate / 1e12
        against = "" if rate is None else "cuBLAS"
        yield Row(f"{kind}, {sizes.prefill} rows", operations / whole / 1e12, "TFLOP/s", against, beside)
        yield Row(f"{kind}, 1 row", weights[0].nbytes / single / 1e9, "GB/s")
