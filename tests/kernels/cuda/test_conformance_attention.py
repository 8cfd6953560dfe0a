"""CUDA C attention beyond what all kernels share: work lists, shared prompts, thread orders, the kernels compared.

All of it on both instruments that execute: the sources through g++, and the PTX that NVRTC made of them, interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from bench_support import ORDERS, need_emulator, need_nvrtc, need_sanitizers
from emulated import emulated_operations
from interpreted import interpreted_operations
from kernel_support import NumpyDevice, Paged, paged, queries_for

from cupaged.cache import PagedKVCache
from cupaged.errors import KernelError
from cupaged.kernels.cuda.attention import padded, plain_variant, row_bytes, tensor_variant
from cupaged.kernels.cuda.operations import CudaOperations

# By default the interpreter runs what depends on who shares an item, a grid or a warp; the rest of it with `-m slow`.
INSTRUMENTS = {"emulated": emulated_operations, "interpreted": interpreted_operations}
on_both = pytest.mark.parametrize(
    "instrument",
    [pytest.param("emulated", marks=need_emulator), pytest.param("interpreted", marks=need_nvrtc)],
)
on_both_slowly = pytest.mark.parametrize(
    "instrument",
    [
        pytest.param("emulated", marks=need_emulator),
        pytest.param("interpreted", marks=[need_nvrtc, pytest.mark.slow]),
    ],
)

# name -> (tensor cores, query heads of a KV head): the two kernels as the launch layer chooses them
KERNELS = {"plain": (False, 3), "tensor": (None, 4)}


def operations(kernel: str, instrument: str = "emulated", **options: Any) -> CudaOperations:
    make: Callable[..., CudaOperations] = INSTRUMENTS[instrument]
    return make(tensor_cores=KERNELS[kernel][0], **options)


def heads_of(kernel: str, kv_heads: int = 2) -> int:
    return KERNELS[kernel][1] * kv_heads


def launched(ops: CudaOperations) -> dict[str, tuple[int, ...]]:
    """Kernels launched so far and their last grid; the list is cleared."""
    found = dict(ops.backend.launches)  # type: ignore[attr-defined]
    ops.backend.launches.clear()  # type: ignore[attr-defined]
    return found


@on_both_slowly
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensor_cores_are_chosen_by_group_type_and_device_never_by_the_call(dtype: str, instrument: str) -> None:
    """One kernel serves decode and prefill of a model, so that a query's bits are the same in both."""
    for architecture, group, expected in ((80, 4, True), (80, 8, True), (80, 3, False), (75, 8, False)):
        ops = INSTRUMENTS[instrument](architecture=architecture)
        setup = paged(ops, [70, 9], dtype=dtype)
        for counts in ([1, 1], [70, 1], [5, 2]):
            setup.run(queries_for(counts, 2 * group, 64))
            names = launched(ops)
            assert ("paged_attention_tensor" in names) is expected
            assert ("paged_attention" in names) is not expected


@on_both_slowly
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode_at_every_edge(kernel: str, dtype: str, instrument: str) -> None:
    """Contexts around blocks of 16, slices, tiles of 64 and parts of 512, in one call of mixed lengths."""
    contexts = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 575, 1023, 1024, 1025]
    ops = operations(kernel, instrument)
    setup = paged(ops, contexts, dtype=dtype, dim=64)
    queries = queries_for([1] * len(contexts), heads_of(kernel), 64)
    np.testing.assert_allclose(setup.run(queries), setup.expected(queries), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@need_emulator
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_contexts(kernel: str, dim: int, dtype: str) -> None:
    """Of the interpreter: test_K02_long_contexts_as_compiled."""
    contexts = [2047, 2048, 2049, 4095, 4096, 4097, 4999, 5000]
    setup = paged(operations(kernel), contexts, dtype=dtype, dim=dim, block_size=32)
    queries = queries_for([1, 2, 1, 3, 1, 1, 17, 1], heads_of(kernel), dim)
    sinks = np.linspace(-1, 1, heads_of(kernel), dtype=np.float32)
    for options in ({}, {"window": 1000}, {"soft_cap": 20.0, "sinks": sinks})[: 3 if dim == 64 else 1]:
        np.testing.assert_allclose(
            setup.run(queries, **options), setup.expected(queries, **options), rtol=2e-5, atol=2e-5
        )


@on_both_slowly
@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_and_prefill_of_a_query_have_the_same_bits(kernel: str, instrument: str) -> None:
    ops = operations(kernel, instrument)
    setup = paged(ops, [530], dtype="float16")
    (query,) = queries_for([530], heads_of(kernel), 64)
    (tail,) = [query[480:]]
    whole = setup.run([tail])
    for start, stop in pairwise([480, 481, 490, 511, 512, 513, 530]):
        chunk = setup.run([query[start:stop]], contexts=[stop])
        assert np.array_equal(chunk, whole[start - 480 : stop - 480]), (start, stop)


@on_both_slowly
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_two_kernels_differ_by_less_than_stated(dtype: str, instrument: str) -> None:
    """docs/kernels.md: relative to 1 + |value|, at most 2e-6 in float16 and 2e-5 in bfloat16."""
    results = []
    for tensor in (False, True):
        ops = INSTRUMENTS[instrument](tensor_cores=tensor)
        setup = paged(ops, [700, 40], dtype=dtype, dim=128)
        results.append(setup.run(queries_for([2, 1], 8, 128)))
    difference = np.abs(results[0] - results[1]) / (1 + np.abs(results[0]))
    assert 0 < difference.max() < {"float16": 2e-6, "bfloat16": 2e-5}[dtype]


def shared_front(ops: CudaOperations, common: int, tails: list[int], **shape: Any) -> Paged:
    """Sequences whose first `common` tokens lie in the same blocks."""
    setup = paged(ops, [common + tail for tail in tails], **shape)
    size = setup.cache.block_size
    full = common // size
    for row in range(1, len(tails)):
        setup.tables[row, :full] = setup.tables[0, :full]
        setup.keys[row][: full * size] = setup.keys[0][: full * size]
        setup.values[row][: full * size] = setup.values[0][: full * size]
    return setup


@on_both
@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_shared_at_the_front_are_read_once_for_all(kernel: str, instrument: str) -> None:
    """Parts 0 and 1 are in three tables: one item reads each for all three, and no bit changes."""
    ops = operations(kernel, instrument)
    setup = shared_front(ops, 1024, [5, 17, 600], dtype="float16")
    queries = queries_for([1, 2, 1], heads_of(kernel), 64)
    together = setup.run(queries)
    plan = ops.plan_attention(setup.view, setup.tables, [0, 1, 3, 4], setup.contexts, heads_of(kernel))
    parts = plan.passes[0].work.items[:, 3].tolist()
    rows = plan.variant.rows
    need = 4 * KERNELS[kernel][1]
    assert parts.count(0) == parts.count(1) == -(-need // rows)
    np.testing.assert_allclose(together, setup.expected(queries), rtol=2e-5, atol=2e-5)
    alone = [setup.select([row]).run([queries[row]]) for row in range(3)]
    assert np.array_equal(together, np.concatenate(alone))


@on_both
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_grid_walks_the_same_list(kernel: str, instrument: str) -> None:
    """A grid of one worker, of two, of as many as there are items: the list is on the device, its length too."""
    results = []
    for multiprocessors in (1, 2, 100):
        ops = operations(kernel, instrument)
        ops.backend.multiprocessors = multiprocessors  # type: ignore[misc]
        setup = paged(ops, [700, 3, 130, 64, 65], dtype="float16")
        results.append(setup.run(queries_for([1, 3, 1, 1, 9], heads_of(kernel), 64)))
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@on_both
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_bit_depends_on_the_order_of_threads(kernel: str, instrument: str) -> None:
    results = []
    for order in (*ORDERS, "random:8"):
        ops = operations(kernel, instrument)
        ops.backend.order = order  # type: ignore[attr-defined]
        setup = paged(ops, [600, 20], dtype="float16", dim=80)
        results.append(setup.run(queries_for([1, 3], heads_of(kernel), 80)))
    assert all(np.array_equal(result, results[0]) for result in results)


@need_emulator
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_race_and_no_read_of_what_nobody_wrote(kernel: str) -> None:
    ops = operations(kernel)
    setup = paged(ops, [530, 20], dtype="float16", dim=80)
    queries = queries_for([1, 3], heads_of(kernel), 80)
    before = setup.run(queries, window=515)
    for order in ORDERS:
        ops.backend.order, ops.backend.check = order, "race"  # type: ignore[attr-defined]
        assert np.array_equal(setup.run(queries, window=515), before)


@pytest.mark.slow
@need_sanitizers
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sanitizers_find_nothing(kernel: str, dtype: str) -> None:
    ops = operations(kernel)
    setup = paged(ops, [530, 20], dtype=dtype, dim=80, block_size=8)
    queries = queries_for([1, 3], heads_of(kernel), 80)
    before = setup.run(queries)
    ops.backend.check = "asan"  # type: ignore[attr-defined]
    assert np.array_equal(setup.run(queries), before)


@on_both
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_block_size_compiled_in_changes_no_bit(kernel: str, instrument: str) -> None:
    results = []
    for fixed in (False, True):
        backend = operations(kernel, instrument).backend
        ops = CudaOperations(backend, fixed_block_size=fixed, tensor_cores=KERNELS[kernel][0])
        setup = paged(ops, [100, 33], dtype="float16")
        results.append(setup.run(queries_for([2, 1], heads_of(kernel), 64)))
    assert np.array_equal(*results)


@on_both
def test_heads_that_split_over_items(instrument: str) -> None:
    """A single KV head for 40 query heads: items end in the middle of a token."""
    ops = operations("tensor", instrument)
    setup = paged(ops, [80, 3], dtype="float16", kv_heads=1)
    queries = queries_for([2, 1], 40, 64)
    np.testing.assert_allclose(setup.run(queries), setup.expected(queries), rtol=2e-5, atol=2e-5)


@on_both
def test_queries_too_large_or_small_for_float16(instrument: str) -> None:
    """Rows are scaled by a power of two on the way into tensor cores."""
    ops = operations("tensor", instrument)
    setup = paged(ops, [70], dtype="float16")
    (query,) = queries_for([4], 8, 64)
    for factor in (1e6, 1e-9, 1e30):
        scale = 0.125 / factor
        large = [query * np.float32(factor)]
        np.testing.assert_allclose(
            setup.run(large, scale=scale), setup.expected(large, scale=scale), rtol=2e-5, atol=2e-5
        )


def test_K02_what_a_device_cannot_hold_is_refused_with_numbers() -> None:
    ops = emulated_operations()
    cache = PagedKVCache(4, 16, 1, 272, 1, "float16", NumpyDevice(ops))
    with pytest.raises(KernelError, match=r"head_dim: 272 .* 256"):
        ops.plan_attention(cache.view, np.zeros((1, 1), np.int32), [0, 1], [3], 4)
    small = emulated_operations(shared_limit=32 << 10)
    cache = PagedKVCache(4, 16, 1, 256, 1, "float32", NumpyDevice(small))
    with pytest.raises(KernelError, match=r"256 of float32 needs 40,368 bytes .* 32,768"):
        small.plan_attention(cache.view, np.zeros((1, 1), np.int32), [0, 1], [3], 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 120, 128, 256])
def test_rows_of_shared_memory_start_in_different_banks(head_dim: int, dtype: str) -> None:
    """An odd number of 16-byte chunks a row: eight rows at one column touch each of the 32 banks once."""
    assert row_bytes(head_dim, dtype) % 32 == 16
    assert padded(head_dim) >= head_dim and padded(head_dim) % 16 == 0


@on_both_slowly
@pytest.mark.parametrize(
    ("kernel", "dtype", "limits", "pieces"),
    [
        ("plain", "float16", (163, 99, 64), [1, 2, 4]),
        ("plain", "float32", (163, 99), [1, 4]),
        ("tensor", "bfloat16", (163, 99, 64), [1, 2, 4]),
    ],
)
def test_rows_that_come_in_pieces_change_no_bit(
    kernel: str, dtype: str, limits: tuple[int, ...], pieces: list[int], instrument: str
) -> None:
    """Rows of 512 bytes: a device whose blocks have less shared memory takes their columns one piece after the other.
    Chunks and a NaN too, which one piece has and another has not."""
    results, found = [], []
    for limit in limits:
        ops = operations(kernel, instrument, shared_limit=limit << 10)
        setup = paged(ops, [600, 70], dtype=dtype, dim=256, kv_heads=1)
        queries = queries_for([1, 3], heads_of(kernel, 1), 256)
        found.append(ops.plan_attention(setup.view, setup.tables, [0, 1, 4], setup.contexts, heads_of(kernel, 1)))
        before = setup.run(queries, window=515)
        np.testing.assert_allclose(before, setup.expected(queries, window=515), rtol=2e-5, atol=2e-5)
        value = setup.values[1][68:69].astype(np.float32)
        value[..., 130] = np.nan
        slot = np.array([setup.tables[1, 4] * 16 + 4], np.int64)
        ops.write_kv(setup.keys[1][68:69].astype(np.float32), value, setup.view, setup.layer, slot)
        after = setup.run(queries, window=515)
        assert np.array_equal(np.isnan(after).any((0, 1)), np.arange(256) == 130)
        assert np.isnan(after[2:, :, 130]).all() and not np.isnan(after[:2]).any()
        results.append((before, np.nan_to_num(after)))
    assert [plan.variant.ring.pieces for plan in found] == pieces
    for other in results[1:]:
        assert np.array_equal(other[0], results[0][0]) and np.array_equal(other[1], results[0][1])


@need_emulator
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_come_in_pieces_do_not_race(kernel: str) -> None:
    ops = operations(kernel, shared_limit=99 << 10)
    setup = paged(ops, [130, 20], dtype="float16", dim=256, kv_heads=1)
    queries = queries_for([1, 2], heads_of(kernel, 1), 256)
    before = setup.run(queries)
    for order in ORDERS:
        ops.backend.order, ops.backend.check = order, "race"  # type: ignore[attr-defined]
        assert np.array_equal(setup.run(queries), before)


@pytest.mark.parametrize("limit", [99 << 10, 163 << 10, 227 << 10])
def test_enough_bytes_are_under_way(limit: int) -> None:
    """Rings of decode: 40 KiB and more, from what one block may have of any card from sm_80 on."""
    for head_dim in (64, 80, 96, 128, 256):
        for dtype in ("float16", "bfloat16"):
            for make, rows in ((plain_variant, 1), (tensor_variant, 16)):
                assert make(head_dim, dtype, 16, rows, limit).in_flight >= 40 << 10
