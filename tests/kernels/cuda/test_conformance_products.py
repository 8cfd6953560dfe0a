"""Products of many rows through a library: rows narrowed to 16 bits, weights widened by tiles, sums as they should be.

The library is NumPy here; what cuBLAS is called with is test_runtime_cublas.py's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench_support import ORDERS, need_emulator
from emulated import emulated_operations
from kernel_support import ArraySource, guarded, rounded
from quant_support import JoinedSource, blocks_of

from cupaged.kernels import bfloat16
from cupaged.kernels.cuda import packing, products
from cupaged.kernels.cuda.packing import FORMATS

pytestmark = need_emulator
NARROW = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class Library:
    """A `Gemm` on NumPy that keeps what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def __call__(self, x: np.ndarray, weight: np.ndarray, out: np.ndarray, dtype: str) -> None:
        assert x.dtype == weight.dtype == NARROW[dtype] and x.flags.c_contiguous and weight.flags.c_contiguous
        self.calls.append((dtype, x.shape, weight.shape))
        out[...] = wide(x, dtype) @ wide(weight, dtype).T


def wide(array: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16.to_float32(array) if dtype == "bfloat16" else array.astype(np.float32)


def narrow(ops: Any, x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rows, cols = x.shape
    padded = -(-cols // 32) * 32
    out, factors = np.zeros((rows, padded), NARROW[dtype]), np.zeros(rows, np.float32)
    ops._launch(
        "elementwise.cu", "narrow_rows", (rows,), 256, {"STORAGE": products.STORAGE[dtype]},
        x=x, out=out, factors=factors, cols=cols, padded=padded,
    )  # fmt: skip
    return out, factors


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ORDERS)
def test_K20_rows_are_narrowed_to_nearest_and_scaled_only_where_float16_needs_it(dtype: str, order: str) -> None:
    ops = emulated_operations()
    ops.backend.order, ops.backend.check = order, "race"
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 300), np.float32)
    scales = np.array([1, 2.0**-3, 1e5, 3e38, 1e-30, 0, 32767, 2.0**-9], np.float32)
    x = x / np.abs(x).max(1, keepdims=True) * scales[:, None]
    out, factors = narrow(ops, x, dtype)
    if dtype == "float16":
        scaled = factors != 1
        assert scaled.tolist() == [False, False, True, True, True, False, False, True]
        assert (np.frexp(factors)[0] == 0.5).all()  # powers of two: nothing is rounded twice
    else:
        assert (factors == 1).all()
    assert np.array_equal(wide(out, dtype)[:, :300], rounded(x / factors[:, None], dtype).astype(np.float32))
    assert (wide(out, dtype)[:, 300:] == 0).all() and not ops.backend.reports
    plain = narrow(emulated_operations(), x, dtype)
    assert np.array_equal(plain[0], out) and np.array_equal(plain[1], factors)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_K20_infinities_and_nan_stay_what_they_are(dtype: str) -> None:
    x = np.array([[np.inf, 1, -1], [np.nan, 1, 2], [1, 2, 3], [65504, 1e-8, 0]], np.float32)
    out, factors = narrow(emulated_operations(), x, dtype)
    values = wide(out, dtype)[:, :3] * factors[:, None]
    assert values[0, 0] == np.inf and np.isnan(values[1, 0])
    np.testing.assert_allclose(values[2:], x[2:], rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize(
    ("bits", "value"), [(0x3F80, 1.0), (0xC000, -2.0), (0x7F80, np.inf), (0x3F80, 1.00390625), (0x3F82, 1.01171875)]
)
def test_K20_bfloat16_is_the_upper_half_rounded_to_even(bits: int, value: float) -> None:
    assert narrow(emulated_operations(), np.array([[value]], np.float32), "bfloat16")[0][0, 0] == bits


@pytest.mark.parametrize("kind", [*FORMATS, "Q5_K"])
@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_by_a_library_are_near_our_own_product(kind: str, bias: bool) -> None:
    """float32 to the last bits, others to what narrowing rows of x costs; rows of any size, one scaled, one zero."""
    ops, library = emulated_operations(), Library()
    rng = np.random.default_rng(1)
    stored = kind in products.STORAGE
    source = ArraySource(rng.standard_normal((40, 70)) * 0.1) if stored else blocks_of(kind, 40, 256)
    matrix = ops.matrix(source, kind if stored else "quantised")
    x = rng.standard_normal((11, source.shape[1]), np.float32)
    x[3] *= 1e6
    x[4] = 0
    own_bias = rng.standard_normal(40, np.float32) if bias else None
    with guarded(11, 40) as expected:
        ops.matmul(x, matrix, expected, own_bias)
        ops.backend.gemm = library
        with guarded(11, 40) as out:
            ops.matmul(x, matrix, out, own_bias)
            dtype = kind if stored else "float16"
            assert library.calls == [(dtype, (11, -(-x.shape[1] // 32) * 32), (40, -(-x.shape[1] // 32) * 32))]
            step = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
            size = np.abs(x).sum(1, keepdims=True) * np.abs(source.float32(0, 40)).max()
            assert (np.abs(out - expected) <= step * size + 1e-6).all()
            few = out[:8].copy()
            ops.matmul(x[:8], matrix, few, own_bias)  # so few rows are ours, in one order of sums
            assert len(library.calls) == 1 and np.array_equal(few, expected[:8])


def test_tiles_and_parts_of_several_formats_fill_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of three tensors in three formats; a quantised one takes several tiles, whose cut is the matrix's own."""
    monkeypatch.setattr(products, "TILE_BYTES", 128 * 256 * 2)
    ops, library = emulated_operations(), Library()
    ops.backend.gemm = library
    rng = np.random.default_rng(2)
    last = ArraySource(rng.standard_normal((5, 256)) * 0.1)
    last.dtype = "BF16"
    source = JoinedSource(blocks_of("Q4_K", 300, 256), blocks_of("Q8_0", 3, 256, seed=1), last)
    matrix = ops.matrix(source, "quantised")
    assert matrix.dtype == "Q4_K+Q8_0+bfloat16"
    x, bias = rng.standard_normal((9, 256), np.float32), rng.standard_normal(308, np.float32)
    with guarded(9, 308) as out:
        ops.matmul(x, matrix, out, bias)
        weights = source.float32(0, 308)
        assert (np.abs(out - (x @ weights.T + bias)) <= 2**-8 * (np.abs(x) @ np.abs(weights).T)).all()
    assert [weight[0] for _, _, weight in library.calls] == [128, 128, 44, 3, 5]
    names = [name for name, _ in ops.backend.launches]
    assert names.count("narrow_rows") == 2 and names.count("dequantise") == 4 and names.count("finish_rows") == 3


def test_scratch_is_kept_and_only_grows() -> None:
    """A captured product finds the arrays that it was captured with; none are made while it is captured."""
    ops = emulated_operations()
    ops.backend.gemm = Library()
    made: list[tuple[int, ...]] = []
    empty = ops.backend.empty
    ops.backend.empty = lambda shape, dtype: made.append(shape) or empty(shape, dtype)
    matrix = ops.matrix(blocks_of("Q4_0", 8, 64), "quantised")
    made.clear()
    for rows, more in ((9, True), (20, True), (12, False), (20, False)):
        ops.matmul(np.ones((rows, 64), np.float32), matrix, np.empty((rows, 8), np.float32))
        assert bool(made) is more
        made.clear()


def test_a_large_matrix_is_packed_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [
        (blocks_of("Q6_K", 23, 256), "quantised"),
        (blocks_of("Q4_K", 23, 256), "quantised"),
        (ArraySource(np.random.default_rng(0).standard_normal((23, 50))), "bfloat16"),
    ]
    ops = emulated_operations()
    whole = [ops.matrix(source, dtype) for source, dtype in sources]
    monkeypatch.setattr(packing, "PIECE_BYTES", 5 * 4 * 256)
    for before, (source, dtype) in zip(whole, sources, strict=True):
        after = ops.matrix(source, dtype)
        assert (after.rows, after.cols, after.dtype, after.nbytes) == (23, before.cols, before.dtype, before.nbytes)
        for name, plane in before.parts[0].planes.items():
            again = after.parts[0].planes[name]
            assert (plane is None and again is None) or np.array_equal(plane, again)
