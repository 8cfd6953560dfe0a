"""Quantising the inputs of a product: rows of float32 -> int8 in blocks of 32, each with its scale.

A block's scale is d = max|x| / 127, its integers q = round(x * (127 / max|x|)), ties to even. Two exceptions: a block
whose largest magnitude is below 2^-100 counts as zero (127 / max|x| would overflow), and one that holds NaN or an
infinity gets d = NaN, so that the whole row of the product is NaN and no other.

Where that is too coarse (`Operations.matmul`, precise), what is left over, x - d*q, is quantised in turn: the product
is then of twice as many rows, whose results are added by twos. The weights are still read once.
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


def _quantise_block(e: Emitter, values: list[Any], record: Any) -> list[Any]:
    """32 float32 in two vectors -> a record; returns what is left of them, x - d*q, rounded once."""
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
    scale = b.select(finite, scale, ir.Constant(F32, float("nan")))
    factor, magic = e.splat(inverse), like(VF, _ROUND)
    rounded = [b.fadd(b.fmul(value, factor), magic) for value in values]
    integers = [b.sub(b.bitcast(value, VI), like(VI, _ROUND_BITS)) for value in rounded]
    for half, vector in enumerate(integers):
        e.store(b.trunc(vector, ir.VectorType(I8, 16)), e.add(record, 16 * half), 16)
    sums = [e.first(e.reduce(vector, b.add)) for vector in integers]
    total = b.add(*sums)
    e.store(scale, e.add(record, X_SCALE), 4)
    e.store(b.fmul(scale, b.sitofp(total, F32)), e.add(record, X_SUM), 4)
    for place, value, by in (
        (X_MINUS_8, total, -8), (X_MINUS_128, total, -128),
        (X_MINUS_32, sums[0], -32), (X_MINUS_32 + 4, sums[1], -32),
    ):  # fmt: skip
        e.store(b.mul(value, ir.Constant(I32, by)), e.add(record, place), 4)
    minus = b.fneg(e.splat(scale))
    return [e.fma(b.sitofp(q, VF), minus, value) for q, value in zip(integers, values, strict=True)]


@primitive(3)
def quantise_row(e: Emitter, x: Any, blocks: Any, out: Any) -> None:
    """`blocks` blocks of 32 float32 at x -> records of 64 bytes at out."""

    def block(i: Any, _: list[Any]) -> list[Any]:
        source = e.add(x, e.mul(i, 4 * BLOCK))
        values = [e.load_as_float(e.add(source, 64 * half), "float32") for half in (0, 1)]
        _quantise_block(e, values, e.add(out, e.mul(i, X_RECORD)))
        return []

    e.loop(blocks, [], block)


@primitive(4)
def quantise_row_twice(e: Emitter, x: Any, blocks: Any, out: Any, rest: Any) -> None:
    """`quantise_row`, and records of what is left over at `rest`."""

    def block(i: Any, _: list[Any]) -> list[Any]:
        source = e.add(x, e.mul(i, 4 * BLOCK))
        values = [e.load_as_float(e.add(source, 64 * half), "float32") for half in (0, 1)]
        left = _quantise_block(e, values, e.add(out, e.mul(i, X_RECORD)))
        _quantise_block(e, left, e.add(rest, e.mul(i, X_RECORD)))
        return []

    e.loop(blocks, [], block)


@njit(KERNEL, **OPTIONS)
def quantise_rows(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, x stride (bytes), K, out, rows, rows a chunk. Chunk: a group of rows."""
    x, stride, blocks, out = load64(op + 16), load64(op + 24), load64(op + 32) // BLOCK, load64(op + 40)
    rows, step = load64(op + 48), load64(op + 56)
    for row in range(chunk * step, min(rows, (chunk + 1) * step)):
        quantise_row(x + row * stride, blocks, out + row * blocks * X_RECORD)


@njit(KERNEL, **OPTIONS)
def quantise_rows_twice(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record as of `quantise_rows`. The records of what is left over are rows `rows` .. 2 * `rows`."""
    x, stride, blocks, out = load64(op + 16), load64(op + 24), load64(op + 32) // BLOCK, load64(op + 40)
    rows, step = load64(op + 48), load64(op + 56)
    size = blocks * X_RECORD
    for row in range(chunk * step, min(rows, (chunk + 1) * step)):
        quantise_row_twice(x + row * stride, blocks, out + row * size, out + (rows + row) * size)
