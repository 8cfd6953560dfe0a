"""Query, K and V woven into pairs of bfloat16, as attention_pairs.py takes them.

A whole tile whose groups of 16 tokens lie in one piece goes by `weave_k` and `weave_v`: two loads, a permutation and a
store for 32 numbers, while what is read next is prefetched. Measured on Zen 4: 5 % of a prompt's attention, of which
half is the caches' share. All else goes run by run.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from cupaged.kernels.cpu.attention_pairs import NATIVE, rounded, vector_of, weave
from cupaged.kernels.cpu.attention_tiles import GROUPS
from cupaged.kernels.cpu.emit import F32, I16, I32, I64, LANES, VF, VI, Emitter, like, primitive
from cupaged.kernels.interface import TILE


@primitive(4)
def scale_narrow(e: Emitter, source: Any, target: Any, dims: Any, scale: Any) -> None:
    """A row of a query, `dims` float32, times scale (bits), as pairs."""
    b = e.b
    factor = b.bitcast(b.trunc(scale, I32), F32)

    def one(at: Any) -> Any:
        return e.narrow_bfloat(b.fmul(e.load(e.add(source, e.mul(at, 4)), F32, 4), factor))

    vectors = b.ashr(dims, e.const(4))

    wide = e.splat(factor)

    def scaled(at: Any) -> Any:
        return b.fmul(e.load_as_float(e.add(source, at), "float32"), wide)

    def two(i: Any, _: list[Any]) -> list[Any]:
        at = e.mul(i, 128)
        e.store(rounded(e, scaled(at), scaled(e.add(at, 64))), e.add(target, e.mul(i, 64)), 2)
        return []

    def vector(i: Any, _: list[Any]) -> list[Any]:
        i = e.add(i, e.mul(doubles, 2))
        e.store(e.narrow_bfloat(scaled(e.mul(i, 64))), e.add(target, e.mul(i, 32)), 2)
        return []

    def single(i: Any, _: list[Any]) -> list[Any]:
        at = e.add(e.mul(vectors, 16), i)
        e.store(one(at), e.add(target, e.mul(at, 2)), 2)
        return []

    doubles = b.ashr(vectors, e.const(1)) if NATIVE else e.const(0)
    e.loop(doubles, [], two)
    e.loop(b.sub(vectors, e.mul(doubles, 2)), [], vector)
    e.loop(b.sub(dims, e.mul(vectors, 16)), [], single)
    with b.if_then(b.icmp_signed("!=", b.and_(dims, e.const(1)), e.const(0))):
        e.store(ir.Constant(I16, 0), e.add(target, e.mul(dims, 2)), 2)


def gather_k(lanes: int) -> Any:
    """`lanes` tokens of K (transposed in the block) into the tile, two dims at a time."""

    @primitive(4)
    def kernel(e: Emitter, source: Any, row_bytes: Any, tile: Any, dims: Any) -> None:
        words = vector_of(I16, lanes)

        def row(d: Any) -> Any:
            return e.load(e.add(source, e.mul(d, row_bytes)), words, 2)

        def body(i: Any, _: list[Any]) -> list[Any]:
            d = e.mul(i, 2)
            e.store(weave(e, row(d), row(e.add(d, 1))), e.add(tile, e.mul(i, TILE * 4)), 4)
            return []

        pairs = e.b.ashr(dims, e.const(1))
        e.loop(pairs, [], body)
        with e.b.if_then(e.b.icmp_signed("!=", e.b.and_(dims, e.const(1)), e.const(0))):
            last = e.b.zext(row(e.mul(pairs, 2)), vector_of(I32, lanes))
            e.store(last, e.add(tile, e.mul(pairs, TILE * 4)), 4)

    return kernel


@primitive(7)
def gather_v(
    e: Emitter, source: Any, token_bytes: Any, first: Any, count: Any, tile: Any, vectors: Any, check: Any
) -> None:
    """V of tokens first .. first + count - 1 of a tile, whole vectors of 16 dims, into its panels.

    Second members are added to what is there: the first ones must have come before, or zeros. Adds 0 * V to the 16
    floats at `check`, which thereby become NaN if any value is not finite.
    """
    b, words = e.b, vector_of(I16, LANES)

    def token(i: Any, state: list[Any]) -> list[Any]:
        at = e.add(first, i)
        row, target = e.add(source, e.mul(i, token_bytes)), e.add(tile, e.mul(pair_row(e, at), TILE * 4))
        second = e.splat(b.trunc(b.and_(at, e.const(16)), I32))  # 0, or how far it is shifted
        kept = b.sub(e.zero(VI), b.lshr(second, like(VI, 4)))  # of what is there: nothing, or all

        def vector(v: Any, inner: list[Any]) -> list[Any]:
            raw = b.zext(e.load(e.add(row, e.mul(v, 32)), words, 2), VI)
            value = b.bitcast(b.shl(raw, like(VI, 16)), VF)
            panel = e.mul(b.ashr(v, e.const(2)), TILE * TILE * 2)
            place = e.add(e.add(target, panel), e.mul(b.and_(v, e.const(3)), 64))
            old = b.and_(e.load(place, VI, 4), kept)
            e.store(b.or_(old, b.shl(raw, second)), place, 4)
            return [e.fma(value, e.zero(), inner[0])]

        return e.loop(vectors, state, vector)

    (seen,) = e.loop(count, [e.load_as_float(check, "float32")], token)
    e.store(seen, check, 4)


@primitive(5)
def weave_k(e: Emitter, groups: Any, ahead: Any, row_bytes: Any, tile: Any, dims: Any) -> None:
    """A whole tile of K, two dims at a time; dims: even. groups: addresses of its four groups of 16 tokens; ahead: of
    four that are read next, to be prefetched."""
    words = vector_of(I16, LANES)
    keys, future = ([e.load(e.add(places, 8 * j), I64, 8) for j in range(GROUPS)] for places in (groups, ahead))

    def body(i: Any, _: list[Any]) -> list[Any]:
        first = e.mul(i, 2)
        at = e.mul(first, row_bytes)
        for j, key in enumerate(keys):
            e.prefetch(e.add(future[j], e.mul(e.add(first, j % 2), row_bytes)))  # as in direct_scores
            low, high = (e.load(a, words, 2) for a in (e.add(key, at), e.add(e.add(key, at), row_bytes)))
            e.store(weave(e, low, high), e.add(tile, e.add(e.mul(i, TILE * 4), 64 * j)), 4)
        return []

    e.loop(e.b.ashr(dims, e.const(1)), [], body)


@primitive(5, types.int64)
def weave_v(e: Emitter, groups: Any, ahead: Any, token_bytes: Any, tile: Any, panels: Any) -> Any:
    """V of a whole tile into panels; groups, ahead: as of `weave_k`. 1 if any value is not finite, else 0.

    That is seen by the largest magnitude as an integer: two operations a vector, neither in a unit of multiplication.
    """
    b, words = e.b, vector_of(I16, LANES)
    wide = vector_of(I16, 2 * LANES)
    values, future = ([e.load(e.add(places, 8 * j), I64, 8) for j in range(GROUPS)] for places in (groups, ahead))

    def panel(p: Any, state: list[Any]) -> list[Any]:
        shift, target = e.mul(p, TILE * 2), e.add(tile, e.mul(p, TILE * TILE * 2))

        def token(t: Any, inner: list[Any]) -> list[Any]:
            moved, place = e.add(e.mul(t, token_bytes), shift), e.add(target, e.mul(t, 2 * TILE * 4))
            for line in (0, 64):
                for address in future:
                    e.prefetch(e.add(e.add(address, moved), line))
            new = []
            for half, most in enumerate(inner):
                rows = [e.add(address, moved) for address in values[2 * half : 2 * half + 2]]
                for v in range(GROUPS):
                    pairs = weave(e, *(e.load(e.add(row, 32 * v), words, 2) for row in rows))
                    e.store(pairs, e.add(place, half * TILE * 4 + 64 * v), 4)
                    size = b.and_(b.bitcast(pairs, wide), like(wide, 0x7FFF))
                    most = b.select(b.icmp_unsigned(">", size, most), size, most)
                new.append(most)
            return new

        return e.loop(e.const(16), state, token)

    bad = [b.icmp_unsigned(">=", most, like(wide, 0x7F80)) for most in e.loop(panels, [e.zero(wide)] * 2, panel)]
    return b.zext(b.icmp_unsigned("!=", b.bitcast(b.or_(*bad), I32), like(I32, 0)), I64)


def pair_row(e: Emitter, token: Any) -> Any:
    """In which row of a panel of V a token of the tile is: 2t for tokens t and t + 16, 2t + 1 for t + 32 and t + 48."""
    return e.b.or_(e.mul(e.b.and_(token, e.const(15)), 2), e.b.lshr(token, e.const(5)))


@primitive(1, types.int64)
def row_of(e: Emitter, token: Any) -> Any:
    return pair_row(e, token)


@primitive(2)
def clear(e: Emitter, start: Any, lines: Any) -> None:
    """Lines of 64 bytes = 0."""

    def line(i: Any, _: list[Any]) -> list[Any]:
        e.store(e.zero(), e.add(start, e.mul(i, 64)), 4)
        return []

    e.loop(lines, [], line)
