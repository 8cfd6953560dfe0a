"""The CUDA C kernels as an implementation for the conformance suite: the launch layer over the bench's emulator.

`EmulatedBackend` is what CuPy is on a GPU: NumPy arrays for device memory, and kernels that `cudabench` compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cudabench import emulate

from cupaged.kernels.cuda import sources


class EmulatedBackend:
    """`launch.Backend` on the CPU. `order` and `check` are those of `cudabench.Kernel`, for every launch."""

    def __init__(self, architecture: int = 80, shared_limit: int = 163 << 10) -> None:
        self.architecture = architecture
        self.shared_limit = shared_limit
        self.multiprocessors = 4
        self.order = "forward"
        self.check: str | None = None
        self.launches: list[tuple[str, tuple[int, ...]]] = []
        self.reports: list[Any] = []
        self.gemm: Any = None  # a library's product, where a test wants one
        self._kernels: dict[tuple[Any, ...], Any] = {}

    def kernel(self, source: str, name: str, defines: Mapping[str, int], shared_bytes: int) -> Any:
        assert shared_bytes <= self.shared_limit
        key = (source, name, tuple(sorted(defines.items())))
        if key not in self._kernels:
            self._kernels[key] = emulate(
                sources.FOLDER / source, name, defines=defines, include=[sources.FOLDER], arch=self.architecture
            )
        kernel = self._kernels[key]

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[Any], shared: int) -> None:
            self.launches.append((name, grid))
            flat = [spread(a) if isinstance(a, np.ndarray) else a for a in arguments]
            report = kernel(grid, block, flat, shared_mem=shared, order=self.order, check=self.check)
            if report is not None:
                self.reports.append((name, report))

        return launch

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Full of NaN bits: what a kernel forgets to write shows."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.full(count + 64, 0xFF, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + count].view(dtype).reshape(shape)

    def upload(self, host: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            out = self.empty(host.shape, host.dtype)
        out[...] = host
        return out

    def download(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def address(self, array: np.ndarray) -> int:
        return int(array.ctypes.data)


def spread(array: np.ndarray) -> np.ndarray:
    """The stretch of memory from an array's first element to its last, as a flat view: what a pointer reaches."""
    if array.flags.c_contiguous:
        return array
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, (last // array.itemsize + 1,), (array.itemsize,))


def emulated_operations(**options: Any) -> Any:
    """`CudaOperations` on the emulator; `.backend` has the switches."""
    from cupaged.kernels.cuda.operations import CudaOperations

    backend = options.pop("backend", None) or EmulatedBackend(
        **{name: options.pop(name) for name in ("architecture", "shared_limit") if name in options}
    )
    return CudaOperations(backend, fixed_block_size=False, **options)
