"""Float32 products with weights kept as they are stored: bit by bit those with the same values expanded to float32."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import make_operations
from kernel_support import ArraySource, guarded
from quant_support import KINDS, SCALES_AT, BlockSource, JoinedSource, blocks_of, columns_for, fma, set_half

from cupaged.device import make_device
from cupaged.kernels import bfloat16
from cupaged.kernels.cpu.exact_layout import EXACT_LAYOUT_OF
from cupaged.kernels.interface import EXACT_BLOCK_BYTES, packed_bytes
from cupaged.model.parameters import kept_bytes
from cupaged.model.quants import FORMATS

COUNTS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 23, 240, 241)


class FloatSource(ArraySource):
    """Values of a file of 16-bit floats."""

    def __init__(self, values: np.ndarray, dtype: str) -> None:
        narrow = {
            "F16": lambda a: a.astype(np.float16).astype(np.float32),
            "BF16": lambda a: bfloat16.to_float32(bfloat16.from_float32(a)),
        }
        super().__init__(narrow[dtype](values))
        self.dtype = dtype


@pytest.fixture(scope="module")
def cpu() -> Any:
    return make_operations("cpu")


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def source_of(kind: str, rows: int, cols: int) -> Any:
    return FloatSource(normal(rows, cols, seed=3), kind) if kind in ("F16", "BF16") else blocks_of(kind, rows, cols)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal, NaN to NaN."""
    return np.array_equal(one, other, equal_nan=True) and np.array_equal(np.signbit(one), np.signbit(other))


def expanded(source: Any) -> ArraySource:
    return ArraySource(source.float32(0, source.shape[0]))


@pytest.mark.parametrize("kind", [*EXACT_LAYOUT_OF, "F16", "BF16"])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (33, 3), (64, 4), (96, 5), (200, 18)])
def test_products_are_those_of_float32_panels(cpu: Any, kind: str, rows: int, blocks: int) -> None:
    cols = columns_for(kind, blocks) if kind in FORMATS and FORMATS[kind].block > 1 else 32 * blocks - 5
    source = source_of(kind, rows, cols)
    weight, plain = cpu.matrix(source, "float32"), cpu.matrix(expanded(source), "float32")
    assert plain.dtype == "float32"
    assert weight.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, kind)
    assert weight.nbytes == packed_bytes(weight.dtype, rows, cols, exact=True) < plain.nbytes
    x, bias = normal(241, cols), normal(rows, seed=5)
    expected = np.empty((241, rows), np.float32)
    for added in (None, bias):
        cpu.matmul(x, plain, expected, added)
        for count in COUNTS:
            with guarded(count, rows) as out:
                cpu.matmul(x[241 - count :], weight, out, added)
            assert same_bits(out, expected[241 - count :]), count
    ids = np.array([rows - 1, 0, rows // 2], np.int32)
    with guarded(3, cols) as out:
        cpu.embed(ids, weight, out, 6.5)
    assert np.array_equal(out, source.float32(0, rows)[ids] * np.float32(6.5))


def test_products_are_the_chain_that_is_documented(cpu: Any) -> None:
    """Pieces of 128 inputs, each a chain of fused steps from zero, added in order."""
    source, x = blocks_of("Q4_1", 40, 288), normal(3, 288)
    wide = source.float32(0, 40)
    total = np.zeros((3, 40), np.float32)
    for first in range(0, 288, 128):
        chain = np.zeros((3, 40), np.float32)
        for k in range(first, min(288, first + 128)):
            columns = [np.broadcast_to(a, chain.shape) for a in (wide[None, :, k], x[:, k, None])]
            chain = fma(*columns, chain)
        total += chain
    out = np.empty((3, 40), np.float32)
    cpu.matmul(x, cpu.matrix(source, "float32"), out)
    assert same_bits(out, total)


@pytest.mark.parametrize("scale", [65504.0, 6e-8, -1.0, 0.0, np.inf, np.nan])
@pytest.mark.parametrize("kind", EXACT_LAYOUT_OF)
def test_scales_of_all_kinds(cpu: Any, kind: str, scale: float) -> None:
    """The largest and the smallest float16, and what a damaged file may hold."""
    cols = columns_for(kind, 3)
    source = blocks_of(kind, 35, cols)
    set_half(source.raw.reshape(35, -1, FORMATS[kind].block_bytes)[4:6], SCALES_AT.get(kind, (0,))[0], scale)
    weight, plain = cpu.matrix(source, "float32"), cpu.matrix(expanded(source), "float32")
    x = normal(7, cols)
    for count in (1, 7):
        out, expected = np.empty((count, 35), np.float32), np.empty((count, 35), np.float32)
        cpu.matmul(x[:count], weight, out)
        cpu.matmul(x[:count], plain, expected)
        assert same_bits(out, expected)


@pytest.mark.parametrize("kind", EXACT_LAYOUT_OF)
def test_every_integer_of_a_format_is_exact(cpu: Any, kind: str) -> None:
    """Blocks of random bits, and one input at a time: an output is a weight."""
    cols = columns_for(kind, 8)
    size = FORMATS[kind].block_bytes
    raw = np.random.default_rng(8).integers(0, 256, (64, cols // FORMATS[kind].block, size), dtype=np.uint8)
    for at in {"Q4_1": (0, 2), "Q5_1": (0, 2)}.get(kind, SCALES_AT.get(kind, (0,))):
        set_half(raw, at, np.random.default_rng(9).standard_normal(raw.shape[:2]))
    source = BlockSource(kind, raw.reshape(64, -1))
    weight = cpu.matrix(source, "float32")
    x, wide = np.eye(cols, dtype=np.float32), source.float32(0, 64)
    whole = np.empty((cols, 64), np.float32)
    cpu.matmul(x, weight, whole)
    assert np.array_equal(whole, wide.T)
    for first in (0, 37, cols - 3):
        few = np.empty((3, 64), np.float32)
        cpu.matmul(x[first : first + 3], weight, few)
        assert np.array_equal(few, wide.T[first : first + 3])


def test_parts_keep_their_own_formats(cpu: Any) -> None:
    parts = [
        blocks_of("Q5_0", 40, 256, 1), blocks_of("Q5_0", 7, 256, 2), blocks_of("Q6_K", 33, 256, 3),
        ArraySource(normal(5, 256, seed=4)), blocks_of("Q4_K", 64, 256, 5), FloatSource(normal(9, 256), "F16"),
    ]  # fmt: skip
    joined = JoinedSource(*parts)
    weight = cpu.matrix(joined, "float32")
    assert (weight.rows, weight.cols, weight.dtype) == (158, 256, "Q5_0+Q6_K+float32+Q4_K+float16")
    x, bias = normal(11, 256), normal(158, seed=9)
    expected = np.empty((11, 158), np.float32)
    cpu.matmul(x, cpu.matrix(expanded(joined), "float32"), expected, bias)
    for precise in (False, True):  # of no effect here
        with guarded(11, 158) as out:
            cpu.matmul(x, weight, out, bias, precise=precise)
        assert same_bits(out, expected)


def test_floats_of_one_type_are_joined(cpu: Any) -> None:
    sources = [FloatSource(normal(rows, 70, seed=rows), "BF16") for rows in (40, 7, 33)]
    weight = cpu.matrix(JoinedSource(*sources), "float32")
    assert (weight.dtype, weight.nbytes) == ("bfloat16", packed_bytes("bfloat16", 80, 70))
    x, out, expected = normal(5, 70), np.empty((5, 80), np.float32), np.empty((5, 80), np.float32)
    cpu.matmul(x, weight, out)
    cpu.matmul(x, cpu.matrix(expanded(JoinedSource(*sources)), "float32"), expected)
    assert same_bits(out, expected)


@pytest.mark.parametrize("kind", ["Q4_1", "BF16", "F32"])
@pytest.mark.parametrize("outputs", [70, 333, 1000])
def test_threads_do_not_change_bits(kind: str, outputs: int) -> None:
    source = ArraySource(normal(outputs, 96)) if kind == "F32" else source_of(kind, outputs, 96)
    x = normal(150, 96)
    results = []
    for threads in (1, 2, 3, 8):
        device = make_device("cpu", threads=threads)
        try:
            weight = device.ops.matrix(source, "float32")
            outs = [np.full((count, outputs), np.nan, np.float32) for count in (1, 150)]
            for out in outs:
                device.ops.matmul(x[: len(out)], weight, out)
            results.append(outs)
        finally:
            device.close()
    assert np.isfinite(results[0][1]).all()
    for outs in results[1:]:
        assert all(same_bits(one, other) for one, other in zip(outs, results[0], strict=True))


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform != "linux", reason="needs fork and mprotect")
def test_nothing_behind_the_last_panel_is_read() -> None:
    """An odd number of panels of 32, which go in twos; one thread takes all of them."""
    device = make_device("cpu", threads=1)
    weight = device.ops.matrix(blocks_of("Q8_0", 96, 64), "float32")
    x, out = normal(40, 64), np.empty((40, 96), np.float32)
    pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    at = np.frombuffer(pages, np.uint8).ctypes.data
    assert weight.nbytes <= 3 * mmap.PAGESIZE and weight.nbytes % 64 == 0
    end = at + 3 * mmap.PAGESIZE
    ctypes.memmove(end - weight.nbytes, weight.address, weight.nbytes)
    child = os.fork()
    if child == 0:  # dies if it reads the last page
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0)
        device.ops.matmul(x, replace(weight, address=end - weight.nbytes), out)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    device.close()
    assert status == 0


def test_what_cannot_be_kept_is_expanded(cpu: Any) -> None:
    raw = np.zeros((20, 2 * 84), np.uint8)  # Q2_K: a format without a kernel
    assert cpu.matrix(BlockSource("Q2_K", raw), "float32").dtype == "float32"


def test_bytes_are_told_as_kept(cpu: Any) -> None:
    sources = {
        "a": blocks_of("Q4_K", 70, 256), "b": blocks_of("Q8_0", 33, 96), "c": FloatSource(normal(5, 70), "BF16"),
        "d": ArraySource(normal(3, 5)), "norm": ArraySource(normal(5)),
    }  # fmt: skip
    kept = kept_bytes(sources, "float32", as_stored=True)
    matrices = {name: cpu.matrix(source, "float32") for name, source in sources.items() if name != "norm"}
    assert kept == {matrix.dtype: matrix.nbytes for matrix in matrices.values()}
    assert list(kept_bytes(sources, "float32")) == ["float32"]
    assert EXACT_BLOCK_BYTES.keys() == set(KINDS)
