"""What happens to one row of attention, written as LLVM IR: the softmax of a part, and partial results merged.

A partial result is a maximum, a sum of weights and an accumulator over V (attention_record.HEAD tells how they lie).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from cupaged.kernels.cpu.attention_pairs import dot, factor, narrow
from cupaged.kernels.cpu.attention_record import HEAD
from cupaged.kernels.cpu.attention_tiles import GROUPS, NEGATIVE
from cupaged.kernels.cpu.emit import F32, I32, I64, VF, VI, Emitter, like, primitive
from cupaged.kernels.cpu.vector_math import LOG2E, exp2_rough, exp2_weight, rough_range, tanh
from cupaged.kernels.interface import TILE


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


def largest(pairs: bool) -> Any:
    """Maximum of a row's part (scores to base 2), tokens first..last-1 visible (at least one).

    Tiles known..known_end-1 are seen wholly, and their maxima by lane are in `state` already (`raise_tops`). Of the
    tiles that hold a visible token, the scores of invisible ones become -inf. NaN is passed over, and nothing
    below NEGATIVE counts. `state` gets what `weigh` takes for the maximum, as its maximum and as its sum. With `pairs`
    that is the maximum rounded up to a whole number, for exp2_rough; a row beyond its range gives up its own maximum,
    and 0 is what `weigh` takes.
    """

    @primitive(6)
    def kernel(e: Emitter, scores: Any, first: Any, last: Any, state: Any, known: Any, known_end: Any) -> None:
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

        for edge, t in ((first, tile), (last, b.sub(end, e.const(1)))):
            with b.if_then(b.icmp_signed("!=", b.and_(edge, e.const(TILE - 1)), e.const(0))):
                mask(t)
        start, count = e.add(scores, e.mul(tile, TILE * 4)), b.sub(end, tile)

        def places(i: Any) -> list[Any]:
            return [e.add(e.add(start, e.mul(i, TILE * 4)), 64 * j) for j in range(GROUPS)]

        def body(i: Any, tops: list[Any]) -> list[Any]:
            return [e.maximum(e.load_as_float(a, "float32"), top) for a, top in zip(places(i), tops, strict=True)]

        none = like(VF, NEGATIVE)
        some = e.splat(b.icmp_signed("<", known, known_end))
        tops = [b.select(some, e.load_as_float(state, "float32"), none), none, none, none]
        before = b.sub(b.select(b.icmp_signed("<", known, end), known, end), tile)
        tops = e.loop(before, tops, body)
        behind = b.sub(b.select(b.icmp_signed(">", known_end, tile), known_end, tile), tile)
        tops = e.loop(b.sub(count, behind), tops, lambda i, tops: body(e.add(behind, i), tops))
        wide = e.reduce(e.maximum(e.maximum(tops[0], tops[1]), e.maximum(tops[2], tops[3])), e.maximum)
        top = e.first(wide)
        if not pairs:
            e.store(top, state, 4)
            e.store(top, e.add(state, 4), 4)
            return
        whole = e.first(b.fneg(e.floor(b.fneg(wide))))
        for offset in (0, 4):
            e.store(whole, e.add(state, offset), 4)
        with b.if_then(b.not_(b.fcmp_ordered("<", e.maximum(whole, b.fneg(whole)), like(F32, 2.0**21))), likely=False):

            def lower(i: Any, _: list[Any]) -> list[Any]:
                for a in places(i):
                    e.store(b.fsub(e.load_as_float(a, "float32"), wide), a, 4)
                return []

            e.loop(count, [], lower)
            e.store(top, state, 4)
            e.store(like(F32, 0.0), e.add(state, 4), 4)

    return kernel


def weigh(fetch: bool, pairs: bool) -> Any:
    """Scores of a row's part, as `largest` left them -> weights in place, and their sum into `state`.

    Every token of the tiles that hold a visible one gets its weight, 0 if it is invisible or scored -inf. A NaN score
    gives a NaN weight. The sum is by lane in order, then a fixed tree. With `pairs` weights are rounded to bfloat16,
    and lie as attention_pairs.py says; the sum is that of rounded ones, by lane of their pairs (`dot` with ones).
    With `fetch`, a line of each of the four places at `ahead` (+ ahead_offset) is prefetched for every tile, lest
    memory rests meanwhile.

    Operations on 16 lanes with `pairs`: 10 a vector of scores, and half a conversion, permutation, dot product and
    store, of which Zen 4 begins two a cycle: 30 cycles a tile and row in the L1 cache, measured. Fewer operations are
    the only help: with multiply-adds in place of additions, or vreduceps and vscalefps, it takes 29 and 27.
    """

    @primitive(6)
    def kernel(e: Emitter, scores: Any, first: Any, last: Any, state: Any, ahead: Any, ahead_offset: Any) -> None:
        b = e.b
        tile, end = b.ashr(first, e.const(6)), b.ashr(e.add(last, TILE - 1), e.const(6))
        start = e.add(scores, e.mul(tile, TILE * 4))
        top = e.splat(e.load(e.add(state, 4), F32, 4))
        least, to_whole = rough_range(e, top)
        ones = factor(e, like(VI, 0x3F803F80))
        future = [e.add(e.load(e.add(ahead, 8 * j), I64, 8), ahead_offset) for j in range(GROUPS)] if fetch else []

        def body(i: Any, totals: list[Any]) -> list[Any]:
            a = e.add(start, e.mul(i, TILE * 4))
            for place in future:
                e.prefetch(e.add(place, e.mul(i, 64)))
            loaded = [e.load_as_float(e.add(a, 64 * j), "float32") for j in range(GROUPS)]
            if pairs:
                weights = [exp2_rough(e, x, least, to_whole) for x in loaded]
                both = [narrow(e, *weights[2 * half : 2 * half + 2]) for half in (0, 1)]
                for half in (0, 1):
                    e.store(both[half], e.add(a, 64 * half), 4)
                return [dot(e, total, factor(e, p), ones) for total, p in zip(totals, both, strict=True)]
            weights = [exp2_weight(e, b.fsub(x, top)) for x in loaded]
            for j, weight in enumerate(weights):
                e.store(weight, e.add(a, 64 * j), 4)
            return [b.fadd(total, weight) for total, weight in zip(totals, weights, strict=True)]

        totals = e.loop(b.sub(end, tile), [e.zero()] * (GROUPS // 2 if pairs else GROUPS), body)
        while len(totals) > 1:
            totals = [b.fadd(totals[i], totals[i + 1]) for i in range(0, len(totals), 2)]
        e.store(e.first(e.reduce(totals[0], b.fadd)), e.add(state, 4), 4)

    return kernel


@primitive(2)
def fetch(e: Emitter, address: Any, lines: Any) -> None:
    """Lines of 64 bytes that will be read soon, prefetched."""

    def line(i: Any, _: list[Any]) -> list[Any]:
        e.prefetch(e.add(address, e.mul(i, 64)))
        return []

    e.loop(lines, [], line)


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
    """out = accumulator / sum; zeros where nothing was visible. sink: address of a logit that counts once, or 0.

    -0 becomes 0: a token that weighs nothing may be added or left out.
    """
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
    share = b.select(nothing, like(F32, 0.0), b.fdiv(keep, divisor))  # at most 1 / total
    wide = e.splat(share)
    vectors = b.ashr(dims, e.const(4))

    def vector(i: Any, _: list[Any]) -> list[Any]:
        value = e.load_as_float(e.add(run, e.add(e.mul(i, 64), HEAD)), "float32")
        e.store(b.fadd(b.fmul(value, wide), e.zero()), e.add(out, e.mul(i, 64)), 4)
        return []

    def single(i: Any, _: list[Any]) -> list[Any]:
        at = e.mul(e.add(e.mul(vectors, 16), i), 4)
        value = e.load(e.add(run, e.add(at, HEAD)), F32, 4)
        e.store(b.fadd(b.fmul(value, share), like(F32, 0.0)), e.add(out, at), 4)
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
