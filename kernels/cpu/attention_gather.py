"""Where the K and V of a tile are: looked up block by block, gathered into float32 scratch, or read in place."""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu import attention_pairs, attention_weave
from cupaged.kernels.cpu.attention_record import FIELDS, SCORE_BYTES, offsets
from cupaged.kernels.cpu.attention_tiles import (
    GROUPS,
    direct_scores,
    direct_values,
    gather_k,
    gather_v,
    is_nan,
    sum_lanes,
    zero_rows,
)
from cupaged.kernels.cpu.emit import (
    LOAD,
    SIZE,
    load32,
    load64,
    load_bfloat,
    load_raw16,
    store64,
    store_float,
    store_raw16,
)
from cupaged.kernels.cpu.gemm import OPTIONS
from cupaged.kernels.interface import FRAME_MASK, POOL_MASK, POOL_SHIFT, TILE

_AT = offsets(FIELDS, 16)
_dim, _pool, _block_size, _block_stride = _AT["head_dim"], _AT["pool0"], _AT["block_size"], _AT["block_stride"]
_layer, _kv, _head, _k_row, _k_column = (
    _AT[name] for name in ("layer_offset", "kv_stride", "head_stride", "k_row", "k_column")
)
_PANEL_BYTES = TILE * TILE * 4


def block_addresses(size: int) -> Any:
    """Address of a layer's and head's K in a block of the table, wherever the block lives."""

    @njit(types.int64(types.int64, types.int64, types.int64, types.int64), **OPTIONS)
    def block_address(op, table, block, head):  # type: ignore[no-untyped-def]
        reference = load32(table + 4 * block)
        base = load64(op + _pool + 8 * ((reference >> POOL_SHIFT) & POOL_MASK))
        frame = reference & FRAME_MASK
        return base + (frame * load64(op + _block_stride) + load64(op + _layer) + head * load64(op + _head)) * size

    return block_address


def loaders(kind: str, size: int) -> Any:
    """(load_k, load_v): tokens first..last-1 of the tile at `start` into scratch, K as [head_dim][64], V as panels
    [64 tokens][64 dims], with zeros for the tile's other tokens. load_v gives 1 if a V is not finite; it sums up
    what tells that in 64 bytes at `check`."""
    load_one = LOAD[kind]
    block_address = block_addresses(size)
    k16, k8, v16 = gather_k(kind, 16), gather_k(kind, 8), gather_v(kind, size)

    @njit(types.void(*[types.int64] * 8), **OPTIONS)
    def load_k(op, table, head, start, first, last, tile, here):  # type: ignore[no-untyped-def]
        block_size, dim = load64(op + _block_size), load64(op + _dim)
        k_row, k_column = load64(op + _k_row), load64(op + _k_column)
        token = first
        while token < last:
            offset = token % block_size
            run = min(block_size - offset, last - token)
            k = block_address(op, table, token // block_size, head) + offset * k_column * size
            column = token - start
            whole = block_size - offset  # vectors may read the block to its end: other lanes are masked later
            room = TILE - column
            at = 0
            if k_column == 1:
                while at < run and whole - at >= 16 and room - at >= 16:
                    k16(k + at * size, k_row * size, tile + (column + at) * 4, dim)
                    at += 16
                while at < run and whole - at >= 8 and room - at >= 8:
                    k8(k + at * size, k_row * size, tile + (column + at) * 4, dim)
                    at += 8
            for t in range(at, run):
                for d in range(dim):
                    store_float(tile + (d * TILE + column + t) * 4, load_one(k + (d * k_row + t * k_column) * size))
            token += run

    @njit(types.int64(*[types.int64] * 10), **OPTIONS)
    def load_v(op, table, head, start, first, last, tile, check, here, ahead):  # type: ignore[no-untyped-def]
        block_size, dim, kv = load64(op + _block_size), load64(op + _dim), load64(op + _kv) * size
        wide = (dim + TILE - 1) // TILE * TILE
        vectors = dim // 16
        for i in range(16):
            store_float(check + 4 * i, types.float32(0.0))
        for p in range(wide // TILE):
            zero_rows(tile + p * _PANEL_BYTES, 0, first - start)
            zero_rows(tile + p * _PANEL_BYTES, last - start, TILE)
        bad = types.float32(0.0)
        token = first
        while token < last:
            offset = token % block_size
            run = min(block_size - offset, last - token)
            v = block_address(op, table, token // block_size, head) + kv + offset * dim * size
            row = tile + (token - start) * TILE * 4
            v16(v, dim * size, run, row, vectors, _PANEL_BYTES, check)
            if vectors * 16 < wide:
                for t in range(run):
                    for d in range(vectors * 16, dim):
                        x = load_one(v + (t * dim + d) * size)
                        store_float(row + t * TILE * 4 + (d // TILE) * _PANEL_BYTES + (d % TILE) * 4, x)
                        bad += x * types.float32(0.0)
                    for d in range(dim, wide):
                        at = row + t * TILE * 4 + (d // TILE) * _PANEL_BYTES + (d % TILE) * 4
                        store_float(at, types.float32(0.0))
            token += run
        return is_nan(bad + sum_lanes(check))

    return load_k, load_v


def pair_loaders() -> Any:
    """`loaders` of bfloat16, into tiles of pairs (attention_pairs.py).

    here: where `find` has put the addresses of the tile's groups, if they lie in one piece; what is read next, there or
    at `ahead`, is prefetched.
    """
    size = SIZE["bfloat16"]
    block_address = block_addresses(size)
    k16, k8 = attention_weave.gather_k(16), attention_weave.gather_k(8)
    gather_v, row_of, clear = attention_weave.gather_v, attention_weave.row_of, attention_weave.clear
    weave_k, weave_v = attention_weave.weave_k, attention_weave.weave_v

    @njit(types.void(*[types.int64] * 8), **OPTIONS)
    def load_k(op, table, head, start, first, last, tile, here):  # type: ignore[no-untyped-def]
        block_size, dim = load64(op + _block_size), load64(op + _dim)
        k_row, k_column = load64(op + _k_row), load64(op + _k_column)
        if last - first == TILE and here != 0:
            weave_k(here, here + 8 * GROUPS, k_row * size, tile, dim)
            return
        token = first
        while token < last:
            offset = token % block_size
            run = min(block_size - offset, last - token)
            k = block_address(op, table, token // block_size, head) + offset * k_column * size
            column = token - start
            whole = block_size - offset  # vectors may read the block to its end: other lanes are masked later
            room = TILE - column
            at = 0
            if k_column == 1:
                while at < run and whole - at >= 16 and room - at >= 16:
                    k16(k + at * size, k_row * size, tile + (column + at) * 4, dim)
                    at += 16
                while at < run and whole - at >= 8 and room - at >= 8:
                    k8(k + at * size, k_row * size, tile + (column + at) * 4, dim)
                    at += 8
            for t in range(at, run):
                target, k_token = tile + (column + t) * 4, k + t * k_column * size
                for d in range(dim):
                    at_pair = target + d // 2 * TILE * 4 + d % 2 * size
                    store_raw16(at_pair, load_raw16(k_token + d * k_row * size))
                if dim % 2 != 0:
                    store_raw16(target + dim // 2 * TILE * 4 + size, 0)
            token += run

    @njit(types.int64(*[types.int64] * 10), **OPTIONS)
    def load_v(op, table, head, start, first, last, tile, check, here, ahead):  # type: ignore[no-untyped-def]
        block_size, dim, kv = load64(op + _block_size), load64(op + _dim), load64(op + _kv) * size
        wide = (dim + TILE - 1) // TILE * TILE
        vectors = dim // 16
        if last - first == TILE and here != 0 and vectors * 16 == wide:
            return weave_v(here, ahead, dim * size, tile, wide // TILE)
        clear(check, 1)
        if last - first < TILE or vectors * 16 < wide:
            clear(tile, TILE * wide // 32)
        bad = types.float32(0.0)
        token = first
        while token < last:
            offset = token % block_size
            run = min(block_size - offset, last - token)
            v = block_address(op, table, token // block_size, head) + kv + offset * dim * size
            gather_v(v, dim * size, token - start, run, tile, vectors, check)
            if vectors * 16 < wide:
                for t in range(run):
                    place = token - start + t
                    row = tile + row_of(place) * TILE * 4 + place // 16 % 2 * size
                    for d in range(vectors * 16, dim):
                        at = v + (t * dim + d) * size
                        bad += load_bfloat(at) * types.float32(0.0)
                        store_raw16(row + d // TILE * TILE * TILE * 2 + d % TILE * 4, load_raw16(at))
            token += run
        return is_nan(bad + sum_lanes(check))

    return load_k, load_v


def in_place(kind: str, size: int) -> Any:
    """(find, scores, values) of a tile read in place, for any number of rows that see the same tokens of it."""
    block_address = block_addresses(size)
    if kind == "bfloat16":
        s1, s2, s3, s4 = (attention_pairs.direct_scores(rows) for rows in (1, 2, 3, 4))
        v1, v2, v3, v4 = (attention_pairs.direct_values(rows, 4, True) for rows in (1, 2, 3, 4))
        p1, p2, p3, p4 = (attention_pairs.direct_values(rows, 4, False) for rows in (1, 2, 3, 4))
        narrow = attention_pairs.direct_values(1, 1, False)
    else:
        s1, s2, s3, s4 = (direct_scores(rows, kind, size) for rows in (1, 2, 3, 4))
        v1, v2, v3, v4 = (direct_values(rows, 4, kind, size, True) for rows in (1, 2, 3, 4))
        p1, p2, p3, p4 = (direct_values(rows, 4, kind, size, False) for rows in (1, 2, 3, 4))
        narrow = direct_values(1, 1, kind, size, False)

    @njit(types.void(*[types.int64] * 7), **OPTIONS)
    def runs(op, table, head, first, count, keys, values):  # type: ignore[no-untyped-def]
        """Addresses of K and V of `count` runs of 16 tokens from token `first` on, a multiple of 16."""
        block_size, dim, kv = load64(op + _block_size), load64(op + _dim), load64(op + _kv)
        block, offset = first // block_size, first % block_size
        base = block_address(op, table, block, head)
        for i in range(count):
            if offset == block_size:
                block += 1
                offset = 0
                base = block_address(op, table, block, head)
            store64(keys + 8 * i, base + offset * size)
            store64(values + 8 * i, base + (kv + offset * dim) * size)
            offset += 16

    @njit(types.void(*[types.int64] * 7), **OPTIONS)
    def find(op, table, head, low, high, upto, places):  # type: ignore[no-untyped-def]
        """Runs of 16 tokens of a region in the order in which they are read: K of its tiles, V of its tiles, K of the
        tile that follows (to be prefetched). A run outside low..high-1 is one inside; of tokens from upto on, any."""
        start = low // TILE * TILE
        tiles = (high - start + TILE - 1) // TILE
        before, count = (low - start) // 16, (high + 15) // 16 - low // 16
        keys, values = places, places + 8 * GROUPS * tiles
        runs(op, table, head, low // 16 * 16, count, keys + 8 * before, values + 8 * before)
        for i in range(before):
            store64(keys + 8 * i, load64(keys + 8 * before))
            store64(values + 8 * i, load64(values + 8 * before))
        for i in range(before + count, GROUPS * tiles):
            store64(keys + 8 * i, load64(keys + 8 * (before + count - 1)))
            store64(values + 8 * i, load64(values + 8 * (before + count - 1)))
        after = values + 8 * GROUPS * tiles
        coming = min(max((upto + 15) // 16 - (start // 16 + GROUPS * tiles), 0), GROUPS)
        if coming > 0:
            runs(op, table, head, start + TILE * tiles, coming, after, after + 8 * GROUPS)
        for i in range(coming, GROUPS):
            store64(after + 8 * i, load64(values))
            store64(after + 8 * (GROUPS + i), load64(values))

    @njit(types.void(*[types.int64] * 10), **OPTIONS)
    def scores(pointers, shift, row_bytes, dim, q, rows, out, ahead, ahead_shift, ahead_bytes):  # type: ignore[no-untyped-def]
        r = 0
        while r < rows:
            qa = q + r * dim * 4
            oa = out + r * SCORE_BYTES
            step = min(rows - r, 4)
            if step == 4:
                s4(pointers, shift, row_bytes, dim, qa, dim * 4, oa, ahead, ahead_shift, ahead_bytes)
            elif step == 3:
                s3(pointers, shift, row_bytes, dim, qa, dim * 4, oa, ahead, ahead_shift, ahead_bytes)
            elif step == 2:
                s2(pointers, shift, row_bytes, dim, qa, dim * 4, oa, ahead, ahead_shift, ahead_bytes)
            else:
                s1(pointers, shift, row_bytes, dim, qa, dim * 4, oa, ahead, ahead_shift, ahead_bytes)
            ahead, ahead_shift, ahead_bytes = pointers, shift, row_bytes  # once is enough
            r += step

    @njit(types.void(*[types.int64] * 11), **OPTIONS)
    def values(pointers, shift, ahead, ahead_shift, begin, end, dim, weights, acc, stride, rows):  # type: ignore[no-untyped-def]
        token = dim * size
        panels = dim // TILE * TILE
        full = begin == 0 and end == TILE
        r = 0
        while r < rows:
            w = weights + r * SCORE_BYTES
            step = min(rows - r, 4)
            for d in range(0, panels, TILE):
                a, here, there = acc + r * stride + d * 4, shift + d * size, ahead_shift + d * size
                if step == 4:
                    if full:
                        v4(pointers, here, ahead, there, begin, end, token, w, a, stride)
                    else:
                        p4(pointers, here, ahead, there, begin, end, token, w, a, stride)
                elif step == 3:
                    if full:
                        v3(pointers, here, ahead, there, begin, end, token, w, a, stride)
                    else:
                        p3(pointers, here, ahead, there, begin, end, token, w, a, stride)
                elif step == 2:
                    if full:
                        v2(pointers, here, ahead, there, begin, end, token, w, a, stride)
                    else:
                        p2(pointers, here, ahead, there, begin, end, token, w, a, stride)
                elif full:
                    v1(pointers, here, ahead, there, begin, end, token, w, a, stride)
                else:
                    p1(pointers, here, ahead, there, begin, end, token, w, a, stride)
            ahead, ahead_shift = pointers, shift  # once is enough
            r += step
        for d in range(panels, dim, 16):  # what is left of dims, row by row
            for left in range(rows):
                w, a = weights + left * SCORE_BYTES, acc + left * stride
                narrow(pointers, shift + d * size, ahead, 0, begin, end, token, w, a + d * 4, stride)

    return find, scores, values
