"""Paged attention on the CPU: one kernel for decode, prefill and chunks, and a merge.

The context of a query is cut at multiples of PART = 512 tokens, a part into tiles of TILE = 64 tokens, both aligned at
position 0. Within a part all scores come first, then one softmax, then the sum over V; parts are merged in order by
log-sum-exp (Dao 2023, Flash-Decoding). What a row computes depends on its position alone: tokens outside its mask weigh
exactly 0, whoever shares the work.

A work item (plan.py) is up to 96 query rows (tokens x heads of one KV head) by some parts. Its tokens are a piece of
one sequence, or one token each of several sequences whose tables begin with the same blocks: of a part, the `shared`
tokens are read once for all, the rest by each. The tokens of one sequence gather a tile into scratch and go over it in
blocks of 6 rows; others read blocks where they lie, if they hold whole vectors: the same sums. float32 and float16 K/V
are multiplied in float32 (attention_tiles.py), bfloat16 ones by pairs, twice as many at a time (attention_pairs.py).

Bytes: every K/V element of the context is read once per work item; operations 4 * head_dim a key and query head. Decode
is bound by memory (roof: read bandwidth) as long as few heads share a KV head, all else by multiply-adds. Measured
figures: bench/kernels.py.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu import attention_pairs
from cupaged.kernels.cpu.attention_gather import in_place, loaders, pair_loaders
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
    TOKEN_WORDS,
    offsets,
)
from cupaged.kernels.cpu.attention_rows import (
    copy_state,
    empty_state,
    finish_row,
    merge_part,
    scale_copy,
    soften,
    softmax,
)
from cupaged.kernels.cpu.attention_tiles import GROUPS, chain_tiles, masked_values
from cupaged.kernels.cpu.emit import SIZE, load64
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.interface import PART, TILE

_AT, _MERGE = offsets(FIELDS, 16), offsets(MERGE_FIELDS, 16)
_items, _heads, _query, _query_stride, _group, _dim, _states, _scratch, _scratch_bytes = (
    _AT[name] for name in FIELDS[:9]
)
_block_size, _scale, _cap, _k_row, _k_column, _max_rows, _out, _out_stride, _sinks = (
    _AT[name]
    for name in ("block_size", "scale", "soft_cap", "k_row", "k_column", "max_rows", "out", "out_stride", "sinks")
)
_head_stride, _heads_a_chunk = _AT["head_stride"], _AT["heads_a_chunk"]
_ITEM, _TOKEN = offsets(ITEM_FIELDS), offsets(TOKEN_FIELDS)
_tokens_at, _tokens, _begin, _end, _shared, _whole = (_ITEM[name] for name in ITEM_FIELDS)
_row, _position, _low, _table, _state, _parts = (_TOKEN[name] for name in TOKEN_FIELDS)
ITEM_BYTES, TOKEN_BYTES = 8 * ITEM_WORDS, 8 * TOKEN_WORDS
_PANEL_BYTES = TILE * TILE * 4


@njit(types.boolean(types.int64), **OPTIONS)
def whole_vectors(op):  # type: ignore[no-untyped-def]
    """Whether runs of 16 tokens, and of 16 dims, lie in one piece, so that a tile can be read in place."""
    return load64(op + _block_size) % 16 == 0 and load64(op + _dim) % 16 == 0 and load64(op + _k_column) == 1


def regions(kind: str) -> Any:
    """(scores, values): tokens low..high-1 of one table by some tokens' rows; see `attention_parts` for the arrays.

    rows: of a KV head, read in place, as all of them see all these tokens; 0: gathered.
    """
    size = SIZE[kind]
    find, scores_in_place, values_in_place = in_place(kind, size)
    if kind == "bfloat16":
        dims, panel_bytes = 2, _PANEL_BYTES // 2  # of a row of the tile of K; of a panel of V
        load_k, load_v = pair_loaders()
        score_tiles, value_tiles = (chain_tiles(values, attention_pairs.chain_tile) for values in (False, True))
        lone = attention_pairs.masked_values
    else:
        dims, panel_bytes = 1, _PANEL_BYTES
        load_k, load_v = loaders(kind, size)
        score_tiles, value_tiles = chain_tiles(False), chain_tiles(True)
        lone = masked_values

    @njit(types.UniTuple(types.int64, 2)(*[types.int64] * 4), **OPTIONS)
    def seeing(token, tokens, first, last):  # type: ignore[no-untyped-def]
        """The tokens, in a row, that see something of first..last-1. Positions ascend, or all see all of it."""
        a = 0
        while a < tokens and load64(token + a * TOKEN_BYTES + _position) < first:
            a += 1
        b = tokens
        while b > a and load64(token + (b - 1) * TOKEN_BYTES + _low) >= last:
            b -= 1
        return a, b

    @njit(types.void(*[types.int64] * 14), **OPTIONS)
    def region_scores(op, token, tokens, head, heads, rows, low, high, part_start, upto, q, scores, tile, places):  # type: ignore[no-untyped-def]
        group, dim, table = load64(op + _group), load64(op + _dim), load64(token + _table)
        start = low // TILE * TILE
        if rows > 0:
            row_bytes, head_bytes = load64(op + _k_row) * size, load64(op + _head_stride) * size
            find(op, table, head, low, high, upto, places)
            here = places
            while start < high:
                for h in range(heads):
                    out = scores + h * rows * SCORE_BYTES + (start - part_start) * 4
                    ahead, ahead_shift, ahead_bytes = here, (h + 1) * head_bytes, row_bytes
                    if h + 1 == heads:
                        ahead, ahead_shift = here + 8 * GROUPS, 0
                        if start + TILE >= high:
                            ahead_bytes = 16 * size
                    scores_in_place(
                        here, h * head_bytes, row_bytes, dim, q + h * rows * dim * 4, rows, out, ahead, ahead_shift,
                        ahead_bytes,
                    )  # fmt: skip
                here += 8 * GROUPS
                start += TILE
            return
        while start < high:
            first, last = max(start, low), min(start + TILE, high)
            a, b = seeing(token, tokens, first, last)
            if a < b:
                load_k(op, table, head, start, first, last, tile)
                out = scores + a * group * SCORE_BYTES + (start - part_start) * 4
                score_tiles(
                    tile, (dim + dims - 1) // dims, q + a * group * dim * 4, dim * 4, out, SCORE_BYTES, (b - a) * group
                )
            start += TILE

    @njit(types.void(*[types.int64] * 14), **OPTIONS)
    def region_values(op, token, tokens, head, heads, rows, low, high, part_start, upto, weights, acc, tile, places):  # type: ignore[no-untyped-def]
        group, dim, table = load64(op + _group), load64(op + _dim), load64(token + _table)
        wide = (dim + TILE - 1) // TILE * TILE
        stride = HEAD + wide * 4
        start = low // TILE * TILE
        if rows > 0:
            head_bytes = load64(op + _head_stride) * size
            find(op, table, head, low, high, upto, places)
            here = places + 8 * GROUPS * ((high - start + TILE - 1) // TILE)
            while start < high:
                begin, end = max(low - start, 0), min(high - start, TILE)
                for h in range(heads):
                    at = weights + h * rows * SCORE_BYTES + (start - part_start) * 4
                    ahead, ahead_shift = here, (h + 1) * head_bytes
                    if h + 1 == heads:
                        ahead, ahead_shift = here + 8 * GROUPS, 0
                    sums = acc + h * rows * stride + HEAD
                    values_in_place(
                        here, h * head_bytes, ahead, ahead_shift, begin, end, dim, at, sums, stride, rows
                    )  # fmt: skip
                here += 8 * GROUPS
                start += TILE
            return
        while start < high:
            first, last = max(start, low), min(start + TILE, high)
            a, b = seeing(token, tokens, first, last)
            if a < b:
                if load_v(op, table, head, start, first, last, tile) == 0:
                    at, sums = weights + a * group * SCORE_BYTES + (start - part_start) * 4, acc + a * group * stride
                    for p in range(wide // TILE):
                        value_tiles(
                            tile + p * panel_bytes, TILE, at, SCORE_BYTES, sums + HEAD + p * TILE * 4, stride,
                            (b - a) * group,
                        )  # fmt: skip
                else:  # 0 * NaN is NaN: a row must not touch a value that it does not see
                    for r in range(a * group, b * group):
                        seen = token + r // group * TOKEN_BYTES
                        begin, end = max(first, load64(seen + _low)), min(last, load64(seen + _position) + 1)
                        at, sums = weights + r * SCORE_BYTES + (start - part_start) * 4, acc + r * stride + HEAD
                        for p in range(wide // TILE):
                            lone(tile + p * panel_bytes, begin - start, end - start, at, sums + p * TILE * 4)
            start += TILE

    return region_scores, region_values


def attention_parts(kind: str) -> Any:
    """The operation that computes parts, and the output where one item sees them all: a chunk is an item by a KV head.

    Of an item's rows (tokens x group): q [rows, dim] scaled, scores [rows, PART], then as weights; part and run
    [rows] partial results (of a part, and of the parts so far).
    """
    region_scores, region_values = regions(kind)
    pairs = kind == "bfloat16"
    softmax_part, softmax_ahead = softmax(False, pairs), softmax(True, pairs)
    size = SIZE[kind]
    scale_narrow = attention_pairs.scale_narrow

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
        part = scores + most * SCORE_BYTES
        run = part + most * stride
        lowest, highest = load64(token0 + _low), load64(token0 + _position)
        for t in range(tokens):
            token = token0 + t * TOKEN_BYTES
            lowest, highest = min(lowest, load64(token + _low)), max(highest, load64(token + _position))
            source = load64(op + _query) + load64(token + _row) * load64(op + _query_stride) + first_head * dim * 4
            take_query(source, q + t * group * dim * 4, group, dim, load64(op + _scale))
            for g in range(group):
                empty_state(run + (t * group + g) * stride, wide // 16)
        last_part = load64(item + _end)
        upto = min(highest + 1, last_part * PART)
        for number in range(load64(item + _begin), last_part):
            start, end = number * PART, (number + 1) * PART
            together = min(shared, end, highest + 1)  # the end of what all read from one table
            low = max(start, lowest)
            if low < together:
                region_scores(
                    op, token0, tokens, head, heads, joint, low, together, start, upto, q, scores, tile, places
                )
            for t in range(tokens):
                token = token0 + t * TOKEN_BYTES
                first, last = max(start, load64(token + _low)), min(end, load64(token + _position) + 1)
                if max(first, together) < last:
                    r = t * group
                    region_scores(
                        op, token, 1, head, heads, own, max(first, together), last, start, upto, q + r * dim * 4,
                        scores + r * SCORE_BYTES, tile, places,
                    )  # fmt: skip
                for r in range(t * group, (t + 1) * group):
                    empty_state(part + r * stride, wide // 16)
                    if first < last:
                        s = scores + r * SCORE_BYTES
                        if soft_cap != 0:
                            tiles = (first - start) // TILE
                            soften(s + tiles * TILE * 4, (last - start + 15) // 16 - tiles * 4, soft_cap)
                        if tokens > 1 or own == 0:
                            softmax_part(s, first - start, last - start, part + r * stride, places, 0)
                        else:  # region_values will read V; its first tile is on its way already
                            unit = 1 + r // rows_a_unit
                            ahead = (last - low // TILE * TILE + TILE - 1) // TILE + unit // heads
                            shift = unit % heads * head_bytes + r % rows_a_unit * 8 * 64
                            softmax_ahead(
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
                        if whole != 0:
                            merge_part(run + r * stride, part + r * stride, wide // 16)
                        else:
                            copy_state(part + r * stride, target + g * stride, wide // 16)
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
