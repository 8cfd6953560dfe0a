"""Paged attention on the CPU: one kernel for decode, prefill and chunks, and a merge.

The context of a query is cut at multiples of PART = 512 tokens, a part into tiles of TILE = 64 tokens, both aligned at
position 0. A part is an online softmax over its tiles in order (Milakov & Gimelshein 2018); parts are merged in order by
log-sum-exp (Dao 2023, Flash-Decoding). A work item is up to 48 query rows (tokens x heads of one KV head) by one part:
a decode step of one long sequence spreads over threads by parts, a prompt by rows. What a row computes depends on its
position alone: tiles outside its mask change no bit, whoever shares the item.

A tile is first gathered from its blocks into float32 scratch, K as [head_dim][64] and V as panels [64 tokens][64 dims]:
the one place that knows block size, dtype, strides and pools. Scores and P.V are then the tile kernels of gemm.py.

Bytes: every K/V element of the context is read once per work item; operations 4 * head_dim a key and query head. Decode
is bound by memory (roof: read bandwidth), prefill by multiply-adds. Measured figures: bench/kernels.py.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from cupaged.kernels.cpu import emit
from cupaged.kernels.cpu.emit import (
    F32,
    VF,
    VI,
    Emitter,
    as_float,
    like,
    load32,
    load64,
    load_float,
    primitive,
    store_float,
)
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS, row_tiles
from cupaged.kernels.cpu.vector_math import LOG2E, exp2, exp2_float, tanh
from cupaged.kernels.interface import FRAME_MASK, PART, POOL_MASK, POOL_SHIFT, TILE

NEGATIVE = -3e38  # the maximum of no score at all; finite, so that differences of maxima never are NaN
ONE_BITS = 0x3F800000  # 1.0 as float32

# A field of the operation record as its byte offset; the record is written by operations.py.
FIELDS = (
    "items", "num_kv_heads", "query", "query_stride", "group", "head_dim", "states", "scratch", "scratch_bytes",
    "tables", "table_stride", "pool0", "pool1", "pool2", "pool3", "block_size", "block_stride", "layer_offset",
    "kv_stride", "head_stride", "scale", "soft_cap", "k_row", "k_column", "window", "max_rows",
)  # fmt: skip
ITEM_BYTES = 64  # first token, tokens, position of the first, sequence, part, address of its tokens' state offsets


@primitive(6, types.int64)
def softmax_row(e: Emitter, scores: Any, first: Any, last: Any, maximum: Any, sums: Any, soft_cap: Any) -> Any:
    """Scores of a row's tile -> weights in place, tokens first..last-1 visible; updates maximum and sums (by lane).

    Returns the bits of the factor by which earlier results shrink. Invisible tokens get weight 0; a tile with none
    visible leaves everything as it was, bit for bit. NaN scores give NaN weights. With a soft cap (bits, 0: none)
    scores arrive in natural units and become cap * tanh(s / cap) * log2(e) before the mask.
    """
    b = e.b
    vectors, masks = [], []
    cap_bits = b.trunc(soft_cap, ir.IntType(32))
    capped = b.icmp_signed("!=", cap_bits, ir.Constant(ir.IntType(32), 0))
    lo, hi = (e.splat(b.trunc(x, ir.IntType(32))) for x in (first, last))
    for j in range(TILE // 16):
        lane = ir.Constant(VI, list(range(16 * j, 16 * j + 16)))
        masks.append(b.and_(b.icmp_signed(">=", lane, lo), b.icmp_signed("<", lane, hi)))
        vectors.append(e.load_as_float(e.add(scores, 64 * j), "float32"))
    before = b.block
    with b.if_then(capped):
        cap = e.splat(b.bitcast(cap_bits, F32))
        soft = [b.fmul(b.fmul(cap, tanh(e, b.fdiv(v, cap))), like(VF, LOG2E)) for v in vectors]
        inside = b.block
    chosen = []
    for v, s in zip(vectors, soft, strict=True):
        phi = b.phi(VF)
        phi.add_incoming(v, before)
        phi.add_incoming(s, inside)
        chosen.append(phi)
    shown = [b.select(m, v, like(VF, NEGATIVE)) for m, v in zip(masks, chosen, strict=True)]
    old = e.load_as_float(maximum, "float32")
    top = e.maximum(e.maximum(shown[0], shown[1]), e.maximum(shown[2], shown[3]))
    top = e.maximum(e.reduce(top, e.maximum), old)
    shrink = exp2(e, b.fsub(old, top))
    total = b.fmul(e.load_as_float(sums, "float32"), shrink)
    for j, (mask, s) in enumerate(zip(masks, shown, strict=True)):
        some = b.and_(mask, b.fcmp_unordered(">", s, like(VF, float("-inf"))))
        weight = b.select(some, exp2(e, b.fsub(s, top)), e.zero())
        total = b.fadd(total, weight)
        e.store(weight, e.add(scores, 64 * j), 4)
    e.store(total, sums, 4)
    e.store(top, maximum, 4)
    return b.zext(b.bitcast(e.first(shrink), ir.IntType(32)), ir.IntType(64))


@primitive(3)
def scale_row(e: Emitter, row: Any, vectors: Any, factor: Any) -> None:
    """row *= factor (bits), 16 floats a vector."""
    f = e.splat(e.b.bitcast(e.b.trunc(factor, ir.IntType(32)), F32))

    def body(i: Any, _: list[Any]) -> list[Any]:
        a = e.add(row, e.mul(i, 64))
        e.store(e.b.fmul(e.load_as_float(a, "float32"), f), a, 4)
        return []

    e.loop(vectors, [], body)


@primitive(1, types.float32)
def sum_lanes(e: Emitter, address: Any) -> Any:
    return e.first(e.reduce(e.load_as_float(address, "float32"), e.b.fadd))


def gather_k(kind: str, lanes: int) -> Any:
    """`lanes` tokens of K (transposed in the block) into the tile: rows of dims; prefetches the next tile's block."""

    @primitive(5)
    def kernel(e: Emitter, source: Any, row_bytes: Any, tile: Any, dims: Any, ahead: Any) -> None:
        def body(d: Any, _: list[Any]) -> list[Any]:
            offset = e.mul(d, row_bytes)
            e.prefetch(e.add(ahead, offset))
            value = e.load_as_float(e.add(source, offset), kind, lanes)
            e.store(value, e.add(tile, e.mul(d, TILE * 4)), 4)
            return []

        e.loop(dims, [], body)

    return kernel


def gather_v(kind: str, size: int) -> Any:
    """One token's V, whole vectors of 16 dims, into the tile's panels; returns NaN if any is not finite, else 0."""

    @primitive(5, types.float32)
    def kernel(e: Emitter, source: Any, tile: Any, vectors: Any, panel_bytes: Any, ahead: Any) -> Any:
        def body(i: Any, state: list[Any]) -> list[Any]:
            e.prefetch(e.add(ahead, e.mul(i, 16 * size)))
            value = e.load_as_float(e.add(source, e.mul(i, 16 * size)), kind)
            panel = e.mul(e.b.ashr(i, e.const(2)), panel_bytes)
            e.store(value, e.add(e.add(tile, panel), e.mul(e.b.and_(i, e.const(3)), 64)), 4)
            return [e.fma(value, e.zero(), state[0])]

        (check,) = e.loop(vectors, [e.zero()], body)
        return e.first(e.reduce(check, e.b.fadd))

    return kernel


@primitive(1, types.int64, [types.float32])
def is_nan(e: Emitter, x: Any) -> Any:
    return e.b.zext(e.b.fcmp_unordered("uno", x, x), ir.IntType(64))


def attention_parts(kind: str) -> Any:
    """The operation that computes partial results: a chunk is a work item by a KV head."""
    size = {"float32": 4, "float16": 2, "bfloat16": 2}[kind]
    load_one = {"float32": emit.load_float, "float16": emit.load_half, "bfloat16": emit.load_bfloat}[kind]
    k16, k8, v16 = gather_k(kind, 16), gather_k(kind, 8), gather_v(kind, size)
    tiles = row_tiles("float32")
    o = {name: 16 + 8 * i for i, name in enumerate(FIELDS)}
    (items_, heads_, query_, query_stride_, group_, dim_, states_, scratch_, scratch_bytes_, tables_, table_stride_,
     pool_, _p1, _p2, _p3, block_size_, block_stride_, layer_, kv_, head_, scale_, cap_, k_row_, k_column_,
     window_, max_rows_) = (o[name] for name in FIELDS)  # fmt: skip

    @njit(types.int64(types.int64, types.int64, types.int64, types.int64), **OPTIONS)
    def block_address(op, table, block, head):  # type: ignore[no-untyped-def]
        """Address of layer and head of a block of the table, wherever it lives."""
        reference = load32(table + 4 * block)
        base = load64(op + pool_ + 8 * ((reference >> POOL_SHIFT) & POOL_MASK))
        frame = reference & FRAME_MASK
        return base + (frame * load64(op + block_stride_) + load64(op + layer_) + head * load64(op + head_)) * size

    @njit(types.int64(*[types.int64] * 8), **OPTIONS)
    def load_tile(op, table, head, start, first, last, k_tile, v_tile):  # type: ignore[no-untyped-def]
        """Tokens first..last-1 of the tile at `start` into scratch. 1 if a V is not finite."""
        block_size, dim = load64(op + block_size_), load64(op + dim_)
        k_row, k_column, kv = load64(op + k_row_), load64(op + k_column_), load64(op + kv_) * size
        wide = (dim + TILE - 1) // TILE * TILE
        panel_bytes = TILE * TILE * 4
        vectors = dim // 16
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
                    k16(k + at * size, k_row * size, k_tile + (column + at) * 4, dim, k + at * size + kv)
                    at += 16
                while at < run and whole - at >= 8 and room - at >= 8:
                    k8(k + at * size, k_row * size, k_tile + (column + at) * 4, dim, k + at * size + kv)
                    at += 8
            for t in range(at, run):
                for d in range(dim):
                    store_float(k_tile + (d * TILE + column + t) * 4, load_one(k + (d * k_row + t * k_column) * size))
            v = base + kv + offset * dim * size
            for t in range(run):
                target = v_tile + (column + t) * TILE * 4
                source = v + t * dim * size
                bad += v16(source, target, vectors, panel_bytes, source + block_size * dim * size)
                for d in range(vectors * 16, dim):
                    x = load_one(source + d * size)
                    store_float(target + (d // TILE) * panel_bytes + (d % TILE) * 4, x)
                    bad += x * types.float32(0.0)
                for d in range(dim, wide):
                    store_float(target + (d // TILE) * panel_bytes + (d % TILE) * 4, types.float32(0.0))
            token += run
        return is_nan(bad)

    @njit(KERNEL, **OPTIONS)
    def parts_kernel(op, chunk, thread):  # type: ignore[no-untyped-def]
        kv_heads = load64(op + heads_)
        item = load64(op + items_) + (chunk // kv_heads) * ITEM_BYTES
        head = chunk % kv_heads
        token0, tokens, position0 = load64(item), load64(item + 8), load64(item + 16)
        sequence, part, offsets = load64(item + 24), load64(item + 32), load64(item + 40)
        group, dim, window = load64(op + group_), load64(op + dim_), load64(op + window_)
        soft_cap = load64(op + cap_)
        wide = (dim + TILE - 1) // TILE * TILE
        rows = tokens * group
        q = load64(op + scratch_) + thread * load64(op + scratch_bytes_)
        most = load64(op + max_rows_)
        k_tile = q + most * dim * 4
        v_tile = k_tile + TILE * dim * 4
        scores = v_tile + TILE * wide * 4
        acc = scores + most * TILE * 4
        maxima = acc + most * wide * 4
        sums = maxima + most * 64
        scale = as_float(load64(op + scale_))
        for t in range(tokens):
            source = load64(op + query_) + (token0 + t) * load64(op + query_stride_) + head * group * dim * 4
            for i in range(group * dim):
                store_float(q + (t * group * dim + i) * 4, load_float(source + i * 4) * scale)
        for i in range(rows * wide):
            store_float(acc + i * 4, types.float32(0.0))
        for i in range(rows * 16):
            store_float(maxima + i * 4, types.float32(NEGATIVE))
            store_float(sums + i * 4, types.float32(0.0))
        table = load64(op + tables_) + sequence * load64(op + table_stride_)
        low = max(part * PART, position0 - window + 1)  # the first token that any row of the item sees in this part
        high = min((part + 1) * PART, position0 + tokens)  # and the end of the last
        for start in range(low // TILE * TILE, high, TILE):
            first = max(start, low)
            last = min(start + TILE, high)
            bad = load_tile(op, table, head, start, first, last, k_tile, v_tile)
            for i in range(rows):
                emit_zero(scores + i * TILE * 4)
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
            if bad == 0:
                begin = first - start
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
        states = load64(op + states_)
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


@primitive(1)
def emit_zero(e: Emitter, address: Any) -> None:
    """64 floats = 0."""
    for j in range(4):
        e.store(e.zero(), e.add(address, 64 * j), 4)


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
