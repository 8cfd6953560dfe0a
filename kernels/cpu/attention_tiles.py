"""Pieces of paged attention written as LLVM IR: gathering a tile, and the sums over one.

A score is one chain of fused multiply-adds over the dims, from zero; an element of the accumulator is one chain over
the tokens of the part, from zero, tile by tile, within a tile in the order 0, 16, 32, 48, 1, 17, ... (from four places
at once memory is read a fifth faster). A tile that was gathered into float32 scratch first (`chain_tile`) and one that
is read where it lies (`direct_scores`, `direct_values`) go through the same chains, so they give the same bits.

What limits reading in place, measured on Zen 4: 3 or 4 multiply-adds a vector and KV head's group take 12 or 16 cycles
for 4 conversions of float16, which run beside them; broadcasts from memory get in their way by 2 cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, types

from cupaged.kernels.cpu.attention_record import SCORE_BYTES
from cupaged.kernels.cpu.emit import I64, VF, WIDE, Emitter, like, primitive
from cupaged.kernels.cpu.gemm import OPTIONS
from cupaged.kernels.interface import TILE

GROUPS = TILE // 16  # a tile is four groups of 16 tokens
NEGATIVE = -3e38  # the maximum of no score at all; finite, so that differences of maxima never are NaN


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


@primitive(1, types.float32)
def sum_lanes(e: Emitter, address: Any) -> Any:
    return e.first(e.reduce(e.load_as_float(address, "float32"), e.b.fadd))


def direct_scores(rows: int, kind: str, size: int) -> Any:
    """Scores of `rows` queries against a tile, K read where it lies, while other memory is prefetched.

    pointers: int64 addresses of the four groups' K, `shift` to be added; ahead, ahead_shift: of what is read next, laid
    out alike with `ahead_bytes` in place of row_bytes. row_bytes: from one dim of K to the next.
    """

    @primitive(10)
    def kernel(
        e: Emitter, pointers: Any, shift: Any, row_bytes: Any, dims: Any, q: Any, q_stride: Any, scores: Any,
        ahead: Any, ahead_shift: Any, ahead_bytes: Any,
    ) -> None:  # fmt: skip
        keys = [e.add(e.load(e.add(pointers, 8 * j), I64, 8), shift) for j in range(GROUPS)]
        future = [e.add(e.load(e.add(ahead, 8 * j), I64, 8), ahead_shift) for j in range(GROUPS)]
        queries = [e.add(q, e.mul(q_stride, r)) for r in range(rows)]
        unroll = 64 // (16 * size)  # dims whose 16 tokens fill a cache line

        def body(i: Any, acc: list[Any]) -> list[Any]:
            first = e.mul(i, unroll)
            for j, address in enumerate(future):  # in wider blocks a line holds two groups: each fetches every other
                e.prefetch(e.add(address, e.mul(e.add(first, j % unroll), ahead_bytes)))
            for u in range(unroll):
                d = e.add(first, u)
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
                e.store(acc[GROUPS * r + j], e.add(scores, r * SCORE_BYTES + 64 * j), 4)

    return kernel


def direct_values(rows: int, vectors: int, kind: str, size: int, full: bool) -> Any:
    """acc[rows, 16 * vectors dims] += weights @ V of a tile's tokens begin..end-1 (all 64 if `full`), read in place.

    Tokens come in the order 0, 16, 32, 48, 1, 17, ...: from four places at once memory is read faster. pointers: of the
    four groups' V, `offset` to be added (of head and dims, in bytes); ahead, ahead_offset: of what is read next.
    """

    @primitive(10)
    def kernel(
        e: Emitter, pointers: Any, offset: Any, ahead: Any, ahead_offset: Any, begin: Any, end: Any, token_bytes: Any,
        weights: Any, acc: Any, acc_stride: Any,
    ) -> None:  # fmt: skip
        b = e.b

        def token(state: list[Any], row: Any, weight: Any) -> list[Any]:
            loaded = [e.load_as_float(e.add(row, 16 * size * i), kind) for i in range(vectors)]
            new = []
            for r in range(rows):
                p = e.splat(e.load_as_float(e.add(weight, r * SCORE_BYTES), "float32", None))
                new += [e.fma(loaded[i], p, state[vectors * r + i]) for i in range(vectors)]
            return new

        places = [e.add(e.add(acc, e.mul(acc_stride, r)), 64 * i) for r in range(rows) for i in range(vectors)]
        sums = [e.load_as_float(a, "float32") for a in places]
        if full:
            groups = [e.add(e.load(e.add(pointers, 8 * j), I64, 8), offset) for j in range(GROUPS)]
            futures = [e.add(e.load(e.add(ahead, 8 * j), I64, 8), ahead_offset) for j in range(GROUPS)]

            def four(t: Any, state: list[Any]) -> list[Any]:
                moved = e.mul(t, token_bytes)
                for j in range(GROUPS):
                    for line in range(0, 16 * vectors * size, 64):
                        e.prefetch(e.add(e.add(futures[j], moved), line))
                    state = token(state, e.add(groups[j], moved), e.add(weights, e.add(e.mul(t, 4), 64 * j)))
                return state

            sums = e.loop(e.const(16), sums, four)
        else:

            def first_group(limit: Any, t: Any) -> Any:
                """Of the groups, in which token t is not below `limit`: 0 .. GROUPS."""
                group = b.ashr(e.add(b.sub(limit, t), 15), e.const(4))
                group = b.select(b.icmp_signed("<", group, e.const(0)), e.const(0), group)
                return b.select(b.icmp_signed(">", group, e.const(GROUPS)), e.const(GROUPS), group)

            def some(t: Any, state: list[Any]) -> list[Any]:
                moved = e.mul(t, token_bytes)
                low = first_group(begin, t)

                def one(g: Any, inner: list[Any]) -> list[Any]:
                    g = e.add(g, low)
                    row = e.add(e.add(e.load(e.add(pointers, e.mul(g, 8)), I64, 8), offset), moved)
                    return token(inner, row, e.add(weights, e.add(e.mul(t, 4), e.mul(g, 64))))

                return e.loop(b.sub(first_group(end, t), low), state, one)

            sums = e.loop(e.const(16), sums, some)
        for a, s in zip(places, sums, strict=True):
            e.store(s, a, 4)

    return kernel


def raise_tops(e: Emitter, scores: list[Any], tops: Any, stride: Any, fresh: Any) -> None:
    """The 16 running maxima of each row at `tops` (rows `stride` bytes apart) with some vectors of its scores; NaN is
    passed over. fresh: not 0 if these are the first: then nothing is read."""
    b = e.b
    first = e.splat(b.icmp_signed("!=", fresh, e.const(0)))
    for r, row in enumerate(scores):
        place = e.add(tops, e.mul(stride, r))
        top = b.select(first, like(VF, NEGATIVE), e.load_as_float(place, "float32"))
        for score in row:
            top = e.maximum(score, top)
        e.store(top, place, 4)


def chain_tile(rows: int, groups: int, values: bool, half: bool = False, top: bool = False) -> Any:
    """out[rows, n] = x[rows, k] @ panel[k, n] of 16 * groups columns of a panel of 64, float32.

    With `values`: out += of 64 tokens in direct_values' order, k is not used; `half`: of the tile's first 32 tokens, as
    the others weigh nothing. With `top` for scores, three more arguments, those of `raise_tops`. Strides in bytes.
    """

    @primitive(9 if top else 6)
    def kernel(e: Emitter, panel: Any, k: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, *tops: Any) -> None:
        b = e.b
        xs = [e.add(x, e.mul(x_stride, r)) for r in range(rows)]
        places = [e.add(e.add(out, e.mul(out_stride, r)), 64 * g) for r in range(rows) for g in range(groups)]

        def one(at: Any, acc: list[Any]) -> list[Any]:
            row = e.add(panel, e.mul(at, TILE * 4))
            loaded = [e.load_as_float(e.add(row, 64 * g), "float32") for g in range(groups)]
            new = []
            for r in range(rows):
                value = e.splat(e.load_as_float(e.add(xs[r], e.mul(at, 4)), "float32", None))
                new += [e.fma(loaded[g], value, acc[groups * r + g]) for g in range(groups)]
            return new

        def eight(i: Any, acc: list[Any]) -> list[Any]:
            for j in range(8):
                if not half or j % 4 < 2:
                    acc = one(e.add(e.mul(i, 2), 16 * (j % 4) + j // 4) if values else e.add(e.mul(i, 8), j), acc)
            return acc

        if values:
            acc = e.loop(e.const(8), [e.load_as_float(a, "float32") for a in places], eight)
        else:
            whole = b.ashr(k, e.const(3))
            acc = e.loop(whole, [e.zero()] * len(places), eight)
            acc = e.loop(b.sub(k, e.mul(whole, 8)), acc, lambda i, acc: one(e.add(e.mul(whole, 8), i), acc))
        for a, value in zip(places, acc, strict=True):
            e.store(value, a, 4)
        if top:
            raise_tops(e, [acc[groups * r : groups * (r + 1)] for r in range(rows)], *tops)

    return kernel


def chain_tiles(values: bool, tile: Callable[..., Any] = chain_tile) -> Any:
    """`tile` over a whole panel and any number of rows; which tiles are used does not change a bit.

    Of the first `near` rows only the tile's first 32 tokens count: whole blocks of them leave out the others.
    """
    groups = GROUPS if WIDE else 1  # 24 of 32 registers hold sums, or 8 of 16 where 16 lanes take two
    one, two, four = tile(1, groups, values), tile(2, groups, values), tile(4, groups, values)
    six, most = (tile(6, groups, values), 6) if WIDE else (four, 4)
    columns = GROUPS // groups
    if values:
        front, front_columns = tile(most, groups, True, True), columns
    else:
        front, front_columns = (tile(most, groups // 2, False), 1) if WIDE else (four, columns // 2)

    @njit(types.void(*[types.int64] * 8), **OPTIONS)
    def run(panel, k, x, x_stride, out, out_stride, rows, near):  # type: ignore[no-untyped-def]
        for column in range(columns):
            at, to, m = panel + column * 64, out + column * 64, 0
            while near - m >= most:
                if column < front_columns:
                    front(at, k, x + m * x_stride, x_stride, to + m * out_stride, out_stride)
                m += most
            while rows - m >= most:
                six(at, k, x + m * x_stride, x_stride, to + m * out_stride, out_stride)
                m += most
            if rows - m >= 4:
                four(at, k, x + m * x_stride, x_stride, to + m * out_stride, out_stride)
                m += 4
            if rows - m >= 2:
                two(at, k, x + m * x_stride, x_stride, to + m * out_stride, out_stride)
                m += 2
            if rows - m >= 1:
                one(at, k, x + m * x_stride, x_stride, to + m * out_stride, out_stride)

    return run


@primitive(4)
def raise_top(e: Emitter, scores: Any, groups: Any, top: Any, fresh: Any) -> None:
    """`raise_tops` of one row that has been stored, some groups of 16 scores."""
    start = e.b.select(e.b.icmp_signed("!=", fresh, e.const(0)), like(VF, NEGATIVE), e.load_as_float(top, "float32"))

    def group(i: Any, tops: list[Any]) -> list[Any]:
        return [e.maximum(e.load_as_float(e.add(scores, e.mul(i, 64)), "float32"), tops[0])]

    e.store(e.loop(groups, [start], group)[0], top, 4)


def score_tiles_with_tops(tile: Callable[..., Any] = chain_tile) -> Any:
    """`chain_tiles` of scores that all rows see, which raises each row's running maxima on the way: while dot products
    take the units of multiplication, others have nothing to do."""
    groups = GROUPS if WIDE else 1
    most = 6 if WIDE else 4
    block, one = tile(most, groups, False, False, True), tile(1, groups, False)
    columns = GROUPS // groups

    @njit(types.void(*[types.int64] * 10), **OPTIONS)
    def run(panel, k, x, x_stride, out, out_stride, rows, tops, tops_stride, fresh):  # type: ignore[no-untyped-def]
        for column in range(columns):
            at, to, m = panel + column * 64, out + column * 64, 0
            new = fresh if column == 0 else 0
            while rows - m >= most:
                block(
                    at, k, x + m * x_stride, x_stride, to + m * out_stride, out_stride, tops + m * tops_stride,
                    tops_stride, new,
                )  # fmt: skip
                m += most
            while m < rows:
                one(at, k, x + m * x_stride, x_stride, to + m * out_stride, out_stride)
                raise_top(to + m * out_stride, groups, tops + m * tops_stride, new)
                m += 1

    return run


@primitive(5)
def masked_values(e: Emitter, panel: Any, begin: Any, end: Any, weights: Any, acc: Any) -> None:
    """acc[64 dims] += weights @ panel[64, 64] of one row, tokens begin..end-1 alone, in direct_values' order."""
    b = e.b
    places = [e.add(acc, 64 * g) for g in range(GROUPS)]

    def token(i: Any, state: list[Any]) -> list[Any]:
        at = e.add(e.mul(b.and_(i, e.const(3)), 16), b.ashr(i, e.const(2)))
        seen = e.splat(b.and_(b.icmp_signed(">=", at, begin), b.icmp_signed("<", at, end)))
        p = e.splat(e.load_as_float(e.add(weights, e.mul(at, 4)), "float32", None))
        row = e.add(panel, e.mul(at, TILE * 4))
        new = [e.fma(e.load_as_float(e.add(row, 64 * g), "float32"), p, s) for g, s in enumerate(state)]
        return [b.select(seen, x, s) for x, s in zip(new, state, strict=True)]

    for a, s in zip(places, e.loop(e.const(TILE), [e.load_as_float(a, "float32") for a in places], token), strict=True):
        e.store(s, a, 4)


@primitive(3)
def zero_rows(e: Emitter, panel: Any, first: Any, last: Any) -> None:
    """Rows first..last-1 of a panel [64][64] = 0."""

    def row(i: Any, _: list[Any]) -> list[Any]:
        at = e.add(panel, e.mul(e.add(first, i), TILE * 4))
        for g in range(GROUPS):
            e.store(e.zero(), e.add(at, 64 * g), 4)
        return []

    e.loop(e.b.sub(last, first), [], row)


@primitive(1, types.int64, [types.float32])
def is_nan(e: Emitter, x: Any) -> Any:
    return e.b.zext(e.b.fcmp_unordered("uno", x, x), I64)
