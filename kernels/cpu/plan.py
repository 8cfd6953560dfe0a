"""The work list of an attention call on the CPU, made on the host by plain functions. The scheme is attention.py's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupaged.kernels.interface import PART, TILE, Array

NO_WINDOW = 1 << 40
ITEM_WORDS = 8


def max_rows(group: int) -> int:
    """Query rows of a work item: whole tokens of `group` heads, about 48 rows (8 tiles of 6)."""
    return group * max(1, 48 // group)


def padded(head_dim: int) -> int:
    """head_dim rounded up to whole panels of 64."""
    return -(-head_dim // TILE) * TILE


def state_floats(head_dim: int) -> int:
    """Floats of one partial result: maximum, sum, padding to a cache line, accumulator."""
    return 16 + padded(head_dim)


def scratch_floats(head_dim: int, rows: int) -> int:
    """Floats of scratch a thread needs: Q, K tile, V tile and its check, scores, accumulator, maxima and sums by lane,
    two sets of block pointers."""
    wide = padded(head_dim)
    return TILE * (head_dim + wide) + rows * (head_dim + TILE + wide + 32) + 16 + 64


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """Work items and where their partial results go.

    items int64 [n, 8]: first token, tokens, position of the first, sequence, part, address of its tokens' entries in
    state_starts. state_starts, state_counts int64 [T]: the first partial result of a token and how many it has (one
    for each part that it sees, 0 if it sees nothing); in units of all heads.
    """

    num_tokens: int
    items: Array
    tables: Array
    state_starts: Array
    state_counts: Array
    num_states: int
    window: int
    addresses: tuple[int, int, int, int]  # of items, tables, state_starts, state_counts


def make_plan(
    tables: Array, query_starts: Array, context_lens: Array, group: int, window: int | None
) -> CpuAttentionPlan:
    """Cut the queries of S sequences into items of a few tokens by one part of the context.

    Which tokens share an item changes no bit of the result, so the cut is free: whole tokens, max_rows(group) rows.
    """
    reach = NO_WINDOW if window is None else window
    step = max_rows(group) // group
    num_tokens = int(query_starts[-1])
    positions = np.empty(num_tokens, np.int64)
    rows: list[tuple[int, ...]] = []
    for sequence, context in enumerate(context_lens):
        start, stop = int(query_starts[sequence]), int(query_starts[sequence + 1])
        first = int(context) - (stop - start)
        positions[start:stop] = np.arange(first, int(context))
        for token in range(start, stop, step):
            count = min(step, stop - token)
            position = first + token - start
            low, high = max(0, position - reach + 1), position + count
            for part in range(low // PART, -(-max(0, high) // PART)):
                rows.append((token, count, position, sequence, part))
    seen_from = np.maximum(0, positions - reach + 1) // PART
    counts = np.maximum(0, np.where(positions < 0, 0, positions // PART + 1 - seen_from))
    starts = np.cumsum(counts) - counts
    items = np.zeros((len(rows), ITEM_WORDS), np.int64)
    if rows:
        items[:, :5] = rows
        items[:, 5] = starts.__array_interface__["data"][0] + items[:, 0] * 8
    arrays = (items, tables, starts, counts)
    addresses = tuple(int(array.__array_interface__["data"][0]) for array in arrays)
    return CpuAttentionPlan(num_tokens, *arrays, int(counts.sum()), reach, addresses)  # type: ignore[arg-type]
