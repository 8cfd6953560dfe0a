"""Pieces of paged attention written as LLVM IR: softmax of a tile, gathering a tile, and reading one in place.

Reading in place and gathering first give the same bits: both sum scores over dims and weights over tokens in one chain
of fused multiply-adds from zero, in order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from cupaged.kernels.cpu.emit import F32, I64, VF, VI, Emitter, like, primitive
from cupaged.kernels.cpu.vector_math import LOG2E, exp2, tanh
from cupaged.kernels.interface import TILE

NEGATIVE = -3e38  # the maximum of no score at all; finite, so that differences of maxima never are NaN
ONE_BITS = 0x3F800000  # 1.0 as float32
GROUPS = TILE // 16  # a tile is four groups of 16 tokens


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
    """`lanes` tokens of K (transposed in the block) into the tile, dim by dim."""

    @primitive(4)
    def kernel(e: Emitter, source: Any, row_bytes: Any, tile: Any, dims: Any) -> None:
        def body(d: Any, _: list[Any]) -> list[Any]:
            value = e.load_as_float(e.add(source, e.mul(d, row_bytes)), kind, lanes)
            e.store(value, e.add(tile, e.mul(d, TILE * 4)), 4)
            return []

        e.loop(dims, [], body)

    return kernel


def gather_v(kind: str, size: int) -> Any:
    """V of `count` tokens, whole vectors of 16 dims, into the tile's panels; adds 0 * V to the 16 floats at `check`,
    which thereby become NaN if any value is not finite."""

    @primitive(7)
    def kernel(
        e: Emitter, source: Any, token_bytes: Any, count: Any, tile: Any, vectors: Any, panel_bytes: Any, check: Any
    ) -> None:
        def token(t: Any, state: list[Any]) -> list[Any]:
            row, target = e.add(source, e.mul(t, token_bytes)), e.add(tile, e.mul(t, TILE * 4))

            def vector(i: Any, inner: list[Any]) -> list[Any]:
                value = e.load_as_float(e.add(row, e.mul(i, 16 * size)), kind)
                panel = e.mul(e.b.ashr(i, e.const(2)), panel_bytes)
                e.store(value, e.add(e.add(target, panel), e.mul(e.b.and_(i, e.const(3)), 64)), 4)
                return [e.fma(value, e.zero(), inner[0])]

            return e.loop(vectors, state, vector)

        (seen,) = e.loop(count, [e.load_as_float(check, "float32")], token)
        e.store(seen, check, 4)

    return kernel


def direct_scores(rows: int, kind: str, size: int) -> Any:
    """Scores of `rows` queries against a tile, K read where it lies; prefetches the tile's V.

    pointers: int64 addresses of the four groups' K, then of their V. row_bytes: from one dim of K to the next.
    """

    @primitive(6)
    def kernel(e: Emitter, pointers: Any, row_bytes: Any, dims: Any, q: Any, q_stride: Any, scores: Any) -> None:
        keys = [e.load(e.add(pointers, 8 * j), I64, 8) for j in range(GROUPS)]
        values = [e.load(e.add(pointers, 8 * (GROUPS + j)), I64, 8) for j in range(GROUPS)]
        queries = [e.add(q, e.mul(q_stride, r)) for r in range(rows)]
        unroll = 64 // (16 * size)  # dims whose 16 tokens fill a cache line

        def body(i: Any, acc: list[Any]) -> list[Any]:
            for v in values:
                e.prefetch(e.add(v, e.mul(i, 64)))
            for u in range(unroll):
                d = e.add(e.mul(i, unroll), u)
                loaded = [e.load_as_float(e.add(k, e.mul(d, row_bytes)), kind) for k in keys]
                new = []
                for r in range(rows):
                    x = e.splat(e.load_as_float(e.add(queries[r], e.mul(d, 4)), "float32", None))
                    new += [e.fma(loaded[j], x, acc[GROUPS * r + j]) for j in range(GROUPS)]
                acc = new
            return acc

        acc = e.loop(e.b.sdiv(dims, e.const(unroll)), [e.zero()] * (GROUPS * rows), body)
        for r in range(rows):
            for j in range(GROUPS):
                value = e.b.fadd(e.zero(), acc[GROUPS * r + j])
                e.store(value, e.add(scores, r * TILE * 4 + 64 * j), 4)

    return kernel


def direct_values(rows: int, vectors: int, kind: str, size: int) -> Any:
    """acc[rows, 16 * vectors dims] += weights @ V of a tile's tokens begin..end-1, V read where it lies.

    `pointers` as above, `ahead` the next tile's (its K is prefetched); offset: of the dims, in bytes within a token.
    """

    @primitive(9)
    def kernel(
        e: Emitter, pointers: Any, ahead: Any, begin: Any, end: Any, token_bytes: Any, offset: Any, weights: Any,
        acc: Any, acc_stride: Any,
    ) -> None:  # fmt: skip
        b = e.b

        def clamp(x: Any) -> Any:
            x = b.select(b.icmp_signed("<", x, e.const(0)), e.const(0), x)
            return b.select(b.icmp_signed(">", x, e.const(16)), e.const(16), x)

        sums = [e.zero()] * (rows * vectors)
        for j in range(GROUPS):
            first, last = (clamp(b.sub(x, e.const(16 * j))) for x in (begin, end))
            value = e.add(e.load(e.add(pointers, 8 * (GROUPS + j)), I64, 8), offset)
            future = e.add(e.load(e.add(ahead, 8 * j), I64, 8), offset)

            def token(t: Any, state: list[Any], j: int = j, first: Any = first, value: Any = value,
                      future: Any = future) -> list[Any]:  # fmt: skip
                t = e.add(t, first)
                moved = e.mul(t, token_bytes)
                for line in range(0, 16 * vectors * size, 64):
                    e.prefetch(e.add(e.add(future, moved), line))
                row = e.add(value, moved)
                loaded = [e.load_as_float(e.add(row, 16 * size * i), kind) for i in range(vectors)]
                new = []
                for r in range(rows):
                    w = e.add(weights, e.add(e.mul(t, 4), r * TILE * 4 + 64 * j))
                    p = e.splat(e.load_as_float(w, "float32", None))
                    new += [e.fma(loaded[i], p, state[vectors * r + i]) for i in range(vectors)]
                return new

            sums = e.loop(b.sub(last, first), sums, token)
        for r in range(rows):
            for i in range(vectors):
                a = e.add(e.add(acc, e.mul(acc_stride, r)), 64 * i)
                e.store(b.fadd(e.load_as_float(a, "float32"), sums[vectors * r + i]), a, 4)

    return kernel


@primitive(1, types.int64, [types.float32])
def is_nan(e: Emitter, x: Any) -> Any:
    return e.b.zext(e.b.fcmp_unordered("uno", x, x), ir.IntType(64))


@primitive(1)
def zero_scores(e: Emitter, address: Any) -> None:
    """64 floats = 0."""
    for j in range(4):
        e.store(e.zero(), e.add(address, 64 * j), 4)
