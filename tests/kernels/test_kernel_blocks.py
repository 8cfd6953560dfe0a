"""Writing K/V, copying blocks, rounding on the way, and offsets beyond 32 bits."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import pytest
from kernel_support import NumpyDevice, attend, paged, poison, queries_for, rounded, rounds, split

from cupaged.cache import PagedKVCache
from cupaged.errors import KernelError
from cupaged.kernels import bfloat16

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def cache_for(ops: Any, num_blocks: int = 6, dim: int = 40, **options: Any) -> PagedKVCache:
    return PagedKVCache(num_blocks, options.pop("block_size", 8), 2, dim, 3, device=NumpyDevice(ops), **options)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
@pytest.mark.parametrize("k_transposed", [False, True])
def test_write_kv_reaches_its_slots_and_no_other_byte(ops: Any, dtype: Any, layout: Any, k_transposed: bool) -> None:
    """Strided rows in; slots out of order, one skipped. The array is compared with one filled by index arithmetic."""
    cache = cache_for(ops, dtype=dtype, layout=layout, k_transposed=k_transposed)
    array = cache.view.pools[0]
    array[:] = 3
    expected = array.copy()
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((5, 200), np.float32)
    key, value = split(wide[:, 10:90], 5, 2, 40), split(wide[:, 110:190], 5, 2, 40)
    slots = np.array([47, 0, -1, 13, 8], np.int64)
    ops.write_kv(key, value, cache.view, 1, slots)
    narrow = {"float32": lambda x: x, "float16": lambda x: x.astype(np.float16), "bfloat16": bfloat16.from_float32}
    unit = 2 * 2 * 8 * 40
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        frame, offset = divmod(int(slot), 8)
        start = frame * 3 * unit + unit if layout == "block_major" else 6 * unit + frame * unit
        for kv, source in enumerate((key, value)):
            for head in range(2):
                base = start + (kv * 2 + head) * 8 * 40
                where = slice(base + offset * 40, base + offset * 40 + 40)
                if kv == 0 and k_transposed:
                    where = slice(base + offset, base + 8 * 40, 8)
                expected[where] = narrow[dtype](source[token, head])
    assert np.array_equal(array, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_K20_write_kv_rounds_to_nearest_even(ops: Any, dtype: Any) -> None:
    cache = cache_for(ops, dim=4, dtype=dtype)
    key = np.array([1.00390625, 1.01171875, 1.00048828125, -2.0], np.float32)
    value = np.array([65519.0, np.inf, 1e-30, -1.00146484375], np.float32)
    rows = [np.broadcast_to(x, (1, 2, 4)).copy() for x in (key, value)]
    ops.write_kv(*rows, cache.view, 0, np.array([9], np.int64))
    got_key, got_value = cache.gather(0, [1], 2)
    assert np.array_equal(got_key[1, 0], rounded(key, dtype))
    if dtype == "bfloat16":
        assert got_key[1, 0].tolist() == [1.0, 1.015625, 1.0, -2.0]
    assert np.array_equal(got_value[1, 1, [0, 2, 3]], rounded(value[[0, 2, 3]], dtype))
    assert np.isposinf(got_value[1, 1, 1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_K20_nan_and_overflow_survive_narrowing(ops: Any, dtype: Any) -> None:
    """NaNs with any payload stay NaN: one of low bits alone would be cut to infinity."""
    cache = cache_for(ops, dim=4, dtype=dtype)
    key = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x7FBFFFFF], np.uint32).view(np.float32)
    value = np.array([3.4e38, -3.4e38, -0.0, 0.0], np.float32)
    rows = [np.broadcast_to(x, (1, 2, 4)).copy() for x in (key, value)]
    ops.write_kv(*rows, cache.view, 2, np.array([0], np.int64))
    got_key, got_value = cache.gather(2, [0], 1)
    assert np.isnan(got_key).all()
    if dtype == "float32":
        assert np.array_equal(got_value[0, 0], value)
    else:
        assert got_value[0, 0, :2].tolist() == [np.inf, -np.inf]  # bfloat16 ends at 3.39e38
    assert np.signbit(got_value[0, 0, 2:]).tolist() == [True, False]


def test_K09_padding_rows_write_nothing(ops: Any) -> None:
    """3 rows padded to 8: slot -1, context 0. Block 0 belongs to a live sequence and keeps every byte."""
    setup = paged(ops, [16, 20, 5])
    rng = np.random.default_rng(1)
    key, value = rng.standard_normal((2, 8, 2, 64), np.float32)
    before = setup.view.pools[0].copy()
    ops.write_kv(key, value, setup.view, 1, np.full(8, -1, np.int64))
    assert np.array_equal(setup.view.pools[0], before, equal_nan=True)
    queries = queries_for([1] * 8, 4, 64)
    alone = setup.run(queries[:3])
    setup.tables = np.concatenate([setup.tables, np.full((5, setup.tables.shape[1]), -1, np.int32)])
    padded = setup.run(queries, contexts=[16, 20, 5, 0, 0, 0, 0, 0])
    assert np.array_equal(padded[:3], alone)
    assert not padded[3:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
def test_copy_blocks_copies_all_layers_bit_for_bit(ops: Any, dtype: Any, layout: Any) -> None:
    cache = cache_for(ops, dtype=dtype, layout=layout)
    array = cache.view.pools[0]
    array.view(np.uint8)[:] = np.random.default_rng(2).integers(0, 256, array.nbytes, np.uint8)  # NaNs among them
    before = [cache.block_bytes(frame) for frame in range(6)]
    ops.copy_blocks(cache.view, [4, 0, 4], [1, 5, 2])
    after = [cache.block_bytes(frame) for frame in range(6)]
    for frame, source in enumerate([0, 4, 4, 3, 4, 0]):
        assert np.array_equal(after[frame], before[source]), frame
    ops.copy_blocks(cache.view, [], [])
    assert all(np.array_equal(cache.block_bytes(frame), after[frame]) for frame in range(6))


class SparseDevice(NumpyDevice):
    """Memory that is only reserved: pages that nobody touches do not exist."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype)


@pytest.mark.parametrize("k_transposed", [False, True])
@pytest.mark.parametrize(
    ("layout", "num_layers", "frames"),
    # A block of a layer has 2^15 elements: frame 65535 ends at element 2^31 - 1, frame 65536 begins at 2^31.
    [("block_major", 1, [65535, 65536, 131071, 131072]), ("layer_major", 2, [1, 65535, 65536])],
)
def test_K01_offsets_beyond_31_bits(
    ops: Any, layout: Any, num_layers: int, frames: list[int], k_transposed: bool
) -> None:
    """A sequence in a far block equals the same one in block 0, written, attended to and copied."""
    device = SparseDevice(ops)
    try:
        cache = PagedKVCache(
            max(frames) + 1, 16, 8, 128, num_layers, "bfloat16", device, layout=layout, k_transposed=k_transposed
        )
    except OSError as error:
        pytest.skip(f"this machine does not reserve so much address space: {error}")
    layer = num_layers - 1
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 13, 8, 128), np.float32)
    query = rng.standard_normal((2, 16, 128), np.float32)

    def attended(frame: int) -> np.ndarray:
        plan = ops.plan_attention(cache.view, np.array([[frame]], np.int32), [0, 2], [13], 16)
        out = np.full(query.shape, np.nan, np.float32)
        ops.paged_attention(query, cache.view, layer, plan, out, 0.1)
        return out

    for frame in (0, *frames):
        ops.write_kv(key, value, cache.view, layer, frame * 16 + np.arange(13, dtype=np.int64))
    near = attended(0)
    kept = rounded(key, "bfloat16"), rounded(value, "bfloat16")
    expected = attend(query, *kept, 0.1, rounding=rounds(ops, "bfloat16"))
    np.testing.assert_allclose(near, expected, rtol=2e-5, atol=2e-5)
    block = cache.block_bytes(0)
    assert block.any()
    for frame in frames:
        assert np.array_equal(attended(frame), near), frame
        assert np.array_equal(cache.block_bytes(frame), block), frame
        cache.view.pools[0][frame * cache.view.block_stride :][: cache.view.block_stride] = 0
        ops.copy_blocks(cache.view, [0], [frame])
        assert np.array_equal(cache.block_bytes(frame), block), frame
    last = max(frames)
    ops.copy_blocks(cache.view, [last], [2])
    assert np.array_equal(cache.block_bytes(2), block)


def test_K20_bfloat16_bits() -> None:
    values = bfloat16.to_float32(np.array([0x3F80, 0xC000, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001], np.uint16))
    assert values[:4].tolist() == [1.0, -2.0, math.inf, -math.inf]
    assert np.signbit(values[4:6]).tolist() == [False, True]
    assert values[6] == 2.0**-133
    assert np.isnan(bfloat16.to_float32(np.array([0x7FC0, 0x7F81, 0xFFFF], np.uint16))).all()


def test_K20_bfloat16_rounding() -> None:
    halfway = np.array([1.00390625, 1.01171875, -1.00390625, 1.0 + 2**-8 + 2**-20, 1.0 + 2**-8 - 2**-20], np.float32)
    expected = [1.0, 1.015625, -1.0, 1.0078125, 1.0]
    assert bfloat16.to_float32(bfloat16.from_float32(halfway)).tolist() == expected
    bits = np.arange(1 << 16, dtype=np.uint16)
    widened = bfloat16.to_float32(bits)
    numbers = ~np.isnan(widened)
    assert np.array_equal(bfloat16.from_float32(widened)[numbers], bits[numbers])
    assert np.isnan(bfloat16.to_float32(bfloat16.from_float32(widened[~numbers]))).all()
    for payload in (0x7F800001, 0xFF80FFFF, 0x7FFFFFFF, 0xFFFFFFFF):
        nan = np.array([payload], np.uint32).view(np.float32)
        assert np.isnan(bfloat16.to_float32(bfloat16.from_float32(nan))).all()
    assert np.isposinf(bfloat16.to_float32(bfloat16.from_float32(np.array([np.finfo(np.float32).max]))))


def test_K20_bfloat16_rounding_equals_arithmetic() -> None:
    values = np.random.default_rng(0).standard_normal(20000, np.float32) * np.float32(1e3)
    assert np.array_equal(bfloat16.to_float32(bfloat16.from_float32(values)), rounded(values, "bfloat16"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_K20_weights_are_rounded_to_nearest_even(ops: Any, dtype: Any) -> None:
    from kernel_support import ArraySource

    values = np.array([[1.00390625, 1.01171875, 1.00048828125, -2.0, 1.00146484375]], np.float32)
    table = ops.matrix(ArraySource(values), dtype)
    out = np.empty((1, 5), np.float32)
    ops.embed(np.zeros(1, np.int32), table, out)
    assert np.array_equal(out, rounded(values, dtype))


def test_reference_refuses_copies_that_depend_on_order() -> None:
    from cupaged.kernels.reference import ReferenceOperations

    cache = cache_for(ReferenceOperations())
    poison(cache.view.pools[0])
    for sources, destinations in (([0, 1], [2, 2]), ([0, 1], [1, 2]), ([0], [6]), ([-1], [0]), ([0], [1, 2])):
        with pytest.raises(KernelError, match=r"sources|destinations"):
            ReferenceOperations().copy_blocks(cache.view, sources, destinations)


def test_reference_refuses_indices_that_numpy_would_wrap() -> None:
    from kernel_support import ArraySource

    from cupaged.kernels.reference import ReferenceOperations

    ops, row = ReferenceOperations(), np.zeros((1, 4), np.float32)
    table = ops.matrix(ArraySource(np.ones((3, 4))), "float32")
    for bad in (-1, 3):
        with pytest.raises(KernelError, match="ids"):
            ops.embed(np.array([bad]), table, row)
        with pytest.raises(KernelError, match="positions"):
            ops.rope(row[None], np.array([bad]), np.ones((3, 4), np.float32))
    cache = cache_for(ops)
    key = np.zeros((1, 2, 40), np.float32)
    with pytest.raises(KernelError, match="slots"):
        ops.write_kv(key, key, cache.view, 0, np.array([48]))
    with pytest.raises(KernelError, match="layer"):
        ops.write_kv(key, key, cache.view, 3, np.array([0]))
    with pytest.raises(KernelError, match="float64"):
        ops.matrix(ArraySource(np.ones((3, 4))), "float64")  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="tanh"):
        ops.gated_activation(np.zeros((1, 8), np.float32), "tanh", row)  # type: ignore[arg-type]
