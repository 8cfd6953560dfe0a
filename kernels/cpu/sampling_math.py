"""The vector parts of the sampler, and its random number: primitives for sampling.py."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from cupaged.kernels import philox
from cupaged.kernels.cpu.emit import (
    F32,
    F64,
    I32,
    I64,
    LANES,
    VI,
    Emitter,
    like,
    primitive,
    retype,
)


@primitive(1, types.float64)
def load_double(e: Emitter, address: Any) -> Any:
    return e.load(address, F64, 8)


@primitive(2, None, [types.int64, types.float64])
def store_double(e: Emitter, address: Any, value: Any) -> None:
    e.store(value, address, 8)


INFINITE = 0x7F800000  # bits of the magnitude, from which on a float32 is not finite
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


@primitive(3, types.int64)
def scan_groups(e: Emitter, logits: Any, groups: Any, maxima: Any) -> Any:
    """The greatest of each group of 64 floats goes to `maxima`; the greatest of all without their signs, as bits."""
    b = e.b
    bigger = lambda x, y: b.select(b.icmp_signed(">", x, y), x, y)  # noqa: E731

    def body(g: Any, state: list[Any]) -> list[Any]:
        address = e.add(logits, e.mul(g, 4 * GROUP))
        lanes = [e.load_as_float(e.add(address, 64 * i), "float32") for i in range(GROUP // LANES)]
        top = e.maximum(e.maximum(lanes[0], lanes[1]), e.maximum(lanes[2], lanes[3]))
        e.store(e.first(e.reduce(top, e.maximum)), e.add(maxima, e.mul(g, 4)), 4)
        sizes = [b.and_(b.bitcast(x, VI), like(VI, 0x7FFFFFFF)) for x in lanes]
        return [bigger(state[0], bigger(bigger(sizes[0], sizes[1]), bigger(sizes[2], sizes[3])))]

    return b.zext(e.first(e.reduce(e.loop(groups, [e.zero(VI)], body)[0], bigger)), I64)


def _weigh_group(divided: bool) -> Any:
    """Intrinsic (logits, weights, peak, temperature): weights[i] = exp((logits[i] - peak) / temperature) of 64 logits;
    their sum in a fixed tree. Not `divided`, of temperature 1: the same bits, in seven eighths of the time."""

    @primitive(4, types.float64, [types.int64, types.int64, types.float64, types.float64])
    def weigh(e: Emitter, logits: Any, weights: Any, peak: Any, temperature: Any) -> Any:
        b = e.b
        top, divisor = e.splat(peak), e.splat(temperature)
        parts = []
        for i in range(GROUP // LANES):
            x = b.fsub(b.fpext(e.load_as_float(e.add(logits, 64 * i), "float32"), VD), top)
            w = exp_below(e, b.fdiv(x, divisor) if divided else x)
            e.store(w, e.add(weights, 128 * i), 8)
            parts.append(w)
        lanes = b.fadd(b.fadd(parts[0], parts[1]), b.fadd(parts[2], parts[3]))
        return e.first(e.reduce(lanes, b.fadd))

    return weigh


weigh_group, weigh_group_at_one = _weigh_group(True), _weigh_group(False)


@primitive(3, types.float64)
def uniform(e: Emitter, seed: Any, sample: Any, position: Any) -> Any:
    """The number in (0, 1) of one draw: `philox.uniform`, bit for bit. A sample is below 2^32."""
    b = e.b
    low, high = lambda x: b.and_(x, e.const(philox.MASK32)), lambda x: b.lshr(x, e.const(32))
    c0, c1, c2, c3, k0, k1 = low(position), high(position), sample, e.const(0), low(seed), high(seed)
    for _ in range(philox.ROUNDS):
        p0, p1 = (e.mul(c, factor) for c, factor in zip((c0, c2), philox.MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = b.xor(b.xor(high(p1), c1), k0), low(p1), b.xor(b.xor(high(p0), c3), k1), low(p0)
        k0, k1 = (low(e.add(k, step)) for k, step in zip((k0, k1), philox.WEYL, strict=True))
    whole = b.or_(b.shl(c0, e.const(20)), b.lshr(c1, e.const(12)))
    return b.fmul(b.fadd(b.sitofp(whole, F64), like(F64, 0.5)), like(F64, 2.0**-52))


@primitive(1, types.int64)
def order_key(e: Emitter, address: Any) -> Any:
    """The float at `address` as 32 bits whose unsigned order is that of floats (-0.0 and 0.0 alike)."""
    b = e.b
    bits = b.bitcast(b.fadd(e.load(address, F32, 4), like(F32, 0.0)), I32)
    negative = b.icmp_signed("<", bits, like(I32, 0))
    flipped = b.select(negative, b.not_(bits), b.or_(bits, like(I32, -(1 << 31))))
    return b.zext(flipped, I64)


@primitive(2, types.int64)
def greatest_bits(e: Emitter, address: Any, vectors: Any) -> Any:
    """The greatest of 16 * `vectors` floats without their signs, as bits: from 0x7F800000 on one is not finite."""
    b = e.b
    bigger = lambda x, y: b.select(b.icmp_signed(">", x, y), x, y)  # noqa: E731

    def body(i: Any, state: list[Any]) -> list[Any]:
        bits = b.and_(e.load(e.add(address, e.mul(i, 4 * LANES)), VI, 4), like(VI, 0x7FFFFFFF))
        return [bigger(bits, state[0])]

    return b.zext(e.first(e.reduce(e.loop(vectors, [e.zero(VI)], body)[0], bigger)), I64)
