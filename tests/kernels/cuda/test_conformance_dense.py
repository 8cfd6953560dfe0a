"""CUDA C beyond what all kernels share: stored formats of weights, layer norm, fused rotation, the library face."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_support import ORDERS, need_emulator, need_nvrtc
from emulated import emulated_operations
from kernel_support import ArraySource, NumpyDevice, guarded, paged, queries_for, split

from cupaged.cache import PagedKVCache
from cupaged.errors import DeviceError, KernelError
from cupaged.kernels.cuda import library, sources
from cupaged.kernels.cuda.packing import FORMATS

pytestmark = need_emulator
STORED = ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]


@pytest.fixture(scope="module")
def ops() -> Any:
    return emulated_operations()


class Stored:
    """Rows of blocks as in a GGUF file: random bits, with scales of ordinary size."""

    def __init__(self, kind: str, rows: int, cols: int, seed: int = 0) -> None:
        from cupaged.model.quants import FORMATS as FILE_FORMATS
        from cupaged.model.quants import dequantise

        rng = np.random.default_rng(seed)
        size = FILE_FORMATS[kind]
        raw = rng.integers(0, 256, (rows, cols // size.block, size.block_bytes), np.uint8)
        for at in {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
            scales = rng.uniform(-0.02, 0.02, raw.shape[:2]).astype(np.float16)
            raw[..., at : at + 2] = scales[..., None].view(np.uint8)
        self.raw = raw.reshape(rows, -1)
        self.shape, self.dtype, self.parts = (rows, cols), kind, (self,)
        self.wide = dequantise(kind, self.raw)

    def float32(self, start: int, stop: int) -> np.ndarray:
        return self.wide[start:stop]

    def blocks(self, start: int, stop: int) -> np.ndarray:
        return self.raw[start:stop]


@pytest.mark.parametrize("kind", STORED)
def test_stored_blocks_widen_to_the_bits_of_the_file(ops: Any, kind: str) -> None:
    source = Stored(kind, 7, 512)
    matrix = ops.matrix(source, "quantised")
    assert (matrix.dtype, matrix.rows, matrix.cols, matrix.nbytes) == (kind, 7, 512, source.raw.nbytes)
    ids = np.array([6, 0, 3, 3], np.int32)
    with guarded(4, 512) as out:
        ops.embed(ids, matrix, out)
    assert np.array_equal(out, source.wide[ids])
    with guarded(5, 512) as out:
        ops.dequantise(matrix, 2, out, "float32")
    assert np.array_equal(out, source.wide[2:])
    narrow = np.empty((7, 512), np.float16)
    ops.dequantise(matrix, 0, narrow, "float16")
    assert np.array_equal(narrow, source.wide.astype(np.float16))


@pytest.mark.parametrize("kind", STORED)
def test_products_of_stored_blocks(ops: Any, kind: str) -> None:
    """Against float64; and one row's bits are the same alone and among any number of others."""
    source = Stored(kind, 37, 1280)
    matrix = ops.matrix(source, "quantised")
    rng = np.random.default_rng(1)
    x, bias = rng.standard_normal((19, 1280), np.float32), rng.standard_normal(37, np.float32)
    with guarded(19, 37) as whole:
        ops.matmul(x, matrix, whole, bias)
    expected = x.astype(np.float64) @ source.wide.astype(np.float64).T + bias
    scale = np.abs(x).astype(np.float64) @ np.abs(source.wide).astype(np.float64).T
    assert (np.abs(whole - expected) <= 1e-6 * scale + 1e-6).all()
    for count in (1, 2, 8, 9):
        with guarded(count, 37) as out:
            ops.matmul(x[5 : 5 + count], matrix, out, bias)
        assert np.array_equal(out, whole[5 : 5 + count])


def test_a_nan_in_a_row_stays_in_it(ops: Any) -> None:
    matrix = ops.matrix(Stored("Q4_K", 20, 256), "quantised")
    x = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
    before, after = np.empty((4, 20), np.float32), np.empty((4, 20), np.float32)
    ops.matmul(x, matrix, before)
    x[2, 100] = np.nan
    ops.matmul(x, matrix, after)
    assert np.isnan(after[2]).all()
    assert np.array_equal(np.delete(after, 2, 0), np.delete(before, 2, 0))


def test_a_join_of_formats_is_multiplied_part_by_part(ops: Any) -> None:
    """Q, K and V of one file may differ; a format without a kernel here is kept as float16."""

    class Join:
        parts = (Stored("Q4_K", 20, 256), Stored("Q5_0", 7, 256, seed=1), Stored("Q8_0", 9, 256, seed=2))
        shape, dtype = (36, 256), "mixed"
        wide = np.concatenate([part.wide for part in parts])

        def float32(self, start: int, stop: int) -> np.ndarray:
            return self.wide[start:stop]

        def blocks(self, start: int, stop: int) -> None:
            return None

    join = Join()
    matrix = ops.matrix(join, "quantised")
    assert matrix.dtype == "Q4_K+float16+Q8_0" and matrix.rows == 36
    x, bias = np.random.default_rng(3).standard_normal((3, 256)).astype(np.float32), np.arange(36, dtype=np.float32)
    with guarded(3, 36) as out:
        ops.matmul(x, matrix, out, bias)
    wide = join.wide.copy()
    wide[20:27] = wide[20:27].astype(np.float16)
    np.testing.assert_allclose(out, x.astype(np.float64) @ wide.T.astype(np.float64) + bias, rtol=1e-5, atol=1e-4)
    with pytest.raises(KernelError, match="table"):
        ops.embed(np.zeros(1, np.int32), matrix, np.empty((1, 256), np.float32))


@pytest.mark.parametrize("cols", [1, 64, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(ops: Any, cols: int, with_bias: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, cols), np.float32) + 30  # a mean far from zero
    weight, bias = rng.standard_normal(cols, np.float32), rng.standard_normal(cols, np.float32) if with_bias else None
    wide = x.astype(np.float64)
    away = wide - wide.mean(1, keepdims=True)
    expected = away / np.sqrt((away**2).mean(1, keepdims=True) + 1e-5) * weight + (0 if bias is None else bias)
    with guarded(3, cols) as out:
        ops.layer_norm(x, weight, bias, 1e-5, out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5)
    half = np.float32(0.5) * x
    stream, again = half.copy(), half.copy()
    ops.layer_norm(again, weight, bias, 1e-5, again, stream)
    assert np.array_equal(stream, x) and np.array_equal(again, out)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rotary", [64, 32])
@pytest.mark.parametrize("k_transposed", [False, True])
def test_write_kv_with_rotation_stores_what_rope_and_write_kv_store(
    ops: Any, dtype: Any, rotary: int, k_transposed: bool
) -> None:
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 5, 2, 64), np.float32)
    positions = np.array([3, 0, 19, 7, 7], np.int32)
    table = np.cos(rng.standard_normal((20, rotary))).astype(np.float32)
    slots = np.array([9, 0, -1, 13, 8], np.int64)
    arrays = []
    for fused in (False, True):
        cache = PagedKVCache(3, 8, 2, 64, 1, dtype, NumpyDevice(ops), k_transposed=k_transposed)
        cache.array[:] = 0
        given = key.copy()
        if fused:
            ops.write_kv(given, value, cache.view, 0, slots, positions, table)
            assert np.array_equal(given, key)
        else:
            ops.rope(given, positions, table)
            ops.write_kv(given, value, cache.view, 0, slots)
        arrays.append(cache.array)
    assert np.array_equal(arrays[0], arrays[1]) and arrays[0].any()


def test_indices_outside_of_a_table_make_nan(ops: Any) -> None:
    """Ids and positions are on the device, where the host does not look; what has no value is not given one."""
    table = ops.matrix(ArraySource(np.ones((3, 32))), "float32")
    out = np.zeros((3, 32), np.float32)
    ops.embed(np.array([3, 1, -1], np.int32), table, out)
    assert np.isnan(out[[0, 2]]).all() and (out[1] == 1).all()
    x = np.ones((3, 1, 6), np.float32)
    ops.rope(x, np.array([-1, 1, 2], np.int32), np.ones((2, 4), np.float32))
    assert np.isnan(x[[0, 2], :, :4]).all() and np.isfinite(x[1]).all() and (x[..., 4:] == 1).all()


def test_arrays_that_a_kernel_would_read_wrongly_are_refused(ops: Any) -> None:
    x, weight, out = np.ones((4, 8), np.float32), np.ones(8, np.float32), np.empty((4, 8), np.float32)
    for bad, message in (
        ((x[:, ::2], weight[:4], 1e-5, out[:, :4]), "x: rows are not"),
        ((x[::2], weight, 1e-5, out[:2]), "x: rows are not adjacent"),
        ((x.astype(np.float64), weight, 1e-5, out), "x: expected float32"),
        ((x, weight[:7], 1e-5, out), r"weight: expected shape \(8,\)"),
    ):
        with pytest.raises(KernelError, match=message):
            ops.rms_norm(*bad)
    with pytest.raises(KernelError, match="tanh"):
        ops.gated_activation(np.ones((1, 8), np.float32), "tanh", np.ones((1, 4), np.float32))
    from cupaged.kernels.reference import ReferenceOperations

    with pytest.raises(KernelError, match="ReferenceMatrix"):
        ops.matmul(
            x, ReferenceOperations().matrix(ArraySource(np.ones((3, 8))), "float32"), np.empty((4, 3), np.float32)
        )


@pytest.mark.parametrize("order", ORDERS)
def test_no_race_outside_of_attention(order: str) -> None:
    """Every other kernel under the bench's checks, in three orders of threads; the results are those of a plain run."""

    def everything(check: str | None) -> list[Any]:
        ops = emulated_operations()
        ops.backend.order, ops.backend.check = order, check
        rng = np.random.default_rng(0)
        x, weight = rng.standard_normal((3, 300), np.float32), rng.standard_normal(300, np.float32)
        norm, layer, product = np.empty_like(x), np.empty_like(x), np.empty((3, 9), np.float32)
        stream = x.copy()
        ops.rms_norm(x, weight, 1e-5, norm, stream)
        ops.layer_norm(x, weight, weight, 1e-5, layer)
        ops.matmul(x[:, :256].copy(), ops.matrix(Stored("Q6_K", 9, 256), "quantised"), product)
        heads, active = x.copy().reshape(3, 5, 60), np.empty((3, 150), np.float32)
        ops.head_norm(heads, weight[:60].copy(), 1e-5)
        ops.rope(heads, np.arange(3, dtype=np.int32), np.ones((3, 40), np.float32))
        ops.gated_activation(x, "gelu", active)
        from cupaged.kernels.interface import SampleRows

        rows = SampleRows([0.0, 0.8, 1.1], [0, 9, 0], [1.0, 0.8, 0.9], [0.0, 0.0, 0.1], [1, 2, 3], [0] * 3, [5, 6, 7])
        setup = paged(ops, [20, 3], dtype="float16")
        ops.copy_blocks(setup.view, [int(setup.tables[0, 0])], [int(setup.tables[0, 1])])
        return [norm, stream, layer, product, heads, active, ops.sample(x, rows), setup.view.pools[0].copy()]

    for plain, checked in zip(everything(None), everything("race"), strict=True):
        assert np.array_equal(plain, checked, equal_nan=True)


def test_the_library_face_plans_and_runs_alone(ops: Any) -> None:
    """On arrays of the caller, without a PagedKVCache: NumPy here, CuPy on a GPU."""
    setup = paged(ops, [600, 17], dtype="float16")
    view = dataclasses.replace(setup.view, pools=(setup.view.pools[0].copy(),))
    queries = queries_for([1, 3], 8, 64)
    query = np.concatenate(queries)
    out = library.paged_attention(ops, query, view, 1, setup.tables, [600, 17], query_lens=[1, 3], window=300)
    assert np.array_equal(out, setup.run(queries, window=300))
    key, value = np.ones((2, 2, 64), np.float32), np.full((2, 2, 64), 2, np.float32)
    library.write_kv(ops, key, value, view, 1, [int(setup.tables[1, 1]) * 16, -1])
    changed = library.paged_attention(ops, query, view, 1, setup.tables, [600, 17], query_lens=[1, 3])
    assert not np.array_equal(changed[-1], out[-1])
    for slots, message in (([10**6, 0], "slots: 1000000 is not below"), ([3, 3], "slots: a slot is named twice")):
        with pytest.raises(KernelError, match=message):
            library.write_kv(ops, key, value, view, 1, slots)
    for options in ({"query_lens": [1]}, {"soft_cap": 0.0}, {"window": 0}):
        with pytest.raises(KernelError, match=next(iter(options))):
            library.paged_attention(ops, query, view, 1, setup.tables, [600, 17], **options)


def test_without_a_gpu_the_library_says_what_is_missing() -> None:
    with contextlib.suppress(Exception):  # no CuPy, or no driver: what is tested
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceError, match="device 'cuda'"):
        library.cuda_operations()


@need_nvrtc
def test_machine_code_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    from cupaged.kernels.cuda import compile as nvrtc

    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path))
    code = nvrtc.cubin("copy_blocks.cu", 80, {"UNIT_BYTES": 16})
    assert code[:4] == b"\x7fELF" and b"copy_blocks" in code
    (kept,) = (tmp_path / "kernels").iterdir()
    assert nvrtc.cubin("copy_blocks.cu", 80, {"UNIT_BYTES": 16}) == code and len(list(kept.parent.iterdir())) == 1
    whole = kept.read_bytes()
    for damage in (whole[:-1], b"", whole[:40] + b"?" + whole[41:]):
        kept.write_bytes(damage)
        assert nvrtc.cubin("copy_blocks.cu", 80, {"UNIT_BYTES": 16}) == code
        assert kept.read_bytes() == whole
    kept.chmod(0o666)  # anybody may have written it
    kept.write_bytes(whole[:32] + b"evil")
    assert nvrtc.cubin("copy_blocks.cu", 80, {"UNIT_BYTES": 16}) == code
    with pytest.raises(KernelError, match=r"paged_attention.cu.*ROWS=-1"):
        nvrtc.cubin("paged_attention.cu", 80, {"ROWS": -1})


def test_sources_are_inlined_whole() -> None:
    for name in sources.source_names():
        text = sources.inlined(name)
        assert '#include "' not in text and text.count("#pragma once") == len(sources.files(name)) - 1
    assert set(FORMATS) == {"float32", "float16", "bfloat16", *STORED}


def test_strided_rows_reach_the_kernels_as_they_lie(ops: Any) -> None:
    """Q, K and V are columns of one product: views with a stride between rows."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((4, 6 * 64), np.float32)
    heads = split(wide[:, 64:256], 4, 3, 64)
    expected = np.ascontiguousarray(heads)
    before = np.delete(wide, range(64, 256), axis=1)
    ops.head_norm(heads, np.ones(64, np.float32), 1e-6)
    ops.head_norm(expected, np.ones(64, np.float32), 1e-6)
    assert np.array_equal(heads, expected) and np.array_equal(np.delete(wide, range(64, 256), axis=1), before)
