"""The inner loops of products with quantised weights, as LLVM IR: a few rows of input by a panel of 32 outputs.

For every block of 32 inputs, in order, one rounded step an output takes:

    out = fma(float(sum of q * x), scale * d, out)          twice, for either half, where scales serve 16 inputs
    out = fma(minimum, d * sum(x), out)                     of formats that have a minimum

The integer sum is exact, so this chain alone rounds, and it is the same for one row or six, from packed or unpacked
weights, in one piece or several: a matrix-vector product gives the bits of a matrix product.
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
    UNPACKED_BYTES,
    UNPACKED_RECORD,
    UNPACKED_SECOND,
    X_RECORD,
    X_SCALE,
    X_SUM,
    Layout,
)

GROUPS = PANEL // 16
STEPS = BLOCK // 4


def halves(e: Emitter, raw: Any) -> tuple[Any, Any]:
    """The low and the high half of 64 bytes, each as bytes."""
    b = e.b
    low = like(BYTES, 15)
    high = b.bitcast(b.lshr(b.bitcast(raw, PAIRS), like(PAIRS, 4)), BYTES)
    return b.and_(raw, low), b.and_(high, low)


def _weights(e: Emitter, layout: Layout, packed: bool, record: Any) -> Iterator[tuple[int, list[Any]]]:
    """(step, the integers of all 32 outputs in vectors of 64 bytes), steps in any order, loaded when asked for."""
    head = layout.head if packed else UNPACKED_BYTES

    def at(step: int) -> list[Any]:
        return [e.load(e.add(record, head + 4 * PANEL * step + 64 * group), BYTES, 64) for group in range(GROUPS)]

    if not (packed and layout.nibbles):
        for step in range(STEPS):
            yield step, at(step)
        return
    for step in range(STEPS // 2):
        low, high = zip(*(halves(e, raw) for raw in at(step)), strict=True)
        yield step, list(low)
        yield step + STEPS // 2, list(high)


def _scales(e: Emitter, layout: Layout, packed: bool, record: Any, group: int) -> list[Any]:
    """The scale of 16 outputs, and then the minimum or the second scale of a layout that has one."""
    if packed:
        size, kind, second = layout.scale_bytes, layout.scale_type, PANEL * layout.scale_bytes
    else:
        size, kind, second = 4, "float32", UNPACKED_SECOND
    places = [0, second] if layout.minimum or layout.scales == 2 else [0]
    return [e.load_as_float(e.add(record, place + 16 * size * group), kind) for place in places]


def emit_tile(
    e: Emitter, way: Way, layout: Layout, packed: bool, rows: int, records: Any, count: Any, x: Any, x_stride: Any,
    out: Any, out_stride: Any, fresh: Any, ahead: Any, ahead_step: int,
) -> None:  # fmt: skip
    """out[rows, 32] = x[rows, count blocks] . records, added to what `out` holds unless `fresh` (i1).

    records: `count` records of a panel, as packed or unpacked. x: input records. Strides in bytes; out float32.
    ahead: `ahead_step` bytes from here, and from there on a block, are fetched into the cache.
    """
    b = e.b
    pairs = [(row, group) for row in range(rows) for group in range(GROUPS)]
    xs = [e.add(x, e.mul(x_stride, row)) for row in range(rows)]
    outs = [e.add(out, e.mul(out_stride, row)) for row in range(rows)]
    size = layout.record if packed else UNPACKED_RECORD

    def block(i: Any, acc: list[Any]) -> list[Any]:
        record = e.add(records, e.mul(i, size))
        inputs = [e.add(base, e.mul(i, X_RECORD)) for base in xs]
        fetched = e.add(ahead, e.mul(i, ahead_step))
        for line in range(0, ahead_step, 64):
            e.prefetch(e.add(fetched, line))
        weights = _weights(e, layout, packed, record)
        scales = [_scales(e, layout, packed, record, group) for group in range(GROUPS)]
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


def emit_unpack(e: Emitter, layout: Layout, source: Any, count: Any, target: Any) -> None:
    """`count` packed records -> unpacked ones."""

    def block(i: Any, _: list[Any]) -> list[Any]:
        record, out = e.add(source, e.mul(i, layout.record)), e.add(target, e.mul(i, UNPACKED_RECORD))
        for group in range(GROUPS):
            for place, scale in enumerate(_scales(e, layout, True, record, group)):
                e.store(scale, e.add(out, UNPACKED_SECOND * place + 64 * group), 64)
        for step, vectors in _weights(e, layout, True, record):
            for group, vector in enumerate(vectors):
                e.store(vector, e.add(out, UNPACKED_BYTES + 4 * PANEL * step + 64 * group), 64)
        return []

    e.loop(count, [], block)
