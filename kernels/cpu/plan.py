"""The work list of an attention call on the CPU, made on the host by plain functions. The scheme is attention.py's.

A plan is made for every decode step, so it is made by a few NumPy calls over all sequences at once; and a step that
differs from the last one in its positions alone gets that one's plan with other positions (`renewed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cupaged.kernels.cpu.attention_record import ALL, ITEM_WORDS, LONG, TOKEN_WORDS, item_tokens
from cupaged.kernels.interface import PART, TILE, Array

CHUNKS_A_THREAD = 6  # work is split until every thread has about so many chunks, so that the last ones end together


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """Work items and where their partial results go; the arrays' fields are those of attention_record.py.

    items int64 [n, ITEM_WORDS], the longest first. tokens int64 [T, TOKEN_WORDS], in the order in which items take
    them. merges int64 [m]: addresses of the entries of tokens whose parts several items compute. num_states: partial
    results, in units of all heads. tables: kept alive. front: of decoding alone, the columns of the tables that decide
    who shares items, and which of their entries do. left: how often `advance` can move it on; empty if that is not yet
    known.
    """

    num_tokens: int
    items: Array
    tokens: Array
    merges: Array
    tables: Array
    num_states: int
    heads_a_chunk: int  # KV heads that a chunk takes of an item
    chunks: int
    addresses: tuple[int, int]  # of items, merges
    contexts: Array
    front: tuple[Array, Array] | None
    window: int | None
    left: list[int]


@dataclass(frozen=True, slots=True)
class SharedFronts:
    """Which decoding sequences read leading blocks together, part by part.

    order int64 [S]: the sequences, those that share next to each other; all else is in this order. alone bool [S]: who
    shares with nobody. Item i is tokens first[i] .. first[i] + size[i] - 1 over part `part[i]`, and they share the
    context's first shared[i] tokens (a multiple of TILE; ALL if it is one token). Items cover all parts below
    `parts` of the sequences that are not alone. reach int64 [S]: how many tokens a sequence reads together with others.
    """

    order: Array
    alone: Array
    parts: int
    first: Array
    size: Array
    part: Array
    shared: Array
    reach: Array


def shared_fronts(tables: Array, context_lens: Array, block_size: int, most: int) -> SharedFronts | None:
    """Groups of at most `most` sequences whose tables int32 [S, W] begin with the same blocks; None if there are none.

    Whole tiles count, which all members see wholly. A part is shared by all who share its first tile, for as many
    tokens as they all do, so that fronts of different lengths (a prompt for all, a longer one for some) are found part
    by part.
    """
    heads = tables[:, 0].tolist() if tables.shape[1] else []
    if len(set(heads)) == len(heads):
        return None
    order = np.lexsort(tables[:, :: max(1, PART // block_size)].T[::-1])
    sorted_tables, lengths = tables[order], context_lens[order]
    differ = sorted_tables[1:] != sorted_tables[:-1]
    run = differ.argmax(1)  # leading blocks that a sequence shares with the one before
    run[~differ[np.arange(len(run)), run]] = tables.shape[1]
    link = np.minimum(run * block_size, np.minimum(lengths[1:], lengths[:-1])) // TILE * TILE
    parts = -(-int(link.max()) // PART)
    if parts == 0:
        return None
    count = len(order)
    # linked[p, i]: sequence i takes part p together with sequence i - 1
    linked = np.zeros((parts, count), bool)
    linked[:, 1:] = link > np.arange(parts)[:, None] * PART
    alone = ~linked[0]
    alone[:-1] &= ~linked[0, 1:]
    index = np.arange(count)
    started = np.maximum.accumulate(np.where(linked, 0, index), axis=1)
    linked &= (index - started) % most != 0
    starts = np.flatnonzero(~linked)
    size = np.append(starts[1:], linked.size) - starts
    links = np.full(linked.shape, ALL)
    links[:, 1:][linked[:, 1:]] = np.broadcast_to(link, (parts, count - 1))[linked[:, 1:]]
    shared = np.minimum.reduceat(links.ravel(), starts)
    part, first = starts // count, starts % count
    has_part = (size > 1) | ~alone[first]
    reach = np.zeros(count, np.int64)
    reach[1:] = link
    reach[:-1] = np.maximum(reach[:-1], link)
    first, size, part, shared = (array[has_part] for array in (first, size, part, shared))
    return SharedFronts(order, alone, parts, first, size, part, shared, reach)


def make_plan(
    tables: Array, query_starts: Array, context_lens: Array, group: int, kv_heads: int, together: int,
    block_size: int, window: int | None, threads: int,
) -> CpuAttentionPlan:  # fmt: skip
    """Cut the queries of S sequences into items. Which tokens share an item changes no bit of the result.

    A sequence's queries go together, as many as fit an item (`item_tokens`). Decoding sequences that share blocks share
    items for the parts in which they do (not in a window, where hardly any are). Long contexts are split by parts until
    all threads have work; a token whose parts are all in one item needs no merge.
    """
    step = item_tokens(group)
    counts = query_starts[1:] - query_starts[:-1]
    count = int(query_starts[-1])
    fronts = front = None
    rows = first = np.arange(count)
    if count == len(counts) and counts.all():  # decoding alone
        columns = np.full(count, 1 if window is None else 0)  # by their first blocks sequences are known to be alone
        if window is None:
            fronts = shared_fronts(tables, context_lens, block_size, step)
            if fronts is not None:
                rows = fronts.order
                columns[rows] = np.maximum(1, -(-fronts.reach // block_size))
        front_width = int(columns.max(initial=0))
        front = (tables[:, :front_width].copy(), np.arange(front_width) < columns[:, None])
        sequences = rows
        positions = last_positions = context_lens[rows] - 1
        size = np.ones(count, np.int64)
    else:
        sequences = np.repeat(np.arange(len(counts)), counts)
        index = rows - query_starts[sequences]
        positions = index + (context_lens - counts)[sequences]
        steps = np.where(context_lens >= LONG, item_tokens(group, True), step)[sequences]
        first = np.flatnonzero(index % steps == 0)
        size = np.append(first[1:], count) - first
        last_positions = positions[first + size - 1]
    low = np.maximum(positions - (ALL if window is None else window - 1), 0)
    first_parts = low // PART
    parts = np.maximum(positions // PART + 1 - first_parts, 0)  # -1 // PART is -1: before the start there is none

    # Items of one sequence each; where a front is shared, for what lies behind it.
    begin, end = first_parts[first], np.maximum(last_positions // PART + 1, 0)
    cost, others = size * np.maximum(end - begin, 0), 0
    if fronts is not None:
        begin = np.where(fronts.alone, begin, fronts.parts)
        left = np.flatnonzero(fronts.alone | (begin < end))
        first, size, begin, end = first[left], size[left], begin[left], end[left]
        others = int(fronts.size.sum())
    split = False
    if threads > 1:
        target = max(1, (int(cost.sum()) + others) * -(-kv_heads // together) // (threads * CHUNKS_A_THREAD))
        first, size, begin, end, split = split_items(first, size, begin, end, target)
    shared: Array | int = ALL
    if fronts is not None:
        shared = np.concatenate([np.full(len(first), ALL), fronts.shared])
        own, ahead = (first, size, begin, end), (fronts.first, fronts.size, fronts.part, fronts.part + 1)
        first, size, begin, end = (np.concatenate(pair) for pair in zip(own, ahead, strict=True))
    order = np.argsort(size * (begin - end), kind="stable")  # the longest first

    if threads > 1 and len(first) * -(-kv_heads // together) < 3 * threads:
        together = 1
    whole: Array | bool = True
    merged = np.zeros(0, np.int64)
    num_states = 0
    tokens = np.zeros((count, TOKEN_WORDS), np.int64)
    if split or fronts is not None:
        whole, apart = whole_items(first, size, count)
        merged = np.flatnonzero(apart)
        states = np.where(apart, parts, 0)
        ends = np.cumsum(states)
        num_states = int(ends[-1])
        tokens[:, 4] = ends - states
    for column, values in enumerate((rows, positions, low, _address(tables) + sequences * (tables.shape[1] * 4))):
        tokens[:, column] = values
    tokens[:, 5] = parts
    at = _address(tokens)
    items = np.zeros((len(first), ITEM_WORDS), np.int64)
    for column, values in enumerate((at + first * (8 * TOKEN_WORDS), size, begin, end, shared, whole)):
        items[:, column] = values
    items = items[order]
    merges = at + merged * (8 * TOKEN_WORDS)
    chunks = len(items) * -(-kv_heads // together)
    addresses = (_address(items), _address(merges))
    return CpuAttentionPlan(
        count, items, tokens, merges, tables, num_states, together, chunks, addresses, context_lens, front, window, []
    )


def renewed(plan: CpuAttentionPlan, tables: Array, context_lens: Array, window: int | None) -> CpuAttentionPlan | None:
    """The plan for a step of decoding that differs from `plan`'s in positions and in blocks that nobody shares.

    None unless the same number of sequences have grown, or not, without a part more or less, and the blocks that they
    share, or by which they are known to share none, are the same.
    """
    if plan.front is None or len(context_lens) != len(plan.contexts) or not (context_lens >= plan.contexts).all():
        return None
    if not _same_front(plan.front, tables):
        return None
    tokens = plan.tokens.copy()
    rows = tokens[:, 0]
    positions = context_lens[rows] - 1
    tokens[:, 1] = positions
    if window is not None:
        low = np.maximum(positions - (window - 1), 0)
        if not np.array_equal(low // PART, plan.tokens[:, 2] // PART):
            return None
        tokens[:, 2] = low
    if not np.array_equal(positions // PART, plan.tokens[:, 1] // PART):
        return None
    tokens[:, 3] = _address(tables) + rows * (tables.shape[1] * 4)
    moved = _address(tokens) - _address(plan.tokens)
    items = plan.items.copy()
    items[:, 0] += moved
    merges = plan.merges + moved
    return replace(
        plan, items=items, tokens=tokens, merges=merges, tables=tables, contexts=context_lens,
        addresses=(_address(items), _address(merges)), left=[],
    )  # fmt: skip


def _same_front(front: tuple[Array, Array], tables: Array) -> bool:
    """Whether the entries that decide who shares items are what they were."""
    blocks, used = front
    return tables.shape[1] >= blocks.shape[1] and not ((tables[:, : blocks.shape[1]] != blocks) & used).any()


def advance(plans: Sequence[object], changed: Sequence[bool]) -> bool:
    """Move plans of decoding on by a token of each sequence, in place; False, and nothing done, if one cannot be.

    changed: whether `tables`, of each plan, has other entries than before.
    """
    for plan, other in zip(plans, changed, strict=True):
        if not isinstance(plan, CpuAttentionPlan) or plan.front is None:
            return False
        if not plan.left:
            plan.left.append(_steps_left(plan))
        if not plan.left[0] or (other and not _same_front(plan.front, plan.tables)):
            return False
    for plan in plans:
        assert isinstance(plan, CpuAttentionPlan)
        plan.left[0] -= 1
        positions = plan.tokens[:, 1]
        positions += 1
        if plan.window is not None:
            np.maximum(positions - (plan.window - 1), 0, out=plan.tokens[:, 2])
    return True


def _steps_left(plan: CpuAttentionPlan) -> int:
    """Steps of decoding until a token's position, or where its window begins, enters another part."""
    positions = plan.tokens[:, 1]
    steps = PART - 1 - positions % PART
    if plan.window is not None:
        low = positions - (plan.window - 1)
        steps = np.minimum(steps, np.where(low < 0, PART - 1 - low, PART - 1 - low % PART))
    return int(steps.min(initial=PART))


class Planner:
    """Makes the plans of calls of one shape, each out of the last one where that goes."""

    def __init__(self, group: int, kv_heads: int, together: int, block_size: int, window: int | None, threads: int):
        self._shape = (group, kv_heads, together, block_size, window, threads)
        self._window = window
        self._last: CpuAttentionPlan | None = None

    def plan(self, tables: Array, query_starts: Array, context_lens: Array) -> CpuAttentionPlan:
        last, plan = self._last, None
        decoding = int(query_starts[-1]) == len(context_lens) and (query_starts[1:] > query_starts[:-1]).all()
        if last is not None and decoding:
            plan = renewed(last, tables, context_lens, self._window)
        if plan is None:
            plan = make_plan(tables, query_starts, context_lens, *self._shape)
        if decoding:
            self._last = plan
        return plan


def split_items(
    first: Array, size: Array, begin: Array, end: Array, target: int
) -> tuple[Array, Array, Array, Array, bool]:
    """Items cut by parts into pieces of about `target` tokens x parts; True if any was."""
    span = -(-target // size)  # parts of a piece
    pieces = np.maximum(-(-(end - begin) // span), 1)
    if int(pieces.max(initial=1)) == 1:
        return first, size, begin, end, False
    index = np.repeat(np.arange(len(pieces)), pieces)
    number = np.arange(len(index)) - (np.cumsum(pieces) - pieces)[index]
    first, size, span, end = first[index], size[index], span[index], end[index]
    begin = begin[index] + number * span
    return first, size, begin, np.minimum(end, begin + span), True


def whole_items(first: Array, size: Array, count: int) -> tuple[Array, Array]:
    """(items whose tokens are in no other, tokens of `count` that are in none of those)."""

    def covered(chosen: Array) -> Array:
        starts = np.bincount(first[chosen], minlength=count + 1)
        return np.cumsum(starts - np.bincount((first + size)[chosen], minlength=count + 1))[:count]

    several = np.concatenate([[0], np.cumsum(covered(np.arange(len(first))) > 1)])
    whole = several[first + size] == several[first]
    return whole, covered(np.flatnonzero(whole)) == 0


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
