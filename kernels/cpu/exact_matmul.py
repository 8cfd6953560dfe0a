"""Exact float32 products with weights kept as blocks of a quantised file: gemm.py's sums on the file's own values.

Two panels of 32 outputs make gemm.py's 64. For up to FEW rows weights are taken apart in registers and used at once.
For more, a piece of 128 inputs by 64 outputs is written as float32 into scratch (32 KiB, one L1 cache), on which
gemm.py's tiles run for up to 240 rows.

Bytes and operations: for M rows, 2*M*N*K float operations and the packed bytes (20 for 32 weights of Q4_1), read once
for up to 4 rows or for 240. One row: the roof is packed bytes / read bandwidth. Where that is fast, multiplications
come near: 16 weights with a minimum take two fused multiply-adds and 2.2 other instructions, 2.4 cycles on Zen 4 (two
are the multiply-adds'), which two cores stretch to three quarters of their memory's bandwidth from Q4_1, and to all of
it from Q8_0. The processor does not fetch far enough ahead of two streams, so two panels fetch the two that come next
(49152 x 576 from Q4_1 on two threads: 1140 us without, 840 with; 12 blocks ahead in each stream, 1240). Many rows:
fused multiply-adds, as in gemm.py.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu.emit import WIDE, Emitter, primitive
from cupaged.kernels.cpu.exact_layout import FEW
from cupaged.kernels.cpu.exact_tile import emit_tile, emit_widening
from cupaged.kernels.cpu.gemm import KC, OPTIONS, PANELS, product, row_tiles
from cupaged.kernels.cpu.quant_layout import BLOCK, LAYOUTS, PANEL

FAR = 8  # blocks that a tile fetches ahead where panels are long
NEAR = 256 << 10  # bytes of two panels that are fetched whole while two others are in use
_FEW_ROWS = types.void(*[types.int64] * 9)


def tile(layout_name: str, rows: int) -> Any:
    """Intrinsic (a panel, the next one, blocks, x, x stride, out, out stride, ahead): see `emit_tile`."""
    layout = LAYOUTS[layout_name]

    @primitive(8)
    def kernel(
        e: Emitter, one: Any, other: Any, blocks: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, ahead: Any
    ) -> None:  # fmt: skip
        emit_tile(e, layout, rows, (one, other), blocks, x, x_stride, out, out_stride, ahead)

    return kernel


def lone_tile(layout_name: str) -> Any:
    """Intrinsic (a panel, blocks, x, out): one row by one panel, which is slower by an eighth."""
    layout = LAYOUTS[layout_name]

    @primitive(4)
    def kernel(e: Emitter, one: Any, blocks: Any, x: Any, out: Any) -> None:
        emit_tile(e, layout, 1, (one,), blocks, x, e.const(0), out, e.const(0), e.const(FAR * layout.record))

    return kernel


def widening(layout_name: str) -> Any:
    """Intrinsic (a panel's records, another's, blocks, target, ahead): see `emit_widening`."""
    layout = LAYOUTS[layout_name]

    @primitive(5)
    def kernel(e: Emitter, one: Any, other: Any, blocks: Any, target: Any, ahead: Any) -> None:
        emit_widening(e, layout, (one, other), blocks, target, ahead)

    return kernel


def few_rows(layout_name: str) -> Any:
    """A function that runs tiles over up to FEW rows, of one panel (`other` 0) or two."""
    alone, one = lone_tile(layout_name), tile(layout_name, 1)
    if not WIDE:

        @njit(_FEW_ROWS, **OPTIONS)
        def run_narrow(panel, other, blocks, x, x_stride, out, out_stride, rows, ahead):  # type: ignore[no-untyped-def]
            for m in range(rows):
                if other == 0:
                    alone(panel, blocks, x + m * x_stride, out + m * out_stride)
                else:
                    one(panel, other, blocks, x + m * x_stride, x_stride, out + m * out_stride, out_stride, ahead)

        return run_narrow

    two, four = tile(layout_name, 2), tile(layout_name, 4)

    @njit(_FEW_ROWS, **OPTIONS)
    def run(panel, other, blocks, x, x_stride, out, out_stride, rows, ahead):  # type: ignore[no-untyped-def]
        m = 0
        while m < rows:
            xa = x + m * x_stride
            oa = out + m * out_stride
            if other == 0:
                alone(panel, blocks, xa, oa)
                m += 1
            elif rows - m >= 4:
                four(panel, other, blocks, xa, x_stride, oa, out_stride, ahead)
                m += 4
            elif rows - m >= 2:
                two(panel, other, blocks, xa, x_stride, oa, out_stride, ahead)
                m += 2
            else:
                one(panel, other, blocks, xa, x_stride, oa, out_stride, ahead)
                m += 1

    return run


def exact_matmul(layout_name: str) -> Any:
    """The operation, see `gemm.product`: units are panels of 32 outputs."""
    few, widen, tiles = few_rows(layout_name), widening(layout_name), row_tiles("float32")
    size, most = LAYOUTS[layout_name].record, FEW if WIDE else 1

    @njit(PANELS, **OPTIONS)
    def run(weights, k_total, p, width, x, x_stride, out, out_stride, rows, scratch):  # type: ignore[no-untyped-def]
        blocks = k_total // BLOCK
        panel = weights + p * blocks * size
        other = panel + blocks * size
        # The next two panels, if they stay in the L2 cache until then; else what is next in these.
        ahead = 2 * blocks * size
        if ahead > NEAR:
            ahead = FAR * size
        if rows <= most:
            few(panel, other if width == 2 else 0, blocks, x, x_stride, out, out_stride, rows, ahead)
            return
        if width == 1:
            other = panel  # what comes of it is not looked at
        for k in range(0, k_total, KC):
            count = min(KC, k_total - k)
            at = k // BLOCK * size
            widen(panel + at, other + at, count // BLOCK, scratch, ahead)
            tiles(scratch, count, x + 4 * k, x_stride, out, out_stride, rows)

    return product(run, PANEL)
