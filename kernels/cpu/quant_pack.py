"""From a file's blocks to packed panels, and single rows back to float32 for the embedding.

Packing only moves bits (and multiplies the K formats' small scales out), straight from the mapped file: a chunk is a
panel of 32 rows, whose records stay in the L1 cache while they are written. Its roof is the file's bytes read once.

The formats are laid out as in model/quants_blocks.py; scales are computed as there, one float32 product each.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from cupaged.kernels.cpu.emit import (
    I8,
    I32,
    I64,
    Emitter,
    as_float,
    load32,
    load64,
    load_float,
    load_half,
    load_raw16,
    primitive,
    store_float,
    store_raw16,
)
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.cpu.quant_layout import BLOCK, LAYOUT_OF, LAYOUTS, PANEL

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
    """Q4_0, Q4_1. A byte's halves are the same two inputs in the file and in a record: words move as they are."""
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


@njit(types.void(i64, i64, i64, i64), **OPTIONS)
def _k_scales(source, group, target, lane):  # type: ignore[no-untyped-def]
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
    store_float(target + 4 * lane, load_half(source) * f32(s))
    store_float(target + 4 * PANEL + 4 * lane, -(load_half(source + 2) * f32(t)))


def _q4_k() -> Any:
    record, head = _place("nibble_min32")

    @njit(types.void(i64, i64, i64, i64), **OPTIONS)
    def row(source, blocks, target, lane):  # type: ignore[no-untyped-def]
        for block in range(blocks):
            group = block & 7
            _k_scales(source, group, target, lane)
            integers = target + head + 4 * lane
            nibbles = source + 16 + 32 * (group >> 1)
            shift = 4 * (group & 1)
            for j in range(16):
                first = load_byte(nibbles + j) >> shift & 15
                second = load_byte(nibbles + j + 16) >> shift & 15
                _put(integers, j, first | second << 4)
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


_ROWS = {
    "Q4_0": lambda: _four_bits(False),
    "Q4_1": lambda: _four_bits(True),
    "Q8_0": _q8_0,
    "Q5_0": lambda: _five_bits(False),
    "Q5_1": lambda: _five_bits(True),
    "IQ4_NL": _iq4_nl,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def quant_pack(kind: str) -> Any:
    """Rows of format `kind` -> their places in a packed matrix.

    Record: source, source row stride (bytes), first row in the matrix, rows, K, panels. Chunk: a panel they touch.
    """
    row = _ROWS[kind]()
    size = LAYOUTS[LAYOUT_OF[kind]].record

    @njit(KERNEL, **OPTIONS)
    def quant_pack_kernel(op, chunk, _thread):  # type: ignore[no-untyped-def]
        source, stride, first, rows = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
        blocks, panels = load64(op + 48) // BLOCK, load64(op + 56)
        panel = first // PANEL + chunk
        for n in range(max(first, panel * PANEL), min(first + rows, (panel + 1) * PANEL)):
            row(source + (n - first) * stride, blocks, panels + panel * blocks * size, n - panel * PANEL)

    return quant_pack_kernel


def quant_embed(layout_name: str) -> Any:
    """A row of a packed matrix as float32, scaled. Record: ids (int32), panels, out, K, scale bits. Chunk: a token.

    The values are those of the format's own dequantisation, bit for bit, before the scale.
    """
    layout = LAYOUTS[layout_name]
    size, head, offset = layout.record, layout.head, layout.offset
    nibbles, minimum, narrow, halves = layout.nibbles, layout.minimum, layout.scale_bytes == 2, layout.scales == 2

    @njit(KERNEL, **OPTIONS)
    def quant_embed_kernel(op, chunk, _thread):  # type: ignore[no-untyped-def]
        ids, panels, out, blocks = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40) // BLOCK
        factor = as_float(load64(op + 48))
        n = load32(ids + 4 * chunk)
        lane = n % PANEL
        record = panels + n // PANEL * blocks * size
        out += chunk * blocks * BLOCK * 4
        for _ in range(blocks):
            if narrow:
                scale = load_half(record + 2 * lane)
                second = load_half(record + 2 * PANEL + 2 * lane) if minimum else f32(0.0)
            else:
                scale = load_float(record + 4 * lane)
                second = load_float(record + 4 * PANEL + 4 * lane)
            integers = record + head + 4 * lane
            for k in range(BLOCK):
                if nibbles:
                    both = load_byte(integers + ((k & 15) >> 2) * GAP + (k & 3))
                    u = both & 15 if k < 16 else both >> 4
                else:
                    u = load_byte(integers + (k >> 2) * GAP + (k & 3))
                value = f32(u - offset) * (second if halves and k >= 16 else scale)
                if minimum:
                    value += second
                store_float(out + 4 * k, value * factor)
            record += size
            out += 4 * BLOCK

    return quant_embed_kernel
