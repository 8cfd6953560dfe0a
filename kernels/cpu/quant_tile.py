"""The inner loops of products with quantised weights, as LLVM IR: a few rows of input by a panel of 32 outputs.

For every block of 32 inputs, in order, one rounded step an output takes:

    out = fma(float(sum of q * x), scale * d, out)          twice, for either half, where scales serve 16 inputs
    out = fma(minimum, d * sum(x), out)                     of formats that have a minimum

`nibble_pair` has one step less that multiplies; those share the ports of the dot products. f, the sum of (q - 8) * x,
is within 8 * 120 * 32 = 30720 and fits into 16 bits, as sum(x) does, so one vpmaddwd multiplies both, exactly: at most
32767 * (30720 + 3840) < 2^31. Over the blocks of a segment, from zero, and then once:

    part = fma(float(scale * f + minimum * sum(x)), d, part)            scale, minimum: int16
    out = fma(part, unit, out)

Precise products (quant_rows.py) take two integer sums a block, which are put together before they are rounded to a
float: 128 * sum of q * p + sum of q * r, below 2^27. Of `nibble_pair` they take the two steps with float(scale) and
float(minimum).

The integer sum is exact, so this chain alone rounds, and it is the same for one row or six, in one piece or several: a
matrix-vector product gives the bits of a matrix product.

Nibbles are taken apart anew for each tile: measured on 512 rows, that is as fast as from bytes unpacked once (the units
that do it are not those of the dot products), and for few rows it is up to twice as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from llvmlite import ir

from cupaged.kernels.cpu.emit import F32, I32, I64, VF, VI, Emitter, like
from cupaged.kernels.cpu.quant_dot import BYTES, PAIRS, Sum, Way
from cupaged.kernels.cpu.quant_layout import (
    BLOCK,
    PANEL,
    X_FINE,
    X_RECORD,
    X_SCALE,
    X_SUM,
    X_UPPER_SUM,
    Layout,
)

GROUPS = PANEL // 16
STEPS = BLOCK // 4
EIGHT = 8  # rows of the tile that takes 16 outputs at a time: 16 running results and 8 sums fit into 32 registers


def halves(e: Emitter, raw: Any) -> tuple[Any, Any]:
    """The low and the high half of 64 bytes, each as bytes."""
    b = e.b
    low = like(BYTES, 15)
    high = b.bitcast(b.lshr(b.bitcast(raw, PAIRS), like(PAIRS, 4)), BYTES)
    return b.and_(raw, low), b.and_(high, low)


def fetched(layout: Layout) -> int:
    """Bytes that a tile of four rows or more fetches with each block from either address: half a record."""
    return -(-layout.record // 128) * 64


def _weights(e: Emitter, layout: Layout, record: Any, groups: Sequence[int]) -> Iterator[tuple[int, list[Any]]]:
    """(step, the integers of each group's 16 outputs as 64 bytes), steps in any order, loaded when asked for."""

    def at(step: int) -> list[Any]:
        return [e.load(e.add(record, layout.head + 4 * PANEL * step + 64 * group), BYTES, 64) for group in groups]

    if not layout.nibbles:
        for step in range(STEPS):
            yield step, at(step)
        return
    for step in range(STEPS // 2):
        low, high = zip(*(halves(e, raw) for raw in at(step)), strict=True)
        yield step, list(low)
        yield step + STEPS // 2, list(high)


def scales_of(e: Emitter, layout: Layout, record: Any, group: int) -> list[Any]:
    """The scale of 16 outputs, and then the minimum or the second scale of a layout that has one."""
    size = layout.scale_bytes
    if layout.units:
        b, by = e.b, like(VI, 16)
        pairs = e.load(e.add(record, 64 * group), VI, 64)
        return [b.sitofp(b.ashr(b.shl(pairs, by), by), VF), b.sitofp(b.ashr(pairs, by), VF)]
    places = range(layout.scales + layout.minimum)
    return [e.load_as_float(e.add(record, (PANEL * place + 16 * group) * size), layout.scale_type) for place in places]


def scaled(
    e: Emitter, way: Way, layout: Layout, totals: Sequence[Any], scales: Sequence[Any],
    splat: Callable[[int, Any], Any], before: Any, blend: bool = False,
) -> Any:  # fmt: skip
    """before + a block of a row by 16 outputs. totals: its integer sums, one or two. scales: its scale, and its minimum
    if any; the pairs of both where `units` serve one sum. splat: 4 bytes of the row's input record, as a type."""
    b = e.b
    if layout.units and len(totals) == 1:
        both = way.pair_dot(e, totals[0], splat(X_UPPER_SUM, I32), scales[0], blend)
        return e.fma(b.sitofp(both, VF), splat(X_SCALE, F32), before)
    factor = b.fmul(scales[0], splat(X_SCALE, F32))
    total = totals[0]
    for less in totals[1:]:
        total = b.add(b.shl(total, like(VI, X_FINE)), less)
    after = e.fma(b.sitofp(total, VF), factor, before)
    return e.fma(scales[1], splat(X_SUM, F32), after) if layout.minimum else after


def _read_unless(e: Emitter, fresh: Any, addresses: Sequence[Any]) -> list[Any]:
    """The 16 floats at each address, or zeros; what is not needed is not read (a line may be far away)."""
    b = e.b
    before = b.block
    with b.if_then(b.not_(fresh)):
        read = [e.load_as_float(address, "float32") for address in addresses]
        reading = b.block
    values = []
    for value in read:
        phi = b.phi(VF)
        phi.add_incoming(e.zero(), before)
        phi.add_incoming(value, reading)
        values.append(phi)
    return values


def emit_tile(
    e: Emitter, way: Way, layout: Layout, rows: int, terms: int, records: Any, count: Any, x: Any, x_stride: Any,
    out: Any, out_stride: Any, fresh: Any, ahead: tuple[Any, Any] | None = None, ahead_stride: Any = None,
) -> None:  # fmt: skip
    """out[rows, 32] = x[rows, count blocks] . records, added to what `out` holds unless `fresh` (i1).

    records: `count` records of a panel. x: input records, `terms` a block: 2 if precise, else 1. Strides in bytes; out
    float32. ahead: with each block `fetched` bytes from either address are fetched into the cache, the next time
    `ahead_stride` bytes on.
    """
    b = e.b
    pairs = [(row, group) for row in range(rows) for group in range(GROUPS)]
    xs = [e.add(x, e.mul(x_stride, row)) for row in range(rows)]
    outs = [e.add(out, e.mul(out_stride, row)) for row in range(rows)]
    passes = [tuple(range(GROUPS))]
    if rows == EIGHT:
        passes = [(group,) for group in range(GROUPS)]
        # Eight addresses fit into registers; left to itself LLVM computes each input's from the one before.
        opaque = ir.InlineAsm(ir.FunctionType(I64, [I64]), "", "=r,0")
        xs = [b.call(opaque, [base]) for base in xs]

    def block(i: Any, acc: list[Any]) -> list[Any]:
        record = e.add(records, e.mul(i, layout.record))
        inputs = [e.add(base, e.mul(i, terms * X_RECORD)) for base in xs]
        for begin in ahead or ():
            for line in range(0, fetched(layout), 64):
                e.prefetch(e.add(e.add(begin, e.mul(i, ahead_stride)), line))
        result = dict(zip(pairs, acc, strict=True))
        for groups in passes:
            if len(passes) > 1:  # or LLVM does the passes side by side, with too many values for the registers
                b.fence("seq_cst", "singlethread")
            one_pass(record, inputs, groups, result)
            if len(passes) > 1 and layout.scales == 1 and not layout.units:
                # Or LLVM leaves sums and factors of this pass for the next, and stores 26 values in between.
                same = ir.FunctionType(VF, [VF])
                for row in range(rows):
                    result[row, groups[0]] = b.asm(same, "", "=v,0", [result[row, groups[0]]], side_effect=True)
        return list(result.values())

    def one_pass(record: Any, inputs: list[Any], groups: Sequence[int], result: dict[tuple[int, int], Any]) -> None:
        weights = _weights(e, layout, record, groups)
        paired = layout.units and terms == 1
        if paired:
            scales = {group: [e.load(e.add(record, 64 * group), VI, 64)] for group in groups}
            if rows < 4:  # nothing is fetched ahead: read memory in order, or one row is 5 % slower
                b.fence("seq_cst", "singlethread")
        else:
            scales = {group: scales_of(e, layout, record, group) for group in groups}
        chosen = [(row, group) for row in range(rows) for group in groups]
        splat = lambda row, at, kind: e.splat(e.load(e.add(inputs[row], at), kind, 4))  # noqa: E731

        for part in range(layout.scales):
            begin = layout.start + 4 * part if layout.start and not (layout.bits == 8 and way.signed8) else 0
            places = [(row, group, term) for row, group in chosen for term in range(terms)]
            sums = {
                (row, group, term): Sum(splat(row, begin + X_RECORD * term, I32) if begin else e.zero(VI))
                for row, group, term in places
            }
            held: list[tuple[int, list[Any]]] = []
            for left, (step, vectors) in zip(range(STEPS // layout.scales)[::-1], weights, strict=False):
                held.append((step, [way.prepare(e, vector, layout.bits) for vector in vectors]))
                if left == 1:  # the last two steps go row by row, so that what follows them does not come all at once
                    continue
                for row in range(rows):
                    for ready, term in product(held, range(terms)):
                        value = splat(row, 4 * ready[0] + X_RECORD * term, I32)
                        for group, integers in zip(groups, ready[1], strict=True):
                            way.step(e, sums[row, group, term], integers, value, layout.bits)
                    for group in groups if left == 0 else ():
                        totals = [way.value(e, sums[row, group, term]) for term in range(terms)]
                        both = scales[group][part if layout.scales == 2 else 0 :][:2]
                        result[row, group] = scaled(
                            e, way, layout, totals, both, partial(splat, row), result[row, group]
                        )
                held = []

    addresses = [e.add(outs[row], 64 * group) for row, group in pairs]
    if 4 <= rows < EIGHT:  # what is written at the end must not be waited for then (of eight rows it is near)
        for address in addresses:
            e.prefetch(address, near=True)
    run_blocks(e, layout, count, block, addresses, fresh, e.add(records, e.mul(count, layout.record)))
    for begin in (ahead or ())[:1]:
        for line in range(0, layout.unit_bytes, 64):
            e.prefetch(e.add(e.add(begin, e.mul(count, ahead_stride)), line))


def run_blocks(
    e: Emitter, layout: Layout, count: Any, block: Callable[[Any, list[Any]], list[Any]], addresses: Sequence[Any],
    fresh: Any, units: Any,
) -> None:  # fmt: skip
    """``state = block(i, state)`` for `count` blocks, its 16 floats at each address added to what these hold unless
    `fresh` (i1). The addresses go by groups of outputs, one by one; units: where those of the segment are."""
    b = e.b
    if not layout.units:
        begin = _read_unless(e, fresh, addresses)
        for address, value in zip(addresses, e.loop(count, begin, block), strict=True):
            e.store(value, address, 4)
        return
    ends = e.loop(count, [e.zero()] * len(addresses), block)
    factors = [e.load(e.add(units, 64 * group), VF, 64) for group in range(GROUPS)]
    with b.if_else(fresh) as branches:
        for branch, begins in zip(branches, (True, False), strict=True):
            with branch:
                for place, (address, value) in enumerate(zip(addresses, ends, strict=True)):
                    before = e.zero() if begins else e.load_as_float(address, "float32")
                    e.store(e.fma(value, factors[place % GROUPS], before), address, 4)
