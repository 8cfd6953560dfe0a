"""The work list of an attention call on a GPU, made on the host by plain functions. The scheme is attention.cuh's.

A work item is some query rows (tokens x heads of a KV head) by one part of the context. Which rows share an item
changes no bit of the result, so the cut is free: it follows the kernel's row count, and sequences whose tables name the
same blocks for a whole part share items there, so that a common prompt is read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupaged.kernels.interface import PART, Array

NO_WINDOW = (1 << 31) - 1
ITEM_FIELDS = ("first_row", "num_rows", "table", "part", "low", "high", "unused", "unused")


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """Host arrays, int32 all of them.

    items [n, 8]: `ITEM_FIELDS`. tokens: what first_row counts in, as rows of `group` heads: the query tokens of all
    items, item by item. positions [T]: of each query token, -1 and below see nothing. state_starts, state_counts [T]:
    the first partial result of a token and the number of parts that it sees. merges: tokens whose count is not 1.
    num_states: partial results in all (of all heads), those of tokens with a single part not counted.
    """

    num_tokens: int
    items: Array
    tokens: Array
    positions: Array
    state_starts: Array
    state_counts: Array
    merges: Array
    num_states: int
    window: int


def make_plan(
    tables: Array,
    query_starts: Array,
    context_lens: Array,
    group: int,
    rows_per_item: int,
    block_size: int,
    window: int | None = None,
    share: bool = True,
) -> WorkPlan:
    """Cut the queries of S sequences into items of at most `rows_per_item` rows by one part.

    tables int32 [S, W], query_starts int64 [S + 1], context_lens int64 [S], checked by the caller. share: whether
    sequences may share items where their tables name the same blocks for a whole part.
    """
    reach = NO_WINDOW if window is None else min(window, NO_WINDOW)
    counts = np.diff(query_starts)
    num_tokens = int(query_starts[-1])
    sequence_of = np.repeat(np.arange(len(counts)), counts)
    positions, first_part, state_counts = parts_seen(query_starts, context_lens, window)
    kept = np.where(state_counts > 1, state_counts, 0)
    state_starts = np.cumsum(kept) - kept

    # Every (token, part) that there is, ordered so that tokens which may share an item are neighbours.
    token = np.repeat(np.arange(num_tokens), state_counts)
    part = np.arange(len(token)) - np.repeat(np.cumsum(state_counts) - state_counts, state_counts)
    part += np.repeat(first_part, state_counts)
    table = sequence_of[token]
    if share and len(counts) > 1:
        table = _readers(tables, table, part, context_lens, block_size, reach)
    order = np.lexsort((token, part, table))
    token, part, table = token[order], part[order], table[order]

    items = _cut(token, part, table, positions, group, rows_per_item, reach)
    narrow = [x.astype(np.int32) for x in (token, positions, state_starts, state_counts)]
    merges = np.flatnonzero(state_counts != 1).astype(np.int32)
    return WorkPlan(num_tokens, items, narrow[0], narrow[1], narrow[2], narrow[3], merges, int(kept.sum()), reach)


def parts_seen(query_starts: Array, context_lens: Array, window: int | None) -> tuple[Array, Array, Array]:
    """Of each query token: its position, the first part of the context that it sees, and the number of parts."""
    reach = NO_WINDOW if window is None else min(window, NO_WINDOW)
    last_of = np.repeat(context_lens - query_starts[1:], np.diff(query_starts))
    positions = (np.arange(int(query_starts[-1])) + last_of).astype(np.int64)
    first_part = np.maximum(0, positions - reach + 1) // PART
    return positions, first_part, np.where(positions < 0, 0, positions // PART + 1 - first_part)


def _readers(tables: Array, sequence: Array, part: Array, context_lens: Array, block_size: int, reach: int) -> Array:
    """Whose table an entry reads: the first sequence with the same blocks for this whole part, else its own.

    Sequences share a part only where all of it lies in both contexts. With a window the entries before it may differ
    (they may be gone): equality of all entries of the part is asked for, which then holds for those in sight too.
    """
    if not (np.unique(tables[:, 0]).size < len(tables) or reach < NO_WINDOW):
        return sequence  # no two tables begin alike
    readers = sequence.copy()
    width = tables.shape[1]
    for number in np.unique(part):
        first, last = number * PART // block_size, -(-(number + 1) * PART // block_size)
        if last > width:
            continue
        here = np.flatnonzero((part == number) & (context_lens[sequence] >= (number + 1) * PART))
        candidates = np.unique(sequence[here])
        if len(candidates) < 2:
            continue
        entries = np.ascontiguousarray(tables[candidates, first:last])
        keys = entries.view(np.dtype((np.void, entries.shape[1] * 4))).ravel()
        _, representative, group = np.unique(keys, return_index=True, return_inverse=True)
        reader_of = np.zeros(len(tables), np.int64)
        reader_of[candidates] = candidates[representative[group.ravel()]]
        readers[here] = reader_of[sequence[here]]
    return readers


def _cut(
    token: Array, part: Array, table: Array, positions: Array, group: int, rows_per_item: int, reach: int
) -> Array:
    """Items over the ordered entries: runs of one (table, part), cut into at most rows_per_item rows."""
    if not len(token):
        return np.zeros((0, len(ITEM_FIELDS)), np.int32)
    edge = np.flatnonzero(np.r_[True, (np.diff(table) != 0) | (np.diff(part) != 0)])
    length = np.diff(np.r_[edge, len(token)]) * group  # rows of each run
    pieces = -(-length // rows_per_item)
    run = np.repeat(np.arange(len(edge)), pieces)
    within = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first_row = edge[run] * group + within * rows_per_item
    num_rows = np.minimum(rows_per_item, edge[run] * group + length[run] - first_row)
    start, stop = first_row // group, (first_row + num_rows - 1) // group + 1
    own = positions[token]
    # Tokens of a run need not ascend in position when sequences share it: lows and highs are taken over the item.
    seen = np.maximum(own - reach + 1, part * PART)
    ends = np.minimum(own + 1, (part + 1) * PART)
    bounds = np.stack([start, stop], 1).ravel()
    seen_ext, ends_ext = np.r_[seen, seen[-1:]], np.r_[ends, ends[-1:]]
    low = np.minimum.reduceat(seen_ext, bounds)[::2]
    high = np.maximum.reduceat(ends_ext, bounds)[::2]
    items = np.zeros((len(run), len(ITEM_FIELDS)), np.int32)
    for column, values in enumerate((first_row, num_rows, table[edge][run], part[edge][run], low, high)):
        items[:, column] = values
    return items
