"""The sampler's Numba twin: `kernels/reference/sampling.py` is the contract, step by step.

One vector pass finds the maxima of groups of 64 logits, and with them the greedy token. A second makes the weights and
their sums by groups. Where top-k, top-p or min-p leave few tokens, those that may stay are gathered first, in ascending
id: for top-k all that reach the k-th greatest of the groups' maxima (as many groups hold a logit that great); for top-p
all whose weight w has V * w >= (1 - p) / 2 of the sum, since what falls below that cannot be needed to reach p. The
rest works on these few: top-k and top-p by a radix select over the order of floats instead of a sort, three histograms
of 11, 11 and 10 bits over the logits, of counts or of weights. Without any of them the walk to the token goes by the
groups' sums, and token by token in the last group only.

Sums are float64 in one fixed order that depends on V alone; they differ from the contract's sequential ones by a
relative 1e-14 or so.

Bytes: 4 V read twice, 8 V written and read; operations: some 45 a token, nearly all of them exp's. A row of 49,152
logits and its weights stay in the L2 cache.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from cupaged.kernels.cpu.emit import (
    F32,
    F64,
    I32,
    I64,
    LANES,
    VI,
    Emitter,
    like,
    load32,
    load64,
    load_float,
    primitive,
    retype,
    store64,
    store_float,
)
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS

GREEDY_BELOW = 1e-5
TOP_P_SLACK = 1e-12
BUCKETS = 2048


@primitive(1, types.float64)
def load_double(e: Emitter, address: Any) -> Any:
    return e.load(address, F64, 8)


@primitive(2, None, [types.int64, types.float64])
def store_double(e: Emitter, address: Any, value: Any) -> None:
    e.store(value, address, 8)


GROUP = 64  # logits of which only the maximum, or the sum of weights, is looked at first
VD = ir.VectorType(F64, LANES)

_ROUND = 6755399441055744.0  # 1.5 * 2^52: adding it rounds to a whole number, which then stands in the low bits
_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = (
    0.6931471803691238,
    1.9082149292705877e-10,
)  # the high part times a whole number below 2^11 is exact
_TAYLOR = [1.0]
for _n in range(1, 14):
    _TAYLOR.append(_TAYLOR[-1] / _n)  # 1 / n!; what follows the 13th is below 2e-16 for |r| <= ln(2) / 2


def exp_below(e: Emitter, x: Any) -> Any:
    """exp(x) of x <= 0, float64, scalar or vector; 0 below -708 (exp is then below 4e-308). exp(0) is exactly 1.

    x = n ln 2 + r; the series of exp(r) in Horner's form, times 2^n by adding n to the exponent. No fma: processors
    without it would call a library. Error below 4e-16, measured against the exact value.
    """
    b, ty = e.b, x.type
    whole = retype(ty, I64)
    low = like(ty, -708.0)
    y = b.select(b.fcmp_ordered(">", x, low), x, low)
    shifted = b.fadd(b.fmul(y, like(ty, _LOG2E)), like(ty, _ROUND))
    n = b.fsub(shifted, like(ty, _ROUND))
    r = b.fsub(b.fsub(y, b.fmul(n, like(ty, _LN2_HIGH))), b.fmul(n, like(ty, _LN2_LOW)))
    value = like(ty, _TAYLOR[-1])
    for c in _TAYLOR[-2::-1]:
        value = b.fadd(b.fmul(value, r), like(ty, c))
    power = b.shl(b.bitcast(shifted, whole), like(whole, 52))
    value = b.bitcast(b.add(b.bitcast(value, whole), power), ty)
    return b.select(b.fcmp_ordered("<", x, low), like(ty, 0.0), value)


@primitive(1, types.float64, [types.float64])
def exp_double(e: Emitter, x: Any) -> Any:
    return exp_below(e, x)


@primitive(1, types.float32)
def group_maximum(e: Emitter, address: Any) -> Any:
    """The greatest of 64 floats."""
    lanes = [e.load_as_float(e.add(address, 64 * i), "float32") for i in range(GROUP // LANES)]
    top = e.maximum(e.maximum(lanes[0], lanes[1]), e.maximum(lanes[2], lanes[3]))
    return e.first(e.reduce(top, e.maximum))


@primitive(4, types.float64, [types.int64, types.int64, types.float64, types.float64])
def weigh_group(e: Emitter, logits: Any, weights: Any, peak: Any, temperature: Any) -> Any:
    """weights[i] = exp((logits[i] - peak) / temperature) of 64 logits, and their sum in a fixed tree."""
    b = e.b
    top, divisor = e.splat(peak), e.splat(temperature)
    parts = []
    for i in range(GROUP // LANES):
        wide = b.fpext(e.load_as_float(e.add(logits, 64 * i), "float32"), VD)
        w = exp_below(e, b.fdiv(b.fsub(wide, top), divisor))
        e.store(w, e.add(weights, 128 * i), 8)
        parts.append(w)
    lanes = b.fadd(b.fadd(parts[0], parts[1]), b.fadd(parts[2], parts[3]))
    return e.first(e.reduce(lanes, b.fadd))


@primitive(1, types.int64)
def order_key(e: Emitter, address: Any) -> Any:
    """The float at `address` as 32 bits whose unsigned order is that of floats (-0.0 and 0.0 alike)."""
    b = e.b
    bits = b.bitcast(b.fadd(e.load(address, F32, 4), like(F32, 0.0)), I32)
    negative = b.icmp_signed("<", bits, like(I32, 0))
    flipped = b.select(negative, b.not_(bits), b.or_(bits, like(I32, -(1 << 31))))
    return b.zext(flipped, I64)


@njit(types.void(*[types.int64] * 4, types.float64, types.int64), **OPTIONS)
def _keep_largest(logits, weights, size, histogram, need, by_count):  # type: ignore[no-untyped-def]
    """Zero the weight of all but the shortest prefix, by descending logit and ascending id, whose mass reaches `need`.

    The mass of a token is its weight, or 1 if `by_count`; tokens of weight 0 are no part of it unless `by_count`.
    """
    prefix, known, above = 0, 0, types.float64(0.0)
    for width in (11, 11, 10):
        shift = 32 - known - width
        for i in range(BUCKETS):
            store_double(histogram + 8 * i, types.float64(0.0))
        for i in range(size):
            key = order_key(logits + 4 * i)
            if key >> (32 - known) == prefix:
                bucket = histogram + 8 * ((key >> shift) & ((1 << width) - 1))
                mass = types.float64(1.0) if by_count != 0 else load_double(weights + 8 * i)
                store_double(bucket, load_double(bucket) + mass)
        chosen = -1
        last = 0
        reached = above
        for i in range((1 << width) - 1, -1, -1):
            mass = load_double(histogram + 8 * i)
            if mass > types.float64(0.0):
                last = i
                if reached + mass >= need:
                    chosen = i
                    break
                reached += mass
        if chosen < 0:  # rounding alone: the sum of buckets fell short of the sum in order; the last one is kept whole
            chosen = last
            reached -= load_double(histogram + 8 * last)
        above = reached
        prefix = (prefix << width) | chosen
        known += width
    for i in range(size):
        key = order_key(logits + 4 * i)
        mass = types.float64(1.0) if by_count != 0 else load_double(weights + 8 * i)
        if key < prefix:
            store_double(weights + 8 * i, types.float64(0.0))
        elif key == prefix and mass > types.float64(0.0):
            if above >= need and above > types.float64(0.0):
                store_double(weights + 8 * i, types.float64(0.0))
            else:
                above += mass


@njit(types.int64(*[types.int64] * 3), **OPTIONS)
def _maxima(logits, size, maxima):  # type: ignore[no-untyped-def]
    """The maximum of each group (the last is what is left of a whole one, perhaps nothing); returns how many."""
    whole = size // GROUP
    for g in range(whole):
        store_float(maxima + 4 * g, group_maximum(logits + 4 * GROUP * g))
    if whole * GROUP == size:
        return whole
    top = load_float(logits + 4 * GROUP * whole)
    for i in range(whole * GROUP, size):
        x = load_float(logits + 4 * i)
        if x > top:
            top = x
    store_float(maxima + 4 * whole, top)
    return whole + 1


@njit(types.int64(*[types.int64] * 4), **OPTIONS)
def _first_best(logits, size, maxima, groups):  # type: ignore[no-untyped-def]
    """The lowest id of the greatest logit."""
    best = 0
    for g in range(1, groups):
        if load_float(maxima + 4 * g) > load_float(maxima + 4 * best):
            best = g
    top = load_float(maxima + 4 * best)
    i = best * GROUP
    while i < size - 1 and load_float(logits + 4 * i) != top:
        i += 1
    return i


@primitive(2, types.int64)
def greatest_bits(e: Emitter, address: Any, vectors: Any) -> Any:
    """The greatest of 16 * `vectors` floats without their signs, as bits: from 0x7F800000 on one is not finite."""
    b = e.b
    bigger = lambda x, y: b.select(b.icmp_signed(">", x, y), x, y)  # noqa: E731

    def body(i: Any, state: list[Any]) -> list[Any]:
        bits = b.and_(e.load(e.add(address, e.mul(i, 4 * LANES)), VI, 4), like(VI, 0x7FFFFFFF))
        return [bigger(bits, state[0])]

    return b.zext(e.first(e.reduce(e.loop(vectors, [e.zero(VI)], body)[0], bigger)), I64)


@njit(types.int64(*[types.int64] * 2), **OPTIONS)
def _is_finite(logits, size):  # type: ignore[no-untyped-def]
    """Whether no logit is NaN or an infinity, 0 or 1."""
    whole = size // LANES
    top = greatest_bits(logits, whole)
    for i in range(whole * LANES, size):
        top = max(top, load32(logits + 4 * i) & 0x7FFFFFFF)
    return 1 if top < 0x7F800000 else 0


@njit(KERNEL, **OPTIONS)
def finite(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: logits, V, out (int64): 1, or 0 for a row with NaN or infinity. Chunk: a row."""
    size = load64(op + 24)
    store64(load64(op + 32) + chunk * 8, _is_finite(load64(op + 16) + chunk * size * 4, size))


@njit(types.float64(*[types.int64] * 4, types.float64, types.float64), **OPTIONS)
def _weigh(logits, size, weights, sums, peak, temperature):  # type: ignore[no-untyped-def]
    """All weights and their sums by groups; returns the sum of these."""
    whole = size // GROUP
    total = types.float64(0.0)
    for g in range(whole):
        mass = weigh_group(logits + 4 * GROUP * g, weights + 8 * GROUP * g, peak, temperature)
        store_double(sums + 8 * g, mass)
        total += mass
    if whole * GROUP < size:
        mass = types.float64(0.0)
        for i in range(whole * GROUP, size):
            w = exp_double((types.float64(load_float(logits + 4 * i)) - peak) / temperature)
            store_double(weights + 8 * i, w)
            mass += w
        store_double(sums + 8 * whole, mass)
        total += mass
    return total


@njit(types.float32(*[types.int64] * 5), **OPTIONS)
def _reached_by(maxima, groups, k, weights, histogram):  # type: ignore[no-untyped-def]
    """The k-th greatest maximum; k <= groups. At least k logits are as great. Uses room for `groups` weights."""
    for g in range(groups):
        store_double(weights + 8 * g, types.float64(1.0))
    _keep_largest(maxima, weights, groups, histogram, types.float64(k), 1)
    bound = types.float32(0.0)
    none = True
    for g in range(groups):
        x = load_float(maxima + 4 * g)
        if load_double(weights + 8 * g) > types.float64(0.0) and (none or x < bound):
            bound = x
            none = False
    return bound


@njit(types.int64(*[types.int64] * 4, types.float64, types.int64), **OPTIONS)
def _walk(weights, size, sums, groups, threshold, best):  # type: ignore[no-untyped-def]
    """The first id whose running sum exceeds the threshold: by groups, then in the group in which it does."""
    running = types.float64(0.0)
    for g in range(groups):
        mass = load_double(sums + 8 * g)
        if running + mass > threshold:
            token = best
            for i in range(g * GROUP, min(size, (g + 1) * GROUP)):
                w = load_double(weights + 8 * i)
                running += w
                if w > types.float64(0.0):
                    token = i  # the last of them, if rounding has their sum one by one fall short of their sum by tree
                if running > threshold:
                    break
            return token
        running += mass
    return best


@njit(KERNEL, **OPTIONS)
def sample(op, chunk, thread):  # type: ignore[no-untyped-def]
    """Record: logits, V, settings (5 float64 a row: temperature, top_k, top_p, min_p, u), out (int64), scratch,
    scratch bytes a thread (`operations.sample_scratch`), whether rows are checked (-1: not finite). Chunk: a row.

    Scratch, G = V / 64 + 1: weights V f64, histogram f64, sums G f64, kept weights V f64, kept ids V i64, kept logits
    V f32, maxima G f32.
    """
    size = load64(op + 24)
    logits = load64(op + 16) + chunk * size * 4
    settings = load64(op + 32) + chunk * 40
    out = load64(op + 40) + chunk * 8
    if load64(op + 64) != 0 and _is_finite(logits, size) == 0:
        store64(out, -1)
        return
    room = size // GROUP + 1
    weights = load64(op + 48) + thread * load64(op + 56)
    histogram = weights + 8 * size
    sums = histogram + 8 * BUCKETS
    kept_weights = sums + 8 * room
    kept_ids = kept_weights + 8 * size
    kept_logits = kept_ids + 8 * size
    maxima = kept_logits + 4 * size

    groups = _maxima(logits, size, maxima)
    best = _first_best(logits, size, maxima, groups)
    temperature, top_k = load_double(settings), load_double(settings + 8)
    top_p, min_p, u = load_double(settings + 16), load_double(settings + 24), load_double(settings + 32)
    if temperature < GREEDY_BELOW:
        store64(out, best)
        return
    total = _weigh(logits, size, weights, sums, types.float64(load_float(logits + 4 * best)), temperature)
    by_count = types.float64(0.0) < top_k and top_k < types.float64(size)
    if not by_count and top_p >= types.float64(1.0) and min_p <= types.float64(0.0):
        store64(out, _walk(weights, size, sums, groups, u * total, best))
        return

    # Gather what may stay.
    least = min_p
    if top_p < types.float64(1.0):
        least = (types.float64(1.0) - top_p) * total / (types.float64(2.0) * types.float64(size))
    bound = load_float(maxima)
    if by_count and top_k <= types.float64(groups):
        bound = _reached_by(maxima, groups, types.int64(top_k), kept_weights, histogram)
    all_logits = by_count and top_k > types.float64(groups)
    kept = 0
    for g in range(groups):
        if by_count:
            if not all_logits and load_float(maxima + 4 * g) < bound:
                continue
        elif load_double(sums + 8 * g) < least:
            continue
        for i in range(g * GROUP, min(size, (g + 1) * GROUP)):
            x = load_float(logits + 4 * i)
            w = load_double(weights + 8 * i)
            if (all_logits or x >= bound) if by_count else w >= least:
                store64(kept_ids + 8 * kept, i)
                store_double(kept_weights + 8 * kept, w)
                store_float(kept_logits + 4 * kept, x)
                kept += 1

    if by_count:
        _keep_largest(kept_logits, kept_weights, kept, histogram, top_k, 1)
    if top_p < types.float64(1.0):
        if by_count:
            total = types.float64(0.0)
            for j in range(kept):
                total += load_double(kept_weights + 8 * j)
        _keep_largest(kept_logits, kept_weights, kept, histogram, (top_p - TOP_P_SLACK) * total, 0)
    total = types.float64(0.0)
    for j in range(kept):
        w = load_double(kept_weights + 8 * j)
        if w < min_p:
            store_double(kept_weights + 8 * j, types.float64(0.0))
        else:
            total += w
    threshold = u * total
    running = types.float64(0.0)
    token = best
    for j in range(kept):
        running += load_double(kept_weights + 8 * j)
        if running > threshold:
            token = load64(kept_ids + 8 * j)
            break
    store64(out, token)
