"""Single rows of packed matrices back to float32, for the embedding. Roof: the row's packed bytes read once."""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu.emit import (
    I16,
    I64,
    Emitter,
    as_float,
    load32,
    load64,
    load_float,
    load_half,
    primitive,
    store_float,
)
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.cpu.quant_layout import BLOCK, LAYOUTS, PANEL
from cupaged.kernels.cpu.quant_pack import GAP, load_byte

f32 = types.float32


@primitive(1, types.int64)
def load_signed16(e: Emitter, address: Any) -> Any:
    return e.b.sext(e.load(address, I16, 2), I64)


def quant_embed(layout_name: str) -> Any:
    """A row of a packed matrix as float32, scaled. Record: ids (int32), panels, out, K, scale bits. Chunk: a token.

    The values are those of the format's own dequantisation, bit for bit, before the scale; with units those of
    `reference.quantised.in_units`: unit * (scale * (q - 8) + minimum), rounded once.
    """
    layout = LAYOUTS[layout_name]
    longest, units, unit_bytes = layout.piece, layout.units, layout.unit_bytes
    size, head, offset = layout.record, layout.head, layout.offset
    nibbles, minimum, narrow, halves = layout.nibbles, layout.minimum, layout.scale_bytes == 2, layout.scales == 2

    @njit(KERNEL, **OPTIONS)
    def quant_embed_kernel(op, chunk, _thread):  # type: ignore[no-untyped-def]
        ids, panels, out, blocks = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40) // BLOCK
        factor = as_float(load64(op + 48))
        n = load32(ids + 4 * chunk)
        lane = n % PANEL
        count = (blocks + longest - 1) // longest
        step = (blocks + count - 1) // max(1, count)
        record = panels + n // PANEL * (blocks * size + count * unit_bytes)
        out += chunk * blocks * BLOCK * 4
        unit = f32(1.0)
        for block in range(blocks):
            if units:
                if block % step == 0:
                    unit = load_float(record + min(step, blocks - block) * size + 4 * lane)
                scale = f32(load_signed16(record + 4 * lane))
                second = f32(load_signed16(record + 4 * lane + 2))
            elif narrow:
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
                if units:
                    value *= unit
                store_float(out + 4 * k, value * factor)
            record += size
            if units and (block + 1) % step == 0:
                record += unit_bytes
            out += 4 * BLOCK

    return quant_embed_kernel
