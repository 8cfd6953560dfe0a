"""Products in pairs (Winograd 1968), which only some processors use: everywhere here, against those step by step."""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from cupaged.kernels.cpu import processor
from cupaged.kernels.cpu.compile import target_machine
from cupaged.kernels.cpu.emit import I1, I64, Emitter
from cupaged.kernels.cpu.quant_dot import WAYS
from cupaged.kernels.cpu.quant_layout import (
    LAYOUTS,
    PANEL,
    SPREAD,
    X_BIASED,
    X_FINE,
    X_MINUS_8,
    X_PAIRED_START,
    X_RECORD,
    X_SCALE,
    X_SUM,
    X_TOP,
    X_UPPER_SUM,
)
from cupaged.kernels.cpu.quant_pairs import emit_pair_tile, pairs_of
from cupaged.kernels.cpu.quant_tile import emit_tile

BLOCKS = 5
PAIRED = [name for name in LAYOUTS if pairs_of(name)]
VNNI = {"avx512vnni", "avx512f", "avx512bw"}


@pytest.fixture(params=["vnni512", "plain"])
def way(request: Any) -> str:
    if request.param == "vnni512" and not processor.target().features >= VNNI:
        pytest.skip("no AVX512-VNNI")
    return str(request.param)


def built(way: str, layout_name: str, rows: int, terms: int, paired: bool, first: bool = False) -> tuple[Any, Any]:
    """(owner, function of records, x, out, room, fresh): one tile of BLOCKS blocks. first: it takes them apart itself,
    or else a tile of no rows has."""
    layout = LAYOUTS[layout_name]
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 5), "tile")
    e = Emitter(ir.IRBuilder(function.append_basic_block()))
    records, x, out, room, fresh = function.args
    begin = e.b.trunc(fresh, I1)
    count, stride, out_stride = e.const(BLOCKS), e.const(BLOCKS * terms * X_RECORD), e.const(4 * PANEL)
    if paired:
        units = e.add(records, BLOCKS * layout.record)
        for height, source in ((rows, records),) if first else ((0, records), (rows, None)):
            emit_pair_tile(
                e, WAYS[way], layout, height, terms, room, count, x, stride, out, out_stride, begin, units, room,
                e.const(0), source,
            )  # fmt: skip
    else:
        emit_tile(e, WAYS["plain"], layout, rows, terms, records, count, x, stride, out, out_stride, begin)
    e.b.ret_void()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), target_machine())
    engine.finalize_object()
    return engine, ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(engine.get_function_address("tile"))


def aligned(size: int) -> np.ndarray:
    raw = np.zeros(size + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size]


def records_of(layout_name: str, nibbles: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Records of nibbles [BLOCKS, 4, 32, 4] uint8 (two of them each) with random scales, and units behind them."""
    layout = LAYOUTS[layout_name]
    out = aligned(BLOCKS * layout.record + layout.unit_bytes)
    records = out[: BLOCKS * layout.record].reshape(BLOCKS, layout.record)
    if layout.units:
        scales = rng.integers(-32767, 32768, (BLOCKS, 2 * PANEL)).astype(np.int16)
        out[BLOCKS * layout.record :] = rng.random(PANEL, np.float32).view(np.uint8)
    else:
        scales = rng.standard_normal((BLOCKS, PANEL)).astype(np.float16)
    records[:, : layout.head] = scales.view(np.uint8)
    records[:, layout.head :] = nibbles.reshape(BLOCKS, -1)
    return out


def inputs_of(q: np.ndarray, fine: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
    """Input records of q [rows, BLOCKS, 32], and of what is finer, as quant_rows.py would write them."""
    terms = [q] if fine is None else [q, fine]
    out = aligned(q.shape[0] * BLOCKS * len(terms) * X_RECORD)
    records = out.reshape(q.shape[0], BLOCKS, len(terms), X_RECORD)
    scales = rng.random(q.shape[:2], np.float32)
    total = q.sum(axis=2)
    if fine is not None:
        total = (total << X_FINE) + fine.sum(axis=2)
    for term, part in enumerate(terms):
        first, second, record = part[..., :16], part[..., 16:], records[:, :, term]
        put = lambda at, value, kind: record[..., at : at + 4].__setitem__(  # noqa: E731, B023
            ..., np.ascontiguousarray(value.astype(kind))[..., None].view(np.uint8)
        )
        record[..., :32] = part.astype(np.int8).view(np.uint8)
        put(X_SCALE, scales, np.float32)
        put(X_SUM, scales * total.astype(np.float32), np.float32)
        put(X_MINUS_8, -8 * part.sum(axis=2), np.int32)
        put(X_UPPER_SUM, part.sum(axis=2) << 16, np.int32)
        alone = 8 * (first[..., :4] + second[..., :4]).sum(axis=2)
        put(X_PAIRED_START, -alone - ((first[..., 4:] + 128) * second[..., 4:]).sum(axis=2), np.int32)
        record[..., X_BIASED : X_BIASED + 16] = (first + 128).astype(np.uint8)
    return out


@pytest.mark.parametrize(("rows", "terms", "first"), [(6, 1, False), (4, 1, False), (4, 1, True), (4, 2, False)])
@pytest.mark.parametrize("layout", PAIRED)
def test_pairs_give_the_bits_of_steps(way: str, layout: str, rows: int, terms: int, first: bool) -> None:
    """Random operands, and the greatest that there can be, of either sign: sums of two must fit into bytes."""
    rng = np.random.default_rng(rows + terms)
    owner, paired = built(way, layout, rows, terms, True, first)
    other, stepwise = built("plain", layout, rows, terms, False)
    room = aligned(BLOCKS * SPREAD)
    for case in range(18):
        nibbles = rng.integers(0, 256, (BLOCKS, 4, PANEL, 4), dtype=np.uint8)
        q = rng.integers(-X_TOP, X_TOP + 1, (rows, BLOCKS, 32))
        fine = rng.integers(-64, 65, q.shape) if terms == 2 else None
        if case < 16:
            nibbles[:] = (0x00, 0xFF, 0x0F, 0xF0)[case % 4]
            q[..., :16] = (X_TOP, -X_TOP)[case >> 2 & 1]
            q[..., 16:] = (X_TOP, -X_TOP)[case >> 3]
            if fine is not None:
                fine[:] = np.sign(q) * 64
        records, x = records_of(layout, nibbles, rng), inputs_of(q, fine, rng)
        before = rng.standard_normal((rows, PANEL), np.float32)
        for fresh in (0, 1):
            outs = [aligned(4 * rows * PANEL).view(np.float32).reshape(rows, PANEL) for _ in range(2)]
            for run, out in zip((paired, stepwise), outs, strict=True):
                out[:] = before
                run(records.ctypes.data, x.ctypes.data, out.ctypes.data, room.ctypes.data, fresh)
            assert case < 16 or not np.array_equal(outs[0], before)  # of some extreme ones the sum is 0
            assert outs[0].tobytes() == outs[1].tobytes(), (case, fresh)
    del owner, other


def test_which_layouts_and_processors_pair() -> None:
    """4-bit weights that are q - 8; processors that add beside their dot products, as far as that is known."""
    assert PAIRED == ["nibble", "nibble_pair"]
    features = frozenset(VNNI)
    assert processor.Target("znver4", features, "").paired and processor.Target("znver5", features, "").paired
    assert not processor.Target("icelake-server", features, "").paired
    assert not processor.Target("znver4", features - {"avx512vnni"}, "").paired
