"""Launches of attention on NumPy, from work lists, tables and pools as the kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.errors import DeviceError
from cupaged.kernels.interface import FRAME_MASK, PART, POOL_MASK, POOL_SHIFT
from streamdouble.heap import Pointer
from streamdouble.launch_dense import STORED, Defines, Grid, widened

Array = np.ndarray
LOG2E = 1.4426950408889634


def paged_attention(
    grid: Grid, defines: Defines, items: Pointer, num_items: Pointer, tokens: Pointer, positions: Pointer,
    state_starts: Pointer, state_counts: Pointer, tables: Pointer, table_width: int, query: Pointer,
    query_stride: int, pool0: Any, pool1: Any, pool2: Any, pool3: Any, block_stride: int, layer_offset: int,
    kv_stride: int, head_stride: int, block_size: int, out: Pointer, out_stride: int, state_values: Pointer,
    state_scalars: Pointer, sinks: Any, group: int, window: int, scale: float, cap: float,
) -> None:  # fmt: skip
    """All items of a call at once: item, row and token are axes; what a row does not see is masked."""
    dim, storage, kv_heads = defines["HEAD_DIM"], defines["STORAGE"], grid[1]
    heads, count = kv_heads * group, int(num_items.view((1,), np.int32)[0])
    if count <= 0:
        return
    first, rows, table, part, low, high = items.view((count, 8), np.int32)[:, :6].astype(np.int64).T
    row = first[:, None] + np.arange(int(rows.max()))  # [items, rows]
    real = np.arange(row.shape[1]) < rows[:, None]
    row = np.where(real, row, first[:, None])
    entries = tokens.rest(np.int32)
    token = entries[row // group].astype(np.int64)
    position = positions.rest(np.int32)[token].astype(np.int64)

    # K and V of every item, [items, tokens, KVH, D]; tokens beyond an item's own are zeros and never looked up.
    at = low[:, None] + np.arange(int((high - low).max()))
    held = at < high[:, None]
    block = np.where(held, at // block_size, (low // block_size)[:, None])
    reference = tables.rest(np.int32)[table[:, None] * table_width + block].astype(np.int64)
    if (reference < 0).any():
        raise DeviceError("paged_attention: no block, though its tokens are attended")
    base = (reference & FRAME_MASK) * block_stride + layer_offset
    slot = np.where(held, at, low[:, None]) % block_size
    offsets = np.arange(kv_heads)[:, None] * head_stride
    inner = np.arange(dim)
    by_head = (base[..., None, None] + offsets) + np.zeros(dim, np.int64)
    place = slot[..., None, None]
    of_keys = by_head + (inner * block_size + place if defines.get("K_TRANSPOSED") else place * dim + inner)
    of_values = by_head + kv_stride + (place * dim + inner)
    pool_of = reference >> POOL_SHIFT & POOL_MASK
    pools = [None if p is None else p.rest(STORED[storage]) for p in (pool0, pool1, pool2, pool3)]
    keys, values = (_gathered(pools, pool_of, index, held, storage) for index in (of_keys, of_values))

    # Scores in units of log2, [items, KVH, rows, group..., tokens]: a row is a token by a head of the group.
    member = row % group
    queries = query.rest(np.float32)
    places = token * query_stride + member * dim
    index = places[:, None, :, None] + (np.arange(kv_heads) * group * dim)[:, None, None] + inner
    q = queries[index].astype(np.float64)  # [items, KVH, rows, D]
    scores = (q @ keys.transpose(0, 2, 3, 1)) * scale
    if cap:
        scores = cap * np.tanh(scores)
    start = np.maximum(0, position - window + 1)
    seen = (at[:, None, :] >= start[..., None]) & (at[:, None, :] <= position[..., None]) & held[:, None, :]
    scores = np.where(seen[:, None], scores, -np.inf)
    maximum = scores.max(axis=-1)
    finite = np.where(maximum == -np.inf, 0.0, maximum)
    weights = np.where(seen[:, None], np.exp2(scores - finite[..., None]), 0.0)
    total = weights.sum(axis=-1)
    weighted = _weighed(weights, values.transpose(0, 2, 1, 3), seen[:, None])

    lasts = (position >= part[:, None] * PART) & (start < (part[:, None] + 1) * PART) & real
    single = state_counts.rest(np.int32)[token] == 1
    head = np.arange(kv_heads)[:, None] * group + member[:, None, :]  # [items, KVH, rows]
    i, r = np.nonzero(lasts & single)
    if len(i):
        sink = None if sinks is None else sinks.view((heads,), np.float32).astype(np.float64)[head]
        ended = finished(maximum, total, weighted, sink)
        target = out.rest(np.float32)
        where = (token[:, None, :] * out_stride + head * dim)[..., None] + inner
        target[where[i, :, r]] = ended[i, :, r]
    i, r = np.nonzero(lasts & ~single)
    if len(i):
        state = state_starts.rest(np.int32)[token] + part[:, None] - start // PART
        where_state = state[:, None, :] * heads + head
        chosen = where_state[i, :, r]
        state_values.rest(np.float32)[chosen[..., None] * dim + inner] = weighted[i, :, r]
        state_scalars.rest(np.float32)[chosen * 2] = maximum[i, :, r]
        state_scalars.rest(np.float32)[chosen * 2 + 1] = total[i, :, r]


def _gathered(pools: list[Any], pool_of: Array, index: Array, held: Array, storage: int) -> Array:
    """Elements at `index` of each token's pool as float64, zeros where no token is held."""
    found = None
    for number in np.unique(pool_of).tolist():
        pool = pools[number]
        if pool is None:
            raise DeviceError(f"paged_attention: a block of pool {number}, which is absent")
        mine = pool_of == number
        some = widened(pool[np.where(mine[..., None, None], index, 0)], storage)
        found = some if found is None else np.where(mine[..., None, None], some, found)
    assert found is not None
    return np.where(held[..., None, None], found, np.float32(0)).astype(np.float64)


def _weighed(weights: Array, values: Array, seen: Array) -> Array:
    """weights [.., rows, tokens] by values [.., tokens, D]; a NaN reaches the rows that see it, no other."""
    broken = ~np.isfinite(values)
    if not broken.any():
        return weights @ values
    met = np.broadcast_to(seen, weights.shape).astype(np.float64) @ broken.astype(np.float64)
    return np.where(met > 0, np.nan, weights @ np.where(broken, 0.0, values))


def finished(maximum: Array, total: Array, weighted: Array, sink: Array | None) -> Array:
    """attention.cuh's `finished`, with maxima in units of log2."""
    if sink is not None:
        level = sink * LOG2E
        highest = np.maximum(maximum, level)
        highest = np.where(highest == -np.inf, 0.0, highest)
        kept = np.where((maximum == -np.inf) & (total == 0), 0.0, np.exp2(maximum - highest))
        total = total * kept + np.exp2(level - highest)
        weighted = weighted * kept[..., None]
    safe = np.where(total == 0, 1.0, total)
    return np.where((total == 0)[..., None], 0.0, weighted / safe[..., None])


def merge_parts(
    grid: Grid, defines: Defines, merges: Pointer, num_merges: Pointer, state_starts: Pointer, state_counts: Pointer,
    state_values: Pointer, state_scalars: Pointer, out: Pointer, out_stride: int, sinks: Any, heads: int,
) -> None:  # fmt: skip
    dim = defines["HEAD_DIM"]
    count = int(num_merges.view((1,), np.int32)[0])
    for token in merges.view((max(0, count),), np.int32).tolist():
        parts = int(state_counts.rest(np.int32)[token])
        target = out.view((heads, dim), np.float32, (dim, 1), offset=token * out_stride)
        if parts == 0:
            target[...] = 0
            continue
        first = int(state_starts.rest(np.int32)[token])
        scalars = state_scalars.view((parts, heads, 2), np.float32, offset=first * heads * 2).astype(np.float64)
        values = state_values.view((parts, heads, dim), np.float32, offset=first * heads * dim).astype(np.float64)
        maximum = scalars[..., 0].max(axis=0)
        kept = np.where(scalars[..., 0] == maximum, 1.0, np.exp2(scalars[..., 0] - maximum))
        total = (scalars[..., 1] * kept).sum(axis=0)
        sink = None if sinks is None else sinks.view((heads,), np.float32).astype(np.float64)
        target[...] = finished(maximum, total, (values * kept[..., None]).sum(axis=0), sink)
