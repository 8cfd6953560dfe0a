"""200,000 random operations on the block manager; then the driver itself is tested: each planted fault must be seen."""

from __future__ import annotations

from collections import Counter

import pytest
from memory_driver import Divergence, Driver

from cupaged.errors import BlockError, OutOfBlocks
from cupaged.memory import BlockManager, BlockPool, GroupSpec, PlanItem, SequenceTables, frame_of

GROUPS = {
    "one group": [GroupSpec(32, 4)],
    "two block sizes": [GroupSpec(36, 4), GroupSpec(20, 8)],
    "odd sizes": [GroupSpec(110, 1), GroupSpec(26, 5), GroupSpec(14, 16)],
    "short tables": [GroupSpec(28, 3, max_blocks=9), GroupSpec(22, 4, max_blocks=10)],
}


# What a run must have come across, often, to mean anything.
PATHS = ["copies", "forks", "completions", "drained", "OutOfBlocks"]
PATHS += [f"{verb} refused" for verb in ("commit_append", "fork", "free", "complete")]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_random_operations_against_the_rules(groups: list[GroupSpec], seed: int) -> None:
    driver = Driver(seed, groups)
    driver.run(25_000)
    assert driver.ledger is not None
    walked = Counter(driver.seen, drained=driver.ledger.drained)
    rare = {name: walked[name] for name in PATHS}
    assert min(rare.values()) >= 100, rare


def no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "_must_copy", lambda self, group, tables: False)


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


def always_copy(patch: pytest.MonkeyPatch) -> None:
    def must_copy(self: BlockManager, group: int, tables: SequenceTables) -> bool:
        return tables.num_tokens % self.groups[group].block_size != 0

    patch.setattr(BlockManager, "_must_copy", must_copy)


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
        copies = (num_new > 0 and self._must_copy(group, tables) for group in range(len(self.groups)))
        return tuple(need - copy for need, copy in zip(needed(self, tables, num_new), copies, strict=True))

    def can(self: BlockManager, tables: SequenceTables, num_new: int) -> bool:
        return all(a <= pool.num_free for a, pool in zip(fewer(self, tables, num_new), self.pools, strict=True))

    patch.setattr(BlockManager, "can_append", can)


WRONG_TOKENS = [no_copy_on_write, plan_lost, nothing_pinned, pinned_blocks_handed_out, slots_in_a_row]
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
