"""Attention's sums for bfloat16 K/V: dot products of pairs, twice as many multiply-adds as in float32.

Query and weights are rounded to bfloat16 (to nearest even), as K and V are; a sum is a chain in float32 over pairs, of
dims for a score, of tokens for the output. One step of it takes the second of a pair first:

    sum = fma(low, low', fma(high, high', sum))

which is what vdpbf16ps does (measured on Zen 4: 3.2 million random sums, every bit), but that it takes numbers below
2^-126 for zero. Elsewhere two fused multiply-adds do it, at the pace of float32. Tokens come in pairs (0, 16),
(32, 48), (1, 17), ...: from four places at once memory is read a fifth faster.

A pair is 32 bits, its first member the low half. Queries: pairs of dims, a row's last one with a zero if they are odd.
A tile of K: [dims / 2][64 tokens] pairs; of V, in panels of 64 dims: [32 pairs of tokens][64 dims]. Weights lie where
the scores were: a tile's 32 pairs in 128 bytes, those of tokens (t, t + 16) first, then those of (t + 32, t + 48).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from cupaged.kernels.cpu.attention_record import SCORE_BYTES
from cupaged.kernels.cpu.attention_tiles import GROUPS, raise_tops
from cupaged.kernels.cpu.emit import F32, I16, I32, I64, LANES, VF, VI, WIDE, Emitter, like, primitive, retype
from cupaged.kernels.cpu.processor import target
from cupaged.kernels.interface import TILE

NATIVE = WIDE and "avx512bf16" in target().features
_HIGH = -(1 << 16)


class _BfloatType(ir.HalfType):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for: the operands of its intrinsics."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BfloatType._create_instance()
_BFLOATS = ir.VectorType(_BfloatType(), 2 * LANES)


def vector_of(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def weave(e: Emitter, low: Any, high: Any) -> Any:
    """Pairs int32 of two vectors of 16-bit numbers."""
    lanes = low.type.count
    order = [half * lanes + lane for lane in range(lanes) for half in (0, 1)]
    words = e.b.shuffle_vector(low, high, ir.Constant(vector_of(I32, 2 * lanes), order))
    return e.b.bitcast(words, vector_of(I32, lanes))


def halves(e: Emitter, pairs: Any) -> tuple[Any, Any]:
    """The first and the second members as float32, of a vector of pairs or of one."""
    b, ti = e.b, pairs.type
    low, high = b.shl(pairs, like(ti, 16)), b.and_(pairs, like(ti, _HIGH))
    return b.bitcast(low, retype(ti, F32)), b.bitcast(high, retype(ti, F32))


def factor(e: Emitter, pairs: Any) -> Any:
    """What `dot` takes: the pairs themselves, or their halves where there is no instruction for pairs."""
    return pairs if NATIVE else halves(e, pairs)


def spread(e: Emitter, address: Any) -> Any:
    """The pair at `address` in all lanes, as `dot` takes it."""
    pair = e.load(address, I32, 4)
    return e.splat(pair) if NATIVE else tuple(e.splat(half) for half in halves(e, pair))


def woven(e: Emitter, low: Any, high: Any, kept: Sequence[Any] = ()) -> Any:
    """What `dot` takes, of 16 bfloat16 at either address. kept: masks int16 for both, 0 to take zeros instead."""
    words = [e.load(address, vector_of(I16, LANES), 2) for address in (low, high)]
    if kept:
        words = [e.b.and_(word, e.splat(mask)) for word, mask in zip(words, kept, strict=True)]
    if NATIVE:
        return weave(e, *words)
    return tuple(e.b.bitcast(e.b.shl(e.b.zext(word, VI), like(VI, 16)), VF) for word in words)


def dot(e: Emitter, total: Any, x: Any, y: Any) -> Any:
    """total + x . y, pair by pair."""
    if NATIVE:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return e.call(name, VF, total, e.b.bitcast(x, _BFLOATS), e.b.bitcast(y, _BFLOATS))
    return e.fma(x[0], y[0], e.fma(x[1], y[1], total))


def rounded(e: Emitter, low: Any, high: Any) -> Any:
    """The bfloat16 of two vectors, one behind the other; only where there is an instruction for it."""
    both = e.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", _BFLOATS, high, low)
    return e.b.bitcast(both, vector_of(I16, 2 * LANES))


def narrow(e: Emitter, low: Any, high: Any) -> Any:
    """Pairs of two vectors of 16 float32, not below zero, rounded to nearest even. NaN stays NaN, and what is below
    2^-126 becomes zero: so does the instruction."""
    if not NATIVE:
        least = like(VI, 1 << 23)
        tiny = [e.b.icmp_unsigned("<", e.b.bitcast(x, VI), least) for x in (low, high)]
        low, high = (e.b.select(small, e.zero(), x) for small, x in zip(tiny, (low, high), strict=True))
        return weave(e, e.narrow_bfloat(low), e.narrow_bfloat(high))
    words = rounded(e, low, high)
    order = [half * LANES + lane for lane in range(LANES) for half in (0, 1)]
    return e.b.bitcast(e.b.shuffle_vector(words, words, ir.Constant(vector_of(I32, 2 * LANES), order)), VI)


def direct_scores(rows: int) -> Any:
    """`attention_tiles.direct_scores` of pairs: `q` are rows of pairs."""

    @primitive(10)
    def kernel(
        e: Emitter, pointers: Any, shift: Any, row_bytes: Any, dims: Any, q: Any, q_stride: Any, scores: Any,
        ahead: Any, ahead_shift: Any, ahead_bytes: Any,
    ) -> None:  # fmt: skip
        keys = [e.add(e.load(e.add(pointers, 8 * j), I64, 8), shift) for j in range(GROUPS)]
        future = [e.add(e.load(e.add(ahead, 8 * j), I64, 8), ahead_shift) for j in range(GROUPS)]
        queries = [e.add(q, e.mul(q_stride, r)) for r in range(rows)]

        def body(i: Any, acc: list[Any]) -> list[Any]:
            first = e.mul(i, 2)
            for j, address in enumerate(future):  # in wider blocks a line holds two groups: each fetches every other
                e.prefetch(e.add(address, e.mul(e.add(first, j % 2), ahead_bytes)))
            moved = e.mul(first, row_bytes)
            loaded = [woven(e, e.add(k, moved), e.add(e.add(k, moved), row_bytes)) for k in keys]
            new = []
            for r in range(rows):
                x = spread(e, e.add(queries[r], e.mul(i, 4)))
                new += [dot(e, acc[GROUPS * r + j], loaded[j], x) for j in range(GROUPS)]
            return new

        acc = e.loop(e.b.ashr(dims, e.const(1)), [e.zero()] * (GROUPS * rows), body)
        for r in range(rows):
            for j in range(GROUPS):
                e.store(acc[GROUPS * r + j], e.add(scores, r * SCORE_BYTES + 64 * j), 4)

    return kernel


def direct_values(rows: int, vectors: int, full: bool) -> Any:
    """`attention_tiles.direct_values` of pairs. Not `full`: of tokens that are not in begin..end-1 (at least one is)
    nothing is read, and V counts as zero."""

    @primitive(10)
    def kernel(
        e: Emitter, pointers: Any, offset: Any, ahead: Any, ahead_offset: Any, begin: Any, end: Any, token_bytes: Any,
        weights: Any, acc: Any, acc_stride: Any,
    ) -> None:  # fmt: skip
        b = e.b
        places = [e.add(e.add(acc, e.mul(acc_stride, r)), 64 * i) for r in range(rows) for i in range(vectors)]
        sums = [e.load_as_float(a, "float32") for a in places]
        groups = [e.add(e.load(e.add(pointers, 8 * j), I64, 8), offset) for j in range(GROUPS)]
        futures = [e.add(e.load(e.add(ahead, 8 * j), I64, 8), ahead_offset) for j in range(GROUPS)]

        if not full:
            group = e.load(e.add(pointers, e.mul(b.ashr(begin, e.const(4)), 8)), I64, 8)
            some = e.add(e.add(group, offset), e.mul(b.and_(begin, e.const(15)), token_bytes))  # may be read

        def four(t: Any, state: list[Any], halves: Sequence[int] = (0, 1)) -> list[Any]:
            moved = e.mul(t, token_bytes)
            lines = [e.add(group, moved) for group in groups]
            masks: list[list[Any]] = [[], []]
            if full:
                for future in futures:
                    for line in range(0, 32 * vectors, 64):
                        e.prefetch(e.add(e.add(future, moved), line))
            else:
                for j in range(2 * len(halves)):
                    at = e.add(t, 16 * j)
                    seen = b.and_(b.icmp_signed(">=", at, begin), b.icmp_signed("<", at, end))
                    lines[j] = b.select(seen, lines[j], some)
                    masks[j // 2].append(b.sext(seen, I16))
            for half in halves:
                low, high = lines[2 * half : 2 * half + 2]
                loaded = [woven(e, e.add(low, 32 * i), e.add(high, 32 * i), masks[half]) for i in range(vectors)]
                new = []
                for r in range(rows):
                    p = spread(e, e.add(e.add(weights, r * SCORE_BYTES + 64 * half), e.mul(t, 4)))
                    new += [dot(e, state[vectors * r + i], loaded[i], p) for i in range(vectors)]
                state = new
            return state

        if full:
            sums = e.loop(e.const(16), sums, four)
        else:  # of tokens from 32 on, if none is seen, not even zeros are added
            both = b.select(b.icmp_signed(">", end, e.const(32)), e.const(16), e.const(0))
            sums = e.loop(both, sums, four)
            sums = e.loop(b.sub(e.const(16), both), sums, lambda t, state: four(t, state, (0,)))
        for a, s in zip(places, sums, strict=True):
            e.store(s, a, 4)

    return kernel


def chain_tile(rows: int, groups: int, values: bool, half: bool = False, top: bool = False) -> Any:
    """out[rows, n] = x[rows, pairs] . panel[pairs, n] of 16 * groups columns of a panel of 64.

    With `values`: out += , of 32 pairs of tokens and weights, and then of as many of the tile that lies `pairs` bytes
    behind, if that is not 0; `half`: of the tile's first 32 tokens, as the others weigh nothing. With `top`
    for scores, three more arguments, those of `raise_tops`. Strides in bytes.
    """

    @primitive(9 if top else 6)
    def kernel(
        e: Emitter, panel: Any, pairs: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, *tops: Any
    ) -> None:
        b = e.b
        xs = [e.add(x, e.mul(x_stride, r)) for r in range(rows)]
        places = [e.add(e.add(out, e.mul(out_stride, r)), 64 * g) for r in range(rows) for g in range(groups)]

        def one(row: Any, offset: Any, acc: list[Any]) -> list[Any]:
            loaded = [factor(e, e.load(e.add(row, 64 * g), VI, 4)) for g in range(groups)]
            new = []
            for r in range(rows):
                value = spread(e, e.add(xs[r], offset))
                new += [dot(e, acc[groups * r + g], loaded[g], value) for g in range(groups)]
            return new

        def four(i: Any, acc: list[Any], panel: Any = panel, x_offset: Any = 0) -> list[Any]:
            row, offset = e.add(panel, e.mul(i, 4 * TILE * 4)), e.add(e.mul(i, 8 if values else 16), x_offset)
            for j in range(0, 4, 2 if half else 1):
                acc = one(
                    e.add(row, j * TILE * 4), e.add(offset, 64 * (j % 2) + 4 * (j // 2) if values else 4 * j), acc
                )
            return acc

        if values:
            tiles = e.add(b.zext(b.icmp_signed("!=", pairs, e.const(0)), I64), 1)

            def tile(i: Any, acc: list[Any]) -> list[Any]:
                here, shift = e.add(panel, e.mul(i, pairs)), e.mul(i, TILE * 4)
                return e.loop(e.const(8), acc, lambda i, acc: four(i, acc, here, shift))

            acc = e.loop(e.const(1) if half else tiles, [e.load_as_float(a, "float32") for a in places], tile)
        else:
            whole = b.ashr(pairs, e.const(2))
            done = e.mul(whole, 4)
            acc = e.loop(whole, [e.zero()] * len(places), four)

            def single(i: Any, acc: list[Any]) -> list[Any]:
                at = e.add(done, i)
                return one(e.add(panel, e.mul(at, TILE * 4)), e.mul(at, 4), acc)

            acc = e.loop(b.sub(pairs, done), acc, single)
        for a, value in zip(places, acc, strict=True):
            e.store(value, a, 4)
        if top:
            raise_tops(e, [acc[groups * r : groups * (r + 1)] for r in range(rows)], *tops)

    return kernel


@primitive(5)
def masked_values(e: Emitter, panel: Any, begin: Any, end: Any, weights: Any, acc: Any) -> None:
    """acc[64 dims] += weights . panel of one row, where V of tokens that are not in begin..end-1 counts as zero."""
    b = e.b
    places = [e.add(acc, 64 * g) for g in range(GROUPS)]

    def row(i: Any, state: list[Any]) -> list[Any]:
        half, t = b.and_(i, e.const(1)), b.ashr(i, e.const(1))
        low = e.add(t, e.mul(half, 32))
        mask = like(I32, 0)
        for token, bits in ((low, 0xFFFF), (e.add(low, 16), _HIGH)):
            seen = b.and_(b.icmp_signed(">=", token, begin), b.icmp_signed("<", token, end))
            mask = b.or_(mask, b.select(seen, like(I32, bits), like(I32, 0)))
        p = spread(e, e.add(weights, e.add(e.mul(half, 64), e.mul(t, 4))))
        new = []
        for g, total in enumerate(state):
            pairs = b.and_(e.load(e.add(panel, e.add(e.mul(i, TILE * 4), 64 * g)), VI, 4), e.splat(mask))
            new.append(dot(e, total, factor(e, pairs), p))
        return new

    for a, s in zip(places, e.loop(e.const(32), [e.load_as_float(a, "float32") for a in places], row), strict=True):
        e.store(s, a, 4)
