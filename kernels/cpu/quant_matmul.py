"""Matrix product with quantised weights: one fixed order of sums (quant_tile.py) for any number of rows.

Bytes and operations: for M rows, 2*M*N*K integer operations; the weights are read once per 120 rows. Up to 8 rows are
bound by memory: their roof is packed bytes / read bandwidth. One or two rows leave fetching to the processor (by
software, at any distance, was up to a third slower on Zen 4). Four to eight compute so long on a block that it no
longer sees far enough ahead: these fetch AHEAD blocks on (8 rows of 3072 x 576: 66 us without, 51 with). From about 16
rows on the roof is the integer dot product: 128 operations a cycle and 512-bit vpdpbusd, of which the last steps of a
block, on the same two ports, leave 8/10, and 8/11 where a float minimum is added (8/8 with 4-bit weights where
quant_pairs.py takes two products at a time); a piece of a panel then serves all rows from L1 while the next one is
fetched. Measured figures: `cupaged bench matmul`.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu.activation import activate_panels
from cupaged.kernels.cpu.emit import I1, Emitter, load64, load_float, primitive, store_float
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.cpu.processor import target
from cupaged.kernels.cpu.quant_dot import WAYS
from cupaged.kernels.cpu.quant_layout import BLOCK, LAYOUTS, MB, OUTPUTS, PANEL, SCRATCH, X_RECORD
from cupaged.kernels.cpu.quant_pairs import NOT_PAIRED, pair_tiles, pairs_of
from cupaged.kernels.cpu.quant_tile import EIGHT, emit_tile, fetched

FEW = 8  # rows that are served in one pass over a panel, or in two
AHEAD = 12  # blocks that a pass of four rows and more fetches ahead of itself


def low_tile(layout_name: str, rows: int, terms: int = 1) -> Any:
    """Intrinsic (records, count, x, x stride, out, out stride, fresh): see `quant_tile.emit_tile`."""
    layout, way = LAYOUTS[layout_name], WAYS[target().dot]

    @primitive(7)
    def kernel(
        e: Emitter, records: Any, count: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, fresh: Any
    ) -> None:  # fmt: skip
        emit_tile(e, way, layout, rows, terms, records, count, x, x_stride, out, out_stride, e.b.trunc(fresh, I1))

    return kernel


def tall_tile(layout_name: str, rows: int, terms: int = 1) -> Any:
    """The same of rows that fetch, with three more arguments: two addresses and how far they move with a block."""
    layout, way = LAYOUTS[layout_name], WAYS[target().dot]

    @primitive(10)
    def kernel(
        e: Emitter, records: Any, count: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, fresh: Any,
        first: Any, second: Any, stride: Any,
    ) -> None:  # fmt: skip
        begin, ahead = e.b.trunc(fresh, I1), (first, second)
        emit_tile(e, way, layout, rows, terms, records, count, x, x_stride, out, out_stride, begin, ahead, stride)

    return kernel


_TILES = types.void(*[types.int64] * 11)


def row_tiles(layout_name: str) -> Any:
    """A function that runs tiles over any number of rows; which tiles are used does not change a bit.

    Few rows fetch what follows `records`; many what lies from `ahead` to `last`, meanwhile. The last argument is for
    quant_pairs.py.
    """
    one, two = low_tile(layout_name, 1), low_tile(layout_name, 2)
    if not target().wide:
        fetching, step = tall_tile(layout_name, 2), fetched(LAYOUTS[layout_name])

        @njit(_TILES, **OPTIONS)
        def run_narrow(records, count, x, x_stride, out, out_stride, rows, fresh, ahead, last, _room):  # type: ignore[no-untyped-def]
            m = 0
            while m < rows:
                xa = x + m * x_stride
                oa = out + m * out_stride
                if rows > FEW and ahead < last and rows - m >= 2:
                    fetching(records, count, xa, x_stride, oa, out_stride, fresh, ahead, ahead, step)
                    ahead += count * step
                    m += 2
                elif rows - m >= 2:
                    two(records, count, xa, x_stride, oa, out_stride, fresh)
                    m += 2
                else:
                    one(records, count, xa, x_stride, oa, out_stride, fresh)
                    m += 1

        return run_narrow

    four, six, eight = (tall_tile(layout_name, rows) for rows in (4, 6, EIGHT))
    size, half = LAYOUTS[layout_name].record, fetched(LAYOUTS[layout_name])

    @njit(_TILES, **OPTIONS)
    def run(records, count, x, x_stride, out, out_stride, rows, fresh, ahead, last, _room):  # type: ignore[no-untyped-def]
        m = 0
        while m < rows:
            left = rows - m
            xa = x + m * x_stride
            oa = out + m * out_stride
            # Few rows: a whole record from AHEAD blocks on. Many: half a record of the next piece, by each tile until
            # all of it has been fetched.
            first = ahead
            second = ahead
            stride = half if ahead < last else 0
            if rows <= FEW:
                first = records + AHEAD * size
                second = first + half
                stride = size
            if left == EIGHT and rows == EIGHT:
                eight(records, count, xa, x_stride, oa, out_stride, fresh, first, second, stride)
                m += EIGHT
            elif left >= 6 and left != 8:
                six(records, count, xa, x_stride, oa, out_stride, fresh, first, second, stride)
                m += 6
            elif left >= 4:
                four(records, count, xa, x_stride, oa, out_stride, fresh, first, second, stride)
                m += 4
            elif left >= 2:
                two(records, count, xa, x_stride, oa, out_stride, fresh)
                m += 2
            else:
                one(records, count, xa, x_stride, oa, out_stride, fresh)
                m += 1
            ahead += count * stride

    return run


def precise_row_tiles(layout_name: str) -> Any:
    """`row_tiles` of precise products: two integer sums for each output, so tiles of half the rows."""
    one = low_tile(layout_name, 1, 2)
    if not target().wide:

        @njit(_TILES, **OPTIONS)
        def run_narrow(records, count, x, x_stride, out, out_stride, rows, fresh, _ahead, _last, _room):  # type: ignore[no-untyped-def]
            for m in range(rows):
                one(records, count, x + m * x_stride, x_stride, out + m * out_stride, out_stride, fresh)

        return run_narrow

    two, four = tall_tile(layout_name, 2, 2), tall_tile(layout_name, 4, 2)
    size, half = LAYOUTS[layout_name].record, fetched(LAYOUTS[layout_name])

    @njit(_TILES, **OPTIONS)
    def run(records, count, x, x_stride, out, out_stride, rows, fresh, ahead, last, _room):  # type: ignore[no-untyped-def]
        m = 0
        while m < rows:
            xa = x + m * x_stride
            oa = out + m * out_stride
            first = ahead
            second = ahead
            stride = half if ahead < last else 0
            if 2 * rows <= FEW:
                first = records + AHEAD * size
                second = first + half
                stride = size
            if rows - m >= 4:
                four(records, count, xa, x_stride, oa, out_stride, fresh, first, second, stride)
                m += 4
            elif rows - m >= 2:
                two(records, count, xa, x_stride, oa, out_stride, fresh, first, second, stride)
                m += 2
            else:
                one(records, count, xa, x_stride, oa, out_stride, fresh)
                m += 1
            ahead += count * stride

    return run


def quant_matmul(layout_name: str) -> Any:
    """The operation, see `_product`."""
    return _product(layout_name, row_tiles(layout_name), 1)


def quant_matmul_precise(layout_name: str) -> Any:
    """The same with inputs of 15 bits, whose records are two a block."""
    return _product(layout_name, precise_row_tiles(layout_name), 2)


def _product(layout_name: str, tiles: Any, terms: int) -> Any:
    """A chunk is a group of rows by a group of panels.

    Record: weights, input records, out, M, N, K, x stride, out stride (bytes), panels of a large chunk, rows a chunk,
    scratch (SCRATCH bytes a thread), bias address (0: none), large chunks, panels of a small chunk (`chunks_of`),
    gated, records made, records a row.

    gated: 0, or an activation's number and 1. There are twice the panels then, those of ups behind those of N gates; a
    panel of each is multiplied, activated and quantised while it lies in L1, to input records of N columns instead of
    `out`. (512 rows of 2 x 1536 outputs are 6 MB, which would go to memory and back: 0.3 ms a layer.)
    """
    layout = LAYOUTS[layout_name]
    size, longest, units, unit_bytes = layout.record, layout.piece, layout.units, layout.unit_bytes
    few, most, x_record = FEW // terms, MB // terms, terms * X_RECORD
    many_tiles, many = tiles, MB
    if target().paired and pairs_of(layout_name):
        many_tiles, many = pair_tiles(layout_name, terms, tiles), NOT_PAIRED

    @njit(KERNEL, **OPTIONS)
    def quant_matmul_kernel(op, chunk, thread):  # type: ignore[no-untyped-def]
        weights, x, out = load64(op + 16), load64(op + 24), load64(op + 32)
        m_total, n_total, blocks = load64(op + 40), load64(op + 48), load64(op + 56) // BLOCK
        x_stride, out_stride = load64(op + 64), load64(op + 72)
        large_size, rows_a_chunk = load64(op + 80), load64(op + 88)
        scratch, bias = load64(op + 96) + thread * SCRATCH, load64(op + 104)
        room = scratch + OUTPUTS
        large, small_size = load64(op + 112), load64(op + 120)
        gated, made, row_blocks = load64(op + 128), load64(op + 136), load64(op + 144)
        panels = (n_total + PANEL - 1) // PANEL
        most_pieces = (blocks + longest - 1) // longest
        panel_bytes = blocks * size + most_pieces * unit_bytes
        groups = large + (panels - large * large_size + small_size - 1) // small_size
        part = chunk % groups
        first_panel = part * large_size
        last_panel = first_panel + large_size
        if part >= large:
            first_panel = large * large_size + (part - large) * small_size
            last_panel = min(panels, first_panel + small_size)
        first_row = (chunk // groups) * rows_a_chunk
        last_row = min(m_total, first_row + rows_a_chunk)
        for row in range(first_row, last_row, most):
            rows = min(most, last_row - row)
            inputs = x + row * x_stride
            pieces = 1 if rows <= few and not units else most_pieces
            step = max(1, (blocks + pieces - 1) // pieces)
            for p in range(first_panel, last_panel):
                columns = min(PANEL, n_total - p * PANEL)
                target = out + row * out_stride + p * PANEL * 4
                stride = out_stride
                direct = columns == PANEL
                if not direct:
                    target = scratch
                    stride = PANEL * 4
                if gated != 0:
                    target = scratch
                    stride = 2 * PANEL * 4
                for half in range(1 if gated == 0 else 2):
                    records = weights + (p + half * panels) * panel_bytes
                    following = weights + (p + (panels if gated != 0 and half == 0 else 1)) * panel_bytes
                    for k in range(0, blocks, step):
                        count = min(step, blocks - k)
                        ahead = records + count * size + unit_bytes
                        if k + count == blocks:
                            ahead = following
                        last = ahead + count * size + unit_bytes
                        at, to, fresh = inputs + k * x_record, target + half * PANEL * 4, 1 if k == 0 else 0
                        if rows > many:
                            many_tiles(records, count, at, x_stride, to, stride, rows, fresh, ahead, last, room)
                        else:
                            tiles(records, count, at, x_stride, to, stride, rows, fresh, ahead, last, room)
                        records = ahead
                if gated != 0:
                    activate_panels(gated - 1, scratch, rows, made + (row * row_blocks + p) * X_RECORD, row_blocks)
                elif not direct or bias != 0:
                    for r in range(rows):
                        a = target + r * stride
                        o = out + (row + r) * out_stride + p * PANEL * 4
                        if bias != 0:
                            for c in range(columns):
                                store_float(a + 4 * c, load_float(a + 4 * c) + load_float(bias + (p * PANEL + c) * 4))
                        if not direct:
                            for c in range(columns):
                                store_float(o + 4 * c, load_float(a + 4 * c))

    return quant_matmul_kernel
