"""The sampler's Numba twin: `kernels/reference/sampling.py` is the contract, step by step.

One vector pass finds the maxima of groups of 64 logits, and with them the greedy token, and whether all are finite. A
second makes the weights and
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

from numba import njit, types

from cupaged.kernels.cpu.emit import (
    LANES,
    load32,
    load64,
    load_float,
    store64,
    store_float,
)
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.cpu.sampling_math import (
    GROUP,
    INFINITE,
    exp_double,
    greatest_bits,
    load_double,
    order_key,
    scan_groups,
    store_double,
    uniform,
    weigh_group,
    weigh_group_at_one,
)

GREEDY_BELOW = 1e-5
TOP_P_SLACK = 1e-12
BUCKETS = 2048


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
def _scan(logits, size, maxima):  # type: ignore[no-untyped-def]
    """The maximum of each group (the last is what is left of a whole one); whether all logits are finite, 0 or 1."""
    whole = size // GROUP
    greatest = scan_groups(logits, whole, maxima)
    if whole * GROUP < size:
        top = load_float(logits + 4 * GROUP * whole)
        for i in range(whole * GROUP, size):
            x = load_float(logits + 4 * i)
            if x > top:
                top = x
            greatest = max(greatest, load32(logits + 4 * i) & 0x7FFFFFFF)
        store_float(maxima + 4 * whole, top)
    return 1 if greatest < INFINITE else 0


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


@njit(types.int64(*[types.int64] * 2), **OPTIONS)
def _is_finite(logits, size):  # type: ignore[no-untyped-def]
    """Whether no logit is NaN or an infinity, 0 or 1."""
    whole = size // LANES
    top = greatest_bits(logits, whole)
    for i in range(whole * LANES, size):
        top = max(top, load32(logits + 4 * i) & 0x7FFFFFFF)
    return 1 if top < INFINITE else 0


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
        source, target = logits + 4 * GROUP * g, weights + 8 * GROUP * g
        if temperature == types.float64(1.0):
            mass = weigh_group_at_one(source, target, peak, temperature)
        else:
            mass = weigh_group(source, target, peak, temperature)
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
    """Record: logits, V, settings (a row: 4 float64, temperature, top_k, top_p, min_p, and 3 int64, what `uniform`
    takes), out (int64), scratch, scratch bytes a thread (`operations.sample_scratch`), whether rows are checked (-1:
    not finite). Chunk: a row.

    Scratch, G = V / 64 + 1: weights V f64, histogram f64, sums G f64, kept weights V f64, kept ids V i64, kept logits
    V f32, maxima G f32.
    """
    size = load64(op + 24)
    logits = load64(op + 16) + chunk * size * 4
    settings = load64(op + 32) + chunk * 56
    out = load64(op + 40) + chunk * 8
    room = size // GROUP + 1
    weights = load64(op + 48) + thread * load64(op + 56)
    histogram = weights + 8 * size
    sums = histogram + 8 * BUCKETS
    kept_weights = sums + 8 * room
    kept_ids = kept_weights + 8 * size
    kept_logits = kept_ids + 8 * size
    maxima = kept_logits + 4 * size

    groups = (size + GROUP - 1) // GROUP
    if _scan(logits, size, maxima) == 0 and load64(op + 64) != 0:
        store64(out, -1)
        return
    best = _first_best(logits, size, maxima, groups)
    temperature, top_k = load_double(settings), load_double(settings + 8)
    top_p, min_p = load_double(settings + 16), load_double(settings + 24)
    if temperature < GREEDY_BELOW:
        store64(out, best)
        return
    u = uniform(load64(settings + 32), load64(settings + 40), load64(settings + 48))
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
