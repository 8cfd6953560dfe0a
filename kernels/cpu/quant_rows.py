"""Quantising the inputs of a product: rows of float32 -> int8 in blocks of 32, each with its scale.

A block's scale is d = max|x| / 127, its integers q = round(x * (127 / max|x|)), ties to even. Two exceptions: a block
whose largest magnitude is below 2^-100 counts as zero (127 / max|x| would overflow), and one that holds NaN or an
infinity gets d = NaN, so that the whole row of the product is NaN and no other.

Where that is too coarse (`Operations.matmul`, precise), what is left over, x * (127 / max|x|) - q, is kept in 8 more
bits: times 256, rounded, at most 127 in magnitude. A block then makes two records, which one pass over the weights
takes together.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit

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


def _scales(e: Emitter, values: list[Any]) -> tuple[Any, Any]:
    """(127 / max|x|, max|x| / 127) of a block in two vectors, as scalars."""
    b = e.b
    # Magnitudes as integers: NaN is then greater than infinity, and infinity than all else.
    sizes = [b.and_(b.bitcast(value, VI), like(VI, 0x7FFFFFFF)) for value in values]
    bigger = lambda p, q: b.select(b.icmp_signed(">", p, q), p, q)  # noqa: E731
    largest = e.first(e.reduce(bigger(*sizes), bigger))
    size = b.bitcast(largest, F32)
    finite = b.icmp_signed("<", largest, ir.Constant(I32, 0x7F800000))
    some = b.fcmp_ordered(">=", size, ir.Constant(F32, TINY))
    used = b.select(b.and_(finite, some), size, ir.Constant(F32, 1.0))
    zero = ir.Constant(F32, 0.0)
    inverse = b.select(some, b.fdiv(ir.Constant(F32, 127.0), used), zero)
    scale = b.select(some, b.fdiv(used, ir.Constant(F32, 127.0)), zero)
    return inverse, b.select(finite, scale, ir.Constant(F32, float("nan")))


def _round(e: Emitter, values: list[Any]) -> list[Any]:
    """Integers of small floats; of NaN and large ones anything."""
    b = e.b
    return [b.sub(b.bitcast(b.fadd(value, like(VF, _ROUND)), VI), like(VI, _ROUND_BITS)) for value in values]


def _put(e: Emitter, integers: list[Any], record: Any) -> Any:
    """The integers of a record and what takes offsets away; returns their sum."""
    b = e.b
    for half, vector in enumerate(integers):
        e.store(b.trunc(vector, ir.VectorType(I8, 16)), e.add(record, 16 * half), 16)
    sums = [e.first(e.reduce(vector, b.add)) for vector in integers]
    total = b.add(*sums)
    for place, value, by in (
        (X_MINUS_8, total, -8), (X_MINUS_128, total, -128),
        (X_MINUS_32, sums[0], -32), (X_MINUS_32 + 4, sums[1], -32),
    ):  # fmt: skip
        e.store(b.mul(value, ir.Constant(I32, by)), e.add(record, place), 4)
    return total


def _put_scale(e: Emitter, scale: Any, total: Any, record: Any) -> None:
    e.store(scale, e.add(record, X_SCALE), 4)
    e.store(e.b.fmul(scale, e.b.sitofp(total, F32)), e.add(record, X_SUM), 4)


def _quantise_block(e: Emitter, values: list[Any], record: Any, precise: bool) -> None:
    """32 float32 in two vectors -> a record, or two."""
    b = e.b
    inverse, scale = _scales(e, values)
    factor = e.splat(inverse)
    stretched = [b.fmul(value, factor) for value in values]
    integers = _round(e, stretched)
    total = _put(e, integers, record)
    if precise:
        left = [b.fsub(value, b.sitofp(q, VF)) for q, value in zip(integers, stretched, strict=True)]
        rest = _round(e, [b.fmul(value, like(VF, 256.0)) for value in left])
        for limit, past in ((127, ">"), (-127, "<")):
            rest = [b.select(b.icmp_signed(past, r, like(VI, limit)), like(VI, limit), r) for r in rest]
        total = b.add(b.shl(total, ir.Constant(I32, 8)), _put(e, rest, e.add(record, X_RECORD)))
        scale = b.fmul(scale, ir.Constant(F32, 1 / 256))
    _put_scale(e, scale, total, record)


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


@njit(KERNEL, **OPTIONS)
def quantise_rows(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, x stride (bytes), K, out, rows, rows a chunk. Chunk: a group of rows."""
    x, stride, blocks, out = load64(op + 16), load64(op + 24), load64(op + 32) // BLOCK, load64(op + 40)
    rows, step = load64(op + 48), load64(op + 56)
    for row in range(chunk * step, min(rows, (chunk + 1) * step)):
        quantise_row(x + row * stride, blocks, out + row * blocks * X_RECORD)


@njit(KERNEL, **OPTIONS)
def quantise_rows_precisely(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record as of `quantise_rows`; a row's records are twice as many."""
    x, stride, blocks, out = load64(op + 16), load64(op + 24), load64(op + 32) // BLOCK, load64(op + 40)
    rows, step = load64(op + 48), load64(op + 56)
    for row in range(chunk * step, min(rows, (chunk + 1) * step)):
        quantise_row_precisely(x + row * stride, blocks, out + row * blocks * 2 * X_RECORD)
