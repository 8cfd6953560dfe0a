"""Paged attention on the CPU: one kernel for decode, prefill and chunks, and a merge.

The context of a query is cut at multiples of PART = 512 tokens, a part into tiles of TILE = 64 tokens, both aligned at
position 0. Within a part all scores come first, then one softmax, then the sum over V; parts are merged in order by
log-sum-exp (Dao 2023, Flash-Decoding). What a row computes depends on its position alone: tokens outside its mask weigh
exactly 0, whoever shares the work.

A work item (plan.py) is some query rows (tokens x heads of one KV head, 96 or of a long context 192) by some parts. Its
tokens are a piece of one sequence, or one token each of several sequences whose tables begin with the same blocks: of a
part, the `shared` tokens are read once for all, the rest by each. The tokens of one sequence gather a tile into scratch
and go over it in blocks of 6 rows; others read blocks where they lie, if they hold whole vectors: the same sums
(attention_regions.py). float32 and float16 K/V are multiplied in float32 (attention_tiles.py), bfloat16 ones by pairs,
twice as many at a time (attention_pairs.py).

Bytes: every K/V element of the context is read once per work item; operations 4 * head_dim a key and query head. Decode
is bound by memory (roof: read bandwidth) as long as few heads share a KV head, all else by multiply-adds. Measured
figures: bench/kernels.py.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu.attention_record import (
    ALL,
    FIELDS,
    HEAD,
    ITEM_FIELDS,
    ITEM_WORDS,
    MERGE_FIELDS,
    PLACES_BYTES,
    SCORE_BYTES,
    TOKEN_FIELDS,
    offsets,
)
from cupaged.kernels.cpu.attention_regions import TOKEN_BYTES, regions, whole_vectors
from cupaged.kernels.cpu.attention_rows import (
    copy_state,
    empty_state,
    fetch,
    finish_row,
    largest,
    merge_part,
    scale_copy,
    soften,
    weigh,
)
from cupaged.kernels.cpu.attention_tiles import GROUPS
from cupaged.kernels.cpu.attention_weave import scale_narrow
from cupaged.kernels.cpu.emit import SIZE, load64
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.interface import PART, TILE

_AT, _MERGE = offsets(FIELDS, 16), offsets(MERGE_FIELDS, 16)
_items, _heads, _query, _query_stride, _group, _dim, _states, _scratch, _scratch_bytes = (
    _AT[name] for name in FIELDS[:9]
)
_scale, _cap, _max_rows, _out, _out_stride, _sinks = (
    _AT[name] for name in ("scale", "soft_cap", "max_rows", "out", "out_stride", "sinks")
)
_head_stride, _heads_a_chunk = _AT["head_stride"], _AT["heads_a_chunk"]
_ITEM, _TOKEN = offsets(ITEM_FIELDS), offsets(TOKEN_FIELDS)
_tokens_at, _tokens, _begin, _end, _shared, _whole = (_ITEM[name] for name in ITEM_FIELDS)
_row, _position, _low, _table, _state, _parts = (_TOKEN[name] for name in TOKEN_FIELDS)
ITEM_BYTES = 8 * ITEM_WORDS


def attention_parts(kind: str) -> Any:
    """The operation that computes parts, and the output where one item sees them all: a chunk is an item by a KV head.

    Of an item's rows (tokens x group): q [rows, dim] scaled, scores [rows, PART], then as weights; part and run
    [rows] partial results (of a part, and of the parts so far; the first part's is both).
    """
    region_scores, region_values = regions(kind)
    pairs = kind == "bfloat16"
    largest_part, weigh_part, weigh_ahead = largest(pairs), weigh(False, pairs), weigh(True, pairs)
    size = SIZE[kind]

    @njit(types.void(*[types.int64] * 5), **OPTIONS)
    def take_query(source, q, rows, dim, scale):  # type: ignore[no-untyped-def]
        if pairs:
            for r in range(rows):
                scale_narrow(source + r * dim * 4, q + r * dim * 4, dim, scale)
        else:
            scale_copy(source, q, rows * dim, scale)

    @njit(types.void(*[types.int64] * 5), **OPTIONS)
    def attend(op, item, head, heads, scratch):  # type: ignore[no-untyped-def]
        """An item by one KV head; by several if it is one token that is read in place: rows are then [heads, group]."""
        token0, tokens, shared, whole = (
            load64(item + _tokens_at), load64(item + _tokens), load64(item + _shared), load64(item + _whole),
        )  # fmt: skip
        group, dim, soft_cap = load64(op + _group) * heads, load64(op + _dim), load64(op + _cap)
        kv_heads = load64(op + _heads)
        first_head = head * load64(op + _group)
        wide = (dim + TILE - 1) // TILE * TILE
        stride = HEAD + wide * 4
        own = joint = 0  # rows of a head that are read in place, of a token and of all
        if whole_vectors(op):
            own = load64(op + _group)
            if tokens == 1:
                joint = own
            elif shared < ALL:
                joint = tokens * own
        head_bytes = load64(op + _head_stride) * size
        rows_a_unit = max(1, 16 * dim * size // (8 * 64))  # softmax prefetches 8 lines of each run of 16 tokens
        most = load64(op + _max_rows)
        tile, places = scratch, scratch + TILE * wide * 4 + 64
        q = places + PLACES_BYTES
        scores = q + most * wide * 4
        other = scores + most * SCORE_BYTES
        run = other + most * stride
        lowest, highest = load64(token0 + _low), load64(token0 + _position)
        if tokens > 1:
            for t in range(tokens):  # all at once: one after the other, each would be waited for
                source = load64(op + _query) + load64(token0 + t * TOKEN_BYTES + _row) * load64(op + _query_stride)
                fetch(source + first_head * dim * 4, (group * dim * 4 + 63) // 64)
                if whole != 0:
                    target = load64(op + _out) + load64(token0 + t * TOKEN_BYTES + _row) * load64(op + _out_stride)
                    fetch(target + first_head * dim * 4, (group * dim * 4 + 63) // 64)
        for t in range(tokens):
            token = token0 + t * TOKEN_BYTES
            lowest, highest = min(lowest, load64(token + _low)), max(highest, load64(token + _position))
            source = load64(op + _query) + load64(token + _row) * load64(op + _query_stride) + first_head * dim * 4
            take_query(source, q + t * group * dim * 4, group, dim, load64(op + _scale))
        first_part, last_part = load64(item + _begin), load64(item + _end)
        if first_part >= last_part:
            for r in range(tokens * group):
                empty_state(run + r * stride, wide // 16)
        upto = min(highest + 1, last_part * PART)
        for number in range(first_part, last_part):
            start, end = number * PART, (number + 1) * PART
            part = run if number == first_part else other  # the first part is all there is so far
            together = min(shared, end, highest + 1)  # the end of what all read from one table
            low = max(start, lowest)
            for r in range(tokens * group):
                empty_state(part + r * stride, wide // 16)
            known = known_end = start  # tokens of tiles that all rows see, of which maxima are taken on the way
            if shared >= ALL and joint == 0 and soft_cap == 0:
                latest = token0 + (tokens - 1) * TOKEN_BYTES
                known = start + (max(load64(latest + _low) - start, 0) + TILE - 1) // TILE * TILE
                known_end = min(load64(token0 + _position) + 1, end) // TILE * TILE
            if low < together:
                region_scores(
                    op, token0, tokens, head, heads, joint, low, together, start, upto, q, scores, tile, places, part,
                    known, known_end,
                )  # fmt: skip
            for t in range(tokens):
                token = token0 + t * TOKEN_BYTES
                first, last = max(start, load64(token + _low)), min(end, load64(token + _position) + 1)
                if max(first, together) < last:
                    r = t * group
                    region_scores(
                        op, token, 1, head, heads, own, max(first, together), last, start, upto, q + r * dim * 4,
                        scores + r * SCORE_BYTES, tile, places, part, 0, 0,
                    )  # fmt: skip
                for r in range(t * group, (t + 1) * group):
                    if first < last:
                        s = scores + r * SCORE_BYTES
                        if soft_cap != 0:
                            tiles = (first - start) // TILE
                            soften(s + tiles * TILE * 4, (last - start + 15) // 16 - tiles * 4, soft_cap)
                        largest_part(
                            s, first - start, last - start, part + r * stride, (known - start) // TILE,
                            (known_end - start) // TILE,
                        )  # fmt: skip
                if first < last:
                    for r in range(t * group, (t + 1) * group):
                        s = scores + r * SCORE_BYTES
                        if tokens > 1 or own == 0:
                            weigh_part(s, first - start, last - start, part + r * stride, places, 0)
                        else:  # region_values will read V; its first tile is on its way already
                            unit = 1 + r // rows_a_unit
                            ahead = (last - low // TILE * TILE + TILE - 1) // TILE + unit // heads
                            shift = unit % heads * head_bytes + r % rows_a_unit * 8 * 64
                            weigh_ahead(
                                s, first - start, last - start, part + r * stride,
                                places + min(ahead, 2 * PART // TILE) * 8 * GROUPS, shift,
                            )  # fmt: skip
            if low < together:
                region_values(
                    op, token0, tokens, head, heads, joint, low, together, start, upto, scores, part, tile, places
                )
            for t in range(tokens):
                token = token0 + t * TOKEN_BYTES
                first, last = max(start, load64(token + _low)), min(end, load64(token + _position) + 1)
                if max(first, together) < last:
                    r = t * group
                    region_values(
                        op, token, 1, head, heads, own, max(first, together), last, start, upto,
                        scores + r * SCORE_BYTES, part + r * stride, tile, places,
                    )  # fmt: skip
                if first < last:
                    slot = load64(token + _state) + number - load64(token + _low) // PART
                    target = load64(op + _states) + (slot * kv_heads * load64(op + _group) + first_head) * stride
                    for g in range(group):
                        r = t * group + g
                        if whole == 0:
                            copy_state(part + r * stride, target + g * stride, wide // 16)
                        elif part != run:
                            merge_part(run + r * stride, part + r * stride, wide // 16)
        if whole != 0:
            for t in range(tokens):
                target = load64(op + _out) + load64(token0 + t * TOKEN_BYTES + _row) * load64(op + _out_stride)
                for g in range(group):
                    sink = load64(op + _sinks)
                    if sink != 0:
                        sink += (first_head + g) * 4
                    finish_row(run + (t * group + g) * stride, sink, target + (first_head + g) * dim * 4, dim)

    @njit(KERNEL, **OPTIONS)
    def parts_kernel(op, chunk, thread):  # type: ignore[no-untyped-def]
        kv_heads, together = load64(op + _heads), load64(op + _heads_a_chunk)
        chunks = (kv_heads + together - 1) // together
        item = load64(op + _items) + chunk // chunks * ITEM_BYTES
        first = chunk % chunks * together
        last = min(kv_heads, first + together)
        scratch = load64(op + _scratch) + thread * load64(op + _scratch_bytes)
        if load64(item + _tokens) == 1 and whole_vectors(op):
            attend(op, item, first, last - first, scratch)
        else:
            for head in range(first, last):
                attend(op, item, head, 1, scratch)

    return parts_kernel


_merges, _m_heads, _m_group, _m_dim, _m_states, _m_scratch, _m_scratch_bytes, _m_out, _m_out_stride, _m_sinks = (
    _MERGE[name] for name in MERGE_FIELDS
)


@njit(KERNEL, **OPTIONS)
def attention_merge(op, chunk, thread):  # type: ignore[no-untyped-def]
    """Partial results of a token -> output, in the order of parts. A chunk is a token in `merges` by a KV head.

    The sink logit of a head counts once, in the denominator.
    """
    kv_heads, group, dim = load64(op + _m_heads), load64(op + _m_group), load64(op + _m_dim)
    token = load64(load64(op + _merges) + chunk // kv_heads * 8)
    wide = (dim + TILE - 1) // TILE * TILE
    stride = HEAD + wide * 4
    run = load64(op + _m_scratch) + thread * load64(op + _m_scratch_bytes)
    out = load64(op + _m_out) + load64(token + _row) * load64(op + _m_out_stride)
    sinks = load64(op + _m_sinks)
    for h in range(chunk % kv_heads * group, (chunk % kv_heads + 1) * group):
        empty_state(run, wide // 16)
        for part in range(load64(token + _parts)):
            slot = (load64(token + _state) + part) * kv_heads * group + h
            merge_part(run, load64(op + _m_states) + slot * stride, wide // 16)
        sink = sinks
        if sinks != 0:
            sink = sinks + h * 4
        finish_row(run, sink, out + h * dim * 4, dim)
