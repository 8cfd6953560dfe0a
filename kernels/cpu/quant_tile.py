"""The inner loops of products with quantised weights, as LLVM IR: a few rows of input by a panel of 32 outputs.

For every block of 32 inputs, in order, one rounded step an output takes:

    out = fma(float(sum of q * x), scale * d, out)          twice, for either half, where scales serve 16 inputs
    out = fma(minimum, d * sum(x), out)                     of formats that have a minimum

The integer sum is exact, so this chain alone rounds, and it is the same for one row or six, in one piece or several: a
matrix-vector product gives the bits of a matrix product.

Nibbles are taken apart anew for each tile: measured on 512 rows, that is as fast as from bytes unpacked once (the units
that do it are not those of the dot products), and for few rows it is up to twice as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from cupaged.kernels.cpu.emit import F32, I32, VF, VI, Emitter, like
from cupaged.kernels.cpu.quant_dot import BYTES, PAIRS, Sum, Way
from cupaged.kernels.cpu.quant_layout import (
    BLOCK,
    PANEL,
    X_RECORD,
    X_SCALE,
    X_SUM,
    Layout,
)

GROUPS = PANEL // 16
STEPS = BLOCK // 4
FETCH = 256


def halves(e: Emitter, raw: Any) -> tuple[Any, Any]:
    """The low and the high half of 64 bytes, each as bytes."""
    b = e.b
    low = like(BYTES, 15)
    high = b.bitcast(b.lshr(b.bitcast(raw, PAIRS), like(PAIRS, 4)), BYTES)
    return b.and_(raw, low), b.and_(high, low)


def _weights(e: Emitter, layout: Layout, record: Any) -> Iterator[tuple[int, list[Any]]]:
    """(step, the integers of all 32 outputs in vectors of 64 bytes), steps in any order, loaded when asked for."""

    def at(step: int) -> list[Any]:
        return [
            e.load(e.add(record, layout.head + 4 * PANEL * step + 64 * group), BYTES, 64) for group in range(GROUPS)
        ]

    if not layout.nibbles:
        for step in range(STEPS):
            yield step, at(step)
        return
    for step in range(STEPS // 2):
        low, high = zip(*(halves(e, raw) for raw in at(step)), strict=True)
        yield step, list(low)
        yield step + STEPS // 2, list(high)


def _scales(e: Emitter, layout: Layout, record: Any, group: int) -> list[Any]:
    """The scale of 16 outputs, and then the minimum or the second scale of a layout that has one."""
    size = layout.scale_bytes
    places = range(layout.scales + layout.minimum)
    return [e.load_as_float(e.add(record, (PANEL * place + 16 * group) * size), layout.scale_type) for place in places]


def emit_tile(
    e: Emitter, way: Way, layout: Layout, rows: int, records: Any, count: Any, x: Any, x_stride: Any,
    out: Any, out_stride: Any, fresh: Any, ahead: Any, ahead_stride: Any,
) -> None:  # fmt: skip
    """out[rows, 32] = x[rows, count blocks] . records, added to what `out` holds unless `fresh` (i1).

    records: `count` records of a panel. x: input records. Strides in bytes; out float32. ahead: with each block FETCH
    bytes from here are fetched into the cache, the next time `ahead_stride` bytes on.
    """
    b = e.b
    pairs = [(row, group) for row in range(rows) for group in range(GROUPS)]
    xs = [e.add(x, e.mul(x_stride, row)) for row in range(rows)]
    outs = [e.add(out, e.mul(out_stride, row)) for row in range(rows)]

    def block(i: Any, acc: list[Any]) -> list[Any]:
        record = e.add(records, e.mul(i, layout.record))
        inputs = [e.add(base, e.mul(i, X_RECORD)) for base in xs]
        fetched = e.add(ahead, e.mul(i, ahead_stride))
        for line in range(0, FETCH, 64):
            e.prefetch(e.add(fetched, line))
        weights = _weights(e, layout, record)
        scales = [_scales(e, layout, record, group) for group in range(GROUPS)]
        acc = list(acc)
        splat = lambda row, at, kind: e.splat(e.load(e.add(inputs[row], at), kind, 4))  # noqa: E731
        for part in range(layout.scales):
            begin = layout.start + 4 * part if layout.start and not (layout.bits == 8 and way.signed8) else 0
            sums = {(row, group): Sum(splat(row, begin, I32) if begin else e.zero(VI)) for row, group in pairs}
            for step, vectors in islice(weights, STEPS // layout.scales):
                prepared = [way.prepare(e, vector, layout.bits) for vector in vectors]
                for row in range(rows):
                    value = splat(row, 4 * step, I32)
                    for group in range(GROUPS):
                        way.step(e, sums[row, group], prepared[group], value, layout.bits)
            for index, (row, group) in enumerate(pairs):
                factor = b.fmul(scales[group][part if layout.scales == 2 else 0], splat(row, X_SCALE, F32))
                acc[index] = e.fma(b.sitofp(way.value(e, sums[row, group]), VF), factor, acc[index])
        if layout.minimum:
            for index, (row, group) in enumerate(pairs):
                acc[index] = e.fma(scales[group][1], splat(row, X_SUM, F32), acc[index])
        return acc

    addresses = [e.add(outs[row], 64 * group) for row, group in pairs]
    begin = [b.select(fresh, e.zero(), e.load_as_float(address, "float32")) for address in addresses]
    for address, value in zip(addresses, e.loop(count, begin, block), strict=True):
        e.store(value, address, 4)
