"""Precise products with quantised weights: inputs of 16 bits, in two integer sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import make_operations
from quant_support import KINDS, JoinedSource, blocks_of, columns_for, product_by_the_chain

from cupaged.kernels.reference import quantised


@pytest.fixture(scope="session", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Any:
    return make_operations(request.param)


@pytest.fixture(scope="session")
def cpu() -> Any:
    return make_operations("cpu")


def inputs(count: int, cols: int) -> np.ndarray:
    """Normal, with an outlier here and there, as a model's activations have."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((count, cols), np.float32)
    x[rng.random(x.shape) < 0.01] *= 30
    return x


def product(ops: Any, source: Any, x: np.ndarray, precise: bool, bias: np.ndarray | None = None) -> np.ndarray:
    out = np.full((len(x), source.shape[0]), np.nan, np.float32)
    ops.matmul(x, ops.matrix(source, "quantised"), out, bias, precise=precise)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_a_hundredth(ops: Any, kind: str) -> None:
    source = blocks_of(kind, 45, columns_for(kind, 8))
    x = inputs(9, source.shape[1])
    exact = x.astype(np.float64) @ source.float32(0, 45).astype(np.float64).T
    plain, precise = (np.abs(product(ops, source, x, p) - exact) for p in (False, True))
    assert 0 < precise.mean() < plain.mean() / 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
def test_the_bits_are_those_of_the_chain(cpu: Any, kind: str, biased: bool) -> None:
    """For any number of rows at once, too."""
    source = blocks_of(kind, 70, columns_for(kind, 27))  # more blocks than a piece of a panel has
    x = inputs(70, source.shape[1])
    bias = np.random.default_rng(8).standard_normal(70, np.float32) if biased else None
    expected = product_by_the_chain(x, quantised.matrix(source), bias, precise=True)
    for count in (1, 2, 3, 4, 5, 7, 11, 70):
        assert product(cpu, source, x[:count], True, bias).tobytes() == expected[:count].tobytes(), count


def test_what_is_left_over_is_kept_where_it_is_greatest(ops: Any) -> None:
    """A value half-way between two integers leaves 64 128ths, of either sign."""
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = 120.0, 63.5, -63.5, 2.5, 1.0
    integers, scales = quantised.quantise_rows(x, precise=True)
    assert integers[0, 0, :5].tolist() == [15360, 128 * 64 - 64, -128 * 64 + 64, 2 * 128 + 64, 128]
    assert scales.tolist() == [[1 / 128]]
    source = blocks_of("Q4_0", 40, 32)
    exact = x.astype(np.float64) @ source.float32(0, 40).astype(np.float64).T
    np.testing.assert_allclose(product(ops, source, x, True), exact, rtol=1e-6)


def test_joins_are_multiplied_part_by_part(cpu: Any) -> None:
    parts = [blocks_of(kind, rows, 64, seed) for seed, (kind, rows) in enumerate((("Q8_0", 12301), ("Q4_1", 33)))]
    x = inputs(3, 64)
    whole = product(cpu, JoinedSource(*parts), x, True)
    for part, columns in zip(parts, (slice(0, 12301), slice(12301, None)), strict=True):
        alone = product(cpu, part, x, True)
        assert whole[:, columns].tobytes() == alone.tobytes()
        assert product(cpu, part, x[1:2], True).tobytes() == alone[1:2].tobytes()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_or_all_zero(ops: Any, wrong: float) -> None:
    source = blocks_of("Q4_0", 40, 96)
    x = inputs(4, 96)
    x[1, 50], x[2] = wrong, 0
    out = product(ops, source, x, True)
    assert np.isnan(out[1]).all() and not out[2].any()
    assert out[[0, 3]].tobytes() == product(ops, source, x[[0, 3]], True).tobytes()


def test_float_weights_take_no_notice(ops: Any) -> None:
    source = blocks_of("Q8_0", 20, 64)
    x = inputs(5, 64)
    weight = ops.matrix(source, "float32")
    plain, precise = np.zeros((5, 20), np.float32), np.zeros((5, 20), np.float32)
    ops.matmul(x, weight, plain)
    ops.matmul(x, weight, precise, precise=True)
    assert plain.tobytes() == precise.tobytes()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize(("begin", "plain"), [(0, 0), (31, 0), (32, 32), (70, 64), (76, 64), (77, 77), (500, 77)])
def test_precise_from_an_output_on(ops: Any, kind: str, begin: int, plain: int) -> None:
    """Whole panels of 32 before it are plain, or all."""
    source = blocks_of(kind, 77, 64)
    x, bias = inputs(5, 64), np.random.default_rng(8).standard_normal(77, np.float32)
    out = np.full((5, 77), np.nan, np.float32)
    ops.matmul(x, ops.matrix(source, "quantised"), out, bias, precise=True, precise_from=begin)
    coarse, fine = (product(ops, source, x, p, bias) for p in (False, True))
    assert not np.array_equal(coarse, fine)
    assert np.array_equal(out[:, :plain], coarse[:, :plain])
    assert np.array_equal(out[:, plain:], fine[:, plain:])


def test_precise_from_counts_the_outputs_of_all_parts(ops: Any) -> None:
    source = JoinedSource(
        *(blocks_of(kind, rows, 64, seed) for seed, (kind, rows) in enumerate((("Q8_0", 40), ("Q4_1", 90))))
    )
    x, out = inputs(3, 64), np.full((3, 130), np.nan, np.float32)
    ops.matmul(x, ops.matrix(source, "quantised"), out, precise=True, precise_from=80)
    coarse, fine = (product(ops, source, x, p) for p in (False, True))
    assert np.array_equal(out[:, :72], coarse[:, :72])  # 40, and a panel of the second part's first 40
    assert np.array_equal(out[:, 72:], fine[:, 72:])


def test_a_captured_norm_quantises_for_both_kinds_of_outputs() -> None:
    from cupaged.device import get_device

    device = get_device("cpu")
    weight = device.ops.matrix(blocks_of("Q4_1", 96, 64), "quantised")
    x, scale = inputs(40, 64), np.linspace(0.5, 2, 64, dtype=np.float32)
    hidden, outs = np.empty_like(x), np.full((2, 40, 96), np.nan, np.float32)
    device.ops.rms_norm(x, scale, 1e-5, hidden)
    device.ops.matmul(hidden, weight, outs[0], precise=True, precise_from=64)
    with device.capture() as step:
        device.ops.rms_norm(x, scale, 1e-5, hidden)
        device.ops.matmul(hidden, weight, outs[1], precise=True, precise_from=64)
    step.replay()
    assert step.records.count == 3  # the norm and two products
    assert outs[0].tobytes() == outs[1].tobytes()
