"""The work planner, a plain function: what its list covers, whatever the lengths; and what sequences share."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cupaged.kernels.cuda.plan import make_plan
from cupaged.kernels.interface import PART

SEQUENCES = st.lists(
    st.integers(0, 1700).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, min(n, 40) + 2))), max_size=6
)


@given(
    SEQUENCES,
    st.sampled_from([1, 2, 3, 4, 7, 8, 40]),
    st.sampled_from([1, 4, 8, 16, 32]),
    st.sampled_from([1, 8, 16, 24, 64]),
    st.one_of(st.none(), st.integers(1, 900)),
    st.integers(0, 3),
)
def test_every_row_gets_every_part_that_it_sees_once(
    sequences: list[tuple[int, int]], group: int, rows: int, size: int, window: int | None, shared: int
) -> None:
    contexts = np.array([n for n, _ in sequences], np.int64)
    starts = np.cumsum([0] + [count for _, count in sequences]).astype(np.int64)
    width = max(1, -(-int(contexts.max(initial=0)) // size))
    tables = np.arange(len(sequences) * width, dtype=np.int32).reshape(len(sequences), width)
    common = shared * PART // size
    tables[:, :common] = np.arange(common)[:width]  # every table begins alike
    plan = make_plan(tables, starts, contexts, group, rows, size, window)

    covered: Counter[tuple[int, int, int]] = Counter()
    for first_row, num_rows, table, part, low, high, *_ in plan.items.tolist():
        assert 1 <= num_rows <= rows and part * PART <= low < high <= (part + 1) * PART
        seen = []
        for row in range(first_row, first_row + num_rows):
            token = int(plan.tokens[row // group])
            covered[token, row % group, part] += 1
            position = int(plan.positions[token])
            first = 0 if window is None else max(0, position - window + 1)
            seen.append((max(first, part * PART), min(position + 1, (part + 1) * PART)))
            sequence = int(np.searchsorted(starts, token, "right")) - 1
            for at in range(seen[-1][0], seen[-1][1]):  # the table read holds the row's own blocks
                assert tables[table, at // size] == tables[sequence, at // size]
        assert (low, high) == (min(a for a, _ in seen), max(b for _, b in seen))
    expected: Counter[tuple[int, int, int]] = Counter()
    states = 0
    for sequence, (context, count) in enumerate(sequences):
        for token in range(int(starts[sequence]), int(starts[sequence + 1])):
            position = context - (int(starts[sequence]) + count - token)
            assert plan.positions[token] == position
            first = 0 if window is None else max(0, position - window + 1)
            parts = range(first // PART, position // PART + 1) if position >= 0 else range(0)
            expected.update((token, head, part) for head in range(group) for part in parts)
            assert plan.state_counts[token] == len(parts)
            if len(parts) > 1:
                assert plan.state_starts[token] == states
                states += len(parts)
            assert (token in plan.merges) == (len(parts) != 1)
    assert covered == expected and plan.num_states == states


def test_sequences_share_only_whole_parts_that_are_the_same() -> None:
    contexts = np.array([1500, 1100, 600, 1500], np.int64)
    tables = np.arange(4 * 94, dtype=np.int32).reshape(4, 94)
    tables[1, :64] = tables[0, :64]  # two parts
    tables[2, :33] = tables[0, :33]  # one part and a block
    starts = np.arange(5, dtype=np.int64)
    plan = make_plan(tables, starts, contexts, 4, 16, 16)
    readers = {(int(item[3]), int(item[2])): int(item[1]) for item in plan.items}
    # (part, table) -> rows: part 0 for three sequences, part 1 for two, the rest alone
    assert readers == {(0, 0): 12, (0, 3): 4, (1, 0): 8, (1, 2): 4, (1, 3): 4, (2, 0): 4, (2, 1): 4, (2, 3): 4}
    apart = make_plan(tables, starts, contexts, 4, 16, 16, share=False)
    assert {(int(item[3]), int(item[2])) for item in apart.items} == {
        (part, row) for row, context in enumerate(contexts) for part in range(-(-int(context) // PART))
    }


def test_no_sequences() -> None:
    plan = make_plan(np.zeros((0, 1), np.int32), np.zeros(1, np.int64), np.zeros(0, np.int64), 4, 16, 16)
    assert plan.num_tokens == 0 and len(plan.items) == 0 and len(plan.merges) == 0
