"""The library face on a GPU: attention and K/V writes on CuPy arrays, and the backend that runs them.

**No GPU has run this file yet.** What it calls of CuPy was read in CuPy's sources and documentation; everything above
it (launch layer, planner, kernels) runs on the test bench.

    ops = cuda_operations()
    write_kv(ops, key, value, cache, layer, slots)
    out = paged_attention(ops, query, cache, layer, tables, context_lens)

`cache` is an `interface.KVView` of the caller's own arrays, or the `view` of a `PagedKVCache`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from cupaged.errors import DeviceError, KernelError
from cupaged.kernels.cuda import compile
from cupaged.kernels.cuda.launch import Kernel
from cupaged.kernels.cuda.operations import CudaOperations
from cupaged.kernels.interface import Array, KVView

_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEFAULT_SHARED = 48 << 10  # what a block may have without asking


class CupyBackend:
    """`launch.Backend` on one CUDA device, on CuPy's current stream."""

    def __init__(self, device: int = 0) -> None:
        """DeviceError: no CuPy, no driver, no such device, or one older than sm_70."""
        try:
            import cupy
        except ImportError as error:
            raise DeviceError(
                f"device 'cuda': CuPy cannot be imported ({error}); pip install 'cupaged[gpu]'"
            ) from error
        self._cupy = cupy
        try:
            self._device = cupy.cuda.Device(device)
            attributes = self._device.attributes
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(f"device 'cuda': device {device} cannot be had ({error})") from error
        self.architecture = 10 * attributes["ComputeCapabilityMajor"] + attributes["ComputeCapabilityMinor"]
        self.shared_limit = attributes["MaxSharedMemoryPerBlockOptin"]
        self.multiprocessors = attributes["MultiProcessorCount"]
        if self.architecture < 70:
            raise DeviceError(f"device 'cuda': compute capability {self.architecture / 10} is below 7.0")
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._kernels: dict[tuple[Any, ...], Any] = {}

    def kernel(self, source: str, name: str, defines: Mapping[str, int], shared_bytes: int) -> Kernel:
        variant = (source, tuple(sorted(defines.items())))
        key = (*variant, name, shared_bytes > _DEFAULT_SHARED and shared_bytes)
        if key not in self._kernels:
            with self._device:
                if variant not in self._modules:
                    module = self._cupy.cuda.function.Module()
                    module.load(compile.cubin(source, self.architecture, defines))
                    self._modules[variant] = module
                function = self._modules[variant].get_function(name)
                if shared_bytes > _DEFAULT_SHARED:
                    self._cupy.cuda.driver.funcSetAttribute(function.ptr, _DYNAMIC_SHARED_SIZE, shared_bytes)
            self._kernels[key] = function
        function = self._kernels[key]

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[Any], shared: int) -> None:
            with self._device:
                function((*grid, 1, 1)[:3], (*block, 1, 1)[:3], tuple(arguments), shared)

        return launch

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        with self._device:
            return self._cupy.empty(shape, dtype)  # from CuPy's pool, aligned to 512 bytes

    def upload(self, host: Array) -> Array:
        with self._device:
            return self._cupy.asarray(host)

    def download(self, array: Array) -> Array:
        with self._device:
            return self._cupy.asnumpy(array)

    def address(self, array: Array) -> int:
        return int(array.data.ptr)


@functools.cache
def cuda_operations(device: int = 0) -> CudaOperations:
    """All operations on a CUDA device, on CuPy arrays. Compiled at first use, kept in the user's cache folder."""
    return CudaOperations(CupyBackend(device))


def write_kv(
    ops: CudaOperations,
    key: Array,
    value: Array,
    cache: KVView,
    layer: int,
    slots: Array,
    positions: Array | None = None,
    rope_table: Array | None = None,
) -> None:
    """Store K and V [T, KVH, D] float32 of T tokens; slots [T]: frame * block_size + offset, negative to skip.

    slots may be NumPy (checked and sent up) or an int64 array of the device (not looked at). With positions and
    rope_table, K is rotated on its way. KernelError names the argument.
    """
    if isinstance(slots, np.ndarray) or not hasattr(slots, "dtype"):
        host = np.asarray(slots, np.int64)
        pool = cache.pools[0]
        limit = 0 if pool is None else int(pool.size) // (2 * cache.kv_stride * cache.num_layers) * cache.block_size
        used = host[host >= 0]
        if used.size and int(used.max()) >= limit:
            raise KernelError(f"slots: {int(used.max())} is not below {limit}, the slots of the cache")
        if len(np.unique(used)) != len(used):
            raise KernelError("slots: a slot is named twice")
        slots = ops.backend.upload(host)
    ops.write_kv(key, value, cache, layer, slots, positions, rope_table)


def paged_attention(
    ops: CudaOperations,
    query: Array,
    cache: KVView,
    layer: int,
    tables: Any,
    context_lens: Sequence[int],
    scale: float | None = None,
    *,
    query_lens: Sequence[int] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Causal attention of S sequences over a layer; gives `out` [T, H, D] float32, on the device.

    query [T, H, D] float32 on the device. tables (int32 [S, W] of block references, -1 for none), context_lens and
    query_lens (default: one query each) are on the host, where the work is planned. The rest is that of
    `cupaged.paged_attention`. KernelError names the argument, what was expected and what came.
    """
    contexts = [int(length) for length in context_lens]
    counts = [1] * len(contexts) if query_lens is None else [int(length) for length in query_lens]
    if len(counts) != len(contexts):
        raise KernelError(f"query_lens: expected {len(contexts)} as context_lens, got {len(counts)}")
    if query.ndim != 3:
        raise KernelError(f"query: expected three dimensions [T, H, D], got shape {tuple(query.shape)}")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise KernelError(f"soft_cap: expected None or a finite number above 0, got {soft_cap!r:.40}")
    if out is None:
        out = ops.backend.empty(tuple(query.shape), np.float32)
    starts = [0, *accumulate(counts)]
    plan = ops.plan_attention(cache, np.asarray(tables, np.int32), starts, contexts, int(query.shape[1]), window)
    ops.paged_attention(
        query, cache, layer, plan, out, cache.head_dim**-0.5 if scale is None else scale, soft_cap, sinks
    )
    return out
