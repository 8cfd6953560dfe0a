"""Quantising the inputs of a product: rows of float32 -> int8 in blocks of 32, each with its scale.

A block's scale is d = max|x| / 127, its integers q = round(x * (127 / max|x|)), ties to even. Two exceptions: a block
whose largest magnitude is below 2^-100 counts as zero (127 / max|x| would overflow), and one that holds NaN or an
infinity gets d = NaN, so that the whole row of the product is NaN and no other.

Where that is too coarse (`Operations.matmul`, precise), what is left over, x * (127 / max|x|) - q, is kept in 8 more
bits: times 256, rounded, at most 127 in magnitude. A block then makes two records, which one pass over the weights
takes together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types

from cupaged.kernels.cpu.emit import F32, I8, I32, VF, VI, Emitter, like, load64, primitive
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.cpu.quant_layout import (
    BLOCK,
    X_MINUS_8,
    X_MINUS_32,
    X_MINUS_128,
    X_RECORD,
    X_SCALE,
    X_SUM,
)

TINY = 2.0**-100
# Added to a float of magnitude below 2^22 it rounds it to an integer, ties to even, which then stands in the low bits.
_ROUND = 1.5 * 2.0**23
_ROUND_BITS = 0x4B400000


def _pick(e: Emitter, v: Any, w: Any, lanes: list[int]) -> Any:
    return e.b.shuffle_vector(v, w, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _fold(e: Emitter, v: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes combined, one half with the other: order is of no account, and narrow vectors are cheap."""
    while v.type.count > 1:
        half = v.type.count // 2
        v = combine(_pick(e, v, v, list(range(half))), _pick(e, v, v, list(range(half, 2 * half))))
    return e.first(v)


def _sums(e: Emitter, v: Any, w: Any) -> tuple[Any, Any]:
    """The sums of two vectors of 16 integers."""
    half = [e.b.add(_pick(e, x, x, list(range(8))), _pick(e, x, x, list(range(8, 16)))) for x in (v, w)]
    both = e.b.add(
        _pick(e, half[0], half[1], [0, 1, 2, 3, 8, 9, 10, 11]), _pick(e, half[0], half[1], [4, 5, 6, 7, 12, 13, 14, 15])
    )
    both = e.b.add(_pick(e, both, both, [0, 1, 4, 5]), _pick(e, both, both, [2, 3, 6, 7]))
    both = e.b.add(_pick(e, both, both, [0, 2]), _pick(e, both, both, [1, 3]))
    return e.first(both), e.b.extract_element(both, ir.Constant(I32, 1))


def _scales(e: Emitter, values: list[Any]) -> tuple[Any, Any]:
    """(127 / max|x|, max|x| / 127) of a block in two vectors, as scalars."""
    b = e.b
    # Magnitudes as integers: NaN is then greater than infinity, and infinity than all else.
    sizes = [b.and_(b.bitcast(value, VI), like(VI, 0x7FFFFFFF)) for value in values]
    bigger = lambda p, q: b.select(b.icmp_signed(">", p, q), p, q)  # noqa: E731
    largest = _fold(e, bigger(*sizes), bigger)
    size = b.bitcast(largest, F32)
    finite = b.icmp_signed("<", largest, ir.Constant(I32, 0x7F800000))
    some = b.fcmp_ordered(">=", size, ir.Constant(F32, TINY))
    used = b.select(b.and_(finite, some), size, ir.Constant(F32, 1.0))
    four, zero = ir.VectorType(F32, 4), ir.Constant(F32, 0.0)
    above = b.insert_element(ir.Constant(four, [127.0, 1.0, 1.0, 1.0]), used, ir.Constant(I32, 1))
    below = b.insert_element(ir.Constant(four, [1.0, 127.0, 1.0, 1.0]), used, ir.Constant(I32, 0))
    both = b.fdiv(above, below)  # one division takes as long as four
    inverse = b.select(some, e.first(both), zero)
    scale = b.select(some, b.extract_element(both, ir.Constant(I32, 1)), zero)
    return inverse, b.select(finite, scale, ir.Constant(F32, float("nan")))


def _put(e: Emitter, rounded: list[Any], record: Any) -> Any:
    """Floats of integers + _ROUND -> the integers of a record and what takes offsets away; returns their sum.

    Of NaN and large ones come any integers.
    """
    b = e.b
    bits = [b.bitcast(value, VI) for value in rounded]
    for half, vector in enumerate(bits):  # the low byte of _ROUND_BITS is 0
        e.store(b.trunc(vector, ir.VectorType(I8, 16)), e.add(record, 16 * half), 16)
    sums = [b.sub(total, ir.Constant(I32, 16 * _ROUND_BITS % 2**32)) for total in _sums(e, *bits)]
    total = b.add(*sums)
    for place, value, by in (
        (X_MINUS_8, total, -8), (X_MINUS_128, total, -128),
        (X_MINUS_32, sums[0], -32), (X_MINUS_32 + 4, sums[1], -32),
    ):  # fmt: skip
        e.store(b.mul(value, ir.Constant(I32, by)), e.add(record, place), 4)
    return total


def _quantise_block(e: Emitter, values: list[Any], record: Any, precise: bool) -> None:
    """32 float32 in two vectors -> a record, or two."""
    b, magic = e.b, like(VF, _ROUND)
    inverse, scale = _scales(e, values)
    factor = e.splat(inverse)
    stretched = [b.fmul(value, factor) for value in values]
    rounded = [b.fadd(value, magic) for value in stretched]
    total = _put(e, rounded, record)
    if precise:
        left = [b.fsub(value, b.fsub(near, magic)) for near, value in zip(rounded, stretched, strict=True)]
        rest = [b.fadd(b.fmul(value, like(VF, 256.0)), magic) for value in left]
        for limit, past in ((_ROUND + 127, "<"), (_ROUND - 127, ">")):
            rest = [b.select(b.fcmp_ordered(past, r, like(VF, limit)), r, like(VF, limit)) for r in rest]
        total = b.add(b.shl(total, ir.Constant(I32, 8)), _put(e, rest, e.add(record, X_RECORD)))
        scale = b.fmul(scale, ir.Constant(F32, 1 / 256))
    e.store(scale, e.add(record, X_SCALE), 4)
    e.store(b.fmul(scale, b.sitofp(total, F32)), e.add(record, X_SUM), 4)


def _quantise_row(precise: bool) -> Any:
    """Intrinsic (x, blocks, out): `blocks` blocks of 32 float32 at x -> records at out."""

    @primitive(3)
    def quantise_row(e: Emitter, x: Any, blocks: Any, out: Any) -> None:
        def block(i: Any, _: list[Any]) -> list[Any]:
            source = e.add(x, e.mul(i, 4 * BLOCK))
            values = [e.load_as_float(e.add(source, 64 * half), "float32") for half in (0, 1)]
            _quantise_block(e, values, e.add(out, e.mul(i, (1 + precise) * X_RECORD)), precise)
            return []

        e.loop(blocks, [], block)

    return quantise_row


quantise_row, quantise_row_precisely = _quantise_row(False), _quantise_row(True)


@njit(types.void(*[types.int64] * 5), **OPTIONS)
def quantise(x, k, records, row, precise):  # type: ignore[no-untyped-def]
    """The `k` floats at x -> the records of row `row`."""
    blocks = k // BLOCK
    if precise != 0:
        quantise_row_precisely(x, blocks, records + row * blocks * 2 * X_RECORD)
    else:
        quantise_row(x, blocks, records + row * blocks * X_RECORD)


@njit(KERNEL, **OPTIONS)
def quantise_rows(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, x stride (bytes), K, out, whether precise, rows, rows a chunk. Chunk: a group of rows; of precise
    records a row has twice as many."""
    x, stride, k, out, precise = (
        load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40), load64(op + 48),
    )  # fmt: skip
    rows, step = load64(op + 56), load64(op + 64)
    for row in range(chunk * step, min(rows, (chunk + 1) * step)):
        quantise(x + row * stride, k, out, row, precise)
