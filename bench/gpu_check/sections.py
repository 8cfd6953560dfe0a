"""The sections of the check, in the order in which they are worth the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cupaged.bench.gpu_check import suites
from cupaged.bench.gpu_check.report import Row
from cupaged.bench.gpu_check.runner import Failed, Section
from cupaged.bench.gpu_check.sizes import Sizes

if TYPE_CHECKING:
    from cupaged.device.cuda import CudaDevice

_CALLS = 200  # launches of which the time of one is the mean


def _on_device(rows: Callable[[CudaDevice, Sizes], Iterator[Row]]) -> Callable[[Sizes], Iterator[Row]]:
    """A section that needs nothing but a device, which it gets and which is closed behind it.

    Where launches cannot be captured as graphs, they are timed one by one, and that is a fault.
    """

    def run(sizes: Sizes) -> Iterator[Row]:
        device = make_cuda()
        try:
            yield from rows(device, sizes)
            if device.graphs.failure is not None:
                raise Failed(f"timed launch by launch, because graphs do not work: {device.graphs.failure}")
        finally:
            device.close()

    return run


def make_cuda() -> CudaDevice:
    from cupaged.device.cuda import CudaDevice

    return CudaDevice()


def facts(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    """What the card has, and what a launch costs."""
    import numpy as np

    runtime = device.runtime
    memory = runtime.memory()
    yield Row("memory", memory[0] / 2**30, "GiB")
    yield Row("of it free", memory[1] / 2**30, "GiB")
    yield Row("multiprocessors", runtime.multiprocessors, "")
    yield Row("shared memory of a block", runtime.shared_limit / 1024, "KiB")
    yield Row("cuBLAS found", int(runtime.has_gemm), "")
    x = device.upload(np.zeros((1, 16), np.float32))
    device.ops.add(x, x)
    device.synchronize()
    began = time.perf_counter()
    for _ in range(_CALLS):
        device.ops.add(x, x)
    issued = time.perf_counter()
    device.synchronize()
    yield Row("issuing a launch, on the host", (issued - began) / _CALLS * 1e6, "µs")
    yield Row("a launch, all in all", (time.perf_counter() - began) / _CALLS * 1e6, "µs")


def _decode(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    from cupaged.bench.gpu_check.attention import decode_rows

    return decode_rows(device, sizes)


def _layouts(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    from cupaged.bench.gpu_check.attention import layout_rows

    return layout_rows(device, sizes)


def _products(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    from cupaged.bench.gpu_check.attention import prefill_rows
    from cupaged.bench.gpu_check.products import product_rows

    yield from product_rows(device, sizes)
    yield from prefill_rows(device, sizes)


def _swaps(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    from cupaged.bench.gpu_check.swaps import swap_rows

    return swap_rows(device, sizes)


def _steps(sizes: Sizes) -> Iterator[Row]:
    from cupaged.bench.gpu_check.steps import step_rows

    return step_rows(sizes)


def _prefill(sizes: Sizes) -> Iterator[Row]:
    from cupaged.bench.gpu_check.products import library_rate
    from cupaged.bench.gpu_check.steps import prefill_rows

    device = make_cuda()
    try:
        rate = library_rate(device, sizes)
    finally:
        device.close()
    yield from prefill_rows(sizes, rate)


def _rival_attention(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    from cupaged.bench.gpu_check.rivals import attention_rows

    return attention_rows(device, sizes)


def _rival_generate(sizes: Sizes) -> Iterator[Row]:
    from cupaged.bench.gpu_check.rivals import generate_rows

    return generate_rows(sizes)


def _small(sizes: Sizes) -> Iterator[Row]:
    from cupaged.bench.gpu_check.small import small_rows

    return small_rows(sizes)


_MODELS, _KERNELS, _SANITIZER = 80.0, 120.0, 90.0  # seconds
SECTIONS = (
    Section("facts", "the device", 30, _on_device(facts)),
    Section("models", "models on the device: tests/gpu", _MODELS + 20, lambda sizes: suites.model_tests(_MODELS)),
    Section("decode", "decode attention", 40, _on_device(_decode)),
    Section("products", "matrix products", 40, _on_device(_products)),
    Section("steps", "decode steps, with and without CUDA graphs", 60, _steps),
    Section("prefill", "prefill", 40, _prefill),
    Section("swaps", "swapping", 30, _on_device(_swaps)),
    Section("layouts", "block-major beside layer-major", 30, _on_device(_layouts)),
    Section(
        "kernels", "the conformance suite on the device", _KERNELS + 20, lambda sizes: suites.kernel_tests(_KERNELS)
    ),
    Section("attention", "beside PyTorch's attention", 30, _on_device(_rival_attention)),
    Section("generate", "beside Transformers", 60, _rival_generate),
    Section("sanitizer", "compute-sanitizer", _SANITIZER + 20, lambda sizes: suites.sanitizer(_SANITIZER)),
)
# Not of a whole check: what compute-sanitizer runs.
INNER = (Section("small", "a small model", 60, _small),)
