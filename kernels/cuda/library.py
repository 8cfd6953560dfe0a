"""The library face on a GPU: attention and K/V writes on CuPy arrays.

**No GPU has run this file yet.** Everything beneath it but `cupy_runtime.py` runs on the test bench.

    ops = cuda_operations()
    write_kv(ops, key, value, cache, layer, slots)
    out = paged_attention(ops, query, cache, layer, tables, context_lens)

`cache` is an `interface.KVView` of the caller's own arrays, or the `view` of a `PagedKVCache`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.cuda.backend import RuntimeBackend
from cupaged.kernels.cuda.cupy_runtime import CupyRuntime
from cupaged.kernels.cuda.operations import CudaOperations
from cupaged.kernels.interface import Array, KVView


@functools.cache
def cuda_operations(device: int = 0) -> CudaOperations:
    """All operations on a GPU, on CuPy arrays. Compiled at first use, kept in the user's cache folder.

    They run on CuPy's current stream. NoDeviceError: no CuPy, no driver, no such device, or one older than sm_70.
    """
    runtime = CupyRuntime(device)
    return CudaOperations(RuntimeBackend(runtime, stream=runtime.current_stream()))


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
