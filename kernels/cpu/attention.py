"""Paged attention on the CPU: one kernel for decode, prefill and chunks, and a merge.

The context of a query is cut at multiples of PART = 512 tokens, a part into tiles of TILE = 64 tokens, both aligned at
position 0. A part is an online softmax over its tiles in order (Milakov & Gimelshein 2018); parts are merged in order
by log-sum-exp (Dao 2023, Flash-Decoding). A work item is up to 48 query rows (tokens x heads of one KV head) by one
part: a decode step of one long sequence spreads over threads by parts, a prompt by rows. What a row computes depends on
its position alone: tiles outside its mask change no bit, whoever shares the item.

A tile is first gathered from its blocks into float32 scratch, K as [head_dim][64] and V as panels [64 tokens][64 dims],
and scores and P.V are then the tile kernels of gemm.py. A single query (decode) reads blocks where they lie instead, if
they hold whole vectors: the same sums, without the way through scratch.

Bytes: every K/V element of the context is read once per work item; operations 4 * head_dim a key and query head. Decode
is bound by memory (roof: read bandwidth), prefill by multiply-adds. Measured figures: bench/kernels.py.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu.attention_tiles import (
    GROUPS,
    NEGATIVE,
    ONE_BITS,
    direct_scores,
    direct_values,
    gather_k,
    gather_v,
    is_nan,
    scale_row,
    softmax_row,
    sum_lanes,
    zero_scores,
)
from cupaged.kernels.cpu.emit import LOAD, SIZE, as_float, load32, load64, load_float, store64, store_float
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS, row_tiles
from cupaged.kernels.cpu.vector_math import LOG2E, exp2_float
from cupaged.kernels.interface import FRAME_MASK, PART, POOL_MASK, POOL_SHIFT, TILE

# A field of the operation record, 8 bytes each from offset 16; the record is written by operations.py.
FIELDS = (
    "items", "num_kv_heads", "query", "query_stride", "group", "head_dim", "states", "scratch", "scratch_bytes",
    "tables", "table_stride", "pool0", "pool1", "pool2", "pool3", "block_size", "block_stride", "layer_offset",
    "kv_stride", "head_stride", "scale", "soft_cap", "k_row", "k_column", "window", "max_rows",
)  # fmt: skip
ITEM_BYTES = 64  # first token, tokens, position of the first, sequence, part, address of its tokens' state offsets
_OFFSET = {name: 16 + 8 * i for i, name in enumerate(FIELDS)}
(_items, _heads, _query, _query_stride, _group, _dim, _states, _scratch, _scratch_bytes, _tables, _table_stride,
 _pool, _pool1, _pool2, _pool3, _block_size, _block_stride, _layer, _kv, _head, _scale, _cap, _k_row, _k_column,
 _window, _max_rows) = (_OFFSET[name] for name in FIELDS)  # fmt: skip


def block_addresses(size: int) -> Any:
    """Address of a layer's and head's K in a block of the table, wherever the block lives."""

    @njit(types.int64(types.int64, types.int64, types.int64, types.int64), **OPTIONS)
    def block_address(op, table, block, head):  # type: ignore[no-untyped-def]
        reference = load32(table + 4 * block)
        base = load64(op + _pool + 8 * ((reference >> POOL_SHIFT) & POOL_MASK))
        frame = reference & FRAME_MASK
        return base + (frame * load64(op + _block_stride) + load64(op + _layer) + head * load64(op + _head)) * size

    return block_address


def tile_loader(kind: str, size: int, block_address: Any) -> Any:
    """Gather tokens first..last-1 of the tile at `start` into scratch. 1 if a V among them is not finite."""
    load_one = LOAD[kind]
    k16, k8, v16 = gather_k(kind, 16), gather_k(kind, 8), gather_v(kind, size)

    @njit(types.int64(*[types.int64] * 8), **OPTIONS)
    def load_tile(op, table, head, start, first, last, k_tile, v_tile):  # type: ignore[no-untyped-def]
        block_size, dim = load64(op + _block_size), load64(op + _dim)
        k_row, k_column, kv = load64(op + _k_row), load64(op + _k_column), load64(op + _kv) * size
        wide = (dim + TILE - 1) // TILE * TILE
        panel_bytes = TILE * TILE * 4
        vectors = dim // 16
        check = v_tile + TILE * wide * 4
        for i in range(16):
            store_float(check + 4 * i, types.float32(0.0))
        bad = types.float32(0.0)
        token = first
        while token < last:
            block = token // block_size
            offset = token % block_size
            run = min(block_size - offset, last - token)
            base = block_address(op, table, block, head)
            column = token - start
            k = base + offset * k_column * size
            whole = block_size - offset  # vectors may read the block to its end: other lanes are masked later
            room = TILE - column
            at = 0
            if k_column == 1:
                while at < run and whole - at >= 16 and room - at >= 16:
                    k16(k + at * size, k_row * size, k_tile + (column + at) * 4, dim)
                    at += 16
                while at < run and whole - at >= 8 and room - at >= 8:
                    k8(k + at * size, k_row * size, k_tile + (column + at) * 4, dim)
                    at += 8
            for t in range(at, run):
                for d in range(dim):
                    store_float(k_tile + (d * TILE + column + t) * 4, load_one(k + (d * k_row + t * k_column) * size))
            v = base + kv + offset * dim * size
            v16(v, dim * size, run, v_tile + column * TILE * 4, vectors, panel_bytes, check)
            if vectors * 16 < wide:
                for t in range(run):
                    target = v_tile + (column + t) * TILE * 4
                    for d in range(vectors * 16, dim):
                        x = load_one(v + (t * dim + d) * size)
                        store_float(target + (d // TILE) * panel_bytes + (d % TILE) * 4, x)
                        bad += x * types.float32(0.0)
                    for d in range(dim, wide):
                        store_float(target + (d // TILE) * panel_bytes + (d % TILE) * 4, types.float32(0.0))
            token += run
        return is_nan(bad + sum_lanes(check))

    return load_tile


def direct_tile(kind: str, size: int, block_address: Any) -> Any:
    """(find, scores, values) of a tile read in place, for any number of rows of one query."""
    s1, s2, s3, s4 = (direct_scores(rows, kind, size) for rows in (1, 2, 3, 4))
    v1, v2, v3, v4 = (direct_values(rows, 4, kind, size) for rows in (1, 2, 3, 4))
    n1, n4 = direct_values(1, 1, kind, size), direct_values(4, 1, kind, size)

    @njit(types.void(*[types.int64] * 7), **OPTIONS)
    def find(op, table, head, start, first, last, pointers):  # type: ignore[no-untyped-def]
        """Addresses of the tile's four groups of 16 tokens, K and V; of a group without a token, another's."""
        block_size, dim, kv = load64(op + _block_size), load64(op + _dim), load64(op + _kv) * size
        for j in range(GROUPS):
            token = min(max(start + 16 * j, first // 16 * 16), (last - 1) // 16 * 16)
            base = block_address(op, table, token // block_size, head)
            offset = token % block_size
            store64(pointers + 8 * j, base + offset * size)
            store64(pointers + 8 * (GROUPS + j), base + kv + offset * dim * size)

    @njit(types.void(*[types.int64] * 6), **OPTIONS)
    def scores(pointers, row_bytes, dim, q, rows, out):  # type: ignore[no-untyped-def]
        r = 0
        while r < rows:
            qa = q + r * dim * 4
            oa = out + r * TILE * 4
            left = rows - r
            if left >= 4:
                s4(pointers, row_bytes, dim, qa, dim * 4, oa)
                r += 4
            elif left == 3:
                s3(pointers, row_bytes, dim, qa, dim * 4, oa)
                r += 3
            elif left == 2:
                s2(pointers, row_bytes, dim, qa, dim * 4, oa)
                r += 2
            else:
                s1(pointers, row_bytes, dim, qa, dim * 4, oa)
                r += 1

    @njit(types.void(*[types.int64] * 9), **OPTIONS)
    def values(pointers, ahead, begin, end, dim, weights, acc, wide, rows):  # type: ignore[no-untyped-def]
        token = dim * size
        stride = wide * 4
        r = 0
        while r < rows:
            left = rows - r
            w = weights + r * TILE * 4
            step = min(left, 4)
            for d in range(0, dim // TILE * TILE, TILE):
                a = acc + r * stride + d * 4
                if step == 4:
                    v4(pointers, ahead, begin, end, token, d * size, w, a, stride)
                elif step == 3:
                    v3(pointers, ahead, begin, end, token, d * size, w, a, stride)
                elif step == 2:
                    v2(pointers, ahead, begin, end, token, d * size, w, a, stride)
                else:
                    v1(pointers, ahead, begin, end, token, d * size, w, a, stride)
            for d in range(dim // TILE * TILE, dim, 16):
                a = acc + r * stride + d * 4
                if step == 4:
                    n4(pointers, ahead, begin, end, token, d * size, w, a, stride)
                else:
                    for i in range(step):
                        n1(pointers, ahead, begin, end, token, d * size, w + i * TILE * 4, a + i * stride, stride)
            r += step

    return find, scores, values


def attention_parts(kind: str) -> Any:
    """The operation that computes partial results: a chunk is a work item by a KV head."""
    size = SIZE[kind]
    block_address = block_addresses(size)
    load_tile = tile_loader(kind, size, block_address)
    find, scores_in_place, values_in_place = direct_tile(kind, size, block_address)
    tiles = row_tiles("float32")

    @njit(KERNEL, **OPTIONS)
    def parts_kernel(op, chunk, thread):  # type: ignore[no-untyped-def]
        kv_heads = load64(op + _heads)
        item = load64(op + _items) + (chunk // kv_heads) * ITEM_BYTES
        head = chunk % kv_heads
        token0, tokens, position0 = load64(item), load64(item + 8), load64(item + 16)
        sequence, part, offsets = load64(item + 24), load64(item + 32), load64(item + 40)
        group, dim, window = load64(op + _group), load64(op + _dim), load64(op + _window)
        soft_cap = load64(op + _cap)
        wide = (dim + TILE - 1) // TILE * TILE
        rows = tokens * group
        q = load64(op + _scratch) + thread * load64(op + _scratch_bytes)
        most = load64(op + _max_rows)
        k_tile = q + most * dim * 4
        v_tile = k_tile + TILE * dim * 4
        scores = v_tile + TILE * wide * 4 + 64
        acc = scores + most * TILE * 4
        maxima = acc + most * wide * 4
        sums = maxima + most * 64
        scale = as_float(load64(op + _scale))
        for t in range(tokens):
            source = load64(op + _query) + (token0 + t) * load64(op + _query_stride) + head * group * dim * 4
            for i in range(group * dim):
                store_float(q + (t * group * dim + i) * 4, load_float(source + i * 4) * scale)
        for i in range(rows * wide):
            store_float(acc + i * 4, types.float32(0.0))
        for i in range(rows * 16):
            store_float(maxima + i * 4, types.float32(NEGATIVE))
            store_float(sums + i * 4, types.float32(0.0))
        table = load64(op + _tables) + sequence * load64(op + _table_stride)
        low = max(part * PART, position0 - window + 1)  # the first token that any row of the item sees in this part
        high = min((part + 1) * PART, position0 + tokens)  # and the end of the last
        block_size, k_row = load64(op + _block_size), load64(op + _k_row)
        in_place = tokens == 1 and block_size % 16 == 0 and dim % 16 == 0 and load64(op + _k_column) == 1
        pointers = sums + most * 64 + 64
        ahead = pointers + 64
        if in_place and low < high:
            start = low // TILE * TILE
            find(op, table, head, start, low, min(start + TILE, high), ahead)
        for start in range(low // TILE * TILE, high, TILE):
            first = max(start, low)
            last = min(start + TILE, high)
            bad = types.int64(0)
            if in_place:
                pointers, ahead = ahead, pointers
                following = start + TILE if start + TILE < high else start
                find(op, table, head, following, max(following, low), min(following + TILE, high), ahead)
                scores_in_place(pointers, k_row * size, dim, q, rows, scores)
            else:
                bad = load_tile(op, table, head, start, first, last, k_tile, v_tile)
                for i in range(rows):
                    zero_scores(scores + i * TILE * 4)
                tiles(k_tile, dim, q, dim * 4, scores, TILE * 4, rows)
            for r in range(rows):
                position = position0 + r // group
                seen_from = max(start, position - window + 1) - start
                seen_to = min(start + TILE, position + 1) - start
                factor = softmax_row(
                    scores + r * TILE * 4, seen_from, seen_to, maxima + r * 64, sums + r * 64, soft_cap
                )
                if factor != ONE_BITS:
                    scale_row(acc + r * wide * 4, wide // 16, factor)
            begin = first - start
            if in_place:
                values_in_place(pointers, ahead, begin, last - start, dim, scores, acc, wide, rows)
            elif bad == 0:
                for p in range(wide // TILE):
                    tiles(
                        v_tile + (p * TILE + begin) * TILE * 4, last - first, scores + begin * 4, TILE * 4,
                        acc + p * TILE * 4, wide * 4, rows,
                    )  # fmt: skip
            else:  # 0 * NaN is NaN: a row must not touch a value that it does not see
                for r in range(rows):
                    position = position0 + r // group
                    begin = max(first, position - window + 1) - start
                    end = min(last, position + 1) - start
                    if begin < end:
                        for p in range(wide // TILE):
                            tiles(
                                v_tile + (p * TILE + begin) * TILE * 4, end - begin, scores + (r * TILE + begin) * 4,
                                TILE * 4, acc + (r * wide + p * TILE) * 4, wide * 4, 1,
                            )  # fmt: skip
        states = load64(op + _states)
        state_bytes = (16 + wide) * 4
        heads = kv_heads * group
        for t in range(tokens):
            position = position0 + t
            first_part = max(0, position - window + 1) // PART
            if part >= first_part and part * PART <= position:
                slot = load64(offsets + t * 8) + part - first_part
                for g in range(group):
                    r = t * group + g
                    target = states + (slot * heads + head * group + g) * state_bytes
                    store_float(target, load_float(maxima + r * 64))
                    store_float(target + 4, sum_lanes(sums + r * 64))
                    for d in range(wide):
                        store_float(target + 64 + d * 4, load_float(acc + (r * wide + d) * 4))

    return parts_kernel


@njit(KERNEL, **OPTIONS)
def attention_merge(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Partial results of a token -> output, in the order of parts: sum of 2^(m_i - M) * (l_i, acc_i).

    Record: states, state offsets [T] (in parts), parts [T], heads, head_dim, out, out stride, sinks (address, 0: none),
    tokens. A chunk is a token. The sink logit of a head counts once, in the denominator.
    """
    states, offsets, counts = load64(op + 16), load64(op + 24), load64(op + 32)
    heads, dim, out, out_stride = load64(op + 40), load64(op + 48), load64(op + 56), load64(op + 64)
    sinks = load64(op + 72)
    wide = (dim + TILE - 1) // TILE * TILE
    state_bytes = (16 + wide) * 4
    base = states + load64(offsets + chunk * 8) * heads * state_bytes
    parts = load64(counts + chunk * 8)
    for h in range(heads):
        target = out + chunk * out_stride + h * dim * 4
        for d in range(dim):
            store_float(target + d * 4, types.float32(0.0))
        top = types.float32(NEGATIVE)
        for i in range(parts):
            m = load_float(base + (i * heads + h) * state_bytes)
            top = m if m > top else top
        total = types.float32(0.0)
        if sinks != 0:
            sink = load_float(sinks + h * 4) * types.float32(LOG2E)
            top = sink if sink > top else top
            total = exp2_float(sink - top)
        for i in range(parts):
            state = base + (i * heads + h) * state_bytes
            weight = exp2_float(load_float(state) - top)
            total += weight * load_float(state + 4)
            for d in range(dim):
                a = target + d * 4
                store_float(a, load_float(a) + weight * load_float(state + 64 + d * 4))
        if total == types.float32(0.0):  # nothing visible: zeros, not 0 / 0
            for d in range(dim):
                store_float(target + d * 4, types.float32(0.0))
        else:
            for d in range(dim):
                store_float(target + d * 4, load_float(target + d * 4) / total)
