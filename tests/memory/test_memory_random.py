"""Random operations on the block manager, 1,000,000 in the slow run; then the driver itself is tested: each planted
fault must be seen."""

from __future__ import annotations

from collections import Counter

import pytest
from memory_driver import Driver
from memory_judges import Divergence

from cupaged.errors import BlockError, OutOfBlocks
from cupaged.memory import BlockManager, BlockPool, BlockTable, GroupSpec, PlanItem, SequenceTables, frame_of
from cupaged.memory.appending import must_copy
from cupaged.memory.moving import move

GROUPS = {
    "one group": [GroupSpec(32, 4)],
    "two block sizes": [GroupSpec(36, 4), GroupSpec(20, 8)],
    "odd sizes": [GroupSpec(110, 1), GroupSpec(26, 5), GroupSpec(14, 16)],
    "short tables": [GroupSpec(28, 3, max_blocks=9), GroupSpec(22, 4, max_blocks=10)],
    "windows": [GroupSpec(32, 4), GroupSpec(30, 2, window=9), GroupSpec(20, 4, window=2)],
}


SWAPPED = {
    "one group": [GroupSpec(20, 4, host_blocks=10)],
    "two block sizes": [GroupSpec(24, 4, host_blocks=12), GroupSpec(14, 8, host_blocks=5)],
    "one of two has a host pool": [GroupSpec(30, 4), GroupSpec(12, 8, host_blocks=4)],
    "little on the device": [GroupSpec(11, 3, max_blocks=16, host_blocks=8)],
    "windows": [GroupSpec(14, 4, host_blocks=10, window=14), GroupSpec(18, 2, host_blocks=6, window=6)],
}

# What a run must have come across, often, to mean anything.
VERBS = ["create", "append", "write", "fork", "free", "abort", "trim", "complete", "run_copies"]
PATHS = [*VERBS, "copies", "drained", "forks of a part", "aborted while written", "append: OutOfBlocks", "in place"]
PATHS += [f"{verb} refused" for verb in ("commit_append", "fork", "free", "complete")]
SWAP_PATHS = ["swap_out", "swap_in", "swapped_out", "swapped_in", "blocks moved while shared", "aborted while moving"]
SWAP_PATHS += [f"{verb} refused" for verb in ("swap_out", "swap_in")]
SWAP_PATHS += ["append: BlockError", "swap_out: OutOfBlocks", "swap_in: OutOfBlocks", "swap_out: BlockError"]


def walk(driver: Driver, operations: int, paths: list[str], least: int, audit_every: int = 250) -> Counter[str]:
    """Run, and see that each path was taken at least so often."""
    driver.run(operations, audit_every)
    if any(spec.window for spec in driver.manager.groups):
        paths = [*paths, "slide", "blocks passed"]
    assert driver.ledger is not None
    ledger = driver.ledger
    counts = {"drained": ledger.drained, "swapped_out": ledger.swapped_out, "swapped_in": ledger.swapped_in}
    walked = Counter(driver.seen, **counts)
    taken = {name: walked[name] for name in paths}
    assert min(taken.values()) >= least, taken
    return walked


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_random_operations_against_the_rules(groups: list[GroupSpec]) -> None:
    walk(Driver(1, groups), 8_000, PATHS, 20)


@pytest.mark.parametrize("groups", SWAPPED.values(), ids=SWAPPED)
def test_random_operations_with_swaps(groups: list[GroupSpec]) -> None:
    walk(Driver(2, groups, in_place=len(groups) == 1), 8_000, PATHS + SWAP_PATHS, 10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "groups", [*GROUPS.values(), *SWAPPED.values()], ids=[*GROUPS, *(f"{n}, swapped" for n in SWAPPED)]
)
def test_a_million_random_operations(groups: list[GroupSpec], seed: int) -> None:
    """20 runs of 62,500: an audit every 1,000, every path taken hundreds of times in each."""
    swapped = any(spec.host_blocks for spec in groups)
    walked = walk(Driver(100 + seed, groups, in_place=seed == 1), 62_500, PATHS + SWAP_PATHS * swapped, 100, 1000)
    assert walked["audits"] == 62
    assert sum(walked[verb] for verb in [*VERBS, "swap_out", "swap_in", "slide"]) == 62_500


def no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("cupaged.memory.manager.must_copy", lambda pool, table, num_tokens: False)
    patch.setattr(BlockPool, "used_once", lambda self, ref: True)


def plan_lost(patch: pytest.MonkeyPatch) -> None:
    prepare = BlockManager.prepare_append
    patch.setattr(BlockManager, "prepare_append", lambda self, tables, num_new: prepare(self, tables, num_new)[1:])


def nothing_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "pin", lambda self, ref: None)
    patch.setattr(BlockPool, "unpin", lambda self, ref: None)


def pinned_blocks_handed_out(patch: pytest.MonkeyPatch) -> None:
    """Pins counted, but not heeded where the last user frees a block."""
    patch.setattr(BlockPool, "_retire", BlockPool._release)


def slots_in_a_row(patch: pytest.MonkeyPatch) -> None:
    def slots(self: BlockManager, tables: SequenceTables, group: int, start: int, stop: int) -> list[int]:
        first = frame_of(tables.tables[group].refs[0]) * self.groups[group].block_size if stop else 0
        return [first + position for position in range(start, stop)]

    patch.setattr(BlockManager, "slots", slots)


def written_in_place_though_shared(patch: pytest.MonkeyPatch) -> None:
    """The short way of decoding does not look who else uses a block."""
    patch.setattr(BlockPool, "used_once", lambda self, ref: 0 <= ref - self._base < self.num_blocks)


def always_copy(patch: pytest.MonkeyPatch) -> None:
    def always(pool: BlockPool, table: BlockTable, num_tokens: int) -> bool:
        return num_tokens % table.block_size != 0

    patch.setattr("cupaged.memory.manager.must_copy", always)


def fork_does_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "fork", lambda self, refs: None)


def block_too_many(patch: pytest.MonkeyPatch) -> None:
    """The fault of A01, the other way round."""
    patch.setattr("cupaged.memory.manager.blocks_for", lambda num_tokens, size: num_tokens // size + 1)


def destination_left_pinned(patch: pytest.MonkeyPatch) -> None:
    def complete(self: BlockManager, ticket: int) -> None:
        if ticket not in self._unfinished:
            raise BlockError("unknown")
        item = self._unfinished.pop(ticket)
        self.pools[item.group].unpin(item.source)

    patch.setattr(BlockManager, "complete", complete)


def failed_append_keeps_a_block(patch: pytest.MonkeyPatch) -> None:
    prepare = BlockManager.prepare_append

    def leaky(self: BlockManager, tables: SequenceTables, num_new: int) -> list[PlanItem]:
        try:
            return prepare(self, tables, num_new)
        except OutOfBlocks:
            self.pools[0].allocate_many(min(1, self.pools[0].num_free))
            raise

    patch.setattr(BlockManager, "prepare_append", leaky)


def copies_not_counted_in_need(patch: pytest.MonkeyPatch) -> None:
    """The fault of A17's kind: admission says yes, the append then finds no block."""
    needed = BlockManager.blocks_needed

    def fewer(self: BlockManager, tables: SequenceTables, num_new: int) -> tuple[int, ...]:
        copies = (
            num_new > 0 and must_copy(pool, table, tables.num_tokens)
            for pool, table in zip(self.pools, tables.tables, strict=True)
        )  # fmt: skip
        return tuple(need - copy for need, copy in zip(needed(self, tables, num_new), copies, strict=True))

    def can(self: BlockManager, tables: SequenceTables, num_new: int) -> bool:
        return all(a <= pool.num_free for a, pool in zip(fewer(self, tables, num_new), self.pools, strict=True))

    patch.setattr(BlockManager, "can_append", can)


def move_lost(patch: pytest.MonkeyPatch) -> None:
    swap_in = BlockManager.swap_in
    patch.setattr(BlockManager, "swap_in", lambda self, group, refs: swap_in(self, group, refs)[1:])


def sharers_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A move changes the table of whoever asked, and not of those who share the block."""
    swap_out = BlockManager.swap_out

    def forgetful(self: BlockManager, group: int, refs: list[int]) -> list[PlanItem]:
        items = swap_out(self, group, refs)
        back = {item.destination: item.source for item in items}
        users = [tables.tables[group] for tables in self.sequences() if back.keys() & set(tables.tables[group].refs)]
        for table in users[1:]:
            table.refs = [back.get(ref, ref) for ref in table.refs]
        return items

    patch.setattr(BlockManager, "swap_out", forgetful)


def moved_blocks_lose_users(patch: pytest.MonkeyPatch) -> None:
    def losing(*arguments: object) -> list[PlanItem]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "fork", lambda pool, refs: None)
            return move(*arguments)  # type: ignore[arg-type]

    patch.setattr("cupaged.memory.manager.move", losing)


def arrived_blocks_never_ready(patch: pytest.MonkeyPatch) -> None:
    complete = BlockManager.complete

    def forgetful(self: BlockManager, ticket: int) -> None:
        self.arriving = dict.fromkeys(self.arriving, False)
        complete(self, ticket)

    patch.setattr(BlockManager, "complete", forgetful)


WRONG_TOKENS = [
    no_copy_on_write,
    written_in_place_though_shared,
    plan_lost,
    nothing_pinned,
    pinned_blocks_handed_out,
    slots_in_a_row,
]
WRONG_COUNTS = [
    always_copy, fork_does_not_count, block_too_many, destination_left_pinned, failed_append_keeps_a_block,
    copies_not_counted_in_need,
]  # fmt: skip


@pytest.mark.parametrize("fault", WRONG_TOKENS)
def test_faults_that_spoil_contents_are_read_back(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(Divergence, match=r"tokens in group \d: .* read, .* written"):
        Driver(1, GROUPS["two block sizes"], use_ledger=False).run(10_000)


@pytest.mark.parametrize("fault", WRONG_TOKENS + WRONG_COUNTS)
def test_every_planted_fault_is_seen(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((Divergence, BlockError)):
        Driver(1, GROUPS["two block sizes"]).run(10_000)


def test_the_device_alone_finds_nothing_wrong_with_the_manager() -> None:
    Driver(1, GROUPS["two block sizes"], use_ledger=False).run(10_000)


@pytest.mark.parametrize("fault", [pinned_blocks_handed_out, move_lost, sharers_forgotten, moved_blocks_lose_users])
def test_faults_of_moves_are_read_back(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((Divergence, BlockError)):
        Driver(1, SWAPPED["one group"], use_ledger=False).run(10_000)


@pytest.mark.parametrize("fault", [move_lost, sharers_forgotten, moved_blocks_lose_users, arrived_blocks_never_ready])
def test_every_planted_fault_of_moves_is_seen(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((Divergence, BlockError)):
        Driver(1, SWAPPED["two block sizes"]).run(10_000)


def test_the_device_alone_finds_nothing_wrong_with_moves() -> None:
    Driver(1, SWAPPED["one group"], use_ledger=False).run(8_000)
