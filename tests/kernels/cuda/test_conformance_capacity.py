"""Work plans that lie by capacities: what fits takes another's place without a new launch, and no bit depends on it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from bench_support import need_emulator
from emulated import emulated_operations
from hypothesis import given
from hypothesis import strategies as st
from kernel_support import Paged, paged, queries_for

from cupaged.kernels.cuda import attention_run
from cupaged.kernels.cuda.capacity import Capacity, pack
from cupaged.kernels.cuda.plan import make_plan

pytestmark = need_emulator
HEADS = {False: 6, True: 8}  # tensor cores -> query heads for two KV heads


def plan_of(setup: Paged, counts: list[int], contexts: list[int], heads: int, **options: Any) -> Any:
    starts = np.cumsum([0, *counts]).tolist()
    return setup.ops.plan_attention(setup.view, setup.tables, starts, contexts, heads, **options)


def run(setup: Paged, plan: Any, query: np.ndarray) -> np.ndarray:
    out = np.full_like(query, 777)
    setup.ops.paged_attention(query, setup.view, setup.layer, plan, out, 0.125)
    return out


@pytest.mark.parametrize("tensor", [False, True])
def test_another_plan_in_the_same_place_gives_its_own_bits(tensor: bool) -> None:
    """Replays of a decode step: lengths grow within capacities; the launches, arguments and grids, are the first's."""
    ops = emulated_operations(tensor_cores=tensor)
    setup = paged(ops, [1100, 700, 40], dtype="float16")
    heads = HEADS[tensor]
    query = np.concatenate(queries_for([1, 1, 1], heads, 64))
    captured = plan_of(setup, [1, 1, 1], [1090, 600, 30], heads)
    run(setup, captured, query)
    for contexts in ([1091, 601, 31], [1100, 700, 40], [600, 520, 0], [700, 513, 40], [1090, 600, 30]):
        other = plan_of(setup, [1, 1, 1], contexts, heads)
        ops.backend.launches.clear()
        assert ops.refill_plan(captured, other)
        assert np.array_equal(run(setup, captured, query), run(setup, other, query))
        first, second = ops.backend.launches[:2], ops.backend.launches[2:]
        assert [name for name, _ in first] == [captured.variant.kernel, "merge_parts"]
        assert [name for name, _ in second][:1] == [captured.variant.kernel]


def test_what_does_not_fit_is_left_alone() -> None:
    ops = emulated_operations()
    setup = paged(ops, [1100, 300], dtype="float16")
    query = np.concatenate(queries_for([1, 1], 6, 64))
    captured = plan_of(setup, [1, 1], [100, 100], 6)
    assert not ops.refill_plan(captured, plan_of(setup, [1, 1], [101, 101], 6))  # it lies nowhere yet
    expected = run(setup, captured, query)
    for counts, contexts, options in (
        ([1, 1], [1100, 300], {}),  # more parts than there is room for, and merges
        ([1, 1], [513, 100], {}),  # a merge, of which the captured launches have none
        ([2, 1], [100, 100], {}),  # another number of queries
        ([1, 1], [100, 100], {"window": 50}),
    ):
        assert not ops.refill_plan(captured, plan_of(setup, counts, contexts, 6, **options))
    assert not ops.refill_plan(captured, plan_of(setup, [1, 1], [100, 100], 2))
    assert np.array_equal(run(setup, captured, query), expected)
    assert captured.fresh().placed is None and captured.placed is not None


@pytest.mark.parametrize("tensor", [False, True])
def test_queries_computed_some_at_a_time_give_the_same_bits(tensor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results take at most STATE_BYTES; sequences are cut anywhere, a token goes alone if it must."""
    ops = emulated_operations(tensor_cores=tensor)
    setup = paged(ops, [600, 9, 1100], dtype="float16")
    heads, counts = HEADS[tensor], [4, 2, 3]
    queries = queries_for(counts, heads, 64)
    whole = setup.run(queries)
    state = heads * 66 * 4
    for limit in (state, 5 * state):
        monkeypatch.setattr(attention_run, "STATE_BYTES", limit)
        plan = plan_of(setup, counts, setup.contexts, heads)
        bounds = [(one.first, one.stop) for one in plan.passes]
        assert len(bounds) > 2 and bounds[0][0] == 0 and bounds[-1][1] == sum(counts)
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
        assert max(one.work.num_states for one in plan.passes) * state <= max(limit, 3 * state)
        assert np.array_equal(setup.run(queries), whole)
        assert ops.refill_plan(placed := _placed(setup, plan, queries), plan.fresh())
        assert np.array_equal(run(setup, placed, np.concatenate(queries)), whole)


def _placed(setup: Paged, plan: Any, queries: list[np.ndarray]) -> Any:
    run(setup, plan, np.concatenate(queries))
    return plan


@given(
    st.lists(st.integers(0, 1500), min_size=1, max_size=5),
    st.lists(st.integers(0, 1500), min_size=5, max_size=5),
    st.sampled_from([16, 64]),
)
def test_packed_words_are_the_plan_in_any_capacity_that_holds_it(
    contexts: list[int], others: list[int], size: int
) -> None:
    def planned(lengths: list[int]) -> tuple[Any, np.ndarray]:
        width = max(1, -(-max(lengths) // size))
        tables = np.arange(len(lengths) * width, dtype=np.int32).reshape(len(lengths), width)
        starts = np.arange(len(lengths) + 1)
        return make_plan(tables, starts, np.array(lengths), 3, 4, size), tables

    work, tables = planned(contexts)
    other, other_tables = planned(others[: len(contexts)])
    own, room = Capacity.of(work, tables), Capacity.of(other, other_tables)
    assert own.holds(own)
    for capacity in (own, *([room] if room.holds(own) else [])):
        words = pack(work, tables, capacity)
        assert words.dtype == np.int32 and len(words) == capacity.words
        views = capacity.views(words)
        assert views["num_items"] == len(work.items) and views["num_merges"] == len(work.merges)
        assert np.array_equal(views["items"][: work.items.size], work.items.ravel())
        for name in ("tokens", "positions", "state_starts", "state_counts", "merges"):
            assert np.array_equal(views[name][: len(getattr(work, name))], getattr(work, name))
        laid = views["tables"].reshape(len(contexts), capacity.width)
        assert np.array_equal(laid[:, : tables.shape[1]], tables) and (laid[:, tables.shape[1] :] == -1).all()
        assert capacity.states >= work.num_states
