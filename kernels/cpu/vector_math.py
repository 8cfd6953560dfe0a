"""exp2 and tanh for one float32 or 16 lanes: the same operations either way, so the same bits."""

from __future__ import annotations

from typing import Any

from numba import types

from cupaged.kernels.cpu.emit import F32, I32, Emitter, like, primitive, retype

LOG2E = 1.4426950408889634

# 2^f on [0, 1) as 1 + f * (c1 + f * (c2 + ...)): a relative minimax fit of degree 6 with the constant held at 1, so
# that exp2(0) is exactly 1. Error in float32 arithmetic below 6.6e-8 (measured over 10^6 points).
_EXP2 = (2.161291765e-4, 1.24678477e-3, 9.67545164e-3, 5.54852807e-2, 0.240229306, 0.693147044)


def exp2(e: Emitter, x: Any) -> Any:
    """2**x. Clamped to [2^-126, 2^127]; NaN stays NaN."""
    b, ty = e.b, x.type
    ti = retype(ty, I32)
    lo, hi = like(ty, -126.0), like(ty, 127.0)
    y = b.select(b.fcmp_ordered(">", x, lo), x, lo)
    y = b.select(b.fcmp_ordered("<", y, hi), y, hi)
    whole = e.floor(y)
    f = b.fsub(y, whole)
    p = like(ty, _EXP2[0])
    for c in _EXP2[1:]:
        p = e.fma(p, f, like(ty, c))
    p = e.fma(p, f, like(ty, 1.0))
    power = b.shl(b.add(b.fptosi(whole, ti), like(ti, 127)), like(ti, 23))
    value = b.fmul(p, b.bitcast(power, ty))
    return b.select(b.fcmp_unordered("uno", x, x), x, value)


# 2^f on [-1/2, 1/2], as above, of degree 5. Error in float32 arithmetic below 1.7e-7 (measured over 10^6 points).
_EXP2_HALF = (1.3264727e-3, 9.6715126e-3, 5.5507337e-2, 0.24022242, 0.69314698)
_TO_WHOLE = 1.5 * 2**23  # added to n, leaves n in the low bits
_TO_BITS = _TO_WHOLE + 127  # added to n, leaves n + 127 in the low bits: 2^n is those bits, shifted


def exp2_weight(e: Emitter, x: Any) -> Any:
    """2**x for x <= 0, and exactly 0 below -126; NaN stays NaN. A softmax's weights: half of exp2's operations."""
    b, ty = e.b, x.type
    lo, to_bits = like(ty, -126.0), like(ty, _TO_BITS)
    shifted = b.fadd(e.maximum(lo, x), to_bits)  # rounds to the nearest whole number
    f = b.fsub(e.maximum(lo, x), b.fsub(shifted, to_bits))
    p = like(ty, _EXP2_HALF[0])
    for c in (*_EXP2_HALF[1:], 1.0):
        p = e.fma(p, f, like(ty, c))
    power = b.bitcast(b.shl(b.bitcast(shifted, retype(ty, I32)), like(retype(ty, I32), 23)), ty)
    return b.select(b.fcmp_unordered(">=", x, lo), b.fmul(p, power), like(ty, 0.0))


# The same of degree 3. Error below 1.02e-4 (measured over 10^6 points): a twentieth of what a bfloat16 is rounded by.
_EXP2_ROUGH = (5.500895e-2, 0.242211, 0.6932829)


def rough_range(e: Emitter, top: Any) -> tuple[Any, Any]:
    """What `exp2_rough` takes of `top`, a whole number of at most 2^21."""
    return e.b.fsub(top, like(top.type, 127.0)), e.b.fsub(like(top.type, _TO_WHOLE), top)


def exp2_rough(e: Emitter, x: Any, least: Any, to_whole: Any) -> Any:
    """2**(x - top) for x <= top, to 1.02e-4 of it, for weights that are rounded to bfloat16; NaN stays NaN.

    least, to_whole: `rough_range(top)`. As top is whole, f is x less the nearest whole number n, without rounding. 2^f
    is scaled by adding n - top to its exponent, which spares a multiplication, a comparison and a selection. x is
    clamped to top - 127, where f is 0 and 2^f exactly 1: its exponent becomes that of 0. A little above, results are
    below 2^-126, and the caller takes them for 0 (`narrow`). To a NaN the lowest 9 bits of its payload are added:
    zeros, as NaN comes from a bfloat16, or is the one that processors make.
    """
    b, ty = e.b, x.type
    ti = retype(ty, I32)
    y = e.maximum(least, x)
    shifted = b.fadd(y, to_whole)  # rounds to the nearest whole number; n - top is in the low bits
    f = b.fsub(y, b.fsub(shifted, to_whole))
    p = like(ty, _EXP2_ROUGH[0])
    for c in (*_EXP2_ROUGH[1:], 1.0):
        p = e.fma(p, f, like(ty, c))
    power = b.shl(b.bitcast(shifted, ti), like(ti, 23))
    return b.bitcast(b.add(b.bitcast(p, ti), power), ty)


def exp2_clamped(e: Emitter, x: Any) -> Any:
    """2**x, of x clamped to [-126, 126]; of NaN anything. For sums that NaN, or 2^126, decides anyhow."""
    b, ty = e.b, x.type
    to_bits = like(ty, _TO_BITS)
    y = e.maximum(like(ty, -126.0), x)
    y = b.select(b.fcmp_ordered("<", y, like(ty, 126.0)), y, like(ty, 126.0))
    shifted = b.fadd(y, to_bits)  # rounds to the nearest whole number
    f = b.fsub(y, b.fsub(shifted, to_bits))
    p = like(ty, _EXP2_HALF[0])
    for c in (*_EXP2_HALF[1:], 1.0):
        p = e.fma(p, f, like(ty, c))
    power = b.bitcast(b.shl(b.bitcast(shifted, retype(ty, I32)), like(retype(ty, I32), 23)), ty)
    return b.fmul(p, power)


def tanh(e: Emitter, x: Any) -> Any:
    """tanh x = 1 - 2 / (1 + e^2x); absolute error about 1e-7, and 1 beyond |x| = 30."""
    b, ty = e.b, x.type
    grown = exp2(e, b.fmul(x, like(ty, 2 * LOG2E)))
    return b.fsub(like(ty, 1.0), b.fdiv(like(ty, 2.0), b.fadd(like(ty, 1.0), grown)))


@primitive(1, types.float32, [types.float32])
def exp2_float(e: Emitter, x: Any) -> Any:
    return exp2(e, x)


@primitive(1, types.float32, [types.float32])
def tanh_float(e: Emitter, x: Any) -> Any:
    return tanh(e, x)


@primitive(1, types.float32, [types.float32])
def sqrt_float(e: Emitter, x: Any) -> Any:
    return e.sqrt(x)


@primitive(3, types.float32, [types.float32] * 3)
def fma_float(e: Emitter, x: Any, y: Any, z: Any) -> Any:
    return e.fma(x, y, z)


@primitive(2, types.float32)
def sum_of_squares(e: Emitter, address: Any, n: Any) -> Any:
    """Sum of x^2 over n floats: 16 lanes of fma chains, a fixed tree, then the tail one by one."""
    blocks = e.b.ashr(n, e.const(4))

    def block(i: Any, state: list[Any]) -> list[Any]:
        v = e.load_as_float(e.add(address, e.mul(i, 64)), "float32")
        return [e.fma(v, v, state[0])]

    (lanes,) = e.loop(blocks, [e.zero()], block)
    total = e.first(e.reduce(lanes, e.b.fadd))
    done = e.mul(blocks, 16)

    def tail(i: Any, state: list[Any]) -> list[Any]:
        x = e.load(e.add(address, e.mul(e.add(done, i), 4)), F32, 4)
        return [e.fma(x, x, state[0])]

    return e.loop(e.b.sub(n, done), [total], tail)[0]
