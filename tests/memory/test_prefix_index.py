"""The prefix index alone: what it finds, keeps and lets go. Each stored token is held against a plain model."""

from __future__ import annotations

import random

import pytest

from cupaged.memory import BlockManager, GroupSpec, SequenceTables
from cupaged.memory.pool import FrameState
from cupaged.memory.prefix import Match, PrefixIndex


class Memory:
    """A block manager, its index, and what is written in each block: {(group, block): [tokens so far]}."""

    def __init__(
        self, num_blocks: int = 64, sizes: tuple[int, ...] = (4,), windows: tuple[int | None, ...] | None = None
    ) -> None:
        windows = windows or (None,) * len(sizes)
        groups = [GroupSpec(num_blocks, size, window=window) for size, window in zip(sizes, windows, strict=True)]
        self.manager = BlockManager(groups)
        self.manager.prefixes = self.index = PrefixIndex(self.manager.pools, groups)
        self.sizes = sizes
        self.contents: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    def store(self, tokens: list[int], *, salt: object = None, index: bool = True) -> SequenceTables:
        tables = self.manager.create()
        for group in range(len(self.sizes)):
            self.index.evict(group, self.manager.blocks_needed(tables, len(tokens))[group])
        self.manager.prepare_append(tables, len(tokens))
        for group, size in enumerate(self.sizes):
            for position in range(len(tokens)):
                ref = tables.tables[group].refs[position // size]
                # K/V of a position depend on all tokens up to it.
                self.contents.setdefault((group, ref), [()] * size)[position % size] = tuple(tokens[: position + 1])
        self.manager.commit_append(tables, len(tokens))
        if index:
            self.index.insert(tokens, tables, salt)
        return tables

    def free(self, tables: SequenceTables) -> None:
        self.manager.free(tables)

    def begin(self, tokens: list[int], match: Match) -> SequenceTables:
        """A sequence that begins with a match, whose copies are done."""
        tables, plan = self.manager.adopt(match)
        for item in plan:
            self.contents[item.group, item.destination] = list(self.contents[item.group, item.source])
            self.manager.complete(item.ticket)
        self.check_window(tables, tokens)
        return tables

    def grow(self, tables: SequenceTables, tokens: list[int], count: int) -> None:
        """Compute the next `count` tokens of a sequence, as an engine does."""
        start, stop = tables.num_tokens, tables.num_tokens + count
        self.manager.prepare_append(tables, count)
        for group, size in enumerate(self.sizes):
            for position in range(start, stop):
                ref = tables.tables[group].refs[position // size]
                self.contents.setdefault((group, ref), [()] * size)[position % size] = tuple(tokens[: position + 1])
        self.check_window(tables, tokens)
        self.manager.commit_append(tables, count)
        self.manager.remember(tables, tokens)
        self.manager.slide(tables)

    def check_window(self, tables: SequenceTables, tokens: list[int]) -> None:
        """All that the next token sees is there, and right."""
        for group, spec in enumerate(self.manager.groups):
            first = 0 if spec.window is None else max(0, tables.num_tokens + 1 - spec.window)
            for position in range(first, tables.num_tokens):
                index, offset = divmod(position, spec.block_size)
                ref = tables.tables[group].refs[index]
                assert self.contents[group, ref][offset] == tuple(tokens[: position + 1])

    def read(self, match: Match) -> list[tuple[int, ...]]:
        """What the matched blocks hold, position by position, the same in every group."""
        found = []
        for group, size in enumerate(self.sizes):
            slots = []
            nodes = [*match.nodes, match.partial] if match.partial is not None else list(match.nodes)
            for node in nodes:
                for ref in node.blocks[group]:
                    slots += self.contents[group, ref][:size]
            found.append(slots[: match.num_tokens])
        assert all(slots == found[0] for slots in found)
        return found[0]

    def check(self) -> None:
        self.index.audit()
        for pool in self.manager.pools:
            pool.audit()


def prefixes(tokens: list[int], count: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[: i + 1]) for i in range(count)]


def test_P01_a_prompt_of_whole_blocks_leaves_a_token_to_compute() -> None:
    memory = Memory(sizes=(16,))
    tokens = list(range(32))
    memory.free(memory.store(tokens))
    match = memory.index.match(tokens, len(tokens) - 1)
    assert (len(match.nodes), match.partial_tokens, match.num_tokens) == (1, 15, 31)
    assert memory.read(match) == prefixes(tokens, 31)


class Collides(int):
    """A token whose hash says nothing."""

    def __hash__(self) -> int:
        return 0


def test_P02_tokens_are_compared_in_full() -> None:
    memory = Memory()
    first = [Collides(x) for x in (1, 2, 3, 4, 5, 6, 7, 8)]
    second = [Collides(x) for x in (1, 2, 3, 4, 5, 37, 6, 8)]  # token + 31, next - 1
    memory.store(first)
    memory.store(second)
    assert hash(tuple(first)) == hash(tuple(second))
    for tokens in (first, second):
        match = memory.index.match(tokens, 8)
        assert match.num_tokens == 8 and memory.read(match) == prefixes(tokens, 8)
    other = [Collides(x) for x in (1, 2, 3, 4, 5, 37, 37, 8)]
    assert memory.index.match(other, 8).num_tokens == 6


def test_P03_an_evicted_block_is_not_found_again() -> None:
    memory = Memory(num_blocks=3)
    a, b = [1] * 12, [2] * 12
    memory.free(memory.store(a))
    assert memory.index.match(a, 12).num_tokens == 12
    memory.free(memory.store(b))
    assert memory.index.match(a, 12).num_tokens == 0
    assert memory.read(memory.index.match(b, 12)) == prefixes(b, 12)
    memory.check()


def test_P04_only_what_was_written_is_found() -> None:
    memory = Memory()
    tables = memory.manager.create()
    memory.manager.prepare_append(tables, 12)
    memory.index.insert(list(range(12)), tables)
    memory.manager.commit_append(tables, 5)  # the first block alone is complete
    memory.index.insert(list(range(12)), tables)
    assert memory.index.match(list(range(12)), 12).num_tokens == 4
    memory.free(tables)
    memory.check()


def test_P02_salts_share_nothing() -> None:
    memory = Memory()
    memory.store([1, 2, 3, 4], salt="a")
    assert memory.index.match([1, 2, 3, 4], 4, "b").num_tokens == 0
    assert memory.index.match([1, 2, 3, 4], 4).num_tokens == 0
    assert memory.index.match([1, 2, 3, 4], 4, "a").num_tokens == 4


def test_the_best_part_of_a_block_is_found() -> None:
    memory = Memory(sizes=(8,))
    memory.store([1, 2, 3, 4, 5, 6, 7, 8])
    memory.store([1, 2, 3, 9, 9, 9, 9, 9])
    match = memory.index.match([1, 2, 3, 9, 9, 0, 0, 0, 0], 8)
    assert (match.nodes, match.partial_tokens) == ((), 5)
    assert memory.read(match) == prefixes([1, 2, 3, 9, 9], 5)
    assert memory.index.match([2, 2], 1).num_tokens == 0
    assert memory.index.match([1], 0) == Match(unit=8)


def test_equal_sequences_end_up_in_the_same_blocks() -> None:
    memory = Memory()
    tokens = list(range(10))
    first = memory.store(tokens)
    second = memory.store(tokens, index=False)
    own = list(second.tables[0].refs)
    memory.index.insert(tokens, second)
    assert second.tables[0].refs[:2] == first.tables[0].refs[:2]
    assert second.tables[0].refs[2] == own[2]  # not complete: stays its own
    assert memory.index.merged == 2
    memory.manager.audit()
    memory.check()


def test_leaves_go_before_parents_and_the_least_recently_used_first() -> None:
    memory = Memory(num_blocks=5)
    stem = [1, 1, 1, 1]
    a, b = [*stem, 2, 2, 2, 2], [*stem, 3, 3, 3, 3]
    memory.free(memory.store(a))
    memory.free(memory.store(b))
    assert memory.manager.pools[0].num_cached == 3
    memory.index.match(a, 8)  # b's leaf is now the oldest
    assert memory.index.evict(0, 3)
    assert memory.index.match(b, 8).num_tokens == 4 and memory.index.match(a, 8).num_tokens == 8
    assert memory.index.evict(0, 5)
    assert memory.index.num_nodes == 0
    memory.check()


def test_what_a_sequence_uses_stays() -> None:
    memory = Memory(num_blocks=4)
    used = memory.store([1] * 8)
    memory.free(memory.store([2] * 8))
    assert not memory.index.evict(0, 3)
    assert memory.manager.pools[0].num_free == 2
    assert memory.index.match([1] * 8, 8).num_tokens == 8
    memory.free(used)
    assert memory.index.evict(0, 4)
    memory.check()


def test_moved_blocks_are_forgotten_with_what_builds_on_them() -> None:
    memory = Memory()
    tables = memory.store(list(range(12)))
    memory.index.discard(0, [tables.tables[0].refs[1], 10_000])
    assert memory.index.match(list(range(12)), 12).num_tokens == 4
    memory.check()
    memory.index.insert(list(range(12)), tables)  # its cursor was on a node that is gone
    assert memory.index.match(list(range(12)), 12).num_tokens == 12
    memory.check()


def test_clear_gives_everything_back() -> None:
    memory = Memory()
    kept = memory.store([5] * 8)
    memory.free(memory.store([6] * 8, salt="x"))
    memory.index.clear()
    assert memory.index.match([5] * 8, 8).num_tokens == 0
    assert memory.manager.pools[0].num_cached == 0
    memory.free(kept)
    assert memory.manager.pools[0].num_free == 64
    memory.check()


def test_a_draining_block_does_not_count_as_free() -> None:
    memory = Memory(num_blocks=2)
    tables = memory.store([1] * 8)
    pool = memory.manager.pools[0]
    ref = tables.tables[0].refs[1]
    pool.pin(ref)  # a copy reads it
    memory.free(tables)
    assert not memory.index.evict(0, 2) and pool.state(ref) is FrameState.DRAINING
    pool.unpin(ref)
    assert pool.num_free == 2
    memory.check()


@pytest.mark.parametrize("sizes", [(4,), (1,), (2, 4), (4, 6)])
@pytest.mark.parametrize("seed", range(3))
def test_random_use_finds_the_longest_prefix_that_is_there(sizes: tuple[int, ...], seed: int) -> None:
    """Against a model: every token list ever stored and not evicted. Few tokens, so that prefixes meet often."""
    rng = random.Random(seed)
    memory = Memory(num_blocks=40, sizes=sizes)
    live: list[SequenceTables] = []
    hits = evictions = 0
    for _ in range(600):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
        match = memory.index.match(tokens, len(tokens) - 1)
        assert match.num_tokens < len(tokens)
        assert memory.read(match) == prefixes(tokens, match.num_tokens)  # never anybody else's
        hits += match.num_tokens > 0
        while any(not memory.index.evict(group, -(-len(tokens) // size)) for group, size in enumerate(sizes)):
            memory.free(live.pop(rng.randrange(len(live))))
        live.append(memory.store(tokens))
        whole = len(tokens) // memory.index.unit * memory.index.unit
        assert memory.index.match(tokens, whole).num_tokens == whole
        if len(live) > 3 or rng.random() < 0.3:
            memory.free(live.pop(rng.randrange(len(live))))
        memory.check()
        memory.manager.audit()
        evictions = memory.index.evicted
    assert hits > 100 and evictions > 20
    for tables in live:
        memory.free(tables)
    for pool in memory.manager.pools:
        assert pool.num_free + pool.num_cached == pool.num_blocks
    memory.index.clear()
    assert all(pool.num_free == pool.num_blocks for pool in memory.manager.pools)


@pytest.mark.parametrize("other_first", [False, True])
def test_a_fork_of_another_salt_leaves_the_index_whole(other_first: bool) -> None:
    """A block stands in one place of the tree, and whoever uses a unit uses all before it, whatever is forked."""
    memory = Memory(16)
    tokens = list(range(100, 112))
    parent = memory.store(tokens, salt="a")
    other = memory.store(tokens[:4], salt="b") if other_first else None
    child = memory.manager.fork(parent)
    memory.index.insert(tokens, child, "b")
    memory.check()
    assert memory.index.match(tokens, 12, "b").num_tokens == (4 if other_first else 0)
    memory.free(parent)
    memory.check()
    for tables in filter(None, (child, other)):
        memory.free(tables)
        memory.check()
    pool = memory.manager.pools[0]
    pool.allocate_many(pool.num_available)  # all that counts as available can be had
    assert pool.num_available == 0


@pytest.mark.parametrize(
    ("sizes", "windows"),
    [((4,), (6,)), ((1,), (3,)), ((4,), (1,)), ((2, 4), (None, 5)), ((4, 6), (7, None)), ((4, 4), (3, 11))],
)
@pytest.mark.parametrize("seed", range(3))
def test_windows_give_up_blocks_and_find_what_they_need(
    sizes: tuple[int, ...], windows: tuple[int | None, ...], seed: int
) -> None:
    """Sequences come, share what is known, grow in chunks, slide and go, with too few blocks for all of them."""
    rng = random.Random(seed)
    blocks = 26 if min(sizes) >= 4 else 44
    memory = Memory(blocks, sizes, windows)
    manager = memory.manager
    live: list[tuple[SequenceTables, list[int]]] = []
    hits = 0
    for _ in range(800):
        if len(live) < 4 and rng.random() < 0.3:
            tokens = [rng.randrange(2) for _ in range(40)]
            match = memory.index.match(tokens, 39)
            hits += match.num_tokens > 0
            while any(pool.num_available < blocks // 3 for pool in manager.pools) and live:
                memory.free(live.pop(rng.randrange(len(live)))[0])
            live.append((memory.begin(tokens, memory.index.match(tokens, 39)), tokens))
        elif live:
            tables, tokens = rng.choice(live)
            count = min(rng.choice([1, 1, 2, 5, 9]), 40 - tables.num_tokens)
            if not manager.can_append(tables, count):
                live.remove((tables, tokens))
                memory.free(tables)
            else:
                memory.grow(tables, tokens, count)
                if tables.num_tokens == 40:
                    live.remove((tables, tokens))
                    memory.free(tables)
        memory.check()
        manager.audit()
    assert hits > 8 and memory.index.evicted > 8
    for tables, _ in live:
        memory.free(tables)
    for pool in manager.pools:
        assert pool.num_free + pool.num_cached == pool.num_blocks
        taken = pool.allocate_many(pool.num_available)  # all that counts as available can be had
        assert len(taken) == pool.num_blocks


def test_a_match_ends_where_every_window_is_whole() -> None:
    """Once blocks in the middle are gone, prefixes that end just behind them are not found; longer and shorter are."""
    memory = Memory(12, (4, 4), (None, 5))
    tokens = list(range(100, 132))
    tables = memory.begin(tokens, memory.index.match(tokens, 31))
    for _ in range(8):
        memory.grow(tables, tokens, 4)
    assert memory.manager.stats().groups[1].pool.used == 1  # of the eight, of which the others are cached
    assert [memory.index.match(tokens, end).num_tokens for end in (8, 17, 31)] == [8, 17, 31]
    memory.index.evict(1, 4 + 3)  # three of the seven
    held = [ref >= 0 for node in memory.index.match(tokens, 32).nodes for ref in node.blocks[1]]
    assert held.count(False) == 3 and all(held[-2:])
    gone = [index for index, there in enumerate(held) if not there]
    for end in range(1, 32):
        found = memory.index.match(tokens, end).num_tokens
        needed = range(max(0, found - 4) // 4, -(-found // 4))
        assert found <= end and not set(needed) & set(gone)
        better = [n for n in range(found + 1, end + 1) if not set(range(max(0, n - 4) // 4, -(-n // 4))) & set(gone)]
        assert not better
    memory.check()
