"""From a file's blocks to packed panels.

Packing only moves bits (multiplies the K formats' small scales out, and rounds the scales of `nibble_pair`), straight
from the mapped file: a chunk is a panel of 32 rows, whose records stay in the L1 cache while they are written. Its roof
is the file's bytes read once.

The formats are laid out as in model/quants_blocks.py; scales are computed as there, one float32 product each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from cupaged.kernels.cpu.emit import (
    F32,
    I8,
    I32,
    I64,
    Emitter,
    as_float,
    load64,
    load_half,
    load_raw16,
    primitive,
    store_float,
    store_raw16,
)
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.cpu.quant_layout import BLOCK, EXACT_LAYOUT_OF, LAYOUT_OF, LAYOUTS, PANEL, Layout

f32, i64 = types.float32, types.int64
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL (ggml-common.h)


@primitive(1, types.int64)
def load_byte(e: Emitter, address: Any) -> Any:
    return e.b.zext(e.load(address, I8, 1), I64)


@primitive(1, types.int64)
def load_signed_byte(e: Emitter, address: Any) -> Any:
    return e.b.sext(e.load(address, I8, 1), I64)


@primitive(2)
def store_byte(e: Emitter, address: Any, value: Any) -> None:
    e.store(e.b.trunc(value, I8), address, 1)


@primitive(3)
def copy_word(e: Emitter, target: Any, source: Any, flip: Any) -> None:
    """4 bytes, wherever they lie, with the bits of `flip` turned over."""
    e.store(e.b.xor(e.load(source, I32, 1), e.b.trunc(flip, I32)), target, 4)


@primitive(1, types.int64)
def level(e: Emitter, index: Any) -> Any:
    """What a nibble of IQ4_NL stands for."""
    table = ir.Constant(ir.VectorType(I8, 16), list(_LEVELS))
    return e.b.sext(e.b.extract_element(table, index), I64)


GAP = 4 * PANEL  # from one step's 4 bytes of an output to the next's
_FLIP = 0x80808080

# Each of these makes a function that packs one row: (source, blocks of 32, first record of the panel, place in it).


def _place(layout_name: str) -> tuple[int, int]:
    """Bytes of a record, and where its integers begin."""
    return LAYOUTS[layout_name].record, LAYOUTS[layout_name].head


def _four_bits(minimum: bool) -> Any:
    """Q4_0; Q4_1 with its own scales. A byte's halves are the same inputs in the file and in a record, so words move
    as they are."""
    record, head = _place("nibble_min" if minimum else "nibble")
    size, begin = (20, 4) if minimum else (18, 2)

    @njit(types.void(i64, i64, i64, i64), **OPTIONS)
    def row(source, blocks, target, lane):  # type: ignore[no-untyped-def]
        for _ in range(blocks):
            store_raw16(target + 2 * lane, load_raw16(source))
            if minimum:
                store_raw16(target + 2 * PANEL + 2 * lane, load_raw16(source + 2))
            for step in range(4):
                copy_word(target + head + GAP * step + 4 * lane, source + begin + 4 * step, 0)
            source += size
            target += record

    return row


def _q8_0() -> Any:
    record, head = _place("byte")

    @njit(types.void(i64, i64, i64, i64), **OPTIONS)
    def row(source, blocks, target, lane):  # type: ignore[no-untyped-def]
        for _ in range(blocks):
            store_raw16(target + 2 * lane, load_raw16(source))
            for step in range(8):
                copy_word(target + head + GAP * step + 4 * lane, source + 2 + 4 * step, _FLIP)
            source += 34
            target += record

    return row


@njit(types.void(i64, i64, i64), **OPTIONS)
def _put(integers, k, value):  # type: ignore[no-untyped-def]
    """The byte of input k."""
    store_byte(integers + (k >> 2) * GAP + (k & 3), value)


def _five_bits(minimum: bool) -> Any:
    """Q5_0 as 8 bits (q - 16 + 128), Q5_1."""
    record, head = _place("byte_min32" if minimum else "byte")
    size, high_at, begin, offset = (24, 4, 8, 0) if minimum else (22, 2, 6, 112)

    @njit(types.void(i64, i64, i64, i64), **OPTIONS)
    def row(source, blocks, target, lane):  # type: ignore[no-untyped-def]
        for _ in range(blocks):
            if minimum:
                store_float(target + 4 * lane, load_half(source))
                store_float(target + 4 * PANEL + 4 * lane, load_half(source + 2))
            else:
                store_raw16(target + 2 * lane, load_raw16(source))
            integers = target + head + 4 * lane
            for j in range(16):
                low = load_byte(source + begin + j)
                first = load_byte(source + high_at + (j >> 3)) >> (j & 7)
                second = load_byte(source + high_at + 2 + (j >> 3)) >> (j & 7)
                _put(integers, j, (low & 15 | (first & 1) << 4) + offset)
                _put(integers, j + 16, (low >> 4 | (second & 1) << 4) + offset)
            source += size
            target += record

    return row


def _iq4_nl() -> Any:
    record, head = _place("byte")

    @njit(types.void(i64, i64, i64, i64), **OPTIONS)
    def row(source, blocks, target, lane):  # type: ignore[no-untyped-def]
        for _ in range(blocks):
            store_raw16(target + 2 * lane, load_raw16(source))
            integers = target + head + 4 * lane
            for j in range(16):
                both = load_byte(source + 2 + j)
                _put(integers, j, level(both & 15) + 128)
                _put(integers, j + 16, level(both >> 4) + 128)
            source += 18
            target += record

    return row


@njit(types.UniTuple(f32, 2)(i64, i64), **OPTIONS)
def _k_scale(source, group):  # type: ignore[no-untyped-def]
    """The scale d*s and the minimum -m*t of a group of 32 in a superblock of Q4_K or Q5_K: 6 bits each, see
    model/quants_blocks.py."""
    packed = source + 4
    if group < 4:
        s = load_byte(packed + group) & 63
        t = load_byte(packed + group + 4) & 63
    else:
        rest = load_byte(packed + group + 4)
        s = rest & 15 | load_byte(packed + group - 4) >> 6 << 4
        t = rest >> 4 | load_byte(packed + group) >> 6 << 4
    return load_half(source) * f32(s), -(load_half(source + 2) * f32(t))


@njit(types.void(i64, i64, i64, i64), **OPTIONS)
def _k_scales(source, group, target, lane):  # type: ignore[no-untyped-def]
    scale, minimum = _k_scale(source, group)
    store_float(target + 4 * lane, scale)
    store_float(target + 4 * PANEL + 4 * lane, minimum)


@njit(types.void(i64, i64, i64), **OPTIONS)
def _k_nibbles(source, group, integers):  # type: ignore[no-untyped-def]
    """The nibbles of a group of 32 in a superblock of Q4_K."""
    nibbles = source + 16 + 32 * (group >> 1)
    shift = 4 * (group & 1)
    for j in range(16):
        first = load_byte(nibbles + j) >> shift & 15
        second = load_byte(nibbles + j + 16) >> shift & 15
        _put(integers, j, first | second << 4)


def _q4_k() -> Any:
    """Q4_K with its own scales."""
    record, head = _place("nibble_min32")

    @njit(types.void(i64, i64, i64, i64), **OPTIONS)
    def row(source, blocks, target, lane):  # type: ignore[no-untyped-def]
        for block in range(blocks):
            group = block & 7
            _k_scales(source, group, target, lane)
            _k_nibbles(source, group, target + head + 4 * lane)
            if group == 7:
                source += 144
            target += record

    return row


def _q5_k() -> Any:
    record, head = _place("byte_min32")

    @njit(types.void(i64, i64, i64, i64), **OPTIONS)
    def row(source, blocks, target, lane):  # type: ignore[no-untyped-def]
        for block in range(blocks):
            group = block & 7
            _k_scales(source, group, target, lane)
            integers = target + head + 4 * lane
            nibbles = source + 48 + 32 * (group >> 1)
            shift = 4 * (group & 1)
            for j in range(32):
                low = load_byte(nibbles + j) >> shift & 15
                high = load_byte(source + 16 + j) >> group & 1
                _put(integers, j, low | high << 4)
            if group == 7:
                source += 176
            target += record

    return row


def _q6_k() -> Any:
    record, head = _place("byte_half32")

    @njit(types.void(i64, i64, i64, i64), **OPTIONS)
    def row(source, blocks, target, lane):  # type: ignore[no-untyped-def]
        for block in range(blocks):
            group = block & 7
            d = load_half(source + 208)
            for half in range(2):
                s = load_signed_byte(source + 192 + 2 * group + half)
                store_float(target + 4 * PANEL * half + 4 * lane, d * f32(s))
            integers = target + head + 4 * lane
            side, part = group >> 2, group & 3
            nibbles = source + 64 * side + 32 * (part & 1)
            for j in range(32):
                low = load_byte(nibbles + j) >> (4 * (part >> 1)) & 15
                high = load_byte(source + 128 + 32 * side + j) >> (2 * part) & 3
                _put(integers, j, low | high << 4)
            if group == 7:
                source += 210
            target += record

    return row


@njit(types.UniTuple(f32, 2)(i64, i64), **OPTIONS)
def _q4_1_scale(source, block):  # type: ignore[no-untyped-def]
    return load_half(source + 20 * block), load_half(source + 20 * block + 2)


@njit(types.void(i64, i64, i64), **OPTIONS)
def _q4_1_nibbles(source, block, integers):  # type: ignore[no-untyped-def]
    for step in range(4):
        copy_word(integers + GAP * step, source + 20 * block + 4 + 4 * step, 0)


@njit(types.UniTuple(f32, 2)(i64, i64), **OPTIONS)
def _q4_k_scale(source, block):  # type: ignore[no-untyped-def]
    return _k_scale(source + 144 * (block >> 3), block & 7)


@njit(types.void(i64, i64, i64), **OPTIONS)
def _q4_k_nibbles(source, block, integers):  # type: ignore[no-untyped-def]
    _k_nibbles(source + 144 * (block >> 3), block & 7, integers)


_MOST, _NAN = np.float32(32767), np.float32(np.nan)
_INFINITY = 0x7F800000  # its bits


@primitive(1, types.int64, [types.float32])
def magnitude(e: Emitter, value: Any) -> Any:
    """The bits of |value|, in order of size: infinity and then NaN are the greatest."""
    return e.b.zext(e.b.and_(e.b.bitcast(value, I32), ir.Constant(I32, 0x7FFFFFFF)), I64)


@primitive(3, None, [types.int64, types.float32, types.float32])
def store_rounded(e: Emitter, address: Any, low: Any, high: Any) -> None:
    """Two floats within 16 bits, rounded to integers, ties to even. (Of NaN: any.)"""
    b = e.b
    # From 1.5 * 2^23 on floats are integers, which stand in their low bits.
    bits = [b.bitcast(b.fadd(value, ir.Constant(F32, 1.5 * 2.0**23)), I32) for value in (low, high)]
    both = b.or_(b.and_(bits[0], ir.Constant(I32, 0xFFFF)), b.shl(bits[1], ir.Constant(I32, 16)))
    e.store(both, address, 4)


def _in_units(scale_of: Any, nibbles_of: Any) -> Any:
    """Scale and minimum of (q - 8) as 16-bit multiples of a segment's unit: `reference.quantised.in_units`."""
    layout = LAYOUTS["nibble_pair"]
    record, head, unit_bytes, longest = layout.record, layout.head, layout.unit_bytes, layout.piece

    @njit(types.void(i64, i64, i64, i64), **OPTIONS)
    def row(source, blocks, target, lane):  # type: ignore[no-untyped-def]
        count = (blocks + longest - 1) // longest
        step = (blocks + count - 1) // max(1, count)
        for first in range(0, blocks, max(1, step)):
            last = min(blocks, first + step)
            largest = 0
            for block in range(first, last):
                scale, minimum = scale_of(source, block)
                largest = max(largest, magnitude(scale), magnitude(minimum + f32(8.0) * scale))
            unit, inverse = _NAN, f32(0.0)
            if largest < _INFINITY:
                unit = as_float(largest) / _MOST
                if largest > 0:
                    inverse = _MOST / as_float(largest)
            for block in range(first, last):
                scale, minimum = scale_of(source, block)
                store_rounded(target + 4 * lane, scale * inverse, (minimum + f32(8.0) * scale) * inverse)
                nibbles_of(source, block, target + head + 4 * lane)
                target += record
            store_float(target + 4 * lane, unit)
            target += unit_bytes

    return row


_ROWS = {
    "Q4_0": lambda: _four_bits(False),
    "Q4_1": lambda: _in_units(_q4_1_scale, _q4_1_nibbles),
    "Q8_0": _q8_0,
    "Q5_0": lambda: _five_bits(False),
    "Q5_1": lambda: _five_bits(True),
    "IQ4_NL": _iq4_nl,
    "Q4_K": lambda: _in_units(_q4_k_scale, _q4_k_nibbles),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


_EXACT_ROWS = _ROWS | {"Q4_1": lambda: _four_bits(True), "Q4_K": _q4_k}


def quant_pack(kind: str) -> Any:
    """Rows of format `kind` -> their places in a matrix of LAYOUT_OF[kind]."""
    return _pack(_ROWS[kind](), LAYOUTS[LAYOUT_OF[kind]])


def quant_pack_exact(kind: str) -> Any:
    """The same for EXACT_LAYOUT_OF[kind]."""
    return _pack(_EXACT_ROWS[kind](), LAYOUTS[EXACT_LAYOUT_OF[kind]])


def _pack(row: Any, layout: Layout) -> Any:
    """Record: source, source row stride (bytes), first row in the matrix, rows, K, panels. Chunk: a panel of those."""
    size, longest, unit_bytes = layout.record, layout.piece, layout.unit_bytes

    @njit(KERNEL, **OPTIONS)
    def quant_pack_kernel(op, chunk, _thread):  # type: ignore[no-untyped-def]
        source, stride, first, rows = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
        blocks, panels = load64(op + 48) // BLOCK, load64(op + 56)
        panel_bytes = blocks * size + (blocks + longest - 1) // longest * unit_bytes
        panel = first // PANEL + chunk
        for n in range(max(first, panel * PANEL), min(first + rows, (panel + 1) * PANEL)):
            row(source + (n - first) * stride, blocks, panels + panel * panel_bytes, n - panel * PANEL)

    return quant_pack_kernel
