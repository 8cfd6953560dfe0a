"""What happens to one row of attention, written as LLVM IR: the softmax of a part, and partial results merged.

A partial result is a maximum, a sum of weights and an accumulator over V (attention_record.HEAD tells how they lie).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from cupaged.kernels.cpu.attention_pairs import halves, narrow
from cupaged.kernels.cpu.attention_record import HEAD
from cupaged.kernels.cpu.attention_tiles import GROUPS
from cupaged.kernels.cpu.emit import F32, I32, I64, VF, VI, Emitter, like, primitive
from cupaged.kernels.cpu.vector_math import LOG2E, exp2_weight, tanh
from cupaged.kernels.interface import TILE

NEGATIVE = -3e38  # the maximum of no score at all; finite, so that differences of maxima never are NaN


@primitive(3)
def soften(e: Emitter, scores: Any, vectors: Any, soft_cap: Any) -> None:
    """scores = cap * tanh(scores / cap) * log2(e), 16 floats a vector; soft_cap are its bits."""
    b = e.b
    cap = e.splat(b.bitcast(b.trunc(soft_cap, I32), F32))

    def body(i: Any, _: list[Any]) -> list[Any]:
        a = e.add(scores, e.mul(i, 64))
        v = e.load_as_float(a, "float32")
        e.store(b.fmul(b.fmul(cap, tanh(e, b.fdiv(v, cap))), like(VF, LOG2E)), a, 4)
        return []

    e.loop(vectors, [], body)


def softmax(fetch: bool, pairs: bool) -> Any:
    """Scores (to base 2) of a row's part -> weights in place, tokens first..last-1 visible (at least one).

    Every token of the tiles that hold a visible one gets its weight, 0 if it is invisible or scored -inf. A NaN score
    gives a NaN weight. `state` gets the maximum and the sum of weights (by lane of 64 in order, then a fixed tree).
    With `pairs` weights are rounded to bfloat16, and lie as attention_pairs.py says; the sum is that of rounded ones.
    With `fetch`, a line of each of the four places at `ahead` (+ ahead_offset) is prefetched for every tile, lest
    memory rests meanwhile.
    """

    @primitive(6)
    def kernel(e: Emitter, scores: Any, first: Any, last: Any, state: Any, ahead: Any, ahead_offset: Any) -> None:
        b = e.b
        tile, end = b.ashr(first, e.const(6)), b.ashr(e.add(last, TILE - 1), e.const(6))
        lo, hi = (e.splat(b.trunc(x, I32)) for x in (first, last))
        hidden = like(VF, float("-inf"))

        def mask(t: Any) -> None:  # both ends at once: a tile may be the first and the last
            base = b.trunc(e.mul(t, TILE), I32)
            for j in range(GROUPS):
                lane = b.add(e.splat(base), ir.Constant(VI, list(range(16 * j, 16 * j + 16))))
                a = e.add(scores, e.add(e.mul(t, TILE * 4), 64 * j))
                inside = b.and_(b.icmp_signed(">=", lane, lo), b.icmp_signed("<", lane, hi))
                e.store(b.select(inside, e.load_as_float(a, "float32"), hidden), a, 4)

        mask(tile)
        with b.if_then(b.icmp_signed("<", e.add(tile, 1), end)):
            mask(b.sub(end, e.const(1)))
        start, count = e.add(scores, e.mul(tile, TILE * 4)), b.sub(end, tile)

        def largest(i: Any, tops: list[Any]) -> list[Any]:
            a = e.add(start, e.mul(i, TILE * 4))
            return [e.maximum(e.load_as_float(e.add(a, 64 * j), "float32"), top) for j, top in enumerate(tops)]

        tops = e.loop(count, [like(VF, NEGATIVE)] * GROUPS, largest)
        top = e.maximum(e.maximum(tops[0], tops[1]), e.maximum(tops[2], tops[3]))
        top = e.reduce(top, e.maximum)

        future = [e.add(e.load(e.add(ahead, 8 * j), I64, 8), ahead_offset) for j in range(GROUPS)] if fetch else []

        def weigh(i: Any, totals: list[Any]) -> list[Any]:
            a, weights = e.add(start, e.mul(i, TILE * 4)), []
            for j in range(GROUPS):
                if fetch:
                    e.prefetch(e.add(future[j], e.mul(i, 64)))
                weight = exp2_weight(e, b.fsub(e.load_as_float(e.add(a, 64 * j), "float32"), top))
                if not pairs:
                    e.store(weight, e.add(a, 64 * j), 4)
                weights.append(weight)
            if pairs:
                rounded: list[Any] = []
                for half in (0, 1):
                    both = narrow(e, *weights[2 * half : 2 * half + 2])
                    e.store(both, e.add(a, 64 * half), 4)
                    rounded += halves(e, both)
                weights = rounded
            return [b.fadd(total, weight) for total, weight in zip(totals, weights, strict=True)]

        totals = e.loop(count, [e.zero()] * GROUPS, weigh)
        total = b.fadd(b.fadd(totals[0], totals[1]), b.fadd(totals[2], totals[3]))
        e.store(e.first(top), state, 4)
        e.store(e.first(e.reduce(total, b.fadd)), e.add(state, 4), 4)

    return kernel


@primitive(2)
def empty_state(e: Emitter, state: Any, vectors: Any) -> None:
    """The result of no part at all: maximum NEGATIVE, sum 0, accumulator 0."""
    e.store(like(F32, NEGATIVE), state, 4)
    e.store(like(F32, 0.0), e.add(state, 4), 4)

    def body(i: Any, _: list[Any]) -> list[Any]:
        e.store(e.zero(), e.add(state, e.add(e.mul(i, 64), HEAD)), 4)
        return []

    e.loop(vectors, [], body)


@primitive(3)
def copy_state(e: Emitter, source: Any, target: Any, vectors: Any) -> None:
    """target = source: maximum, sum and accumulator."""

    def body(i: Any, _: list[Any]) -> list[Any]:
        at = e.mul(i, 64)
        e.store(e.load_as_float(e.add(source, at), "float32"), e.add(target, at), 4)
        return []

    e.loop(e.add(vectors, 1), [], body)


@primitive(3)
def merge_part(e: Emitter, run: Any, part: Any, vectors: Any) -> None:
    """run += part, both (maximum, sum, accumulator): log-sum-exp. Parts come in order, whoever computed them."""
    b = e.b
    old, new = (e.splat(e.load(x, F32, 4)) for x in (run, part))
    top = e.maximum(new, old)
    keep, take = exp2_weight(e, b.fsub(old, top)), exp2_weight(e, b.fsub(new, top))
    old_sum, new_sum = (e.splat(e.load(e.add(x, 4), F32, 4)) for x in (run, part))
    e.store(e.first(top), run, 4)
    e.store(e.first(e.fma(new_sum, take, b.fmul(old_sum, keep))), e.add(run, 4), 4)

    def body(i: Any, _: list[Any]) -> list[Any]:
        at = e.add(e.mul(i, 64), HEAD)
        value, a = e.load_as_float(e.add(part, at), "float32"), e.add(run, at)
        e.store(e.fma(value, take, b.fmul(e.load_as_float(a, "float32"), keep)), a, 4)
        return []

    e.loop(vectors, [], body)


@primitive(4)
def finish_row(e: Emitter, run: Any, sink: Any, out: Any, dims: Any) -> None:
    """out = accumulator / sum; zeros where nothing was visible. sink: address of a logit that counts once, or 0."""
    b = e.b
    top, total = e.load(run, F32, 4), e.load(e.add(run, 4), F32, 4)
    before = b.block
    with b.if_then(b.icmp_signed("!=", sink, e.const(0))):
        logit = b.fmul(e.load(sink, F32, 4), like(F32, LOG2E))
        larger = e.maximum(logit, top)
        keep_sink = exp2_weight(e, b.fsub(top, larger))
        total_sink = e.fma(total, keep_sink, exp2_weight(e, b.fsub(logit, larger)))
        inside = b.block
    keep, divisor = b.phi(F32), b.phi(F32)
    for phi, plain, sunk in ((keep, like(F32, 1.0), keep_sink), (divisor, total, total_sink)):
        phi.add_incoming(plain, before)
        phi.add_incoming(sunk, inside)
    nothing = b.fcmp_ordered("==", divisor, like(F32, 0.0))
    wide_keep, wide_divisor = e.splat(keep), e.splat(divisor)
    vectors = b.ashr(dims, e.const(4))

    def vector(i: Any, _: list[Any]) -> list[Any]:
        value = b.fmul(e.load_as_float(e.add(run, e.add(e.mul(i, 64), HEAD)), "float32"), wide_keep)
        e.store(b.select(nothing, e.zero(), b.fdiv(value, wide_divisor)), e.add(out, e.mul(i, 64)), 4)
        return []

    def single(i: Any, _: list[Any]) -> list[Any]:
        at = e.mul(e.add(e.mul(vectors, 16), i), 4)
        value = b.fmul(e.load(e.add(run, e.add(at, HEAD)), F32, 4), keep)
        e.store(b.select(nothing, like(F32, 0.0), b.fdiv(value, divisor)), e.add(out, at), 4)
        return []

    e.loop(vectors, [], vector)
    e.loop(b.sub(dims, e.mul(vectors, 16)), [], single)


@primitive(4)
def scale_copy(e: Emitter, source: Any, target: Any, count: Any, scale: Any) -> None:
    """target = source * scale (bits), `count` floats."""
    b = e.b
    factor = b.bitcast(b.trunc(scale, I32), F32)
    wide, vectors = e.splat(factor), b.ashr(count, e.const(4))

    def vector(i: Any, _: list[Any]) -> list[Any]:
        at = e.mul(i, 64)
        e.store(b.fmul(e.load_as_float(e.add(source, at), "float32"), wide), e.add(target, at), 4)
        return []

    def single(i: Any, _: list[Any]) -> list[Any]:
        at = e.mul(e.add(e.mul(vectors, 16), i), 4)
        e.store(b.fmul(e.load(e.add(source, at), F32, 4), factor), e.add(target, at), 4)
        return []

    e.loop(vectors, [], vector)
    e.loop(b.sub(count, e.mul(vectors, 16)), [], single)
