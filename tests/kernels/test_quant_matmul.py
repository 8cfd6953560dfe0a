"""Products with quantised weights: against float64, against the rounding chain bit by bit, and in odd circumstances."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import make_operations
from gguf.quants import quantize
from kernel_support import ArraySource, guarded
from quant_support import (
    KINDS,
    SCALES_AT,
    BlockSource,
    JoinedSource,
    as_kept,
    blocks_of,
    columns_for,
    product_by_the_chain,
    set_half,
)

from cupaged.device import get_device, make_device
from cupaged.errors import KernelError
from cupaged.kernels.interface import UNIT_FORMATS, packed_bytes
from cupaged.kernels.reference import quantised
from cupaged.model.quants import FORMATS


@pytest.fixture(scope="session", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Any:
    return make_operations(request.param)


@pytest.fixture(scope="session")
def cpu() -> Any:
    return make_operations("cpu")


def inputs(count: int, cols: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, cols), np.float32)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal, NaN to NaN."""
    return np.array_equal(one, other, equal_nan=True) and np.array_equal(np.signbit(one), np.signbit(other))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_is_that_of_the_dequantised_weights(ops: Any, kind: str, with_bias: bool) -> None:
    """Within the error of quantising the input, of which nothing is in common with the code under test."""
    cols = columns_for(kind, 18)
    source = blocks_of(kind, 75, cols)
    weight = ops.matrix(source, "quantised")
    assert (weight.rows, weight.cols, weight.dtype) == (75, cols, kind)
    x, bias = inputs(9, cols), inputs(1, 75, 5)[0] if with_bias else None
    with guarded(9, 75) as out:
        ops.matmul(x, weight, out, bias)
    wide = source.float32(0, 75).astype(np.float64)
    exact = x.astype(np.float64) @ wide.T + (0 if bias is None else bias)
    # rounding to 1/120 of a block's maximum errs by a uniform 1/sqrt(12) of that step; 6 sigma over all outputs
    steps = np.abs(x.reshape(9, -1, 32)).max(2).repeat(32, 1) / 120
    sigma = np.sqrt((steps.astype(np.float64) ** 2) @ (wide**2).T / 12)
    assert (np.abs(out - exact) <= 6 * sigma + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (31, 8), (32, 16), (33, 17), (100, 40)])
def test_cpu_rounds_as_the_chain_says(cpu: Any, kind: str, rows: int, blocks: int) -> None:
    cols = columns_for(kind, blocks)
    source = blocks_of(kind, rows, cols)
    weight, plain = cpu.matrix(source, "quantised"), quantised.matrix(source)
    x, bias = inputs(70, cols), inputs(1, rows, 5)[0]
    expected = product_by_the_chain(x, plain, bias)
    close = np.empty_like(expected)
    quantised.matmul(x, as_kept(plain), close, bias)
    np.testing.assert_allclose(close, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    for count in (*range(1, 14), 31, 70):
        with guarded(count, rows) as out:
            cpu.matmul(x[70 - count :], weight, out, bias)
        assert same_bits(out, expected[70 - count :]), count
    with guarded(70, rows) as out:
        cpu.matmul(x, weight, out)
    assert same_bits(out, product_by_the_chain(x, plain))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_their_number(ops: Any, kind: str) -> None:
    cols = columns_for(kind, 18)
    weight = ops.matrix(blocks_of(kind, 70, cols), "quantised")
    x = inputs(260, cols)
    whole = np.empty((260, 70), np.float32)
    ops.matmul(x, weight, whole)
    for start, stop in [(0, 1), (259, 260), (3, 5), (10, 13), (7, 11), (100, 106), (30, 100), (119, 241)]:
        with guarded(stop - start, 70) as out:
            ops.matmul(x[start:stop], weight, out)
        assert same_bits(out, whole[start:stop]), (start, stop)


def test_rows_may_be_strided(ops: Any) -> None:
    weight = ops.matrix(blocks_of("Q4_1", 40, 64), "quantised")
    wide, target = inputs(7, 64 + 10), np.full((7, 60), np.nan, np.float32)
    expected = np.empty((7, 40), np.float32)
    ops.matmul(wide[:, 5:69].copy(), weight, expected)
    ops.matmul(wide[:, 5:69], weight, target[:, 10:50])
    assert same_bits(target[:, 10:50], expected)
    assert np.isnan(np.delete(target, range(10, 50), 1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_stay_in_their_row(ops: Any, kind: str) -> None:
    cols = columns_for(kind, 9)
    weight = ops.matrix(blocks_of(kind, 40, cols), "quantised")
    x = inputs(9, cols)
    before, after = np.empty((9, 40), np.float32), np.empty((9, 40), np.float32)
    ops.matmul(x, weight, before)
    for row, bad in ((2, np.nan), (5, np.inf), (6, -np.inf), (8, -np.nan)):
        x[row, 33] = bad
    ops.matmul(x, weight, after)
    assert np.isnan(after[[2, 5, 6, 8]]).all()
    assert same_bits(after[[0, 1, 3, 4, 7]], before[[0, 1, 3, 4, 7]])


@pytest.mark.parametrize("kind", KINDS)
def test_zero_blocks_and_rows(ops: Any, kind: str) -> None:
    cols = columns_for(kind, 3)
    source = blocks_of(kind, 33, cols)
    source.raw[5] = 0  # zero scales; in Q4_0 and its kin the integers are then not zero
    weight = ops.matrix(source, "quantised")
    x = inputs(4, cols)
    x[1] = 0
    x[2, :32] = 0
    out = np.empty((4, 33), np.float32)
    ops.matmul(x, weight, out)
    assert (out[:, 5] == 0).all() and (out[1] == 0).all()
    wide = source.float32(0, 33).astype(np.float64)
    np.testing.assert_allclose(out[2], x[2] @ wide.T, atol=0.05 * np.abs(wide).max() * cols**0.5)


@pytest.mark.parametrize("scale", [65504.0, 6e-8, -1.0, 0.0, np.inf, np.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_scales_of_all_kinds(cpu: Any, kind: str, scale: float) -> None:
    """The largest and the smallest float16, and what a damaged file may hold: poison stays in its output."""
    cols = columns_for(kind, 3)
    source = blocks_of(kind, 35, cols)
    raw = source.raw.reshape(35, -1, FORMATS[kind].block_bytes)
    set_half(raw[4:6], SCALES_AT.get(kind, (0,))[0], scale)
    plain = quantised.matrix(source)
    x = inputs(7, cols)
    expected = product_by_the_chain(x, plain)
    for count in (1, 7):
        out = np.empty((count, 35), np.float32)
        cpu.matmul(x[:count], cpu.matrix(source, "quantised"), out)
        assert np.array_equal(out, expected[:count], equal_nan=True)
    assert np.isfinite(np.delete(expected, [4, 5], 1)).all()


def test_cpu_inputs_of_all_sizes(cpu: Any) -> None:
    """From denormal to nearly infinite, in neighbouring blocks of one row; the largest integers of every sign."""
    source = blocks_of("Q8_0", 40, 32 * 9)
    source.raw.reshape(40, 9, 34)[:, :, 2:] = np.resize([128, 127, 0, 129, 1], (40, 9, 32))  # -128, 127, 0, -127, 1
    x = inputs(6, 32 * 9)
    scales = [1e-45, 1e-38, 2.0**-101, 2.0**-99, 1e-20, 1.0, 1e20, 1e30, 3e37]
    x *= np.repeat(np.array(scales, np.float32), 32)
    x[1] = np.where(np.arange(288) % 2, 127, -127)
    x[2] = 127
    x[3, 200:] = 0
    x[4] = np.float32(1e-40)
    for kind in ("Q8_0", "Q4_1", "Q6_K", "Q5_K", "Q4_0"):
        used = source if kind == "Q8_0" else blocks_of(kind, 40, columns_for(kind, 9))
        rows = np.concatenate([x, x[:, : used.shape[1] - x.shape[1]]], axis=1)
        expected = product_by_the_chain(rows, quantised.matrix(used))
        for count in (1, 6):
            out = np.empty((count, 40), np.float32)
            cpu.matmul(rows[:count], cpu.matrix(used, "quantised"), out)
            assert np.array_equal(out, expected[:count], equal_nan=True), kind
        assert (expected[4] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 6.5])
def test_embedding_is_the_formats_own_dequantisation(ops: Any, cpu: Any, kind: str, scale: float) -> None:
    """Of what is kept in units: the multiples of those."""
    cols = columns_for(kind, 9)
    source = blocks_of(kind, 75, cols)
    table = ops.matrix(source, "quantised")
    ids = np.array([74, 0, 31, 32, 33, 7, 7], np.int32)
    with guarded(7, cols) as out:
        ops.embed(ids, table, out, scale)
    values = source.float32(0, 75)
    if ops is cpu and kind in UNIT_FORMATS:
        whole, units = quantised.in_units(quantised.matrix(source))
        own, values = values, whole.values() * np.repeat(units, 32, 1)
        assert 0 < np.abs(values - own).max() <= 4.5 * units.max()
    assert np.array_equal(out, values[ids] * np.float32(scale))


def rms(values: np.ndarray) -> float:
    return float(np.sqrt((values.astype(np.float64) ** 2).mean()))


@pytest.mark.parametrize("kind", UNIT_FORMATS)
def test_rounding_scales_is_far_below_what_inputs_lose(cpu: Any, kind: str) -> None:
    """Precise products, of which the input's error is a hundredth, beside plain ones."""
    cols = columns_for(kind, 40)
    source, x = blocks_of(kind, 96, cols), inputs(40, cols)
    exact = x.astype(np.float64) @ source.float32(0, 96).astype(np.float64).T
    plain, precise = np.empty((40, 96), np.float32), np.empty((40, 96), np.float32)
    weight = cpu.matrix(source, "quantised")
    cpu.matmul(x, weight, plain)
    cpu.matmul(x, weight, precise, precise=True)
    lost, rounded = rms(plain - exact) / rms(exact), rms(precise - exact) / rms(exact)
    print(f"{kind}: inputs {lost:.2e}, scales {rounded:.2e}")
    assert rounded < lost / 50


@pytest.mark.parametrize(("ratio", "limit"), [(30, 0.15), (300, 1.2), (1000, 3.5)])
def test_blocks_beside_one_of_far_larger_scale(cpu: Any, ratio: int, limit: float) -> None:
    """The worst case: inputs that are larger where scales are smaller, so that all blocks count the same. What rounding
    the scales adds, over what inputs lose; other segments of the row have a unit of their own."""
    cols = 32 * 48
    rng = np.random.default_rng(3)
    sizes = np.ones(48, np.float32)
    sizes[5] = ratio
    values = rng.standard_normal((64, cols), np.float32) * np.repeat(sizes, 32) * np.float32(1e-3)
    source = BlockSource("Q4_1", quantize(values, gguf.GGMLQuantizationType.Q4_1))
    x = inputs(40, cols) / np.repeat(sizes, 32)
    wide = source.float32(0, 64).astype(np.float64)
    weight, out = cpu.matrix(source, "quantised"), np.empty((40, 64), np.float32)
    cpu.matmul(x, weight, out)
    own = np.empty_like(out)
    quantised.matmul(x, quantised.matrix(source), own, None)
    lost, added = rms(own - x @ wide.T), rms(out - own)
    print(f"{ratio}: added {added / lost:.3f} of what inputs lose")
    assert 0 < added < limit * lost
    x[:, : 32 * 24] = 0  # the second segment alone
    cpu.matmul(x, weight, out)
    quantised.matmul(x, quantised.matrix(source), own, None)
    assert rms(out - own) < 0.01 * rms(own - x @ wide.T)


def test_parts_keep_their_own_formats(ops: Any) -> None:
    """As q, k, v of a mixed file: neighbours of one format share panels, a float part stays a float."""
    parts = [
        blocks_of("Q5_0", 40, 256, 1), blocks_of("Q5_0", 7, 256, 2), blocks_of("Q6_K", 33, 256, 3),
        ArraySource(inputs(5, 256, 4)), blocks_of("Q4_K", 64, 256, 5), blocks_of("Q8_0", 3, 256, 6),
    ]  # fmt: skip
    weight = ops.matrix(JoinedSource(*parts), "quantised")
    assert (weight.rows, weight.cols) == (152, 256)
    x, bias = inputs(11, 256), inputs(1, 152, 9)[0]
    with guarded(11, 152) as out:
        ops.matmul(x, weight, out, bias)
    first = 0
    for part in parts:
        alone = np.empty((11, part.shape[0]), np.float32)
        places = slice(first, first + part.shape[0])
        ops.matmul(x, ops.matrix(part, "quantised"), alone, bias[places])
        assert same_bits(out[:, places], alone)
        first += part.shape[0]


class Unkept(BlockSource):
    """A format without a kernel."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        raw = rng.integers(0, 256, (20, 2, 84), dtype=np.uint8)
        set_half(raw, 80, 0.01)
        set_half(raw, 82, 0.01)
        super().__init__("Q2_K", raw.reshape(20, -1))


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (ArraySource(inputs(20, 512)), "float32"),
        (ArraySource(inputs(20, 70)), "float32"),
        (Unkept(), "float16"),
    ],
)
def test_what_has_no_kernel_is_kept_as_floats(ops: Any, source: Any, dtype: str) -> None:
    weight = ops.matrix(source, "quantised")
    assert weight.dtype == dtype
    x = inputs(5, source.shape[1])
    expected, out = np.empty((5, 20), np.float32), np.empty((5, 20), np.float32)
    ops.matmul(x, ops.matrix(source, dtype), expected)
    ops.matmul(x, weight, out)
    assert same_bits(out, expected)


def test_sources_are_packed_from_any_rows(cpu: Any) -> None:
    """Rows in another order, every other row, a part that begins within a panel."""
    source = blocks_of("Q4_1", 130, 96)
    x = inputs(3, 96)
    whole = np.empty((3, 130), np.float32)
    cpu.matmul(x, cpu.matrix(source, "quantised"), whole)
    order = np.random.default_rng(2).permutation(130)
    for rows in (order, np.arange(0, 130, 2), np.arange(129, -1, -1)):
        out = np.empty((3, len(rows)), np.float32)
        view = source.raw[::2] if len(rows) == 65 else source.raw[rows]
        cpu.matmul(x, cpu.matrix(BlockSource("Q4_1", view), "quantised"), out)
        assert same_bits(out, whole[:, rows])
    cuts = [0, 5, 37, 64, 130]
    parts = [BlockSource("Q4_1", source.raw[a:b]) for a, b in pairwise(cuts)]
    joined = cpu.matrix(JoinedSource(*parts), "quantised")
    assert (joined.dtype, joined.nbytes) == ("Q4_1", packed_bytes("Q4_1", 130, 96))
    out = np.empty((3, 130), np.float32)
    cpu.matmul(x, joined, out)
    assert same_bits(out, whole)


@pytest.mark.parametrize("outputs", [70, 333, 1000])
def test_threads_do_not_change_bits(outputs: int) -> None:
    """They get large chunks and small ones, as many as there are panels for."""
    source, x = blocks_of("Q4_1", outputs, 96), inputs(150, 96)
    results = []
    for threads in (1, 2, 3, 5, 8):
        device = make_device("cpu", threads=threads)
        try:
            weight = device.ops.matrix(source, "quantised")
            outs = [np.full((count, outputs), np.nan, np.float32) for count in (1, 150)]
            for out in outs:
                device.ops.matmul(x[: len(out)], weight, out)
            results.append(outs)
        finally:
            device.close()
    assert np.isfinite(results[0][1]).all()
    for outs in results[1:]:
        assert all(same_bits(one, other) for one, other in zip(outs, results[0], strict=True))


def test_a_product_that_follows_a_norm_has_its_input_quantised_there() -> None:
    """In a capture only; the same bits. Of another array, or of fewer rows, it is quantised apart."""
    device = get_device("cpu")
    matrix = device.ops.matrix(blocks_of("Q4_1", 40, 64), "quantised")
    x, norm = inputs(5, 64), np.ones(64, np.float32)
    hidden, gate_up = device.empty((5, 64), np.float32), inputs(5, 128, 2)
    outs = [device.empty((count, 40), np.float32) for count in (5, 5, 3, 5)]

    def run() -> None:
        device.ops.rms_norm(x, norm, 1e-5, hidden)
        device.ops.matmul(hidden, matrix, outs[0])
        device.ops.gated_activation(gate_up, "silu", hidden)
        device.ops.matmul(hidden, matrix, outs[1])
        device.ops.rms_norm(x, norm, 1e-5, hidden)
        device.ops.matmul(hidden[:3], matrix, outs[2])
        device.ops.rms_norm(x, norm, 1e-5, hidden)
        device.ops.matmul(x, matrix, outs[3])

    run()
    expected = [out.copy() for out in outs]
    with device.capture() as step:
        run()
    assert step.records.count == 8 + 2  # type: ignore[attr-defined]
    for out in outs:
        out[:] = np.nan
    step.replay()
    assert all(np.array_equal(out, wanted) for out, wanted in zip(outs, expected, strict=True))


def test_refusals(ops: Any) -> None:
    source = blocks_of("Q4_1", 8, 64)
    with pytest.raises(KernelError, match="int7"):
        ops.matrix(ArraySource(inputs(8, 64)), "int7")
    joined = ops.matrix(JoinedSource(source, blocks_of("Q8_0", 8, 64)), "quantised")
    with pytest.raises(KernelError, match="several types"):
        ops.embed(np.zeros(1, np.int32), joined, np.empty((1, 64), np.float32))
    with pytest.raises(KernelError, match="gives no rows of blocks"):
        source.blocks = lambda start, stop: None  # type: ignore[method-assign]
        ops.matrix(source, "quantised")
