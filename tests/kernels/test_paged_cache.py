"""PagedKVCache, and the checked library face `write_kv` and `paged_attention`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_support import NumpyDevice, attend, paged, poison, queries_for, rounded

from cupaged import BlockTable, PagedKVCache, paged_attention, write_kv
from cupaged.errors import CupagedError, KernelError, OptionError
from cupaged.kernels.interface import FORMAT_SHIFT, POOL_SHIFT
from cupaged.kernels.reference import ReferenceOperations


def small(ops: Any = None, **options: Any) -> PagedKVCache:
    arguments: dict[str, Any] = {"num_blocks": 6, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "num_layers": 3}
    device = NumpyDevice(ReferenceOperations() if ops is None else ops)
    return PagedKVCache(**arguments | {"device": device} | options)


def tokens(count: int, heads: int = 2, dim: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    key, value = np.random.default_rng(seed).standard_normal((2, count, heads, dim), np.float32)
    return key, value


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("num_blocks", 0, "1..268435456"),
        ("num_blocks", 2**28 + 1, "1..268435456"),
        ("num_blocks", 1.5, "whole"),
        ("num_blocks", True, "1.."),
        ("block_size", 0, "1..256"),
        ("block_size", 257, "1..256"),
        ("num_kv_heads", -1, "1.."),
        ("head_dim", 0, "1.."),
        ("num_layers", None, "whole"),
        ("dtype", "float64", "float32, float16, bfloat16"),
        ("layout", "slot_major", "block_major, layer_major"),
    ],
)
def test_constructor_names_the_argument_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        small(**{name: value})
    assert str(caught.value).startswith(name)
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_large_a_cache_is_refused_with_its_bytes() -> None:
    class Full(NumpyDevice):
        def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            raise MemoryError("no room")

    with pytest.raises(OptionError, match=r"num_blocks: 9,216 bytes.*no room"):
        small(device=Full(ReferenceOperations()))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sizes(dtype: Any) -> None:
    """R05's arithmetic: 2 (K and V) x layers x block size x KV heads x head dim x bytes."""
    cache = small(dtype=dtype)
    element = 4 if dtype == "float32" else 2
    assert cache.bytes_per_block == 2 * 3 * 4 * 2 * 8 * element
    assert cache.nbytes == 6 * cache.bytes_per_block == cache.view.pools[0].nbytes
    large = small(num_blocks=1, block_size=16, num_kv_heads=8, head_dim=128, num_layers=32, dtype="float16")
    assert large.bytes_per_block == 2 << 20


def test_default_device_is_the_cpu_with_its_alignment_and_key_order() -> None:
    from cupaged.device import get_device

    cache = PagedKVCache(3, 16, 1, 8, 1)
    assert cache.device is get_device("cpu")
    assert cache.view.k_transposed is get_device("cpu").k_transposed
    assert cache.view.pools[0].ctypes.data % 64 == 0
    key, value = tokens(20, heads=1)
    write_kv(key, value, cache, 0, np.arange(20) + 16)
    query = queries_for([1], 2, 8)[0]
    out = paged_attention(query, cache, 0, [[1, 2]], [20])
    np.testing.assert_allclose(out, attend(query, key, value, 8**-0.5), rtol=2e-5, atol=2e-5)


def test_the_array_is_not_touched() -> None:
    """Pages of a large cache must not come into being before blocks are written."""

    class Lent(NumpyDevice):
        def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            return np.full(shape, 7, dtype)

    assert (small(device=Lent(ReferenceOperations())).view.pools[0] == 7).all()


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
@pytest.mark.parametrize("k_transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gather_returns_what_write_stored(ops: Any, layout: Any, k_transposed: bool, dtype: Any) -> None:
    cache = small(ops, layout=layout, k_transposed=k_transposed, dtype=dtype)
    poison(cache.view.pools[0])
    key, value = tokens(7)
    refs = [4, 1]
    cache.write(2, [16, 17, 18, 19, 4, 5, 6], key, value)
    got_key, got_value = cache.gather(2, refs, 7)
    assert got_key.dtype == got_value.dtype == np.float32
    assert np.array_equal(got_key, rounded(key, dtype)) and np.array_equal(got_value, rounded(value, dtype))
    assert np.isnan(cache.gather(1, refs, 7)[0]).all()
    assert cache.gather(2, refs, 0)[0].shape == (0, 2, 8)
    for layer, table, count in (
        (3, refs, 7),
        (-1, refs, 7),
        (2, [4], 7),
        (2, [4, 6], 7),
        (2, [4, -1], 7),
        (2, refs, -1),
    ):
        with pytest.raises(KernelError):
            cache.gather(layer, table, count)


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
def test_block_bytes_are_layers_of_k_then_v(layout: Any) -> None:
    cache = small(layout=layout)
    cache.view.pools[0][:] = np.arange(cache.view.pools[0].size, dtype=np.float32)
    unit = 2 * 2 * 4 * 8
    first = cache.block_bytes(2).view(np.float32)
    starts = [(2 * 3 + layer) * unit if layout == "block_major" else (layer * 6 + 2) * unit for layer in range(3)]
    assert np.array_equal(first, np.concatenate([np.arange(start, start + unit) for start in starts]))
    assert len(cache.block_bytes(0)) == cache.bytes_per_block
    for frame in (-1, 6):
        with pytest.raises(KernelError, match="frame"):
            cache.block_bytes(frame)


def test_copy_blocks_takes_pairs_and_plan_items(ops: Any) -> None:
    cache = small(ops)
    cache.view.pools[0][:] = np.arange(cache.view.pools[0].size, dtype=np.float32)
    before = [cache.block_bytes(frame) for frame in range(6)]
    cache.copy_blocks([(0, 3), SimpleNamespace(source=0, destination=5), (1, 4)])
    for frame, source in enumerate([0, 1, 2, 0, 1, 0]):
        assert np.array_equal(cache.block_bytes(frame), before[source])
    cache.copy_blocks([])
    for bad in ([(0, 6)], [(-1, 0)], [(0, 1), (2, 1)], [(0, 1), (1, 2)], [(0, (1 << POOL_SHIFT) | 1)]):
        with pytest.raises(KernelError, match=r"source|destination"):
            cache.copy_blocks(bad)


def test_face_equals_operations_and_takes_every_form_of_table(ops: Any) -> None:
    setup = paged(ops, [40, 5, 100], dtype="float16")
    queries = queries_for([3, 1, 100], 6, 64)
    query = np.concatenate(queries)
    options: dict[str, Any] = {"window": 30, "soft_cap": 20.0, "sinks": np.ones(6, np.float32)}
    expected = setup.run(queries, **options)
    lists = [[int(ref) for ref in row if ref >= 0] for row in setup.tables]
    block_tables = []
    for refs in lists:
        table = BlockTable(16)
        for ref in refs:
            table.append_block(ref)
        block_tables.append(table)
    for tables in (setup.tables, setup.tables.astype(np.int64), lists, block_tables):
        out = paged_attention(query, setup.cache, 1, tables, [40, 5, 100], query_lens=[3, 1, 100], **options)
        assert np.array_equal(out, expected)
    given = np.empty_like(query)
    out = paged_attention(
        query, setup.cache, 1, lists, [40, 5, 100], 64**-0.5, query_lens=[3, 1, 100], out=given, **options
    )
    assert out is given
    assert np.array_equal(given, expected)


def test_face_decodes_by_default(ops: Any) -> None:
    setup = paged(ops, [40, 5, 100])
    queries = queries_for([1, 1, 1], 4, 64)
    out = paged_attention(np.concatenate(queries), setup.cache, 1, setup.tables, np.array([40, 5, 100]))
    assert np.array_equal(out, setup.run(queries))
    np.testing.assert_allclose(out, setup.expected(queries), rtol=2e-5, atol=2e-5)


def test_face_takes_padding_and_no_sequences(ops: Any) -> None:
    setup = paged(ops, [40])
    (query,) = queries_for([3], 4, 64)
    out = paged_attention(query, setup.cache, 1, [setup.tables[0].tolist(), [], []], [40, 0, 0])
    assert np.array_equal(out[:1], setup.run([query[:1]]))
    assert not out[1:].any()
    assert paged_attention(query[:0], setup.cache, 1, [], []).shape == (0, 4, 64)


def attention_arguments() -> dict[str, Any]:
    cache = small(num_layers=1)
    write_kv(*tokens(24), cache, 0, np.arange(24))
    query = np.ones((2, 4, 8), np.float32)
    return {"query": query, "cache": cache, "layer": 0, "tables": [[0, 1], [2, 3]], "context_lens": [8, 5]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 1}, r"layer: 1 .*0\.\.0"),
        ({"query": np.ones((2, 4, 8))}, "query: .*float32.*float64"),
        ({"query": np.ones((2, 4, 9), np.float32)}, r"query: .*\[2, 4, 8\].*\[2, 4, 9\]"),
        ({"query": np.ones((3, 4, 8), np.float32)}, r"query: .*\[2, 4, 8\].*\[3, 4, 8\]"),
        ({"query": np.ones((2, 8), np.float32)}, r"query: .*three dimensions.*\(2, 8\)"),
        ({"query": np.ones((2, 3, 8), np.float32)}, r"query: 3 heads.* 2 KV heads"),
        ({"query": np.ones((2, 8, 4), np.float32).swapaxes(1, 2)}, "query: .*strided"),
        ({"tables": [[0, 1]]}, "tables: .*2 rows.*1"),
        ({"tables": [[0, 1], [2, 6]]}, r"tables\[1, 1\]: 6 .*6"),
        ({"tables": [[0, -1], [2, 3]]}, r"tables\[0, 1\]: -1"),
        ({"tables": [[0, 1 << FORMAT_SHIFT], [2, 3]]}, r"tables\[0, 1\]"),
        ({"tables": [[0, 1 << POOL_SHIFT], [2, 3]]}, r"tables\[0, 1\]"),
        ({"tables": [[0, 2**31], [2, 3]]}, "tables: .*int32"),
        ({"tables": np.ones((2, 2), np.float32)}, "tables: .*integers.*float32"),
        ({"tables": np.ones(2, np.int32)}, "tables: .*2 dimension"),
        ({"context_lens": [9, 5]}, r"context_lens\[0\]: 9 .*0\.\.8"),
        ({"context_lens": [8, -1]}, r"context_lens\[1\]: -1"),
        ({"context_lens": [8.5, 5]}, "context_lens: .*integers"),
        ({"query_lens": [2]}, "query_lens: expected 2.*got 1"),
        ({"query_lens": [3, -1]}, r"query_lens\[1\]: -1"),
        ({"query_lens": [0, 2], "context_lens": [8, 1]}, r"query_lens\[1\]: 2 .*0\.\.1"),
        ({"window": 0}, "window: .*at least 1.*0"),
        ({"soft_cap": 0.0}, "soft_cap: .*above 0"),
        ({"soft_cap": float("inf")}, "soft_cap: .*inf"),
        ({"scale": float("nan")}, "scale: .*nan"),
        ({"sinks": np.ones(3, np.float32)}, r"sinks: .*\[4\].*\[3\]"),
        ({"sinks": np.ones(4)}, "sinks: .*float32"),
        ({"sinks": np.ones(8, np.float32)[::2]}, "sinks: .*strided"),
        ({"out": np.empty((2, 4, 7), np.float32)}, "out: "),
        ({"out": np.empty((2, 4, 8), np.float16)}, "out: .*float16"),
    ],
)
def test_face_names_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    arguments = attention_arguments()
    assert np.isfinite(paged_attention(**arguments)).all()
    with pytest.raises(KernelError, match=message) as caught:
        paged_attention(**arguments | change)
    assert isinstance(caught.value, CupagedError)
    assert "\n" not in str(caught.value)


def test_face_refuses_an_output_over_its_query() -> None:
    arguments = attention_arguments()
    with pytest.raises(KernelError, match="out: overlaps query"):
        paged_attention(**arguments, out=arguments["query"])


def test_face_lets_blocks_before_the_window_be_gone() -> None:
    arguments = attention_arguments()
    expected = paged_attention(**arguments, window=3)
    assert np.array_equal(paged_attention(**arguments | {"tables": [[-1, 1], [2, 3]]}, window=3), expected)
    with pytest.raises(KernelError, match=r"tables\[0, 0\]: -1 is no plain block"):
        paged_attention(**arguments | {"tables": [[-1, 1], [2, 3]]}, window=5)
    several = arguments | {"query": np.ones((4, 4, 8), np.float32), "query_lens": [3, 1]}  # the first sees 3, 4, 5
    with pytest.raises(KernelError, match=r"tables\[0, 0\]: -1 is no plain block"):
        paged_attention(**several | {"tables": [[-1, 1], [2, 3]]}, window=3)
    assert np.isfinite(paged_attention(**several | {"tables": [[-1, 1], [2, 3]]}, window=2)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 3}, r"layer: 3"),
        ({"key": np.ones((2, 2, 8))}, "key: .*float64"),
        ({"value": np.ones((2, 3, 8), np.float32)}, r"value: .*\[2, 2, 8\].*\[2, 3, 8\]"),
        ({"key": np.ones((2, 8, 2), np.float32).swapaxes(1, 2)}, "key: .*strided"),
        ({"slots": [0, 24]}, "slots: 24 .*24"),
        ({"slots": [3, 3]}, "slots: .*twice"),
        ({"slots": [0]}, "key: "),
        ({"slots": [0.0, 1.0]}, "slots: .*integers"),
        ({"slots": [[0, 1]]}, "slots: .*1 dimension"),
    ],
)
def test_write_kv_names_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    key, value = tokens(2)
    arguments: dict[str, Any] = {"key": key, "value": value, "cache": small(), "layer": 0, "slots": [5, -1]}
    write_kv(**arguments)
    assert np.array_equal(arguments["cache"].gather(0, [1], 2)[0][1], key[0])
    with pytest.raises(KernelError, match=message):
        write_kv(**arguments | change)
