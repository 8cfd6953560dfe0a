"""Weights, norms, products, rope and activations against their formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from kernel_support import ArraySource, guarded, rounded, split

CLOSE = {"rtol": 2e-6, "atol": 2e-6}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("count", "rows", "cols"), [(1, 37, 70), (5, 192, 576), (3, 1, 1), (20, 65, 257), (0, 8, 8)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matmul(ops: Any, count: int, rows: int, cols: int, dtype: str, with_bias: bool) -> None:
    source = ArraySource(normal(rows, cols) / math.sqrt(cols))
    weight = ops.matrix(source, dtype)
    assert (weight.rows, weight.cols, weight.dtype) == (rows, cols, dtype)
    assert weight.nbytes >= rows * cols * (4 if dtype == "float32" else 2)
    x, bias = normal(count, cols, seed=1), normal(rows, seed=2) if with_bias else None
    with guarded(count, rows) as out:
        ops.matmul(x, weight, out, bias)
    expected = x.astype(np.float64) @ rounded(source.array, dtype).T + (0 if bias is None else bias)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_matmul_passes_nan_on_to_its_own_row_only(ops: Any) -> None:
    weight = ops.matrix(ArraySource(normal(40, 70)), "float32")
    x = normal(6, 70, seed=1)
    before, after = np.empty((6, 40), np.float32), np.empty((6, 40), np.float32)
    ops.matmul(x, weight, before)
    x[2, 5] = np.nan
    ops.matmul(x, weight, after)
    assert np.isnan(after[2]).all()
    assert np.array_equal(np.delete(after, 2, 0), np.delete(before, 2, 0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embed(ops: Any, dtype: str) -> None:
    source = ArraySource(normal(50, 33))
    table = ops.matrix(source, dtype)
    ids = np.array([49, 0, 7, 7, 1], np.int32)
    with guarded(5, 33) as out:
        ops.embed(ids, table, out)
    assert np.array_equal(out, rounded(source.array, dtype)[ids].astype(np.float32))
    ops.embed(ids, table, out, scale=6.5)
    np.testing.assert_allclose(out, rounded(source.array, dtype)[ids] * 6.5, rtol=1e-6)


def test_vector_is_a_float32_array(ops: Any) -> None:
    values = normal(33)
    vector = np.asarray(ops.vector(ArraySource(values)))
    assert vector.dtype == np.float32
    assert np.array_equal(vector, values)


def norm64(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("cols", [1, 33, 64, 576, 4099])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_rms_norm(ops: Any, cols: int, eps: float) -> None:
    x, weight = normal(3, cols), normal(cols, seed=1)
    with guarded(3, cols) as out:
        ops.rms_norm(x, weight, eps, out)
    np.testing.assert_allclose(out, norm64(x, weight, eps), **CLOSE)
    in_place = x.copy()
    ops.rms_norm(in_place, weight, eps, in_place)
    assert np.array_equal(in_place, out)


def test_rms_norm_adds_to_the_residual_first(ops: Any) -> None:
    x, residual, weight = normal(3, 70), normal(3, 70, seed=1), normal(70, seed=2)
    stream, out = residual.copy(), np.empty((3, 70), np.float32)
    ops.rms_norm(x, weight, 1e-5, out, stream)
    assert np.array_equal(stream, residual + x)
    np.testing.assert_allclose(out, norm64(residual + x, weight, 1e-5), **CLOSE)
    again, in_place = residual.copy(), x.copy()
    ops.rms_norm(in_place, weight, 1e-5, in_place, again)
    assert np.array_equal(in_place, out) and np.array_equal(again, stream)


@pytest.mark.parametrize("scale", [1e-18, 1e12])
def test_rms_norm_of_small_and_large_rows(ops: Any, scale: float) -> None:
    x, weight = normal(2, 96) * np.float32(scale), np.ones(96, np.float32)
    out = np.empty((2, 96), np.float32)
    ops.rms_norm(x, weight, 1e-5, out)
    np.testing.assert_allclose(out, norm64(x, weight, 1e-5), rtol=1e-5)


@pytest.mark.parametrize("dim", [33, 64, 80, 128])
def test_head_norm_on_strided_rows(ops: Any, dim: int) -> None:
    wide, weight = normal(4, 3 * dim + 50), normal(dim, seed=1)
    expected = norm64(wide[:, 20 : 20 + 3 * dim].reshape(4, 3, dim), weight, 1e-6)
    rest = np.delete(wide, range(20, 20 + 3 * dim), axis=1)
    ops.head_norm(split(wide[:, 20 : 20 + 3 * dim], 4, 3, dim), weight, 1e-6)
    np.testing.assert_allclose(wide[:, 20 : 20 + 3 * dim].reshape(4, 3, dim), expected, **CLOSE)
    assert np.array_equal(np.delete(wide, range(20, 20 + 3 * dim), axis=1), rest)


@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 80), (128, 32), (33, 32), (6, 2)])
def test_rope_rotates_half_split_pairs_of_strided_rows(ops: Any, dim: int, rotary: int) -> None:
    half = rotary // 2
    angles = np.arange(40)[:, None] * 10000.0 ** -(np.arange(half) / half)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions = np.array([39, 0, 7, 7, 3], np.int32)
    wide = normal(5, 2 * dim + 30)
    x = split(wide[:, 10 : 10 + 2 * dim], 5, 2, dim)
    expected = x.astype(np.float64)
    for token, position in enumerate(positions):
        for i in range(half):
            z = (x[token, :, i] + 1j * x[token, :, i + half]) * np.exp(1j * angles[position, i])
            expected[token, :, i], expected[token, :, i + half] = z.real, z.imag
    rest = np.delete(wide, range(10, 10 + 2 * dim), axis=1)
    ops.rope(x, positions, table)
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(x[..., rotary:], expected[..., rotary:])
    assert np.array_equal(np.delete(wide, range(10, 10 + 2 * dim), axis=1), rest)


def activation64(x: float, name: str) -> float:
    if name == "silu":
        return x * math.exp(x) / (1 + math.exp(x)) if x < 0 else x / (1 + math.exp(-x))
    if name == "gelu":
        return x * math.erfc(-x / math.sqrt(2)) / 2
    if name == "gelu_tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return max(x, 0.0)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("columns", [1, 33, 96])
def test_gated_activation(ops: Any, activation: Any, columns: int) -> None:
    gate_up = normal(4, 2 * columns) * 3
    gate_up[0, :columns] = np.resize([0.0, -100.0, 100.0, -1e4, 1e4, -1e-3, 1e-3, -20.0, 5.0, -5.0], columns)
    with guarded(4, columns) as out:
        ops.gated_activation(gate_up, activation, out)
    gate = np.vectorize(lambda x: activation64(float(x), activation), otypes=[float])(gate_up[:, :columns])
    np.testing.assert_allclose(out, gate * gate_up[:, columns:], rtol=1e-5, atol=3e-6)


def test_add(ops: Any) -> None:
    x, y = normal(3, 77), normal(3, 77, seed=1)
    expected = x + y
    ops.add(x, y)
    assert np.array_equal(x, expected)


def test_nothing_to_do_is_done(ops: Any) -> None:
    """Zero rows."""
    empty, table = np.empty((0, 64), np.float32), np.ones((4, 32), np.float32)
    weight = ops.matrix(ArraySource(normal(8, 64)), "float32")
    ops.embed(np.empty(0, np.int32), weight, empty)
    ops.rms_norm(empty, np.ones(64, np.float32), 1e-5, empty, empty.copy())
    ops.head_norm(empty.reshape(0, 2, 32), np.ones(32, np.float32), 1e-5)
    ops.rope(empty.reshape(0, 2, 32), np.empty(0, np.int32), table)
    ops.gated_activation(empty, "silu", np.empty((0, 32), np.float32))
    ops.add(empty, empty.copy())
    assert empty.shape == (0, 64)
