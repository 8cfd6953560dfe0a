"""Matrix product with quantised weights: one fixed order of sums (quant_tile.py) for any number of rows.

Bytes and operations: for M rows, 2*M*N*K integer operations; the weights are read once per 120 rows. Up to 6 rows are
bound by memory: their roof is packed bytes / read bandwidth, and the processor's own prefetching is the best there is
(fetching by software, at any distance, was up to a third slower on Zen 4). From about 16 rows on the roof is the
integer dot product: 128 operations a cycle and 512-bit vpdpbusd; a piece of a panel then serves all rows from L1 while
the next one is fetched. Measured figures: `cupaged bench matmul`.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu.emit import I1, Emitter, load64, load_float, primitive, store_float
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.cpu.processor import target
from cupaged.kernels.cpu.quant_dot import WAYS
from cupaged.kernels.cpu.quant_layout import BLOCK, LAYOUTS, MB, PANEL, SCRATCH, X_RECORD
from cupaged.kernels.cpu.quant_tile import FETCH, emit_tile

FEW = 6  # rows that are served in one pass over a panel


def tile(layout_name: str, rows: int) -> Any:
    """Intrinsic (records, count, x, x stride, out, out stride, fresh, ahead, stride): see `quant_tile.emit_tile`."""
    layout, way = LAYOUTS[layout_name], WAYS[target().dot]

    @primitive(9)
    def kernel(
        e: Emitter, records: Any, count: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, fresh: Any, ahead: Any,
        ahead_stride: Any,
    ) -> None:  # fmt: skip
        begin = e.b.trunc(fresh, I1)
        emit_tile(e, way, layout, rows, records, count, x, x_stride, out, out_stride, begin, ahead, ahead_stride)

    return kernel


def row_tiles(layout_name: str) -> Any:
    """A function that runs tiles over any number of rows; which tile heights are used does not change a bit.

    What lies from `ahead` to `last` is fetched meanwhile.
    """
    one, two = tile(layout_name, 1), tile(layout_name, 2)
    arguments = types.void(*[types.int64] * 10)
    if target().wide:
        four, six = tile(layout_name, 4), tile(layout_name, 6)

        @njit(arguments, **OPTIONS)
        def run(records, count, x, x_stride, out, out_stride, rows, fresh, ahead, last):  # type: ignore[no-untyped-def]
            m = 0
            while m < rows:
                left = rows - m
                xa = x + m * x_stride
                oa = out + m * out_stride
                fetch = FETCH if ahead < last else 0
                if left >= 6 and left != 8:
                    six(records, count, xa, x_stride, oa, out_stride, fresh, ahead, fetch)
                    m += 6
                elif left >= 4:
                    four(records, count, xa, x_stride, oa, out_stride, fresh, ahead, fetch)
                    m += 4
                elif left >= 2:
                    two(records, count, xa, x_stride, oa, out_stride, fresh, ahead, fetch)
                    m += 2
                else:
                    one(records, count, xa, x_stride, oa, out_stride, fresh, ahead, fetch)
                    m += 1
                ahead += count * fetch

        return run

    @njit(arguments, **OPTIONS)
    def run_narrow(records, count, x, x_stride, out, out_stride, rows, fresh, ahead, last):  # type: ignore[no-untyped-def]
        m = 0
        while m < rows:
            xa = x + m * x_stride
            oa = out + m * out_stride
            fetch = FETCH if ahead < last else 0
            if rows - m >= 2:
                two(records, count, xa, x_stride, oa, out_stride, fresh, ahead, fetch)
                m += 2
            else:
                one(records, count, xa, x_stride, oa, out_stride, fresh, ahead, fetch)
                m += 1
            ahead += count * fetch

    return run_narrow


def quant_matmul(layout_name: str) -> Any:
    """The operation: a chunk is a group of rows by a group of panels.

    Record: weights, input records, out, M, N, K, x stride, out stride (bytes), panels of a large chunk, rows a chunk,
    scratch (SCRATCH bytes a thread), bias address (0: none), large chunks, panels of a small chunk (`chunks_of`).
    """
    tiles = row_tiles(layout_name)
    size, longest = LAYOUTS[layout_name].record, LAYOUTS[layout_name].piece

    @njit(KERNEL, **OPTIONS)
    def quant_matmul_kernel(op, chunk, thread):  # type: ignore[no-untyped-def]
        weights, x, out = load64(op + 16), load64(op + 24), load64(op + 32)
        m_total, n_total, blocks = load64(op + 40), load64(op + 48), load64(op + 56) // BLOCK
        x_stride, out_stride = load64(op + 64), load64(op + 72)
        large_size, rows_a_chunk = load64(op + 80), load64(op + 88)
        scratch, bias = load64(op + 96) + thread * SCRATCH, load64(op + 104)
        large, small_size = load64(op + 112), load64(op + 120)
        panels = (n_total + PANEL - 1) // PANEL
        groups = large + (panels - large * large_size + small_size - 1) // small_size
        part = chunk % groups
        first_panel = part * large_size
        last_panel = first_panel + large_size
        if part >= large:
            first_panel = large * large_size + (part - large) * small_size
            last_panel = min(panels, first_panel + small_size)
        first_row = (chunk // groups) * rows_a_chunk
        last_row = min(m_total, first_row + rows_a_chunk)
        for row in range(first_row, last_row, MB):
            rows = min(MB, last_row - row)
            inputs = x + row * x_stride
            pieces = 1 if rows <= FEW else (blocks + longest - 1) // longest
            step = max(1, (blocks + pieces - 1) // pieces)
            for p in range(first_panel, last_panel):
                columns = min(PANEL, n_total - p * PANEL)
                target = out + row * out_stride + p * PANEL * 4
                stride = out_stride
                direct = columns == PANEL
                if not direct:
                    target = scratch
                    stride = PANEL * 4
                panel = weights + p * blocks * size
                for k in range(0, blocks, step):
                    count = min(step, blocks - k)
                    records = panel + k * size
                    ahead = records + count * size
                    # few rows: what follows is fetched by the processor itself
                    last = ahead if rows <= FEW else ahead + count * size
                    tiles(
                        records, count, inputs + k * X_RECORD, x_stride, target, stride, rows, 1 if k == 0 else 0,
                        ahead, last,
                    )  # fmt: skip
                if not direct or bias != 0:
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
