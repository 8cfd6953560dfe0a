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

That takes about 25 instructions and 640 bytes written for a block of 16 outputs: 30 to 35 cycles by itself, less in the
midst of the first tile's sums (32 rows of 576 x 1536: 167 us instead of 174 for all).

A virtual machine also has minutes, probably those in which another one shares the core, when this takes 10.2 cycles: no
more than without pairs (10.0 to 10.3).
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
NOT_PAIRED = 24  # rows for which it does not pay to take records apart
SCALES = 4 * PANEL  # where they stand in a block
INTEGERS = 2 * SCALES
# Rows of a tile by the terms of the input, whose sums and results fill 24 registers; and of the first one, which takes
# a piece apart and needs more of them for itself.
HEIGHTS = {1: (6, 4), 2: (4, 0)}


def emit_pair_tile(
    e: Emitter, way: Way, layout: Layout, rows: int, terms: int, spread: Any, count: Any, x: Any, x_stride: Any,
    out: Any, out_stride: Any, fresh: Any, units: Any, ahead: Any, ahead_stride: Any, records: Any = None,
) -> None:  # fmt: skip
    """`quant_tile.emit_tile` of `count` blocks that have been taken apart at `spread`, `ahead` being one address.

    units: where those of the segment are. records: of the same blocks, which this tile, of any rows or none, takes
    apart.
    """
    b = e.b
    places = [(row, group) for row in range(rows) for group in range(GROUPS)]
    xs = [e.add(x, e.mul(x_stride, row)) for row in range(rows)]
    all_terms, eight = range(terms), like(BYTES, 8)

    def block(i: Any, acc: list[Any]) -> list[Any]:
        to = e.add(spread, e.mul(i, SPREAD))
        inputs = [e.add(base, e.mul(i, terms * X_RECORD)) for base in xs]
        result = dict(zip(places, acc, strict=True))
        splat = lambda row, at, kind=I32: e.splat(e.load(e.add(inputs[row], at), kind, 4))  # noqa: E731
        vectors = lambda at: [e.load(e.add(to, at + 64 * group), BYTES, 64) for group in range(GROUPS)]  # noqa: E731
        for line in range(0, fetched(layout), 64):
            e.prefetch(e.add(e.add(ahead, e.mul(i, ahead_stride)), line))
        record = None if records is None else e.add(records, e.mul(i, layout.record))
        added = [Sum(e.zero(VI)) for _ in range(GROUPS)]  # what the outputs' own products add to a sum

        def put(value: Any, at: int, group: int) -> None:
            e.store(value, e.add(to, at + 64 * group), 64)

        def taken_apart(step: int) -> tuple[list[Any], list[Any]]:
            """The integers of two steps, `step` and HALF later, of each group's outputs."""
            at = (INTEGERS + 4 * PANEL * step, INTEGERS + 4 * PANEL * (step + HALF))
            if record is None:
                return vectors(at[0]), vectors(at[1])
            found: tuple[list[Any], list[Any]] = ([], [])
            for group in range(GROUPS):
                raw = e.load(e.add(record, layout.head + 4 * PANEL * step + 64 * group), BYTES, 64)
                low, high = halves(e, raw)
                if step:
                    low, high = b.sub(low, eight), b.sub(high, eight)
                    biased = way.prepare(e, b.xor(high, like(BYTES, 0x80)), 8)
                    way.step(e, added[group], biased, b.bitcast(low, VI), 8)
                for values, value, place in zip(found, (low, high), at, strict=True):
                    values.append(value)
                    put(value, place, group)
            return found

        def scales(group: int) -> list[Any]:
            if layout.units and terms > 1:
                return scales_of(e, layout, e.add(to, SCALES), group)
            return [e.load(e.add(to, SCALES + 64 * group), VI if layout.units else VF, 64)]

        if record is not None:
            for group in range(GROUPS):
                if layout.units:
                    put(e.load(e.add(record, 64 * group), VI, 64), SCALES, group)
                else:
                    put(e.load_as_float(e.add(record, 32 * group), layout.scale_type), SCALES, group)
        starts = [] if record is not None else [b.bitcast(start, VI) for start in vectors(0)]
        sums = {}
        for row, term in product(range(rows), all_terms):
            start = splat(row, X_PAIRED_START + X_RECORD * term)
            for group in range(GROUPS):
                sums[row, group, term] = Sum(b.add(starts[group], start) if starts else start)
        for step in range(HALF):
            first, second = taken_apart(step)
            own = []
            if record is not None and step == HALF - 1:
                own = [b.sub(e.zero(VI), way.value(e, added[group])) for group in range(GROUPS)]
                for group in range(GROUPS):
                    put(own[group], 0, group)
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
                        if own:
                            totals = [b.add(total, own[group]) for total in totals]
                        at, before = partial(splat, row), result[row, group]
                        result[row, group] = scaled(e, way, layout, totals, scales(group), at, before, blend=True)
        return list(result.values())

    addresses = [e.add(e.add(out, e.mul(out_stride, row)), 64 * group) for row, group in places]
    for address in addresses:  # what is written at the end must not be waited for then
        e.prefetch(address, near=True)
    run_blocks(e, layout, count, block, addresses, fresh, units)


def _pair_tile(layout: Layout, way: Way, rows: int, terms: int, first: bool = False) -> Any:
    """Intrinsic (records, spread, count, x, x stride, out, out stride, fresh, units, ahead, ahead stride). first: it
    takes the records apart."""

    @primitive(11)
    def kernel(
        e: Emitter, records: Any, spread: Any, count: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, fresh: Any,
        units: Any, ahead: Any, ahead_stride: Any,
    ) -> None:  # fmt: skip
        begin, source = e.b.trunc(fresh, I1), records if first else None
        emit_pair_tile(
            e, way, layout, rows, terms, spread, count, x, x_stride, out, out_stride, begin, units, ahead,
            ahead_stride, source,
        )  # fmt: skip

    return kernel


def pairs_of(layout_name: str) -> bool:
    """Whether weights of a layout can be paired."""
    layout = LAYOUTS[layout_name]
    return layout.nibbles and layout.offset == 8


def pair_tiles(layout_name: str, terms: int, others: Any) -> Any:
    """`quant_matmul.row_tiles` of 4 rows and more; what is left is left to `others`."""
    layout, way = LAYOUTS[layout_name], WAYS[target().dot]
    height, first_height = HEIGHTS[terms]
    first = _pair_tile(layout, way, first_height, terms, True)
    tall, four = (_pair_tile(layout, way, rows, terms) for rows in (height, 4))
    size, fetches = layout.record, fetched(layout)

    @njit(types.void(*[types.int64] * 11), **OPTIONS)
    def run(records, count, x, x_stride, out, out_stride, rows, fresh, ahead, last, room):  # type: ignore[no-untyped-def]
        units = records + count * size
        stride = fetches
        first(records, room, count, x, x_stride, out, out_stride, fresh, units, ahead, stride)
        m = first_height
        ahead += count * stride
        while rows - m >= 4:
            xa = x + m * x_stride
            oa = out + m * out_stride
            if ahead >= last:
                stride = 0
            if rows - m >= height and rows - m != 8:
                tall(records, room, count, xa, x_stride, oa, out_stride, fresh, units, ahead, stride)
                m += height
            else:
                four(records, room, count, xa, x_stride, oa, out_stride, fresh, units, ahead, stride)
                m += 4
            ahead += count * stride
        if m < rows:
            xa = x + m * x_stride
            oa = out + m * out_stride
            others(records, count, xa, x_stride, oa, out_stride, rows - m, fresh, ahead, last, room)

    return run
