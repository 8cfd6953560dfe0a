"""The inner loop of products of many rows with 4-bit weights, on processors that add beside their multiplications.

Winograd (1968, "A New Algorithm for Inner Product", IEEE Transactions on Computers C-17) takes two products by one
multiplication, since

    (x1 + w2) * (x2 + w1)  =  x1 * w1 + x2 * w2  +  x1 * x2  +  w1 * w2

where x1 * x2 hangs on the row alone and w1 * w2 on the output alone. Of 4-bit weights w - 8 and inputs within 120 the
two sums fit into bytes, so one vpdpbusd does the work of two, for two vpaddb. These find units of their own on Zen 4
(four units add, two of them multiply): a dot product and two additions take 1.5 cycles where two dot products take 2.

A block of 32 inputs has 8 steps of 4. Steps 0 and 4 are multiplied as they are, 1 to 3 are paired with 5 to 7. For a
row and 16 outputs a block then takes 5 dot products and 2 scaling steps on the multipliers, 6 + 3 other operations:
16 on four units, 8 cycles at the least, instead of 10; measured 8.5 (all of it from L1 or L2). With two or with four
pairs it is 8.6 and 8.9.

The integers are exact, so every bit is that of quant_tile.py. What a pair adds is taken away where a sum starts:

    x1 + 128 as unsigned bytes (X_BIASED)    (x1 + 128 + w2) * (x2 + w1) = x1 * w1 + x2 * w2 + (x1 + 128) * x2
                                                                           + (w2 + 128) * w1
    of the row (X_PAIRED_START)              - the sum of (x1 + 128) * x2, - 8 * the sum of x in steps 0 and 4
    of the outputs (below)                   - the sum of (w2 + 128) * w1

A piece of a panel is taken apart once for all rows, into blocks of SPREAD bytes:

    starts    [32]           int32, as above
    scales    [32]           float32; or the pairs of `nibble_pair`
    bytes     [8][32][4]     q of steps 0 and 4, q - 8 of the others

Taking it apart: 1 KiB written a block, about 25 instructions for 16 outputs, once for up to 120 rows.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from numba import njit, types

from cupaged.kernels.cpu.emit import I1, I32, VF, VI, Emitter, like, primitive
from cupaged.kernels.cpu.gemm import OPTIONS
from cupaged.kernels.cpu.processor import target
from cupaged.kernels.cpu.quant_dot import BYTES, WAYS, Sum, Way
from cupaged.kernels.cpu.quant_layout import (
    LAYOUTS,
    PANEL,
    SPREAD,
    X_BIASED,
    X_PAIRED_START,
    X_RECORD,
    Layout,
)
from cupaged.kernels.cpu.quant_tile import GROUPS, STEPS, fetched, halves, run_blocks, scaled, scales_of

HALF = STEPS // 2
FEW = 16  # rows for which it does not pay to take records apart
SCALES = 4 * PANEL  # where they stand in a block
INTEGERS = 2 * SCALES
HEIGHTS = {1: (6, 4), 2: (4, 4)}  # rows of the tiles by the terms of the input: sums and results fill 24 registers


def emit_spread(e: Emitter, way: Way, layout: Layout, records: Any, count: Any, to: Any) -> None:
    """Take `count` records of a panel apart, to blocks of SPREAD bytes."""
    b = e.b
    eight = like(BYTES, 8)

    def block(i: Any, _: list[Any]) -> list[Any]:
        record, spread = e.add(records, e.mul(i, layout.record)), e.add(to, e.mul(i, SPREAD))
        for group in range(GROUPS):
            start = Sum(e.zero(VI))
            for step in range(HALF):
                raw = e.load(e.add(record, layout.head + 4 * PANEL * step + 64 * group), BYTES, 64)
                low, high = halves(e, raw)
                if step:
                    low, high = b.sub(low, eight), b.sub(high, eight)
                    biased = b.xor(high, like(BYTES, 0x80))
                    way.step(e, start, way.prepare(e, biased, 8), b.bitcast(low, VI), 8)
                for at, value in ((step, low), (step + HALF, high)):
                    e.store(value, e.add(spread, INTEGERS + 4 * PANEL * at + 64 * group), 64)
            e.store(b.sub(e.zero(VI), way.value(e, start)), e.add(spread, 64 * group), 64)
            if layout.units:
                scales = e.load(e.add(record, 64 * group), VI, 64)
            else:
                scales = e.load_as_float(e.add(record, 32 * group), layout.scale_type)
            e.store(scales, e.add(spread, SCALES + 64 * group), 64)
        return []

    e.loop(count, [], block)


def emit_pair_tile(
    e: Emitter, way: Way, layout: Layout, rows: int, terms: int, spread: Any, count: Any, x: Any, x_stride: Any,
    out: Any, out_stride: Any, fresh: Any, units: Any, ahead: Any, ahead_stride: Any,
) -> None:  # fmt: skip
    """`quant_tile.emit_tile` of `count` blocks that `emit_spread` has taken apart, `ahead` being one address. units:
    where those of the segment are."""
    b = e.b
    places = [(row, group) for row in range(rows) for group in range(GROUPS)]
    xs = [e.add(x, e.mul(x_stride, row)) for row in range(rows)]
    all_terms = range(terms)

    def block(i: Any, acc: list[Any]) -> list[Any]:
        record = e.add(spread, e.mul(i, SPREAD))
        inputs = [e.add(base, e.mul(i, terms * X_RECORD)) for base in xs]
        result = dict(zip(places, acc, strict=True))
        splat = lambda row, at, kind=I32: e.splat(e.load(e.add(inputs[row], at), kind, 4))  # noqa: E731
        vectors = lambda at: [e.load(e.add(record, at + 64 * group), BYTES, 64) for group in range(GROUPS)]  # noqa: E731
        for line in range(0, fetched(layout), 64):
            e.prefetch(e.add(e.add(ahead, e.mul(i, ahead_stride)), line))

        def scales(group: int) -> list[Any]:
            if layout.units and terms > 1:
                return scales_of(e, layout, e.add(record, SCALES), group)
            return [e.load(e.add(record, SCALES + 64 * group), VI if layout.units else VF, 64)]

        starts, sums = vectors(0), {}
        for row, term in product(range(rows), all_terms):
            start = splat(row, X_PAIRED_START + X_RECORD * term)
            for group in range(GROUPS):
                sums[row, group, term] = Sum(b.add(b.bitcast(starts[group], VI), start))
        for step in range(HALF):
            first, second = (vectors(INTEGERS + 4 * PANEL * at) for at in (step, step + HALF))
            for row in range(rows):
                for term in all_terms:
                    later = splat(row, 4 * (step + HALF) + X_RECORD * term)
                    sooner = splat(row, (X_BIASED if step else 0) + 4 * step + X_RECORD * term)
                    for group in range(GROUPS):
                        total = sums[row, group, term]
                        if step == 0:
                            way.step(e, total, way.prepare(e, first[group], layout.bits), sooner, layout.bits)
                            way.step(e, total, way.prepare(e, second[group], layout.bits), later, layout.bits)
                        else:
                            left = b.add(b.bitcast(sooner, BYTES), second[group])
                            right = b.add(b.bitcast(later, BYTES), first[group])
                            way.step(e, total, way.prepare(e, left, 8), b.bitcast(right, VI), 8)
                if step == HALF - 1:
                    for group in range(GROUPS):
                        totals = [way.value(e, sums[row, group, term]) for term in all_terms]
                        before = result[row, group]
                        at = partial(splat, row)
                        result[row, group] = scaled(e, way, layout, totals, scales(group), at, before, blend=True)
        return list(result.values())

    addresses = [e.add(e.add(out, e.mul(out_stride, row)), 64 * group) for row, group in places]
    for address in addresses:  # what is written at the end must not be waited for then
        e.prefetch(address, near=True)
    run_blocks(e, layout, count, block, addresses, fresh, units)


def _pair_tile(layout: Layout, way: Way, rows: int, terms: int) -> Any:
    """Intrinsic (spread, count, x, x stride, out, out stride, fresh, units, ahead, ahead stride)."""

    @primitive(10)
    def kernel(
        e: Emitter, spread: Any, count: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, fresh: Any,
        units: Any, ahead: Any, ahead_stride: Any,
    ) -> None:  # fmt: skip
        begin = e.b.trunc(fresh, I1)
        emit_pair_tile(
            e, way, layout, rows, terms, spread, count, x, x_stride, out, out_stride, begin, units, ahead, ahead_stride
        )

    return kernel


def pairs_of(layout_name: str) -> bool:
    """Whether weights of a layout can be paired."""
    layout = LAYOUTS[layout_name]
    return layout.nibbles and layout.offset == 8


def pair_tiles(layout_name: str, terms: int, others: Any) -> Any:
    """`quant_matmul.row_tiles`, of more rows than FEW; what is left, and few rows, are left to `others`."""
    layout, way = LAYOUTS[layout_name], WAYS[target().dot]
    tall, four = (_pair_tile(layout, way, rows, terms) for rows in HEIGHTS[terms])
    height, size, fetches = HEIGHTS[terms][0], layout.record, fetched(layout)

    @primitive(3)
    def spread(e: Emitter, records: Any, count: Any, to: Any) -> None:
        emit_spread(e, way, layout, records, count, to)

    @njit(types.void(*[types.int64] * 11), **OPTIONS)
    def run(records, count, x, x_stride, out, out_stride, rows, fresh, ahead, last, room):  # type: ignore[no-untyped-def]
        m = 0
        if rows > FEW:
            spread(records, count, room)
        while rows > FEW and rows - m >= 4:
            xa = x + m * x_stride
            oa = out + m * out_stride
            units = records + count * size
            stride = fetches if ahead < last else 0
            if rows - m >= height and rows - m != 8:
                tall(room, count, xa, x_stride, oa, out_stride, fresh, units, ahead, stride)
                m += height
            else:
                four(room, count, xa, x_stride, oa, out_stride, fresh, units, ahead, stride)
                m += 4
            ahead += count * stride
        if m < rows:
            xa = x + m * x_stride
            oa = out + m * out_stride
            others(records, count, xa, x_stride, oa, out_stride, rows - m, fresh, ahead, last, room)

    return run
