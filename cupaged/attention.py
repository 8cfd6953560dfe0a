"""The library face of attention: the same kernels that the engine calls, with their arguments checked.

The engine calls `device.ops` itself, with metadata that it made; these functions are for whoever builds another runtime
on the parts. They take NumPy arrays (of the CPU device) and refuse, by name, what a kernel would read wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.interface import FORMAT_SHIFT, FRAME_MASK, NO_BLOCK, POOL_MASK, POOL_SHIFT, Array

if TYPE_CHECKING:
    from cupaged.cache import PagedKVCache


def write_kv(key: Array, value: Array, cache: PagedKVCache, layer: int, slots: Array) -> None:
    """Store K and V of T tokens in a layer of the cache.

    key, value [T, KVH, D] float32, a token's [KVH, D] contiguous; slots: T integers, frame * block_size + offset, or
    negative to skip a token (padding). Narrower caches round to nearest, ties to even. A slot named twice would hold
    either token: KernelError, as for any argument of another shape, dtype or range.
    """
    _check_cache(cache, layer)
    slots = _integers("slots", slots, np.int64, dimensions=1)
    expected = (len(slots), cache.num_kv_heads, cache.head_dim)
    _check_rows("key", key, expected)
    _check_rows("value", value, expected)
    used = slots[slots >= 0]
    limit = cache.num_blocks * cache.block_size
    if used.size and int(used.max()) >= limit:
        raise KernelError(f"slots: {int(used.max())} is not below {limit}, the slots of the cache")
    if len(np.unique(used)) != len(used):
        raise KernelError("slots: a slot is named twice")
    cache.device.ops.write_kv(key, value, cache.view, layer, slots)


def paged_attention(
    query: Array,
    cache: PagedKVCache,
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
    """Causal attention of S sequences over a layer of the cache; gives `out` [T, H, D] float32.

    query [T, H, D] float32, a token's [H, D] contiguous; H a multiple of the KV heads. Sequence s brings query_lens[s]
    queries (default: one each, decode), the last of its context_lens[s] positions, whose K and V are already written.
    A context of 0 is padding: its rows give zeros.
    tables: int32 [S, W] of block references padded with -1, or S sequences of them, or S BlockTables.
    scale: default D ** -0.5. window W: a query sees W keys, its own included; blocks wholly before every window may be
    -1. soft_cap: scores become cap * tanh(score / cap), before the mask. sinks [H] float32: a logit per head, counted
    once in the softmax's denominator. out: made if None; must not overlap `query`.

    KernelError names the argument, what was expected and what came.
    """
    _check_cache(cache, layer)
    contexts = [int(length) for length in _integers("context_lens", context_lens, np.int64, dimensions=1)]
    queries = [1] * len(contexts)
    if query_lens is not None:
        queries = [int(length) for length in _integers("query_lens", query_lens, np.int64, dimensions=1)]
    if len(queries) != len(contexts):
        raise KernelError(f"query_lens: expected {len(contexts)} as context_lens, got {len(queries)}")
    if not isinstance(query, np.ndarray):
        raise KernelError(f"query: expected a NumPy array, got {type(query).__name__}")
    if query.ndim != 3:
        raise KernelError(f"query: expected three dimensions [T, H, D], got shape {tuple(query.shape)}")
    heads = query.shape[1]
    if heads == 0 or heads % cache.num_kv_heads:
        raise KernelError(f"query: {heads} heads are no multiple of the cache's {cache.num_kv_heads} KV heads")
    expected = (sum(queries), heads, cache.head_dim)
    _check_rows("query", query, expected)
    if window is not None and (isinstance(window, bool) or not isinstance(window, Integral) or window < 1):
        raise KernelError(f"window: expected None or a whole number of at least 1, got {window!r:.40}")
    if soft_cap is not None and not (_is_finite(soft_cap) and soft_cap > 0):
        raise KernelError(f"soft_cap: expected None or a finite number above 0, got {soft_cap!r:.40}")
    if scale is None:
        scale = cache.head_dim**-0.5
    elif not _is_finite(scale):
        raise KernelError(f"scale: expected a finite number, got {scale!r:.40}")
    if sinks is not None:
        _check_rows("sinks", sinks, (heads,))
    if out is None:
        out = cache.device.empty(expected, np.dtype(np.float32))
    else:
        _check_rows("out", out, expected)
        if np.may_share_memory(out, query):
            raise KernelError("out: overlaps query")
    table = _table_array(tables, len(contexts))
    _check_tables(table, contexts, queries, window, cache)
    starts = [0, *accumulate(queries)]
    plan = cache.device.ops.plan_attention(cache.view, table, starts, contexts, heads, window)
    cache.device.ops.paged_attention(query, cache.view, layer, plan, out, scale, soft_cap, sinks)
    return out


def _check_cache(cache: Any, layer: int) -> None:
    from cupaged.cache import PagedKVCache

    if not isinstance(cache, PagedKVCache):
        raise KernelError(f"cache: expected a PagedKVCache, got {type(cache).__name__}")
    cache.check_layer(layer)


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _integers(name: str, values: Any, dtype: type[np.signedinteger[Any]], dimensions: int) -> Array:
    """values as an array of `dtype` with so many dimensions; KernelError if they are no integers of its range."""
    array = np.asarray(values)
    if array.ndim != dimensions:
        raise KernelError(f"{name}: expected {dimensions} dimension(s), got shape {array.shape}")
    if array.size == 0:
        return array.astype(dtype)
    if array.dtype.kind not in "iu":
        raise KernelError(f"{name}: expected integers, got {array.dtype}")
    limits = np.iinfo(dtype)
    if int(array.min()) < limits.min or int(array.max()) > limits.max:
        raise KernelError(f"{name}: {int(array.min())}..{int(array.max())} do not fit {limits.dtype}")
    return np.ascontiguousarray(array, dtype)


def _check_rows(name: str, array: Array, expected: tuple[int, ...]) -> None:
    """KernelError unless float32 of that shape with everything behind the first dimension contiguous."""
    if not isinstance(array, np.ndarray):
        raise KernelError(f"{name}: expected a NumPy array, got {type(array).__name__}")
    if tuple(array.shape) != expected:
        raise KernelError(f"{name}: expected shape {list(expected)}, got {list(array.shape)}")
    if array.dtype != np.float32:
        raise KernelError(f"{name}: expected float32, got {array.dtype}")
    step = array.itemsize
    for axis in range(array.ndim - 1, 0 if array.ndim > 1 else -1, -1):
        if array.shape[axis] > 1 and array.strides[axis] != step:
            raise KernelError(f"{name}: dimension {axis} is strided; only the first may be (use ascontiguousarray)")
        step *= array.shape[axis]


def _table_array(tables: Any, sequences: int) -> Array:
    """int32 [S, W] of any accepted form of `tables`, short rows padded with -1."""
    if hasattr(tables, "refs") or not isinstance(tables, Iterable):
        raise KernelError(f"tables: expected a table for each sequence, in a list, got one {type(tables).__name__}")
    if not isinstance(tables, np.ndarray):
        rows = [list(table.refs if hasattr(table, "refs") else table) for table in tables]
        width = max((len(row) for row in rows), default=0)
        tables = [row + [NO_BLOCK] * (width - len(row)) for row in rows]
        tables = np.array(tables, np.int64).reshape(len(rows), width)
    if len(tables) != sequences:
        raise KernelError(f"tables: expected {sequences} rows as context_lens, got {len(tables)}")
    return _integers("tables", tables, np.int32, dimensions=2)


def _check_tables(
    table: Array, contexts: list[int], queries: list[int], window: int | None, cache: PagedKVCache
) -> None:
    """KernelError unless every entry that holds a visible key is a plain block of the cache."""
    slots = table.shape[1] * cache.block_size
    for row, (context, count) in enumerate(zip(contexts, queries, strict=True)):
        if not 0 <= context <= slots:
            raise KernelError(f"context_lens[{row}]: {context} is not in 0..{slots}, the slots of its table")
        if count < 0 or (context and count > context):
            raise KernelError(f"query_lens[{row}]: {count} is not in 0..{context}, its context")
        if count == 0:
            continue
        first = 0 if window is None else max(0, context - count - window + 1)
        used = table[row, first // cache.block_size : -(-context // cache.block_size)]
        pools = (used >> POOL_SHIFT) & POOL_MASK
        usable = (used >= 0) & (used >> FORMAT_SHIFT == 0) & (pools < len(cache.view.pools))
        usable &= (used & FRAME_MASK) < cache.num_blocks
        if not usable.all():
            entry = int(np.argmin(usable))
            where = f"tables[{row}, {entry + first // cache.block_size}]"
            raise KernelError(f"{where}: {int(used[entry])} is no plain block of a cache of {cache.num_blocks}")
