"""The CPU's work list of attention: every part of every token once, and blocks that tables share read together.

Tables that share blocks and tables of equal contents that do not must give the same bits.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from kernel_support import NumpyDevice, Paged, contents, paged, poison, queries_for

from cupaged.cache import PagedKVCache
from cupaged.device import get_device
from cupaged.kernels.cpu import plan as plan_module
from cupaged.kernels.cpu.attention_record import (
    ALL,
    ITEM_WORDS,
    LONG,
    TOKEN_WORDS,
    heads_together,
    item_tokens,
    max_rows,
)
from cupaged.kernels.cpu.plan import CpuAttentionPlan, Planner, make_plan, shared_fronts
from cupaged.kernels.interface import PART, POOL_SHIFT, TILE


def shared_tables(
    fronts: list[tuple[int, int]], contexts: list[int], block_size: int, width: int | None = None
) -> np.ndarray:
    """Tables of sequences: of each, (which front, tokens of it) and then blocks of its own, unlike all others."""
    own = iter(range(10_000, 1_000_000))
    width = width or max(-(-context // block_size) for context in contexts)
    tables = np.full((len(contexts), width), -1, np.int32)
    for row, ((front, tokens), context) in enumerate(zip(fronts, contexts, strict=True)):
        count, shared = -(-context // block_size), min(tokens, context) // block_size
        tables[row, :shared] = front * 1000 + np.arange(shared)
        tables[row, shared:count] = [next(own) for _ in range(count - shared)]
    return tables


def check_plan(
    plan: CpuAttentionPlan, tables: np.ndarray, counts: list[int], contexts: list[int], block_size: int, group: int,
    window: int | None,
) -> int:  # fmt: skip
    """That the plan does all there is to do, once; gives the tokens of context that items read, summed over items."""
    at = plan.tokens.__array_interface__["data"][0]
    first_row = [0, *accumulate(counts)]
    seen: dict[tuple[int, int], int] = {}
    read = 0
    assert plan.items.shape[1] == ITEM_WORDS and plan.tokens.shape == (sum(counts), TOKEN_WORDS)
    assert sorted(plan.tokens[:, 0]) == list(range(sum(counts)))
    lengths = {}
    for row, position, low, table_at, _, parts, *_ in plan.tokens.tolist():
        sequence = next(s for s in range(len(counts)) if first_row[s] <= row < first_row[s + 1])
        assert position == contexts[sequence] - counts[sequence] + row - first_row[sequence]
        assert low == (0 if window is None else max(0, position - window + 1))
        assert table_at == tables.__array_interface__["data"][0] + sequence * tables.shape[1] * 4
        lengths[row] = (sequence, position, low)
        assert parts == max(0, position // PART + 1 - low // PART)
    in_whole: set[int] = set()
    for token_at, size, begin, end, shared, whole, *_ in plan.items.tolist():
        first = (token_at - at) // (8 * TOKEN_WORDS)
        members = plan.tokens[first : first + size, 0].tolist()
        assert size * group <= max_rows(group)
        one = len({lengths[row][0] for row in members}) == 1
        assert shared == ALL if one else shared % TILE == 0
        for part in range(begin, end):
            together = min(shared, (part + 1) * PART)
            if not one:
                blocks = slice(part * PART // block_size, together // block_size)
                rows = np.array([tables[lengths[row][0], blocks] for row in members])
                assert (rows == rows[0]).all() and together > part * PART
                assert all(together <= lengths[row][1] + 1 for row in members)
                read += together - part * PART
            for row in members:
                _, position, low = lengths[row]
                if low // PART <= part <= position // PART and position >= 0:
                    seen[row, part] = seen.get((row, part), 0) + 1
                    if not one:
                        read += max(0, min(position + 1, (part + 1) * PART) - together)
        if one:
            last = max(lengths[row][1] for row in members)
            read += max(0, min(end * PART, last + 1) - max(begin * PART, min(lengths[row][2] for row in members)))
        if whole:
            assert not in_whole & set(members)
            in_whole |= set(members)
            for row in members:
                _, position, low = lengths[row]
                assert position < 0 or (begin <= low // PART and position // PART < end)
    for row, (_, position, low) in lengths.items():
        for part in range(low // PART, position // PART + 1 if position >= 0 else 0):
            assert seen.pop((row, part)) == 1
    assert not seen
    merged = (plan.merges - at) // (8 * TOKEN_WORDS)
    assert set(plan.tokens[merged, 0].tolist()) == set(lengths) - in_whole
    slots = [s + p for s, parts in plan.tokens[merged][:, 4:6].tolist() for p in range(parts)]
    assert sorted(slots) == list(range(plan.num_states))
    return read


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("window", [None, 1, 100, 700])
def test_every_part_of_every_token_is_computed_once(threads: int, window: int | None) -> None:
    rng = np.random.default_rng(threads)
    for trial in range(60):
        count = int(rng.integers(1, 40))
        block_size, group = int(rng.choice([8, 16, 24, 64])), int(rng.choice([1, 3, 4, 7, 64]))
        contexts = rng.integers(0, int(rng.choice([70, 600, 2500])), count).tolist()
        counts = [1] * count if trial % 2 else rng.integers(0, 90, count).tolist()
        fronts = [(int(rng.integers(0, 3)), int(rng.integers(0, 2000))) for _ in range(count)]
        tables = shared_tables(fronts, contexts, block_size, max(1, -(-max(contexts) // block_size)))
        starts = np.array([0, *accumulate(counts)])
        plan = make_plan(tables, starts, np.array(contexts), group, 3, 2, block_size, window, threads)
        check_plan(plan, tables, counts, contexts, block_size, group, window)
        assert plan.chunks == len(plan.items) * -(-3 // plan.heads_a_chunk)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_shared_front_is_read_once(threads: int) -> None:
    """Eight samples over a prompt of 1,024 tokens, each 100 further: 1,024 and eight tails, not eight contexts."""
    contexts = [1124] * 8
    tables = shared_tables([(1, 1024)] * 8, contexts, 16)
    plan = make_plan(tables, np.arange(9), np.array(contexts), 3, 3, 3, 16, None, threads)
    assert check_plan(plan, tables, [1] * 8, contexts, 16, 3, None) == 1024 + 8 * 100
    # a table of nobody's, between them, changes nothing for the others
    contexts.insert(3, 700)
    tables = shared_tables([(1, 1024)] * 3 + [(9, 0)] + [(1, 1024)] * 5, contexts, 16)
    plan = make_plan(tables, np.arange(10), np.array(contexts), 3, 3, 3, 16, None, threads)
    assert check_plan(plan, tables, [1] * 9, contexts, 16, 3, None) == 1024 + 8 * 100 + 700


def test_fronts_of_different_lengths_are_found_part_by_part() -> None:
    """A system prompt of 512 tokens for all; two conversations on top of it, of three samples each."""
    contexts = [2000] * 3 + [1500] * 3 + [600]
    tables = shared_tables([(1, 512)] * 7, contexts, 16)
    tables[1:3, 32:96] = tables[0, 32:96]  # the first three share 1,536 tokens
    tables[4:6, 32:64] = tables[3, 32:64]  # the next three 1,024
    order = np.array([3, 0, 6, 4, 1, 5, 2])  # and they come in any order
    tables = np.ascontiguousarray(tables[order])
    contexts = [contexts[i] for i in order]
    plan = make_plan(tables, np.arange(8), np.array(contexts), 3, 3, 3, 16, None, 1)
    expected = 512 + (1024 + 3 * 464) + (512 + 3 * 476) + 88
    assert check_plan(plan, tables, [1] * 7, contexts, 16, 3, None) == expected


def test_only_whole_tiles_that_all_have_written_are_shared() -> None:
    contexts = [200, 130, 64, 63]
    tables = shared_tables([(1, 200)] * 4, contexts, 16)
    fronts = shared_fronts(tables, np.array(contexts), 16, 16)
    assert fronts is not None
    assert (
        fronts.shared.tolist() == [64] and fronts.size.tolist() == [3] and fronts.alone.tolist() == [False] * 3 + [True]
    )
    assert shared_fronts(tables[3:], np.array([63]), 16, 16) is None
    assert shared_fronts(tables[2:], np.array([64, 63]), 16, 16) is None
    assert shared_fronts(shared_tables([(1, 0)] * 3, [100] * 3, 16), np.array([100] * 3), 16, 16) is None


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_few_long_contexts_are_split_and_many_are_balanced(threads: int) -> None:
    """One context of 4,096 gives every thread work; of 32 short ones and a long one, the long one comes first."""
    plan = make_plan(np.arange(256, dtype=np.int32)[None], np.arange(2), np.array([4096]), 3, 3, 3, 16, None, threads)
    assert plan.chunks >= 2 * threads if threads > 1 else plan.chunks == 1
    contexts = np.array([300] * 32 + [5000])
    tables = np.arange(33 * 320, dtype=np.int32).reshape(33, 320)
    plan = make_plan(tables, np.arange(34), contexts, 3, 3, 3, 16, None, threads)
    parts = (plan.items[:, 3] - plan.items[:, 2]).tolist()
    assert parts == sorted(parts, reverse=True)
    assert max(parts) <= max(1, -(-42 // threads))


def test_long_contexts_have_longer_items() -> None:
    """Their K and V do not stay in the L2 cache from one item to the next: fewer items read them."""
    tables = np.arange(2 * 128, dtype=np.int32).reshape(2, 128)
    contexts = np.array([LONG - 1, LONG])
    plan = make_plan(tables, np.array([0, 130, 260]), contexts, 3, 3, 3, 16, None, 1)
    sizes = plan.items[:, 1].tolist()
    assert sorted(sizes) == sorted([32] * 4 + [2] + [64] * 2 + [2])
    assert item_tokens(3) == 32 and item_tokens(3, True) == 64 and item_tokens(200, True) == 1


@pytest.mark.parametrize("window", [None, 600])
def test_a_step_gets_the_last_ones_plan_with_its_own_positions(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences grow by a token a step, take blocks, share and part: what is renewed is as good as what is made."""
    made = []

    def counted(*arguments: Any) -> CpuAttentionPlan:
        made.append(step)
        return make_plan(*arguments)

    monkeypatch.setattr(plan_module, "make_plan", counted)
    planner = Planner(3, 3, 3, 16, window, 2)
    contexts = [1090] * 3 + [500, 800]
    tables = shared_tables([(1, 1024)] * 3 + [(2, 300)] * 2, [context + 60 for context in contexts], 16)
    for step in range(40):
        now = tables.copy()  # blocks are taken as they are needed
        for row, context in enumerate(contexts):
            now[row, -(-context // 16) :] = -1
        if step >= 30:  # another sequence in the first one's place, elsewhere
            now[0] += 5000
        plan = planner.plan(now, np.arange(6), np.array(contexts))
        check_plan(plan, now, [1] * 5, contexts, 16, 3, window)
        contexts = [context + 1 for context in contexts]
    # made at first, when the fourth context grows beyond 512 (and, in the window, when a first part goes out of sight)
    # and, where tables are looked at, when the first table is another
    assert made == ([0, 13, 30] if window is None else [0, 13, 22])
    planner.plan(now[:4], np.arange(5), np.array(contexts[:4]))
    planner.plan(now, np.arange(6), np.array([context - 1 for context in contexts]))
    assert len(made) == 5


def test_heads_together_keep_runs_of_memory_long() -> None:
    assert heads_together(64, 3, 3, 2) == 3  # SmolLM2: all three, 2 KiB each
    assert heads_together(128, 4, 8, 2) == 2  # Llama: 4 KiB each
    assert heads_together(128, 4, 8, 4) == 1
    assert heads_together(64, 80, 8, 2) == 1  # rows of an item are limited


# (front, its tokens) and context of the sequences of one call
GROUPS_OF_SEQUENCES: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "samples": ([(1, 1024)] * 8, [1024 + 9 * i for i in range(1, 9)]),
    "inside-a-part": ([(1, 320)] * 3 + [(2, 64)] * 2, [400, 321, 510, 70, 900]),
    "lengths": ([(1, 1100), (2, 700), (1, 700), (1, 500), (2, 700), (3, 90)], [1300, 701, 900, 520, 720, 90]),
    "more-than-an-item": ([(1, 640)] * 20, [641 + i for i in range(20)]),
    "everything": ([(1, 600)] * 3, [600, 600, 576]),
}


def written(
    case: str, share: bool, *, block_size: int = 16, dim: int = 64, dtype: str = "float16", kv_heads: int = 2,
    seed: int = 5,
) -> Paged:  # fmt: skip
    """Sequences of a case whose fronts lie in the same blocks, or in blocks of their own with the same contents."""
    ops = get_device("cpu").ops
    fronts, contexts = GROUPS_OF_SEQUENCES[case]
    places = shared_tables(fronts, contexts, block_size)
    names = {int(block): index for index, block in enumerate(np.unique(places[places >= 0]))}
    blocks = len(names) if share else int((places >= 0).sum())
    cache = PagedKVCache(blocks, block_size, kv_heads, dim, 1, dtype, NumpyDevice(ops), "block_major", True)
    poison(cache.view.pools[0])
    frames = np.random.default_rng(seed).permutation(blocks)
    tables = np.full_like(places, -1)
    for used, (row, column) in enumerate(zip(*np.nonzero(places >= 0), strict=True)):
        tables[row, column] = frames[names[int(places[row, column])] if share else used]
    own_keys, own_values = contents(contexts, kv_heads, dim, seed)
    front_keys, front_values = contents([1200] * 4, kv_heads, dim, seed + 1)
    for row, ((front, tokens), context) in enumerate(zip(fronts, contexts, strict=True)):
        common = min(tokens, context) // block_size * block_size
        own_keys[row][:common], own_values[row][:common] = front_keys[front][:common], front_values[front][:common]
        at = np.arange(context)
        slots = tables[row, at // block_size].astype(np.int64) * block_size + at % block_size
        ops.write_kv(own_keys[row], own_values[row], cache.view, 0, slots)
    return Paged(ops, cache, 0, tables, contexts, own_keys, own_values)


@pytest.mark.parametrize("case", GROUPS_OF_SEQUENCES)
@pytest.mark.parametrize(
    ("shape", "group"),
    [
        ({}, 3),
        ({"dim": 128, "kv_heads": 1}, 8),
        ({"block_size": 24, "dtype": "float32"}, 2),
        ({"dim": 80, "block_size": 32, "dtype": "bfloat16"}, 5),
    ],
    ids=["plain", "wide", "gathered", "odd"],
)
def test_shared_blocks_and_copies_of_them_give_the_same_bits(case: str, shape: dict[str, Any], group: int) -> None:
    one, apart = (written(case, share, **shape) for share in (True, False))
    heads = one.cache.num_kv_heads * group
    queries = queries_for([1] * len(one.contexts), heads, one.cache.head_dim)
    result = one.run(queries)
    block_size, contexts = one.cache.block_size, np.array(one.contexts)
    assert shared_fronts(one.tables, contexts, block_size, 16) is not None
    assert shared_fronts(apart.tables, contexts, block_size, 16) is None
    assert np.isfinite(result).all()
    assert np.array_equal(result, apart.run(queries))
    sinks = np.linspace(-1, 2, heads, dtype=np.float32)
    assert np.array_equal(one.run(queries, sinks=sinks, soft_cap=20.0), apart.run(queries, sinks=sinks, soft_cap=20.0))
    assert np.array_equal(one.run(queries, window=90), apart.run(queries, window=90))
    for row in (0, len(contexts) - 1):
        assert np.array_equal(one.select([row]).run([queries[row]])[0], result[row])


def test_K08_value_that_is_not_finite_in_a_shared_block_reaches_those_who_see_it() -> None:
    setup = written("inside-a-part", True)
    queries = queries_for([1] * len(setup.contexts), 6, 64)
    before = setup.run(queries)
    value = setup.values[0][300:301].astype(np.float32)
    value[0, 0, 0] = np.nan
    slot = np.array([setup.tables[0, 300 // 16] * 16 + 300 % 16], np.int64)
    setup.ops.write_kv(setup.keys[0][300:301].astype(np.float32), value, setup.view, 0, slot)
    after = setup.run(queries)
    assert np.isnan(after[:3, :3, 0]).all()  # the three who share front 1, the heads of KV head 0
    after[:3, :3, 0] = before[:3, :3, 0]
    assert np.array_equal(after, before)


def test_shared_blocks_may_lie_in_any_pool() -> None:
    """Pool bits are resolved block by block, also of blocks read once for several: all in pool 1, and mixed."""
    setup = written("samples", True)
    queries = queries_for([1] * 8, 6, 64)
    before = setup.run(queries)
    device, stride, tables = setup.view.pools[0], setup.view.block_stride, setup.tables
    used = np.unique(tables[tables >= 0])
    for chosen in (used, used[::2], used[1::3]):
        here = device.copy()
        host = np.full(len(device) + stride, np.nan, device.dtype)
        for frame in chosen:
            host[(frame + 1) * stride : (frame + 2) * stride] = here[frame * stride : (frame + 1) * stride]
            here[frame * stride : (frame + 1) * stride] = np.nan
        setup.view = dataclasses.replace(setup.view, pools=(here, host, None, None))
        setup.tables = np.where(np.isin(tables, chosen), (1 << POOL_SHIFT) | (tables + 1), tables).astype(np.int32)
        assert np.array_equal(setup.run(queries), before)


@pytest.mark.parametrize("window", [None, 1, 40, 700])
@pytest.mark.parametrize("front", [0, 64])
def test_a_plan_moved_on_is_the_plan_made_anew(window: int | None, front: int) -> None:
    """Until a position, or the beginning of its window, enters another part; then, and where the blocks change by
    which sequences share items, it is refused and left as it was."""
    contexts, block_size, steps = [1000, 740, 321], 16, 0
    tables = shared_tables([(1, front)] * 3, [1100] * 3, block_size)
    shape = (3, 2, 1, block_size, window, 2)
    plan = Planner(*shape).plan(tables, np.arange(4), np.array(contexts))
    while plan_module.advance([plan], [steps % 2 == 0]):
        steps += 1
        longer = np.array(contexts) + steps
        anew = make_plan(tables, np.arange(4), longer, *shape)
        for known, wanted in ((plan.tokens, anew.tokens), (plan.items[:, 1:], anew.items[:, 1:])):
            assert np.array_equal(known, wanted)
        check_plan(plan, tables, [1] * 3, longer.tolist(), block_size, 3, window)
    positions = np.array(contexts) + steps - 1
    lows = positions - (positions if window is None else window - 1)
    crossing = ((positions + 1) % PART == 0) | ((lows + 1) % PART == 0) & (lows >= 0) & (window is not None)
    assert crossing.any() and steps > 0
    before = plan.tokens.copy()
    assert not plan_module.advance([plan], [False])
    assert np.array_equal(plan.tokens, before)
    other = Planner(*shape).plan(tables, np.arange(4), np.array([700, 600, 321]))
    if window is None:
        tables[1, 0] = 77
        assert not plan_module.advance([other], [True])
        assert plan_module.advance([other], [False])  # nobody said that they had
    chunk = Planner(*shape).plan(tables, np.array([0, 2, 3]), np.array([700, 600]))
    assert not plan_module.advance([chunk], [False])


@pytest.mark.parametrize(("dim", "block_size"), [(112, 16), (33, 8), (20, 64)])
def test_prompts_of_several_parts_equal_decoding(dim: int, block_size: int) -> None:
    """Where tiles are gathered run by run: nothing of one part may touch what an item's next part needs."""
    ops = get_device("cpu").ops
    setup = paged(ops, [1090], dim=dim, block_size=block_size, dtype="bfloat16", k_transposed=True)
    (query,) = queries_for([200], 6, dim)
    whole = setup.run([query])
    for row in range(200):
        alone = setup.run([query[row : row + 1]], contexts=[891 + row])
        assert np.array_equal(alone[0], whole[row])
