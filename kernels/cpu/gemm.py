"""Matrix product with one fixed order of additions: a row has the same bits for any number of rows.

    out[m, n] = sum over pieces of KC inputs, in order, of (a chain of fused multiply-adds over the piece from zero)

The chain never depends on how many rows share a tile (1, 2, 4 or 6), which panel or thread it is on, or how the weight
is stored, as long as it is worth the same float32. Short pieces also keep the rounding error below that of one long
chain.

Weights are packed at load into panels of 64 outputs, [ceil(N/64)][K][64], zero-padded, as float32, float16 or bfloat16;
16-bit ones are widened by each tile, which for 512 rows is as fast as from float32. Blocks of a quantised file may be
kept as they are: exact_matmul.py.

Bytes and operations: for M rows, 2*M*N*K operations; the weights (N*K elements) are read once per 240 rows. One row is
bound by memory: its roof is weight bytes / read bandwidth. From about 16 rows on the roof is fused multiply-adds:
32 float32 operations a cycle and 512-bit unit. Measured figures: `cupaged bench matmul`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import njit, types

from cupaged.kernels.cpu.emit import (
    LOAD,
    SIZE,
    STORE,
    WIDE,
    Emitter,
    as_float,
    load32,
    load64,
    load_float,
    primitive,
    store_float,
)

PANEL = 64  # outputs in a panel: 4 vectors
KC = 128  # inputs in a piece: KC x 64 float32 weights are 32 KiB, one L1 cache
MB = 240  # rows that a piece of a panel serves before the next is taken
UNROLL = 8
WIDENED = KC * PANEL * 4  # bytes of a piece of a panel as float32: room for weights that are widened (exact_matmul.py)
SCRATCH = WIDENED + MB * PANEL * 4  # bytes a thread needs, outputs of the last, partly filled panel with them

KERNEL = types.void(types.int64, types.int64, types.int64)  # (operation record, chunk, thread)
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def tile(rows: int, kind: str) -> Any:
    """Tile kernel: out[rows, 64] += x[rows, k] @ panel[k, 64]. Strides in bytes; out float32."""
    size = SIZE[kind]
    step = PANEL * size

    @primitive(6)
    def kernel(e: Emitter, panel: Any, k: Any, x: Any, x_stride: Any, out: Any, out_stride: Any) -> None:
        b = e.b
        xs = [e.add(x, e.mul(x_stride, r)) for r in range(rows)]
        outs = [e.add(out, e.mul(out_stride, r)) for r in range(rows)]

        def one(w: Any, offset: Any, acc: list[Any]) -> list[Any]:
            weights = [e.load_as_float(e.add(w, 16 * size * g), kind) for g in range(4)]
            new = []
            for r in range(rows):
                value = e.splat(e.load_as_float(e.add(xs[r], offset), "float32", None))
                new += [e.fma(weights[g], value, acc[4 * r + g]) for g in range(4)]
            return new

        def unrolled(i: Any, acc: list[Any]) -> list[Any]:
            w, offset = e.add(panel, e.mul(i, UNROLL * step)), e.mul(i, 4 * UNROLL)
            for j in range(UNROLL):
                acc = one(e.add(w, j * step), e.add(offset, 4 * j), acc)
            return acc

        whole = b.ashr(k, e.const(3))
        acc = e.loop(whole, [e.zero()] * (4 * rows), unrolled)
        done = e.mul(whole, UNROLL)

        def single(i: Any, acc: list[Any]) -> list[Any]:
            at = e.add(done, i)
            return one(e.add(panel, e.mul(at, step)), e.mul(at, 4), acc)

        acc = e.loop(b.sub(k, done), acc, single)
        for j, a in enumerate(acc):
            address = e.add(outs[j // 4], 64 * (j % 4))
            e.store(b.fadd(e.load_as_float(address, "float32"), a), address, 4)

    return kernel


@primitive(3)
def zero_tile(e: Emitter, out: Any, rows: Any, stride: Any) -> None:
    """out[rows, 64] = 0; stride in bytes."""

    def row(i: Any, _: list[Any]) -> list[Any]:
        address = e.add(out, e.mul(i, stride))
        for g in range(4):
            e.store(e.zero(), e.add(address, 64 * g), 4)
        return []

    e.loop(rows, [], row)


@cache
def row_tiles(kind: str) -> Any:
    """A function that runs tiles over any number of rows; which tile heights are used does not change a bit."""
    one, two = tile(1, kind), tile(2, kind)
    if WIDE:
        four, six = tile(4, kind), tile(6, kind)

        @njit(types.void(*[types.int64] * 7), **OPTIONS)
        def run(panel, k, x, x_stride, out, out_stride, rows):  # type: ignore[no-untyped-def]
            m = 0
            while m < rows:
                left = rows - m
                xa = x + m * x_stride
                oa = out + m * out_stride
                if left >= 6:
                    six(panel, k, xa, x_stride, oa, out_stride)
                    m += 6
                elif left >= 4:
                    four(panel, k, xa, x_stride, oa, out_stride)
                    m += 4
                elif left >= 2:
                    two(panel, k, xa, x_stride, oa, out_stride)
                    m += 2
                else:
                    one(panel, k, xa, x_stride, oa, out_stride)
                    m += 1

        return run

    @njit(types.void(*[types.int64] * 7), **OPTIONS)
    def run_narrow(panel, k, x, x_stride, out, out_stride, rows):  # type: ignore[no-untyped-def]
        m = 0
        while m < rows:
            if rows - m >= 2:
                two(panel, k, x + m * x_stride, x_stride, out + m * out_stride, out_stride)
                m += 2
            else:
                one(panel, k, x + m * x_stride, x_stride, out + m * out_stride, out_stride)
                m += 1

    return run_narrow


PANELS = types.void(*[types.int64] * 10)  # see `product`


def matmul(kind: str) -> Any:
    """The operation on panels of a storage type, see `product`."""
    tiles, size = row_tiles(kind), SIZE[kind]

    @njit(PANELS, **OPTIONS)
    def run(weights, k_total, p, _width, x, x_stride, out, out_stride, rows, _scratch):  # type: ignore[no-untyped-def]
        for k in range(0, k_total, KC):
            panel = weights + (p * k_total + k) * PANEL * size
            tiles(panel, min(KC, k_total - k), x + 4 * k, x_stride, out, out_stride, rows)

    return product(run, PANEL)


def product(run: Any, unit: int) -> Any:
    """The operation. A chunk is a group of rows by a group of units, which are panels of `unit` outputs: 64 or 32.

    Record: weights, x, out, M, N, K, x stride, out stride (bytes), units of a large chunk, rows a chunk, scratch
    (SCRATCH bytes a thread), bias address (0: none), large chunks, units of a small chunk (`operations.chunks_of`).

    run(weights, K, first unit, units, x, x stride, out, out stride, rows, scratch): out[rows, 64] += x[rows, K]
    by the weights of 64 outputs (of half as many, where there is only one unit of 32: what is added to the others is of
    no account).
    """
    span = PANEL // unit

    @njit(KERNEL, **OPTIONS)
    def matmul_kernel(op, chunk, thread):  # type: ignore[no-untyped-def]
        weights, x, out = load64(op + 16), load64(op + 24), load64(op + 32)
        m_total, n_total, k_total = load64(op + 40), load64(op + 48), load64(op + 56)
        x_stride, out_stride = load64(op + 64), load64(op + 72)
        large_size, rows_a_chunk = load64(op + 80), load64(op + 88)
        widened, bias = load64(op + 96) + thread * SCRATCH, load64(op + 104)
        large, small_size = load64(op + 112), load64(op + 120)
        scratch = widened + WIDENED
        units = (n_total + unit - 1) // unit
        groups = large + (units - large * large_size + small_size - 1) // small_size
        part = chunk % groups
        first = part * large_size
        last = min(units, first + large_size)  # of panels of 32 there may be one less than goes in twos
        if part >= large:
            first = large * large_size + (part - large) * small_size
            last = min(units, first + small_size)
        first_row = (chunk // groups) * rows_a_chunk
        last_row = min(m_total, first_row + rows_a_chunk)
        for row in range(first_row, last_row, MB):
            rows = min(MB, last_row - row)
            for p in range(first, last, span):
                width = min(span, last - p)
                columns = min(width * unit, n_total - p * unit)
                target = out + row * out_stride + p * unit * 4
                stride = out_stride
                direct = columns == PANEL
                if not direct:
                    target = scratch
                    stride = PANEL * 4
                zero_tile(target, rows, stride)
                run(weights, k_total, p, width, x + row * x_stride, x_stride, target, stride, rows, widened)
                if not direct or bias != 0:
                    for r in range(rows):
                        a = target + r * stride
                        o = out + (row + r) * out_stride + p * unit * 4
                        if bias != 0:
                            for c in range(columns):
                                store_float(a + 4 * c, load_float(a + 4 * c) + load_float(bias + (p * unit + c) * 4))
                        if not direct:
                            for c in range(columns):
                                store_float(o + 4 * c, load_float(a + 4 * c))

    return matmul_kernel


def pack(kind: str) -> Any:
    """Pack `rows` <= 64 float32 rows of K (contiguous) into one panel. Record: source, panel, rows, K. One chunk."""
    store = STORE[kind]
    size = SIZE[kind]

    @njit(KERNEL, **OPTIONS)
    def pack_kernel(op, _chunk, _thread):  # type: ignore[no-untyped-def]
        source, panel, rows, k_total = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
        for k0 in range(0, k_total, 16):  # 16 columns of 64 rows: whole cache lines in, whole cache lines out
            k1 = min(k0 + 16, k_total)
            for r in range(rows):
                for k in range(k0, k1):
                    store(panel + (k * PANEL + r) * size, load_float(source + (r * k_total + k) * 4))
            for r in range(rows, PANEL):
                for k in range(k0, k1):
                    store(panel + (k * PANEL + r) * size, types.float32(0.0))

    return pack_kernel


def embed(kind: str) -> Any:
    """A row of a packed matrix as float32, scaled. Record: ids (int32), panels, out, K, scale bits. Chunk: a token."""
    load = LOAD[kind]
    size = SIZE[kind]

    @njit(KERNEL, **OPTIONS)
    def embed_kernel(op, chunk, _thread):  # type: ignore[no-untyped-def]
        ids, panels, out, k_total = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
        scale = as_float(load64(op + 48))
        n = load32(ids + 4 * chunk)
        row = panels + (n // PANEL) * k_total * PANEL * size + (n % PANEL) * size
        for k in range(k_total):
            store_float(out + (chunk * k_total + k) * 4, load(row + k * PANEL * size) * scale)

    return embed_kernel
