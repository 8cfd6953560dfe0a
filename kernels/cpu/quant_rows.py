"""Quantising the inputs of a product: rows of float32 -> int8 in blocks of 32, each with its scale.

A block's scale is d = max|x| / 120, its integers q = round(x * (120 / max|x|)), ties to even. Two exceptions: a block
whose largest magnitude is below 2^-100 counts as zero (120 / max|x| would overflow), and one that holds NaN or an
infinity gets d = NaN, so that the whole row of the product is NaN and no other.

Where that is too coarse (`Operations.matmul`, precise), what is left over, x * (120 / max|x|) - q, is kept in 7 more
bits: times 128, rounded, at most 64 in magnitude. A block then makes two records, which one pass over the weights
takes together.

Bytes: 4 an input read (mostly from L1, where what made the row has left it), 2.5 written, 5 of precise records.
Operations: about 19 for 16 inputs, a division for 128; 35 precise; 3 and 6 more with pairs. From and to
L1 that takes 4.1 and 7.6 ns on Zen 4 (3.5 and 6.8 without pairs), with four blocks at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types

from cupaged.kernels.cpu.emit import I1, I8, I32, LANES, VF, VI, Emitter, like, load64, primitive
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.cpu.processor import target
from cupaged.kernels.cpu.quant_dot import BYTES, WAYS, Sum, join
from cupaged.kernels.cpu.quant_layout import (
    BLOCK,
    X_BIASED,
    X_FINE,
    X_MINUS_32,
    X_RECORD,
    X_SCALE,
    X_TOP,
)

TINY = 2.0**-100
# Added to a float of magnitude below 2^22 it rounds it to an integer, ties to even, which then stands in the low bits.
_ROUND = 1.5 * 2.0**23
_ROUND_BITS = 0x4B400000


PAIRED = target().paired  # otherwise nobody reads what quant_pairs.py needs
AT_ONCE = 4  # blocks: a maximum, a sum or a scale of each then fills four lanes of a vector, in the order of the blocks


def _pick(e: Emitter, v: Any, w: Any, lanes: Sequence[int]) -> Any:
    return e.b.shuffle_vector(v, w, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def _fold(e: Emitter, vectors: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes of each of four vectors combined, of vector i in lanes 4i .. 4i + 3. In any order: it is of no account
    to maxima and integers."""
    low, high = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    first, second = (combine(_pick(e, v, w, low), _pick(e, v, w, high)) for v, w in (vectors[:2], vectors[2:]))
    even = [lane for start in (0, 8, 16, 24) for lane in range(start, start + 4)]
    v = combine(_pick(e, first, second, even), _pick(e, first, second, [lane + 4 for lane in even]))
    for other in (2, 1):
        v = combine(v, _pick(e, v, v, [lane ^ other for lane in range(LANES)]))
    return v


def _lanes(e: Emitter, *vectors: Any) -> Any:
    """Lane 0 of each four from the first vector, lane 1 from the second, ...; of two, the lanes in turn."""
    v = vectors[0]
    for number, other in enumerate(vectors[1:], start=1):
        taken = ir.Constant(ir.VectorType(I1, LANES), [lane % len(vectors) == number for lane in range(LANES)])
        v = e.b.select(taken, other, v)
    return v


def _each_four(ty: Any, values: Sequence[float]) -> Any:
    return ir.Constant(ty, list(values) * (LANES // len(values)))


def _scales(e: Emitter, blocks: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
    """(X_TOP / max|x| in lane 0, max|x| / X_TOP in all) of the lanes that stand for a block, each of two vectors."""
    b = e.b
    # Magnitudes as integers: NaN is then greater than infinity, and infinity than all else.
    bigger = lambda p, q: b.select(b.icmp_signed(">", p, q), p, q)  # noqa: E731
    sizes = [[b.and_(b.bitcast(value, VI), like(VI, 0x7FFFFFFF)) for value in values] for values in blocks]
    largest = _fold(e, [bigger(*pair) for pair in sizes], bigger)
    size = b.bitcast(largest, VF)
    finite = b.icmp_signed("<", largest, like(VI, 0x7F800000))
    some = b.fcmp_ordered(">=", size, like(VF, TINY))
    used = b.select(b.and_(finite, some), size, like(VF, 1.0))
    top = like(VF, float(X_TOP))
    both = b.select(some, b.fdiv(_lanes(e, top, used), _lanes(e, used, top)), like(VF, 0.0))  # one division for all
    scale = _pick(e, both, both, [lane | 1 for lane in range(LANES)])
    return both, b.select(finite, scale, like(VF, float("nan")))


def _sums(e: Emitter, blocks: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
    """The sums of the integers behind either half of each block, given as floats of integers + _ROUND.

    16 lanes of first + 2^16 * second: the low half is the sum of the first, with its sign (_ROUND_BITS has none there).
    """
    b, half = e.b, like(VI, 16)
    mixed = [b.add(b.bitcast(first, VI), b.shl(b.bitcast(second, VI), half)) for first, second in blocks]
    total = _fold(e, mixed, b.add)
    first = b.ashr(b.shl(total, half), half)
    rest = b.sub(b.sub(total, like(VI, LANES * _ROUND_BITS % 2**32)), first)
    return first, b.ashr(rest, half)


def _paired(e: Emitter, firsts: Sequence[Any], seconds: Sequence[Any]) -> tuple[Any, Any]:
    """What quant_pairs.py takes from the halves of four blocks' q, each 16 bytes: (first + 128 of all blocks, what its
    sums have too much): (first + 128) * second of inputs 4 to 15 of a half, 8 * q of the others."""
    b, way = e.b, WAYS["vnni512"]
    first, second = join(e, firsts), join(e, seconds)
    biased = b.xor(first, like(BYTES, 0x80))
    alone = ir.Constant(ir.VectorType(I1, BYTES.count), [place % 16 < 4 for place in range(BYTES.count)])
    sums = Sum(e.zero(VI))
    for left, right in ((biased, second), (e.zero(BYTES), first)):
        way.step(e, sums, b.bitcast(b.select(alone, like(BYTES, 8), left), VI), b.bitcast(right, VI), 8)
    total = sums.total
    for other in (1, 2):
        total = b.add(total, _pick(e, total, total, [lane ^ other for lane in range(LANES)]))
    return biased, total


def _put(e: Emitter, blocks: Sequence[Sequence[Any]], sums: tuple[Any, Any], scale: Any, total: Any, to: Any) -> None:
    """Records of four blocks, at the addresses `to`: floats of integers + _ROUND, the sums of these, X_SCALE, and how
    many times that X_SUM is.

    Of NaN and large ones come any integers.
    """
    b = e.b
    both = b.add(*sums)
    floats = b.bitcast(b.fmul(scale, _lanes(e, like(VF, 1.0), b.sitofp(total, VF))), VI)
    # The words of a record from X_SCALE on: X_SCALE, X_SUM, X_MINUS_8, X_MINUS_128; X_MINUS_32, its second, the sum as
    # upper 16 bits, X_PAIRED_START.
    even = ir.Constant(ir.VectorType(I1, LANES), [lane % 4 < 2 for lane in range(LANES)])
    head = b.select(even, floats, b.mul(both, _each_four(VI, (0, 0, -8, -128))))
    # The low byte of _ROUND_BITS is 0.
    halves = [
        [b.trunc(b.bitcast(value, VI), ir.VectorType(I8, 16)) for value in values]
        for values in zip(*blocks, strict=True)
    ]
    biased, extra = _paired(e, *halves) if PAIRED else (None, both)
    tail = b.mul(_lanes(e, sums[0], sums[1], both, extra), _each_four(VI, (-32, -32, 1 << 16, -1)))
    for index, record in enumerate(to):
        for half, values in enumerate(halves):
            e.store(values[index], e.add(record, 16 * half), 16)
        if biased is not None:
            e.store(_pick(e, biased, biased, range(16 * index, 16 * index + 16)), e.add(record, X_BIASED), 16)
        for place, words in ((X_SCALE, head), (X_MINUS_32, tail)):
            e.store(_pick(e, words, words, range(4 * index, 4 * index + 4)), e.add(record, place), 16)


def _quantise_blocks(e: Emitter, blocks: Sequence[Sequence[Any]], plain: Any, fine: Any, at: Sequence[Any]) -> None:
    """Four blocks of 32 float32 -> a record each at `plain`, and two at `fine`, where these are not 0. at: the numbers
    of the blocks."""
    b, magic = e.b, like(VF, _ROUND)
    inverses, scale = _scales(e, blocks)
    factors = [_pick(e, inverses, inverses, [4 * block] * LANES) for block in range(AT_ONCE)]
    stretched = [[b.fmul(value, factor) for value in values] for values, factor in zip(blocks, factors, strict=True)]
    rounded = [[b.fadd(value, magic) for value in values] for values in stretched]
    sums = _sums(e, rounded)
    total = b.add(*sums)
    with b.if_then(b.icmp_signed("!=", plain, e.const(0))):
        _put(e, rounded, sums, scale, total, [e.add(plain, e.mul(i, X_RECORD)) for i in at])
    with b.if_then(b.icmp_signed("!=", fine, e.const(0))):
        rest = [
            [_rest(e, value, near) for value, near in zip(*pair, strict=True)]
            for pair in zip(stretched, rounded, strict=True)
        ]
        less = _sums(e, rest)
        total = b.add(b.shl(total, like(VI, X_FINE)), b.add(*less))
        scale = b.fmul(scale, like(VF, 0.5**X_FINE))
        to = [e.add(fine, e.mul(i, 2 * X_RECORD)) for i in at]
        _put(e, rounded, sums, scale, total, to)
        _put(e, rest, less, scale, total, [e.add(record, X_RECORD) for record in to])


def _rest(e: Emitter, value: Any, near: Any) -> Any:
    """What rounding left of a value, times 2^X_FINE, as a float of an integer + _ROUND."""
    b, magic = e.b, like(VF, _ROUND)
    return b.fadd(b.fmul(b.fsub(value, b.fsub(near, magic)), like(VF, 2.0**X_FINE)), magic)


@primitive(6)
def _quantise(e: Emitter, x: Any, x_step: Any, blocks: Any, plain: Any, fine: Any, step: Any) -> None:
    """`blocks` blocks of 32 float32, one every `x_step` bytes from x on -> every `step`-th of the records at plain, and
    of precise ones at fine (0: none).

    Four at a time; where fewer are left the last one is done again, to the same bits.
    """
    b = e.b
    last = e.add(blocks, -1)

    def some(i: Any, _: list[Any]) -> list[Any]:
        at = [e.add(e.mul(i, AT_ONCE), block) for block in range(AT_ONCE)]
        at = [b.select(b.icmp_signed("<", block, last), block, last) for block in at]
        sources = [e.add(x, e.mul(block, x_step)) for block in at]
        values = [[e.load_as_float(e.add(source, 64 * half), "float32") for half in (0, 1)] for source in sources]
        _quantise_blocks(e, values, plain, fine, [e.mul(block, step) for block in at])
        return []

    e.loop(b.sdiv(e.add(blocks, AT_ONCE - 1), e.const(AT_ONCE)), [], some)


@njit(types.void(*[types.int64] * 5), **OPTIONS)
def quantise(x, k, row, plain, fine):  # type: ignore[no-untyped-def]
    """The `k` floats at x -> the records of row `row`, plain ones at `plain`, precise ones at `fine` (0: none)."""
    blocks = k // BLOCK
    if plain != 0:
        plain += row * blocks * X_RECORD
    if fine != 0:
        fine += row * blocks * 2 * X_RECORD
    _quantise(x, 4 * BLOCK, blocks, plain, fine, 1)


@njit(types.void(*[types.int64] * 5), **OPTIONS)
def quantise_column(x, x_stride, rows, records, row_blocks):  # type: ignore[no-untyped-def]
    """A block of each of some rows, at x -> its record at `records`, of rows of `row_blocks` records."""
    _quantise(x, x_stride, rows, records, 0, row_blocks)


@njit(KERNEL, **OPTIONS)
def quantise_rows(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, x stride (bytes), K, out, whether precise, rows, rows a chunk. Chunk: a group of rows; of precise
    records a row has twice as many."""
    x, stride, k, out, precise = (
        load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40), load64(op + 48),
    )  # fmt: skip
    rows, step = load64(op + 56), load64(op + 64)
    for row in range(chunk * step, min(rows, (chunk + 1) * step)):
        quantise(x + row * stride, k, row, 0 if precise != 0 else out, out if precise != 0 else 0)
