"""The sampler's Numba twin: `kernels/reference/sampling.py` is the contract, step by step.

top-k and top-p are found by a radix select over the order of floats instead of a sort: three histograms of 11, 11 and
10 bits over the logits, of counts for top-k and of weights for top-p. Tokens that fall out get weight 0, which neither
the sums nor the final walk can see.

Bytes: logits once per pass (5 passes of 4 V and 8 V bytes at worst); operations: one exp a token. A row of 49,152
logits stays in the L2 cache.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu import emit
from cupaged.kernels.cpu.emit import F32, F64, I32, I64, Emitter, load64, load_float, primitive, store64
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


@primitive(1, types.float64, [types.float64])
def exp_double(e: Emitter, x: Any) -> Any:
    return e.call("exp", F64, x)


@primitive(1, types.int64)
def order_key(e: Emitter, address: Any) -> Any:
    """The float at `address` as 32 bits whose unsigned order is that of floats (-0.0 and 0.0 alike)."""
    b = e.b
    bits = b.bitcast(b.fadd(e.load(address, F32, 4), emit.like(F32, 0.0)), I32)
    negative = b.icmp_signed("<", bits, emit.like(I32, 0))
    flipped = b.select(negative, b.not_(bits), b.or_(bits, emit.like(I32, -(1 << 31))))
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


@njit(KERNEL, **OPTIONS)
def sample(op, chunk, thread):  # type: ignore[no-untyped-def]
    """Record: logits, V, settings (5 float64 a row: temperature, top_k, top_p, min_p, u), out (int64), scratch,
    scratch bytes a thread ((V + BUCKETS) * 8). Chunk: a row."""
    size = load64(op + 24)
    logits = load64(op + 16) + chunk * size * 4
    settings = load64(op + 32) + chunk * 40
    out = load64(op + 40) + chunk * 8
    weights = load64(op + 48) + thread * load64(op + 56)
    histogram = weights + 8 * size
    best, top = 0, load_float(logits)
    for i in range(1, size):
        x = load_float(logits + 4 * i)
        if x > top:
            best, top = i, x
    temperature, top_k = load_double(settings), load_double(settings + 8)
    top_p, min_p, u = load_double(settings + 16), load_double(settings + 24), load_double(settings + 32)
    if temperature < GREEDY_BELOW:
        store64(out, best)
        return
    peak = types.float64(top)
    for i in range(size):
        z = (types.float64(load_float(logits + 4 * i)) - peak) / temperature
        store_double(weights + 8 * i, exp_double(z))
    if types.float64(0.0) < top_k and top_k < types.float64(size):
        _keep_largest(logits, weights, size, histogram, top_k, 1)
    if top_p < types.float64(1.0):
        total = types.float64(0.0)
        for i in range(size):
            total += load_double(weights + 8 * i)
        _keep_largest(logits, weights, size, histogram, (top_p - TOP_P_SLACK) * total, 0)
    total = types.float64(0.0)
    for i in range(size):
        w = load_double(weights + 8 * i)
        if w < min_p:
            store_double(weights + 8 * i, types.float64(0.0))
        else:
            total += w
    threshold = u * total
    running = types.float64(0.0)
    token = best
    for i in range(size):
        running += load_double(weights + 8 * i)
        if running > threshold:
            token = i
            break
    store64(out, token)
