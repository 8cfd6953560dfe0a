"""The scores of a region of a context, and its sums over V: tile by tile, gathered into scratch or read in place.

A region is the tokens low..high-1 of a part, read from one block table by the rows of one token or more. Of tiles that
all rows see wholly, each row's maxima are taken as the scores come (`raise_tops`), and with pairs two tiles of V are
multiplied at a time. Of a tile at the causal edge, rows that see its first 32 tokens alone leave out the others.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu import attention_pairs
from cupaged.kernels.cpu.attention_gather import in_place, loaders, pair_loaders
from cupaged.kernels.cpu.attention_record import (
    FIELDS,
    HEAD,
    SCORE_BYTES,
    TOKEN_FIELDS,
    TOKEN_WORDS,
    offsets,
)
from cupaged.kernels.cpu.attention_tiles import GROUPS, chain_tiles, masked_values, score_tiles_with_tops
from cupaged.kernels.cpu.emit import SIZE, load64
from cupaged.kernels.cpu.gemm import OPTIONS
from cupaged.kernels.interface import TILE

_AT, _TOKEN = offsets(FIELDS, 16), offsets(TOKEN_FIELDS)
_group, _dim, _block_size, _k_row, _k_column, _head_stride = (
    _AT[name] for name in ("group", "head_dim", "block_size", "k_row", "k_column", "head_stride")
)
_position, _low, _table = (_TOKEN[name] for name in ("position", "low", "table"))
TOKEN_BYTES = 8 * TOKEN_WORDS
_PANEL_BYTES = TILE * TILE * 4


@njit(types.boolean(types.int64), **OPTIONS)
def whole_vectors(op):  # type: ignore[no-untyped-def]
    """Whether runs of 16 tokens, and of 16 dims, lie in one piece, so that a tile can be read in place."""
    return load64(op + _block_size) % 16 == 0 and load64(op + _dim) % 16 == 0 and load64(op + _k_column) == 1


def regions(kind: str) -> Any:
    """(scores, values): tokens low..high-1 of one table by some tokens' rows; see `attention_parts` for the arrays.

    rows: of a KV head, read in place, as all of them see all these tokens; 0: gathered. Of scores, tokens
    known..known_end-1 are whole tiles that all rows see: their maxima go to `tops`, the rows' partial results.
    """
    size = SIZE[kind]
    find, scores_in_place, values_in_place = in_place(kind, size)
    pairs = kind == "bfloat16"
    if pairs:
        dims, panel_bytes = 2, _PANEL_BYTES // 2  # of a row of the tile of K; of a panel of V
        load_k, load_v = pair_loaders()
        score_tiles, value_tiles = (chain_tiles(values, attention_pairs.chain_tile) for values in (False, True))
        score_tops = score_tiles_with_tops(attention_pairs.chain_tile)
        lone = attention_pairs.masked_values
    else:
        dims, panel_bytes = 1, _PANEL_BYTES
        load_k, load_v = loaders(kind, size)
        score_tiles, value_tiles, score_tops = chain_tiles(False), chain_tiles(True), score_tiles_with_tops()
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

    @njit(types.boolean(*[types.int64] * 5), **OPTIONS)
    def all_see(token, a, b, first, last):  # type: ignore[no-untyped-def]
        """Whether all of the tokens a..b-1, at least one, see first..last-1."""
        lowest, latest = token + a * TOKEN_BYTES, token + (b - 1) * TOKEN_BYTES
        return load64(lowest + _position) >= last - 1 and load64(latest + _low) <= first

    @njit(types.int64(*[types.int64] * 4), **OPTIONS)
    def near(token, a, b, limit):  # type: ignore[no-untyped-def]
        """Of the tokens a..b-1, the first ones that see nothing from `limit` on."""
        count = 0
        while a + count < b and load64(token + (a + count) * TOKEN_BYTES + _position) < limit:
            count += 1
        return count

    @njit(types.void(*[types.int64] * 17), **OPTIONS)
    def region_scores(  # type: ignore[no-untyped-def]
        op,
        token,
        tokens,
        head,
        heads,
        rows,
        low,
        high,
        part_start,
        upto,
        q,
        scores,
        tile,
        places,
        tops,
        known,
        known_end,
    ):
        group, dim, table = load64(op + _group), load64(op + _dim), load64(token + _table)
        stride = HEAD + (dim + TILE - 1) // TILE * TILE * 4
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
        here = 0
        if pairs and whole_vectors(op):
            find(op, table, head, low, high, upto, places)
            here = places
        while start < high:
            first, last = max(start, low), min(start + TILE, high)
            a, b = seeing(token, tokens, first, last)
            if a < b:
                load_k(op, table, head, start, first, last, tile, here)
                out = scores + a * group * SCORE_BYTES + (start - part_start) * 4
                if known <= start < known_end:
                    score_tops(
                        tile, (dim + dims - 1) // dims, q, dim * 4, out, SCORE_BYTES, tokens * group, tops, stride,
                        start == known,
                    )  # fmt: skip
                else:
                    score_tiles(
                        tile, (dim + dims - 1) // dims, q + a * group * dim * 4, dim * 4, out, SCORE_BYTES,
                        (b - a) * group, near(token, a, b, start + TILE // 2) * group,
                    )  # fmt: skip
            if here != 0:
                here += 8 * GROUPS
            start += TILE

    @njit(types.void(*[types.int64] * 14), **OPTIONS)
    def region_values(op, token, tokens, head, heads, rows, low, high, part_start, upto, weights, acc, tile, places):  # type: ignore[no-untyped-def]
        group, dim, table = load64(op + _group), load64(op + _dim), load64(token + _table)
        wide = (dim + TILE - 1) // TILE * TILE
        stride, check = HEAD + wide * 4, tile + TILE * wide * 4
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
        here = 0
        if pairs and whole_vectors(op):
            find(op, table, head, low, high, upto, places)
            here = places + 8 * GROUPS * ((high - start + TILE - 1) // TILE)
        while start < high:
            first, last = max(start, low), min(start + TILE, high)
            a, b = seeing(token, tokens, first, last)
            behind = 0  # bytes to a second tile, if all rows see all of both: their sums are read and stored once
            if pairs and a < b and start + 2 * TILE <= high and all_see(token, a, b, start, start + 2 * TILE):
                behind = wide // TILE * panel_bytes
            if a < b:
                ahead = here + 8 * GROUPS * (1 + (behind != 0))
                bad = load_v(op, table, head, start, first, last, tile, check, here, ahead)
                if behind != 0:
                    next_tile, next_here = start + TILE, here + 8 * GROUPS * (here != 0)
                    bad |= load_v(
                        op, table, head, next_tile, next_tile, next_tile + TILE, tile + behind, check, next_here,
                        ahead + 8 * GROUPS,
                    )  # fmt: skip
                if bad == 0:
                    at, sums = weights + a * group * SCORE_BYTES + (start - part_start) * 4, acc + a * group * stride
                    half = near(token, a, b, start + TILE // 2) * group
                    for p in range(wide // TILE):
                        value_tiles(
                            tile + p * panel_bytes, behind, at, SCORE_BYTES, sums + HEAD + p * TILE * 4, stride,
                            (b - a) * group, half,
                        )  # fmt: skip
                else:  # 0 * NaN is NaN: a row must not touch a value that it does not see
                    for r in range(a * group, b * group):
                        seen = token + r // group * TOKEN_BYTES
                        begin, end = max(first, load64(seen + _low)), min(last, load64(seen + _position) + 1)
                        at, sums = weights + r * SCORE_BYTES + (start - part_start) * 4, acc + r * stride + HEAD
                        for p in range(wide // TILE):
                            lone(tile + p * panel_bytes, begin - start, end - start, at, sums + p * TILE * 4)
                            if behind != 0:
                                lone(tile + behind + p * panel_bytes, 0, TILE, at + TILE * 4, sums + p * TILE * 4)
            start += TILE * (1 + (behind != 0))
            if here != 0:
                here += 8 * GROUPS * (1 + (behind != 0))

    return region_scores, region_values
