"""Quantised records back to float32, as LLVM IR: the inner loops of exact products.

A weight is worth what model/quants_blocks.py says, bit for bit: scale * q, or that + minimum, each rounded once. The
product of a scale (11 bits of a float16, or 18 of the product of one and a small integer) and q (at most 8 bits, and 6
beside the longer scales) fits the 24 bits of a float32, so that it is exact, and one fused step gives the same as two.

The units that multiply have two steps to do for each weight of a single row, so integers become floats on others:

    by a sum     the bits of a field from bit b of a word, or'ed to those of 2^(23-b), are the float 2^(23-b) + q, from
                 which 2^(23-b) (and the layout's offset, exactly as well) is subtracted. Fields that reach beyond bit
                 22 are shifted down by 16 first.
    by a table   of nibbles, with AVX-512: vpermw looks two of them up at once, as the upper halves of floats.

Cycles for 16 weights with a minimum and one row, on Zen 4, from L1: 2.4 by the table, 3.1 by sums, 2.8 by conversions
(vcvtdq2ps), 2.5 by a table of whole floats (vpermps); 2 are the multiplications'. Bytes by sums take 2.6: memory is
slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cupaged.kernels.cpu.emit import I16, VF, VI, Emitter, like
from cupaged.kernels.cpu.processor import target
from cupaged.kernels.cpu.quant_layout import BLOCK, PANEL, Layout

GROUPS = PANEL // 16
PIECE = 4  # blocks of a piece: gemm.KC inputs
STEP = 4 * PANEL  # bytes from one step's vectors to the next's
TABLE = "avx512bw" in target().features
SHORTS = ir.VectorType(I16, 32)
_MANTISSA = 23

# consume(state, input of the block, [weights of 16 outputs of each group of each record]) -> state
Consume = Callable[[list[Any], Any, list[Any]], list[Any]]


def fields(e: Emitter, words: Any, high: bool, layout: Layout) -> list[Any]:
    """Four inputs of 16 outputs as float32, the layout's offset taken away: the bytes of each lane, or the low or the
    high half of each."""
    first = 4 if high and layout.nibbles else 0
    if layout.nibbles and TABLE:
        even, odd = (_looked_up(e, words, first + shift, layout) for shift in (0, 8))
        return [pair[place] for place in range(2) for pair in (even, odd)]
    return [_by_a_sum(e, words, first + 8 * j, layout) for j in range(4)]


def _looked_up(e: Emitter, words: Any, at: int, layout: Layout) -> list[Any]:
    """The nibbles at bit `at` and at bit `at` + 16 of each lane."""
    b = e.b
    values = np.array([(i & 15) - layout.offset for i in range(32)], np.float32)  # whatever the bit above a nibble is
    table = ir.Constant(SHORTS, (values.view(np.uint32) >> 16).tolist())
    places = b.bitcast(b.lshr(words, like(VI, at)) if at else words, SHORTS)
    both = b.bitcast(e.call("llvm.x86.avx512.permvar.hi.512", SHORTS, table, places), VI)
    return [b.bitcast(half, VF) for half in (b.shl(both, like(VI, 16)), b.and_(both, like(VI, 0xFFFF0000)))]


def _by_a_sum(e: Emitter, word: Any, at: int, layout: Layout) -> Any:
    """The bits `at` .. of each lane."""
    b = e.b
    if at + layout.bits > _MANTISSA:
        word, at = b.lshr(word, like(VI, 16)), at - 16
    one = 1 << (_MANTISSA - at)  # the float whose last place is worth bit `at`
    mask, bits = like(VI, ((1 << layout.bits) - 1) << at), like(VI, (127 + _MANTISSA - at) << _MANTISSA)
    value = b.bitcast(b.or_(b.and_(word, mask), bits), VF)
    return b.fsub(value, like(VF, float(one + layout.offset)))


def emit_block(e: Emitter, layout: Layout, records: Sequence[Any], state: list[Any], consume: Consume) -> list[Any]:
    """The float32 weights of a block of 32 inputs by 32 outputs of each record, inputs in order."""
    size = layout.scale_bytes

    def scales(place: int) -> list[Any]:
        return [
            e.load_as_float(e.add(record, (PANEL * place + 16 * group) * size), layout.scale_type)
            for record in records
            for group in range(GROUPS)
        ]

    minima = scales(layout.scales) if layout.minimum else None
    factors = scales(0)
    for half in range(2):
        if half and layout.scales == 2:
            factors = scales(1)

        def step(s: Any, state: list[Any], half: int = half, factors: list[Any] = factors) -> list[Any]:
            first = layout.head + (0 if layout.nibbles else 4 * STEP * half)
            at = e.add(e.mul(s, STEP), first)
            words = [e.load(e.add(e.add(r, at), 64 * group), VI, 64) for r in records for group in range(GROUPS)]
            for j, values in enumerate(zip(*(fields(e, word, half == 1, layout) for word in words), strict=True)):
                if minima is None:
                    weights = [e.b.fmul(q, scale) for q, scale in zip(values, factors, strict=True)]
                else:
                    weights = [e.fma(q, *pair) for q, *pair in zip(values, factors, minima, strict=True)]
                state = consume(state, e.add(e.mul(s, 4), 16 * half + j), weights)
            return state

        state = e.loop(4, state, step)
    return state


def _fetch(e: Emitter, layout: Layout, records: Sequence[Any], ahead: Any) -> None:
    """The records that lie `ahead` bytes on."""
    for record in records:
        for line in range(0, layout.record, 64):
            e.prefetch(e.add(e.add(record, ahead), line))


def emit_tile(
    e: Emitter, layout: Layout, rows: int, records: Sequence[Any], blocks: Any, x: Any, x_stride: Any, out: Any,
    out_stride: Any, ahead: Any,
) -> None:  # fmt: skip
    """out[rows, 32 of each record] += x[rows, 32 * blocks] @ the records' weights, a chain and a sum for each PIECE.

    A block fetches those that lie `ahead` bytes on.
    """
    vectors = GROUPS * len(records)
    xs = [e.add(x, e.mul(x_stride, row)) for row in range(rows)]

    def block(i: Any, acc: list[Any]) -> list[Any]:
        at, inputs = e.mul(i, layout.record), e.mul(i, 4 * BLOCK)
        here = [e.add(record, at) for record in records]
        _fetch(e, layout, here, ahead)

        def consume(acc: list[Any], k: Any, weights: list[Any]) -> list[Any]:
            new = []
            offset = e.add(inputs, e.mul(k, 4))
            for row in range(rows):
                value = e.splat(e.load_as_float(e.add(xs[row], offset), "float32", None))
                new += [e.fma(weights[v], value, acc[vectors * row + v]) for v in range(vectors)]
            return new

        return emit_block(e, layout, here, acc, consume)

    def piece(first: Any, count: Any) -> None:
        acc = e.loop(count, [e.zero()] * (vectors * rows), lambda i, acc: block(e.add(first, i), acc))
        for j, a in enumerate(acc):
            address = e.add(e.add(out, e.mul(out_stride, j // vectors)), 64 * (j % vectors))
            e.store(e.b.fadd(e.load_as_float(address, "float32"), a), address, 4)

    def in_turn(i: Any, _: list[Any]) -> list[Any]:
        first = e.mul(i, PIECE)
        left = e.b.sub(blocks, first)
        piece(first, e.b.select(e.b.icmp_signed("<", left, e.const(PIECE)), left, e.const(PIECE)))
        return []

    e.loop(e.b.sdiv(e.add(blocks, PIECE - 1), e.const(PIECE)), [], in_turn)


def emit_widening(e: Emitter, layout: Layout, records: Sequence[Any], blocks: Any, target: Any, ahead: Any) -> None:
    """target[32 * blocks, 32 of each record] = the records' weights. A block fetches those `ahead` bytes on."""
    row = 64 * GROUPS * len(records)

    def block(i: Any, _: list[Any]) -> list[Any]:
        at, place = e.mul(i, layout.record), e.add(target, e.mul(i, BLOCK * row))

        def consume(_: list[Any], k: Any, weights: list[Any]) -> list[Any]:
            for v, weight in enumerate(weights):
                e.store(weight, e.add(e.add(place, e.mul(k, row)), 64 * v), 64)
            return []

        here = [e.add(record, at) for record in records]
        _fetch(e, layout, here, ahead)
        return emit_block(e, layout, here, [], consume)

    e.loop(blocks, [], block)
