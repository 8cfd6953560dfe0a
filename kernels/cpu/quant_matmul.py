"""Matrix product with quantised weights: one fixed order of sums (quant_tile.py) for any number of rows.

Bytes and operations: for M rows, 2*M*N*K integer operations; the weights are read once per 120 rows. One row is bound
by memory: its roof is packed bytes / read bandwidth, and it reads them as they lie. More rows are multiplied with a
piece of a panel unpacked to scratch (20 KiB, in L1), the next piece being fetched meanwhile; from about 16 rows on the
roof is the integer dot product: 128 operations a cycle and 512-bit vpdpbusd. Measured figures: bench/quantised.py.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu.emit import I1, Emitter, load64, load_float, primitive, store_float
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.cpu.processor import target
from cupaged.kernels.cpu.quant_dot import WAYS
from cupaged.kernels.cpu.quant_layout import (
    BLOCK,
    KC,
    LAYOUTS,
    MB,
    PANEL,
    SCRATCH,
    UNPACKED_RECORD,
    X_RECORD,
)
from cupaged.kernels.cpu.quant_tile import emit_tile, emit_unpack

AHEAD = 4096  # bytes that a single row's weights are fetched in advance
FETCH = 256  # bytes of the next piece that a tile fetches with each block


def tile(layout_name: str, packed: bool, rows: int) -> Any:
    """Intrinsic (records, count, x, x stride, out, out stride, fresh, ahead): see `quant_tile.emit_tile`."""
    layout, way = LAYOUTS[layout_name], WAYS[target().dot]
    step = layout.record if packed else FETCH

    @primitive(8)
    def kernel(
        e: Emitter, records: Any, count: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, fresh: Any, ahead: Any
    ) -> None:
        begin = e.b.trunc(fresh, I1)
        emit_tile(e, way, layout, packed, rows, records, count, x, x_stride, out, out_stride, begin, ahead, step)

    return kernel


def unpack(layout_name: str) -> Any:
    """Intrinsic (packed records, count, target)."""

    @primitive(3)
    def kernel(e: Emitter, source: Any, count: Any, target: Any) -> None:
        emit_unpack(e, LAYOUTS[layout_name], source, count, target)

    return kernel


def row_tiles(layout_name: str) -> Any:
    """A function that runs tiles over any number of rows; which tile heights are used does not change a bit."""
    one, two = tile(layout_name, False, 1), tile(layout_name, False, 2)
    arguments = types.void(*[types.int64] * 9)
    if target().wide:
        four, six = tile(layout_name, False, 4), tile(layout_name, False, 6)

        @njit(arguments, **OPTIONS)
        def run(records, count, x, x_stride, out, out_stride, rows, fresh, ahead):  # type: ignore[no-untyped-def]
            m = 0
            while m < rows:
                left = rows - m
                xa = x + m * x_stride
                oa = out + m * out_stride
                if left >= 6:
                    six(records, count, xa, x_stride, oa, out_stride, fresh, ahead)
                    m += 6
                elif left >= 4:
                    four(records, count, xa, x_stride, oa, out_stride, fresh, ahead)
                    m += 4
                elif left >= 2:
                    two(records, count, xa, x_stride, oa, out_stride, fresh, ahead)
                    m += 2
                else:
                    one(records, count, xa, x_stride, oa, out_stride, fresh, ahead)
                    m += 1
                ahead += count * FETCH

        return run

    @njit(arguments, **OPTIONS)
    def run_narrow(records, count, x, x_stride, out, out_stride, rows, fresh, ahead):  # type: ignore[no-untyped-def]
        m = 0
        while m < rows:
            xa = x + m * x_stride
            oa = out + m * out_stride
            if rows - m >= 2:
                two(records, count, xa, x_stride, oa, out_stride, fresh, ahead)
                m += 2
            else:
                one(records, count, xa, x_stride, oa, out_stride, fresh, ahead)
                m += 1
            ahead += count * FETCH

    return run_narrow


def quant_matmul(layout_name: str) -> Any:
    """The operation: a chunk is a group of rows by a group of panels.

    Record: weights, input records, out, M, N, K, x stride, out stride (bytes), panels a chunk, rows a chunk, scratch
    (SCRATCH bytes a thread), bias address (0: none).
    """
    tiles, single, to_bytes = row_tiles(layout_name), tile(layout_name, True, 1), unpack(layout_name)
    size = LAYOUTS[layout_name].record

    @njit(KERNEL, **OPTIONS)
    def quant_matmul_kernel(op, chunk, thread):  # type: ignore[no-untyped-def]
        weights, x, out = load64(op + 16), load64(op + 24), load64(op + 32)
        m_total, n_total, blocks = load64(op + 40), load64(op + 48), load64(op + 56) // BLOCK
        x_stride, out_stride = load64(op + 64), load64(op + 72)
        panels_a_chunk, rows_a_chunk = load64(op + 80), load64(op + 88)
        scratch, bias = load64(op + 96) + thread * SCRATCH, load64(op + 104)
        spare = scratch + KC * UNPACKED_RECORD
        panels = (n_total + PANEL - 1) // PANEL
        groups = (panels + panels_a_chunk - 1) // panels_a_chunk
        first_panel = (chunk % groups) * panels_a_chunk
        last_panel = min(panels, first_panel + panels_a_chunk)
        first_row = (chunk // groups) * rows_a_chunk
        last_row = min(m_total, first_row + rows_a_chunk)
        for row in range(first_row, last_row, MB):
            rows = min(MB, last_row - row)
            inputs = x + row * x_stride
            for p in range(first_panel, last_panel):
                columns = min(PANEL, n_total - p * PANEL)
                target = out + row * out_stride + p * PANEL * 4
                stride = out_stride
                direct = columns == PANEL
                if not direct:
                    target = spare
                    stride = PANEL * 4
                panel = weights + p * blocks * size
                if rows == 1:
                    single(panel, blocks, inputs, x_stride, target, stride, 1, panel + AHEAD)
                else:
                    for k in range(0, blocks, KC):
                        count = min(KC, blocks - k)
                        to_bytes(panel + k * size, count, scratch)
                        tiles(
                            scratch, count, inputs + k * X_RECORD, x_stride, target, stride, rows,
                            1 if k == 0 else 0, panel + (k + count) * size,
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
