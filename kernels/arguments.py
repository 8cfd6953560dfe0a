"""Checks of the arguments of attention, the same for every implementation: what is wrong is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.interface import FRAME_BITS, FRAME_MASK, POOL_MASK, POOL_SHIFT, Array, KVView


def check_attention(
    cache: KVView,
    tables: Array,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    num_heads: int,
    window: int | None,
) -> tuple[Array, Array, Array]:
    """(tables int32 [S, W], query_starts int64 [S + 1], context_lens int64 [S]), checked.

    Only entries of tables whose block holds a visible key are looked at; others, outside the window or the context, may
    be anything. KernelError: heads that are no multiple of the KV heads, a window below 1, lengths that do not fit each
    other or the table, a used entry that is no plain block of this cache.
    """
    if num_heads <= 0 or num_heads % cache.num_kv_heads:
        raise KernelError(f"num_heads: {num_heads} heads are no multiple of {cache.num_kv_heads} KV heads")
    if window is not None and window < 1:
        raise KernelError(f"window: {window} is not at least 1")
    table = np.ascontiguousarray(tables, np.int32)
    starts, contexts = np.array(query_starts, np.int64), np.array(context_lens, np.int64)
    if table.ndim != 2 or len(table) != len(contexts) or len(starts) != len(contexts) + 1:
        raise KernelError(f"tables {table.shape}, query_starts ({len(starts)}): not of {len(contexts)} context_lens")
    queries = starts[1:] - starts[:-1]
    if starts[0] != 0 or queries.min(initial=0) < 0:
        raise KernelError("query_starts: not ascending from 0")
    slots = table.shape[1] * cache.block_size
    if contexts.min(initial=0) < 0 or contexts.max(initial=0) > slots:
        sequence = int(np.flatnonzero((contexts < 0) | (contexts > slots))[0])
        raise KernelError(
            f"context_lens[{sequence}]: {contexts[sequence]} is not in 0..{slots}, the slots of its table"
        )
    last = (contexts + (cache.block_size - 1)) // cache.block_size * (queries > 0)
    column = np.arange(table.shape[1])
    used = column < last[:, None]
    if window is not None:
        used &= column >= (np.maximum(0, contexts - queries - (window - 1)) // cache.block_size)[:, None]
    frames = [0 if pool is None else _frames(cache, int(pool.size)) for pool in cache.pools]
    # Of every decode step, so quick where all blocks are in pool 0: as unsigned numbers all others are greater.
    if ((table.view(np.uint32) >= frames[0]) & used).any():
        _check_references(table, used, frames + [0] * (4 - len(frames)))
    return table, starts, contexts


def _check_references(table: Array, used: Array, frames_of_pool: list[int]) -> None:
    pool = (table >> POOL_SHIFT) & POOL_MASK
    plain = (table >= 0) & (table >> FRAME_BITS < 4)
    good = plain & ((table & FRAME_MASK) < np.asarray(frames_of_pool)[pool])
    bad = np.argwhere(used & ~good)
    if not bad.size:
        return
    row, column = (int(i) for i in bad[0])
    reference, where = int(table[row, column]), f"tables[{row}, {column}]"
    if reference < 0:
        raise KernelError(f"{where}: no block ({reference}), though its tokens are attended")
    if reference >> FRAME_BITS >= 4:
        raise KernelError(f"{where}: a packed block, which these kernels do not read")
    index = int(pool[row, column])
    if frames_of_pool[index] == 0:
        raise KernelError(f"{where}: a block in pool {index}, which the cache does not have")
    raise KernelError(f"{where}: frame {reference & FRAME_MASK} is not in 0..{frames_of_pool[index] - 1}")


def _frames(cache: KVView, elements: int) -> int:
    """Whole blocks in a pool's flat array: as many bytes as K and V of all layers take, whatever the layout."""
    return elements // (2 * cache.kv_stride * cache.num_layers)
