"""Integer dot products on each kind of processor, as LLVM IR: lane l of a sum += u[4l .. 4l+3] . x[4l .. 4l+3].

u are unsigned weights of `bits` bits, x signed inputs in -120..120. All ways are exact, so they give the same bits,
even for x in -127..127; those that do not move signs are for any bytes (quant_pairs.py has sums of both there):

    vnni512, vnni256   vpdpbusd (without saturation) on 64 or 32 bytes
    madd512, madd256   vpmaddubsw makes int16 pair sums, vpmaddwd widens them to int32. The pair sum saturates above
                       32767: weights of 4, 5 and 6 bits stay below, and 8, 4 and 2 steps of them are added before they
                       are widened (8*2*15*127 = 30480, 4*2*31*127 = 31496, 2*2*63*127 = 32004). Of 8-bit weights the
                       sign moves to the input: |w| <= 128 times |x| <= 127, twice, is 32512
    sdot               ARM's signed dot product on 16 bytes
    plain              16-bit multiplications of even and odd bytes, in generic vector IR: SSE2, old ARM, others

An 8-bit weight is stored as w + 128. The ways with `signed8` take the 128 off themselves; for the others the sum starts
from -128 times the sum of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from cupaged.kernels.cpu.emit import I1, I8, I16, I32, VI, Emitter, like

BYTES = ir.VectorType(I8, 64)
PAIRS = ir.VectorType(I16, 32)


def cut(e: Emitter, value: Any, count: int) -> list[Any]:
    """A vector in `count` equal parts."""
    if count == 1:
        return [value]
    size = value.type.count // count
    kind = ir.VectorType(I32, size)
    return [
        e.b.shuffle_vector(value, value, ir.Constant(kind, [size * part + i for i in range(size)]))
        for part in range(count)
    ]


def join(e: Emitter, parts: Sequence[Any]) -> Any:
    """Equal vectors, 1, 2, 4 ..., end to end."""
    parts = list(parts)
    while len(parts) > 1:
        size = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(I32, size), list(range(size)))
        parts = [e.b.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def by_parts(e: Emitter, name: str, count: int, element: Any, *values: Any) -> Any:
    """The intrinsic `name` on `count` parts of 64-byte vectors; its result has elements of type `element`."""
    result = ir.VectorType(element, 512 // element.width // count)
    cuts = [cut(e, value, count) for value in values]
    return join(e, [e.call(name, result, *part) for part in zip(*cuts, strict=True)])


def mixed(e: Emitter, low: Any, high: Any, blend: bool) -> Any:
    """int32 lanes of which the lower 16 bits are those of `low`, the upper those of `high`, whose others are 0.

    blend: without a register for a mask. That takes tiles of few rows 5 % longer, but spares a full one from spilling.
    """
    b = e.b
    if not blend:
        return b.bitcast(b.or_(b.and_(low, like(VI, 0xFFFF)), high), PAIRS)
    upper = ir.Constant(ir.VectorType(I1, PAIRS.count), [place % 2 for place in range(PAIRS.count)])
    return b.select(upper, b.bitcast(high, PAIRS), b.bitcast(low, PAIRS))


def multiplied(e: Emitter, low: Any, high: Any, pairs: Any) -> Any:
    """low * lower half of `pairs` + upper half of `high` * their upper half, by 32-bit multiplications."""
    b, by = e.b, like(VI, 16)
    signed = lambda v: b.ashr(b.shl(v, by), by)  # noqa: E731  (so that LLVM sees that 16 bits are enough)
    return b.add(b.mul(signed(low), signed(pairs)), b.mul(b.ashr(high, by), b.ashr(pairs, by)))


class Sum:
    """One running sum of a tile while its code is written: int32 lanes, and int16 pair sums not yet widened."""

    def __init__(self, start: Any) -> None:
        self.total = start
        self.pairs: Any = None
        self.steps = 0


PAIRS_NAMES = {512: "llvm.x86.avx512.pmaddw.d.512", 256: "llvm.x86.avx2.pmadd.wd"}  # vpmaddwd


class Vnni:
    """vpdpbusd, 512 or 256 bits wide. (LLVM 20 made its operands bytes; it still reads them as int32.)"""

    signed8 = False
    in_32_bits = True  # whether a step adds to the int32 sum at once

    def __init__(self, width: int) -> None:
        self.name, self.count = f"llvm.x86.avx512.vpdpbusd.{width}", 512 // width
        self.pairs_name = PAIRS_NAMES[width]

    def prepare(self, e: Emitter, weights: Any, bits: int) -> Any:
        return e.b.bitcast(weights, VI)

    def step(self, e: Emitter, total: Sum, weights: Any, x: Any, bits: int) -> None:
        total.total = by_parts(e, self.name, self.count, I32, total.total, weights, x)

    def value(self, e: Emitter, total: Sum) -> Any:
        return total.total

    def pair_dot(self, e: Emitter, low: Any, high: Any, pairs: Any, blend: bool = False) -> Any:
        return by_parts(
            e, self.pairs_name, self.count, I32, mixed(e, low, high, blend or self.count > 1), e.b.bitcast(pairs, PAIRS)
        )


class Madd:
    """vpmaddubsw and vpmaddwd, 512 or 256 bits wide."""

    signed8 = True
    in_32_bits = False  # whether a step adds to the int32 sum at once

    def __init__(self, width: int) -> None:
        self.count = 512 // width
        self.bytes_name = "llvm.x86.avx512.pmaddubs.w.512" if width == 512 else "llvm.x86.avx2.pmadd.ub.sw"
        self.pairs_name = PAIRS_NAMES[width]

    def prepare(self, e: Emitter, weights: Any, bits: int) -> Any:
        b = e.b
        weights = b.bitcast(weights, BYTES)
        if bits < 8:
            return weights
        signed = b.xor(weights, like(BYTES, 0x80))
        negative = b.icmp_signed("<", signed, e.zero(BYTES))
        return b.select(negative, b.sub(e.zero(BYTES), signed), signed), signed, negative

    def step(self, e: Emitter, total: Sum, weights: Any, x: Any, bits: int) -> None:
        b = e.b
        x = b.bitcast(x, BYTES)
        if bits == 8:
            weights, signed, negative = weights
            if self.count == 2:
                x = by_parts(e, "llvm.x86.avx2.psign.b", 2, I8, x, signed)
            else:
                x = b.select(negative, b.sub(e.zero(BYTES), x), x)
        product = by_parts(e, self.bytes_name, self.count, I16, weights, x)
        total.pairs = product if total.pairs is None else b.add(total.pairs, product)
        total.steps += 1
        if total.steps == STEPS_IN_16_BITS[bits]:
            self._widen(e, total)

    def _widen(self, e: Emitter, total: Sum) -> None:
        wide = by_parts(e, self.pairs_name, self.count, I32, total.pairs, like(PAIRS, 1))
        total.total = e.b.add(total.total, wide)
        total.pairs, total.steps = None, 0

    def value(self, e: Emitter, total: Sum) -> Any:
        if total.pairs is not None:
            self._widen(e, total)
        return total.total

    def pair_dot(self, e: Emitter, low: Any, high: Any, pairs: Any, blend: bool = False) -> Any:
        return by_parts(
            e, self.pairs_name, self.count, I32, mixed(e, low, high, blend or self.count > 1), e.b.bitcast(pairs, PAIRS)
        )


class SignedDot:
    """ARM's sdot, 128 bits wide."""

    signed8 = True
    in_32_bits = True  # whether a step adds to the int32 sum at once

    def prepare(self, e: Emitter, weights: Any, bits: int) -> Any:
        weights = e.b.bitcast(weights, BYTES)
        return e.b.xor(weights, like(BYTES, 0x80)) if bits == 8 else weights

    def step(self, e: Emitter, total: Sum, weights: Any, x: Any, bits: int) -> None:
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        total.total = by_parts(e, name, 4, I32, total.total, weights, e.b.bitcast(x, BYTES))

    def value(self, e: Emitter, total: Sum) -> Any:
        return total.total

    def pair_dot(self, e: Emitter, low: Any, high: Any, pairs: Any, blend: bool = False) -> Any:
        return multiplied(e, low, high, pairs)


class Plain:
    """16-bit arithmetic that any vector unit has."""

    signed8 = False
    in_32_bits = False  # whether a step adds to the int32 sum at once

    def prepare(self, e: Emitter, weights: Any, bits: int) -> Any:
        pairs = e.b.bitcast(weights, PAIRS)
        return e.b.and_(pairs, like(PAIRS, 0xFF)), e.b.lshr(pairs, like(PAIRS, 8))

    def step(self, e: Emitter, total: Sum, weights: Any, x: Any, bits: int) -> None:
        b = e.b
        x = b.bitcast(x, PAIRS)
        inputs = b.ashr(b.shl(x, like(PAIRS, 8)), like(PAIRS, 8)), b.ashr(x, like(PAIRS, 8))
        products = [b.mul(w, v) for w, v in zip(weights, inputs, strict=True)]  # at most 255 * 127: 15 bits and a sign
        if bits == 8:
            for product in products:
                self._widen(e, total, product)
            return
        both = b.add(*products)
        total.pairs = both if total.pairs is None else b.add(total.pairs, both)
        total.steps += 1
        if total.steps == STEPS_IN_16_BITS[bits]:
            self._widen(e, total, total.pairs)
            total.pairs, total.steps = None, 0

    def _widen(self, e: Emitter, total: Sum, pairs: Any) -> None:
        b = e.b
        lanes = b.bitcast(pairs, VI)
        even, odd = b.ashr(b.shl(lanes, like(VI, 16)), like(VI, 16)), b.ashr(lanes, like(VI, 16))
        total.total = b.add(total.total, b.add(even, odd))

    def value(self, e: Emitter, total: Sum) -> Any:
        if total.pairs is not None:
            self._widen(e, total, total.pairs)
        return total.total

    def pair_dot(self, e: Emitter, low: Any, high: Any, pairs: Any, blend: bool = False) -> Any:
        return multiplied(e, low, high, pairs)


STEPS_IN_16_BITS = {4: 8, 5: 4, 6: 2, 8: 1}
Way = Vnni | Madd | SignedDot | Plain
WAYS: dict[str, Way] = {
    "vnni512": Vnni(512),
    "vnni256": Vnni(256),
    "madd512": Madd(512),
    "madd256": Madd(256),
    "sdot": SignedDot(),
    "plain": Plain(),
}
