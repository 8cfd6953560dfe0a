"""Paged attention against float64 attention that knows nothing of pages."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from kernel_support import attend, paged, poison, queries_for, rounded, rounds, split

from cupaged.errors import KernelError
from cupaged.kernels.interface import FORMAT_SHIFT, POOL_SHIFT

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
# Where weights are rounded to bfloat16, one that lies between two may go either way: 2^-8 of it, seldom.
ROUNDED = {"rtol": 4e-3, "atol": 4e-3}

# (context, queries) of the sequences of one call; lengths lie around blocks, tiles of 64 and parts of 512.
LENGTHS = {
    "decode": [(n, 1) for n in (1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 128, 129)],
    "parts": [(511, 1), (512, 1), (513, 2), (1025, 1)],
    "prefill": [(1, 1), (33, 33), (70, 70)],
    "chunks": [(100, 37), (130, 66), (65, 1), (64, 63), (600, 20)],
    "mixed": [(0, 1), (5, 5), (2000, 3), (31, 0), (17, 1)],
}
# The same edges with fewer queries, where kernels are interpreted.
FEWER_QUERIES = {
    "prefill": [(1, 1), (17, 17), (33, 33)],
    "chunks": [(100, 5), (130, 18), (65, 1), (64, 3), (600, 4)],
}
FACTORS: dict[str, list[Any]] = {
    "dim": [64, 80, 96, 112, 120, 128, 256, 33],
    "group": [1, 2, 3, 4, 7, 8],
    "block_size": [1, 8, 16, 32, 64],
    "window": [None, 1, "B-1", "B", "B+1", 100],
    "lengths": list(LENGTHS),
    "kv_heads": [1, 2, 3],
    "dtype": ["float32", "float16", "bfloat16"],
    "soft_cap": [None, 1.0, 50.0],
    "layout": ["block_major", "layer_major"],
    "k_transposed": [False, True],
    "sinks": [False, True],
}


def pairwise(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Greedy covering array: every pair of values of two factors occurs in some case."""
    names = list(factors)
    pairs = itertools.combinations(names, 2)
    missing = {(a, x, b, y) for a, b in pairs for x in factors[a] for y in factors[b]}

    def gain(case: dict[str, Any], name: str, value: Any) -> int:
        given = case.items()
        return sum(((o, v, name, value) in missing) + ((name, value, o, v) in missing) for o, v in given)

    cases = []
    while missing:
        first = min(missing, key=str)
        case = {first[0]: first[1], first[2]: first[3]}
        for name in names:
            if name not in case:
                gains = [gain(case, name, value) for value in factors[name]]
                case[name] = factors[name][gains.index(max(gains))]
        cases.append(case)
        missing.difference_update({(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)})
    return cases


def window_of(name: Any, block_size: int) -> int | None:
    window = {"B-1": block_size - 1, "B": block_size, "B+1": block_size + 1}.get(name, name)
    return None if window == 0 else window


def name_of(case: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in case.items())


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=name_of)
def test_K02_K08_P10_attention_equals_float64(ops: Any, case: dict[str, Any], is_interpreted: bool) -> None:
    table = LENGTHS | FEWER_QUERIES if is_interpreted else LENGTHS
    lengths = table[case["lengths"]]
    shape = {name: case[name] for name in ("dim", "block_size", "kv_heads", "dtype", "layout", "k_transposed")}
    setup = paged(ops, [context for context, _ in lengths], **shape)
    heads = case["kv_heads"] * case["group"]
    queries = queries_for([count for _, count in lengths], heads, case["dim"])
    options: dict[str, Any] = {"window": window_of(case["window"], case["block_size"]), "soft_cap": case["soft_cap"]}
    if case["sinks"]:
        options["sinks"] = np.linspace(-2, 3, heads, dtype=np.float32)
    got, expected = setup.run(queries, **options), setup.expected(queries, **options)
    tolerance = ROUNDED if rounds(ops, case["dtype"]) else TOLERANCE
    np.testing.assert_allclose(got, expected, **tolerance)
    assert np.percentile(np.abs(got - expected), 90) < 2e-5


def test_bfloat16_costs_little_precision(ops: Any) -> None:
    """Query and weights may be rounded to bfloat16, where K and V are: at most a few 2^-9 of the values."""
    setup = paged(ops, [300], dtype="bfloat16")
    queries = queries_for([4], 4, 64)
    exact = attend(queries[0], setup.keys[0], setup.values[0], 64**-0.5)
    assert np.abs(setup.run(queries) - exact).max() < 0.003


def test_rough_exp2_is_good_for_bfloat16() -> None:
    """Within 1.02e-4, 1 at the top, NaN stays; below 2^-126 something that is taken for 0."""
    from numba import njit, types

    from cupaged.kernels.cpu.emit import VF as VECTOR
    from cupaged.kernels.cpu.emit import Emitter, like, primitive
    from cupaged.kernels.cpu.vector_math import exp2_rough, rough_range

    @primitive(2)
    def sixteen(e: Emitter, source: Any, target: Any) -> None:
        least, to_whole = rough_range(e, like(VECTOR, 3.0))
        e.store(exp2_rough(e, e.load_as_float(source, "float32"), least, to_whole), target, 4)

    @njit(types.void(types.int64, types.int64, types.int64))
    def run(source, target, count):  # type: ignore[no-untyped-def]
        for i in range(0, count, 16):
            sixteen(source + 4 * i, target + 4 * i)

    x = np.concatenate([np.linspace(-123, 3, 99984), [3, -124, -1e9, -np.inf, np.nan, -122.9999] + [0] * 10])
    x = x.astype(np.float32)
    out = np.empty_like(x)
    run(x.ctypes.data, out.ctypes.data, len(x))
    good = out[:99984] / np.exp2(x[:99984].astype(np.float64) - 3) - 1
    assert 5e-5 < np.abs(good).max() < 1.02e-4
    assert out[99984] == 1
    assert (np.abs(out[99985:99988]) < 2.0**-126).all() and not np.signbit(out[99985:99988]).any()
    assert np.isnan(out[99988])


def test_query_and_out_rows_may_be_strided(ops: Any) -> None:
    setup = paged(ops, [40, 9])
    queries = queries_for([3, 1], 4, 64)
    wide = np.full((4, 1000), np.nan, np.float32)
    wide[:, 100:356] = np.concatenate(queries).reshape(4, 256)
    wide_out = np.full((4, 300), 5, np.float32)
    plan = ops.plan_attention(setup.view, setup.tables, [0, 3, 4], [40, 9], 4)
    query, out = split(wide[:, 100:356], 4, 4, 64), split(wide_out[:, :256], 4, 4, 64)
    ops.paged_attention(query, setup.view, 1, plan, out, 0.125)
    assert np.array_equal(wide_out[:, :256].reshape(4, 4, 64), setup.run(queries))
    assert (wide_out[:, 256:] == 5).all()


def test_scale_is_used(ops: Any) -> None:
    setup = paged(ops, [50])
    queries = queries_for([2], 2, 64)
    for scale in (0.3, 0.01):
        np.testing.assert_allclose(setup.run(queries, scale=scale), setup.expected(queries, scale=scale), **TOLERANCE)


def test_no_rows(ops: Any) -> None:
    setup = paged(ops, [20])
    assert setup.run(queries_for([0], 4, 64)).shape == (0, 4, 64)


def test_K03_window_counts_its_own_key(ops: Any) -> None:
    """Zero keys weigh equally and values tell positions: W = 4 at position 10 averages 7, 8, 9, 10."""
    setup = paged(ops, [11], kv_heads=1)
    at = np.arange(11)
    slots = setup.tables[0, at // 16].astype(np.int64) * 16 + at % 16
    positions = np.broadcast_to(at[:, None, None], (11, 1, 64)).astype(np.float32)
    ops.write_kv(np.zeros((11, 1, 64), np.float32), np.ascontiguousarray(positions), setup.view, 1, slots)
    query = np.ones((11, 1, 64), np.float32)
    by_row = setup.run([query], window=4)[:, 0, 0]
    np.testing.assert_allclose(by_row, [np.mean(at[max(0, i - 3) : i + 1]) for i in at], rtol=1e-6)
    np.testing.assert_allclose(setup.run([query[-1:]], window=4), 8.5, rtol=1e-6)


@pytest.mark.parametrize("window", [1, 15, 16, 17])
def test_K03_prefill_equals_decode_in_a_window(ops: Any, window: int, storage: str) -> None:
    setup = paged(ops, [70], dtype=storage)
    (query,) = queries_for([70], 4, 64)
    whole = setup.run([query], window=window)
    np.testing.assert_allclose(whole, setup.expected([query], window=window), **TOLERANCE)
    for position in (0, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64, 69):
        alone = setup.run([query[position : position + 1]], contexts=[position + 1], window=window)
        assert np.array_equal(alone[0], whole[position])


def test_blocks_before_the_window_may_be_gone(ops: Any) -> None:
    """The manager frees blocks that slid out of the window and leaves -1 in the table."""
    setup = paged(ops, [700, 200])
    queries = queries_for([1, 5], 4, 64)
    before = setup.run(queries, window=100)
    setup.tables[0, : (700 - 100) // 16] = -1
    setup.tables[1, : (200 - 5 - 99) // 16] = -1
    assert np.array_equal(setup.run(queries, window=100), before)


@pytest.mark.parametrize("cap", [1.0, 50.0])
def test_K05_soft_cap_comes_before_the_mask(ops: Any, cap: float, storage: str) -> None:
    """Keys after the query score highest: capped to 1 after the mask they would still weigh."""
    setup = paged(ops, [80], dtype=storage)
    (query,) = queries_for([80], 4, 64)
    query *= 4
    capped = setup.run([query], soft_cap=cap)
    np.testing.assert_allclose(capped, setup.expected([query], soft_cap=cap), **TOLERANCE)
    assert np.abs(capped - setup.run([query])).max() > 1e-3
    assert np.abs(capped - setup.run([query], soft_cap=cap * 2)).max() > 1e-4


def test_sink_counts_once_whatever_the_number_of_parts(ops: Any) -> None:
    """All scores 0 and sink 0: it takes 1 / (n + 1) of the weight, and carries nothing."""
    for context in (1, 64, 513, 1030):
        setup = paged(ops, [context], kv_heads=1)
        at = np.arange(context)
        slots = setup.tables[0, at // 16].astype(np.int64) * 16 + at % 16
        zeros = np.zeros((context, 1, 64), np.float32)
        ops.write_kv(zeros, zeros + 1, setup.view, 1, slots)
        out = setup.run([np.ones((1, 2, 64), np.float32)], sinks=np.zeros(2, np.float32))
        np.testing.assert_allclose(out, context / (context + 1), rtol=1e-5)


def test_absent_sinks_and_minus_infinity_are_the_same(ops: Any) -> None:
    setup = paged(ops, [40])
    queries = queries_for([4], 4, 64)
    no_sinks = setup.run(queries, sinks=np.full(4, -np.inf, np.float32))
    np.testing.assert_allclose(no_sinks, setup.run(queries), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sinks", [None, np.zeros(4, np.float32)], ids=["plain", "sinks"])
def test_K07_K21_row_without_a_visible_key_is_zero(ops: Any, sinks: Any, storage: str) -> None:
    """A context of 0, and more queries than positions: the first ones see nothing. Neighbours are unaffected."""
    setup = paged(ops, [0, 3, 40], dtype=storage)
    queries = queries_for([2, 5, 4], 4, 64)
    out = setup.run(queries, sinks=sinks)
    assert np.array_equal(out[:4], np.zeros((4, 4, 64)))
    assert np.array_equal(out[4:7], setup.select([1]).run([queries[1][2:]], sinks=sinks))
    assert np.array_equal(out[7:], setup.select([2]).run([queries[2]], sinks=sinks))


def test_K07_K21_all_scores_minus_infinity_is_zero(ops: Any) -> None:
    setup = paged(ops, [5, 30])
    keys = setup.keys[0].astype(np.float32)
    keys[..., 0] = -np.inf
    slots = setup.tables[0, 0] * 16 + np.arange(5, dtype=np.int64)
    ops.write_kv(keys, setup.values[0].astype(np.float32), setup.view, 1, slots)
    queries = [np.abs(q) + 0.5 for q in queries_for([1, 2], 4, 64)]
    out = setup.run(queries)
    assert np.array_equal(out[0], np.zeros((4, 64)))
    assert np.array_equal(out[1:], setup.select([1]).run([queries[1]]))


def test_K07_infinite_score_is_not_silent(ops: Any) -> None:
    """+inf: the row is NaN (the engine reports it) or all weight is on that key. Rows that do not see it stay."""
    setup = paged(ops, [20])
    (query,) = queries_for([20], 4, 64)
    query = np.abs(query) + 0.5
    before = setup.run([query])
    key = setup.keys[0][12:13].astype(np.float32)
    key[..., 0] = np.inf
    slots = np.array([setup.tables[0, 0] * 16 + 12], np.int64)
    ops.write_kv(key, setup.values[0][12:13].astype(np.float32), setup.view, 1, slots)
    after = setup.run([query])
    assert np.array_equal(after[:12], before[:12])
    value = np.repeat(setup.values[0][12], 2, axis=0).astype(np.float32)
    assert (np.isnan(after[12:]) | (after[12:] == value)).all()


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("position", [0, 40, 63, 64, 550])
def test_nan_reaches_the_rows_that_see_it_and_no_other(ops: Any, where: str, position: int, storage: str) -> None:
    setup = paged(ops, [600, 90], dtype=storage)
    queries = queries_for([600, 90], 4, 64)
    before = setup.run(queries, window=70)
    key, value = (part[0][position : position + 1].astype(np.float32) for part in (setup.keys, setup.values))
    (key if where == "key" else value)[:, 0] = np.nan  # KV head 0, heads 0 and 1
    slots = np.array([setup.tables[0, position // 16] * 16 + position % 16], np.int64)
    ops.write_kv(key, value, setup.view, 1, slots)
    after = setup.run(queries, window=70)
    seen = slice(position, min(position + 70, 600))
    assert np.isnan(after[seen, :2]).all()
    after[seen, :2] = before[seen, :2]
    assert np.array_equal(after, before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("position", [70, 130])
def test_nan_value_in_tiles_that_others_see_wholly(ops: Any, position: int, dtype: str) -> None:
    """Several tiles may be taken together: the NaN of one must not reach rows that end before it."""
    setup = paged(ops, [200], dtype=dtype)
    (query,) = queries_for([200], 4, 64)
    before = setup.run([query])
    key, value = (part[0][position : position + 1].astype(np.float32) for part in (setup.keys, setup.values))
    value[:, 0] = np.nan
    slots = np.array([setup.tables[0, position // 16] * 16 + position % 16], np.int64)
    ops.write_kv(key, value, setup.view, 1, slots)
    after = setup.run([query])
    assert np.isnan(after[position:, :2]).all()
    assert np.array_equal(after[:position], before[:position]) and np.array_equal(after[:, 2:], before[:, 2:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("factor", [1e6, 1e30])
def test_huge_scores_leave_the_greatest_alone(ops: Any, factor: float, dtype: str) -> None:
    """Differences of millions: all weight is on one key, whichever part it is in, and nothing overflows."""
    setup = paged(ops, [600], dtype=dtype)
    (query,) = queries_for([9], 4, 64)
    out = setup.run([query * np.float32(factor)])
    scores = np.einsum("thd,khd->thk", rounded(query, "bfloat16"), np.repeat(setup.keys[0], 2, axis=1))
    scores = np.where(np.arange(600) > np.arange(591, 600)[:, None, None], -np.inf, scores)
    clear = np.partition(scores, -2)[..., -1] - np.partition(scores, -2)[..., -2] > 0.5  # however queries are rounded
    best = scores.argmax(-1)
    expected = np.stack([setup.values[0][best[:, head], head // 2] for head in range(4)], axis=1)
    assert clear.sum() > 10
    np.testing.assert_allclose(out[clear], expected[clear], rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_K08_contents_of_unused_slots_do_not_matter(ops: Any, value: float, dtype: str) -> None:
    """Also the other layer's slots of used blocks, and slots behind the context in the last block."""
    setup = paged(ops, [33, 5], dtype=dtype, dim=80)
    queries = queries_for([2, 1], 6, 80)
    before = setup.run(queries)
    keep = [setup.cache.gather(1, row, context) for row, context in zip(setup.tables, setup.contexts, strict=True)]
    array = setup.view.pools[0]
    bits = {np.inf: 0x7F80, -np.inf: 0xFF80}
    poison(array) if np.isnan(value) else array.fill(bits[value] if dtype == "bfloat16" else value)
    for row, context, (keys, values) in zip(setup.tables, setup.contexts, keep, strict=True):
        at = np.arange(context)
        ops.write_kv(keys, values, setup.view, 1, row[at // 16].astype(np.int64) * 16 + at % 16)
    assert np.array_equal(setup.run(queries), before)
    assert np.isfinite(before).all()


def test_P10_table_order_is_followed(ops: Any) -> None:
    """Blocks 7, 0, 4 by hand, written with plain NumPy: no slot arithmetic beyond one block."""
    setup = paged(ops, [100], dim=64, kv_heads=1, num_layers=1, layer=0)  # 7 blocks and 3 spare ones
    poison(setup.view.pools[0])
    blocks = setup.view.pools[0].reshape(10, 2, 16, 64)
    rng = np.random.default_rng(5)
    keys, values = rng.standard_normal((2, 40, 1, 64), np.float32)
    for position in range(40):
        block = (7, 0, 4)[position // 16]
        blocks[block, 0, position % 16], blocks[block, 1, position % 16] = keys[position, 0], values[position, 0]
    setup.tables[0, :3] = (7, 0, 4)
    setup.keys, setup.values, setup.contexts = [keys.astype(np.float64)], [values.astype(np.float64)], [40]
    queries = queries_for([3], 2, 64)
    np.testing.assert_allclose(setup.run(queries), setup.expected(queries), **TOLERANCE)


@pytest.mark.parametrize("k_transposed", [False, True])
def test_blocks_of_several_pools_give_the_same_bits(ops: Any, k_transposed: bool) -> None:
    """A sequence may lie partly on the host: pool bits are resolved block by block."""
    setup = paged(ops, [600, 130], dtype="float16", k_transposed=k_transposed)
    queries = queries_for([3, 130], 6, 64)
    before = setup.run(queries, window=None)
    device = setup.view.pools[0]
    stride = setup.view.block_stride
    host = np.full(len(device) + 2 * stride, np.nan, np.float16)
    moved = setup.tables.copy()
    for index, (row, column) in enumerate(zip(*np.nonzero(setup.tables >= 0), strict=True)):
        if index % 3 == 0:
            continue
        frame = int(setup.tables[row, column])
        host[(frame + 2) * stride : (frame + 3) * stride] = device[frame * stride : (frame + 1) * stride]
        device[frame * stride : (frame + 1) * stride] = np.nan
        moved[row, column] = ((1 if index % 3 == 1 else 3) << POOL_SHIFT) | (frame + 2)
    setup.view = dataclasses.replace(setup.view, pools=(device, host, None, host.copy()))
    setup.tables = moved
    assert np.array_equal(setup.run(queries), before)


def test_K12_heads_that_do_not_divide_are_refused_with_both_numbers(ops: Any) -> None:
    setup = paged(ops, [20], kv_heads=3)
    for heads in (8, 2, 0):
        with pytest.raises(KernelError, match=rf"\b{heads}\b.*\b3\b"):
            setup.run(queries_for([1], heads, 64))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (-1, "no block"),
        (1 << FORMAT_SHIFT, "packed"),
        (1 << POOL_SHIFT, "pool 1"),
        (3 << POOL_SHIFT, "pool 3"),
        (100, "100"),
    ],
)
def test_unusable_block_references_are_refused(ops: Any, reference: int, message: str) -> None:
    setup = paged(ops, [40, 40])
    setup.tables[1, 2] = reference
    with pytest.raises(KernelError, match=message):
        setup.run(queries_for([1, 1], 4, 64))


@pytest.mark.parametrize(
    ("starts", "contexts", "window", "message"),
    [
        ([0, 1, 2], [40, 49], None, "context_lens"),
        ([0, 1, 2], [40, -1], None, "context_lens"),
        ([0, 2, 1], [40, 40], None, "query_starts"),
        ([1, 2, 3], [40, 40], None, "query_starts"),
        ([0, 1], [40, 40], None, "query_starts"),
        ([0, 1, 2], [40, 40], 0, "window"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    ops: Any, starts: list[int], contexts: list[int], window: int | None, message: str
) -> None:
    setup = paged(ops, [40, 40])
    with pytest.raises(KernelError, match=message):
        ops.plan_attention(setup.view, setup.tables, starts, contexts, 4, window)
