"""A row's arithmetic depends on the row and its position alone: compared bit for bit, for every implementation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from kernel_support import ArraySource, paged, queries_for

from cupaged.device import make_device
from cupaged.kernels.interface import SampleRows

# Around tiles of 64 and parts of 512; with them the first and last of everything.
POSITIONS = (0, 1, 7, 8, 15, 16, 62, 63, 64, 65, 127, 128, 300, 510, 511, 512, 513, 575, 576, 599)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100},
    "capped-with-sinks": {"soft_cap": 30.0, "sinks": np.linspace(-1, 2, 6, dtype=np.float32)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (80, "float32"), (33, "float16")])
def test_prefill_chunks_and_decode_give_the_same_bits(ops: Any, options: dict[str, Any], dim: int, dtype: str) -> None:
    setup = paged(ops, [600], dim=dim, dtype=dtype)
    (query,) = queries_for([600], 6, dim)
    whole = setup.run([query], **options)
    edges = [0, 1, 64, 65, 100, 228, 511, 513, 514, 600]
    for start, stop in pairwise(edges):
        chunk = setup.run([query[start:stop]], contexts=[stop], **options)
        assert np.array_equal(chunk, whole[start:stop]), (start, stop)
    for position in POSITIONS:
        alone = setup.run([query[position : position + 1]], contexts=[position + 1], **options)
        assert np.array_equal(alone[0], whole[position]), position


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_company_does_not_change_bits(ops: Any, options: dict[str, Any]) -> None:
    contexts = [600, 1, 64, 65, 513, 130, 17]
    setup = paged(ops, contexts, dtype="float16")
    queries = queries_for([1, 1, 64, 1, 200, 50, 1], 6, 64)
    together = setup.run(queries, **options)
    ends = np.cumsum([len(q) for q in queries])
    for row, end in enumerate(ends):
        alone = setup.select([row]).run([queries[row]], **options)
        assert np.array_equal(alone, together[end - len(queries[row]) : end]), row
    order = [4, 0, 6, 2]
    shuffled = setup.select(order).run([queries[row] for row in order], **options)
    expected = np.concatenate([together[ends[row] - len(queries[row]) : ends[row]] for row in order])
    assert np.array_equal(shuffled, expected)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_size_layout_and_key_order_do_not_change_bits(ops: Any, options: dict[str, Any], dtype: str) -> None:
    queries = queries_for([3, 1, 70], 6, 96)
    results = [
        paged(ops, [600, 33, 140], dim=96, dtype=dtype, block_size=size, layout=layout, k_transposed=order, seed=4).run(
            queries, **options
        )
        for size, layout, order in [
            (16, "block_major", False),
            (8, "block_major", True),
            (32, "layer_major", False),
            (16, "layer_major", True),
            (64, "block_major", True),
            (1, "layer_major", False),
            (24, "block_major", True),
            (256, "block_major", False),
        ]
    ]
    for other in results[1:]:
        assert np.array_equal(other, results[0])


def test_placement_of_blocks_does_not_change_bits(ops: Any) -> None:
    queries = queries_for([2, 9], 6, 64)
    first = paged(ops, [150, 40], seed=4)
    second = paged(ops, [150, 40], seed=4)
    second.tables = np.array(second.tables)
    keys, values = (
        [second.cache.gather(1, row, n)[i] for row, n in zip(second.tables, [150, 40], strict=True)] for i in (0, 1)
    )
    frames = iter(np.random.default_rng(77).permutation(second.cache.num_blocks))
    for row, (context, k, v) in enumerate(zip([150, 40], keys, values, strict=True)):
        count = -(-context // 16)
        second.tables[row, :count] = [next(frames) for _ in range(count)]
        at = np.arange(context)
        ops.write_kv(k, v, second.view, 1, second.tables[row, at // 16].astype(np.int64) * 16 + at % 16)
    assert not np.array_equal(first.tables, second.tables)
    assert np.array_equal(first.run(queries), second.run(queries))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("rows", "cols"), [(37, 70), (192, 576), (1, 1), (300, 33), (64, 1536)])
def test_matmul_rows_do_not_depend_on_their_number(ops: Any, rows: int, cols: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    weight = ops.matrix(ArraySource(rng.standard_normal((rows, cols), np.float32)), dtype)
    bias = rng.standard_normal(rows, np.float32)
    x = rng.standard_normal((20, cols), np.float32)
    whole = np.empty((20, rows), np.float32)
    ops.matmul(x, weight, whole, bias)
    for count in range(1, 21):
        for offset in {0, (20 - count) // 2, 20 - count}:
            out = np.full((count, rows), np.nan, np.float32)
            ops.matmul(x[offset : offset + count], weight, out, bias)
            assert np.array_equal(out, whole[offset : offset + count]), (count, offset)
    many = np.empty((140, rows), np.float32)
    ops.matmul(np.tile(x, (7, 1)), weight, many, bias)
    assert np.array_equal(many, np.tile(whole, (7, 1)))


def test_row_operations_do_not_depend_on_their_number(ops: Any) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((20, 6 * 80), np.float32)
    weight = rng.standard_normal(6 * 80).astype(np.float32)
    head_weight = rng.standard_normal(80).astype(np.float32)
    positions = rng.integers(0, 50, 20).astype(np.int32)
    table = np.cos(rng.standard_normal((50, 64))).astype(np.float32)

    def everything(part: slice) -> list[np.ndarray]:
        rows = np.ascontiguousarray(x[part])
        normed, residual = np.empty_like(rows), rows[:, ::-1].copy()
        ops.rms_norm(rows, weight, 1e-5, normed, residual)
        heads = rows.copy().reshape(-1, 6, 80)
        ops.head_norm(heads, head_weight, 1e-6)
        turned = rows.copy().reshape(-1, 6, 80)
        ops.rope(turned, positions[part], table)
        activated = np.empty((len(rows), 240), np.float32)
        ops.gated_activation(rows, "silu", activated)
        total = rows.copy()
        ops.add(total, normed)
        return [normed, residual, heads, turned, activated, total]

    whole = everything(slice(0, 20))
    for part in (slice(0, 1), slice(7, 8), slice(3, 16), slice(19, 20), slice(5, 7)):
        for one, all_rows in zip(everything(part), whole, strict=True):
            assert np.array_equal(one, all_rows[part])


def test_thread_count_does_not_change_bits() -> None:
    """Of the CPU device: the same rows computed by 1, 2, 3 and 5 threads."""
    rng = np.random.default_rng(6)
    source = ArraySource(rng.standard_normal((300, 200), np.float32))
    x, norm_weight = rng.standard_normal((130, 200), np.float32), rng.standard_normal(200).astype(np.float32)
    queries = queries_for([150, 1, 1, 40], 6, 64)
    results = []
    for threads in (1, 2, 3, 5):
        device = make_device("cpu", threads=threads)
        try:
            product, normed = np.empty((130, 300), np.float32), np.empty_like(x)
            device.ops.matmul(x, device.ops.matrix(source, "bfloat16"), product)
            device.ops.rms_norm(x, norm_weight, 1e-5, normed)
            attended = paged(device.ops, [150, 1100, 1, 700], dtype="float16").run(queries, window=600)
            ids = SampleRows([0.9] * 20, [0] * 20, [0.9] * 20, [0.0] * 20, [3] * 20, [0] * 20, list(range(20)))
            results.append([product, normed, attended, np.array(device.ops.sample(product[:20].copy(), ids))])
        finally:
            device.close()
    for other in results[1:]:
        for one, first in zip(other, results[0], strict=True):
            assert np.array_equal(one, first)


def test_sampled_tokens_do_not_depend_on_company(ops: Any) -> None:
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((12, 1000), np.float32) * 2
    settings = [
        {
            "temperature": (0.0, 0.7, 1.0, 1.3)[i % 4],
            "top_k": (0, 50, 3)[i % 3],
            "top_p": (1.0, 0.9)[i % 2],
            "min_p": (0.0, 0.05, 0.0, 0.0, 0.01)[i % 5],
            "seed": i * 1000003,
            "sample": i % 3,
            "position": i * 17,
        }
        for i in range(12)
    ]

    def sample(rows: list[int]) -> list[int]:
        fields = {name: [settings[row][name] for row in rows] for name in settings[0]}
        return [int(token) for token in ops.sample(np.ascontiguousarray(logits[rows]), SampleRows(**fields))]

    together = sample(list(range(12)))
    assert [sample([row])[0] for row in range(12)] == together
    assert sample([5, 0, 11, 3]) == [together[row] for row in (5, 0, 11, 3)]
