"""BlockManager: appending on demand, sharing, plans, slots, counters and what it refuses."""

from __future__ import annotations

import pytest
from memory_bytes import grown, state

from cupaged.errors import BlockError, OptionError, OutOfBlocks
from cupaged.memory import BlockManager, GroupSpec, Pool, make_ref


def test_prepare_is_all_or_nothing_over_groups() -> None:
    manager = BlockManager([GroupSpec(8, 4), GroupSpec(3, 8)])
    parent = grown(manager, 6)
    child = manager.fork(parent)
    assert manager.blocks_needed(child, 1) == (1, 1)
    assert manager.blocks_needed(child, 15) == (5, 3)
    before = state(manager)
    with pytest.raises(OutOfBlocks) as caught:
        manager.prepare_append(child, 15)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert not manager.can_append(child, 15)
    assert state(manager) == before
    plan = manager.prepare_append(child, 10)
    assert [(item.ticket, item.group) for item in plan] == [(0, 0), (1, 1)]
    assert [len(table.refs) for table in child.tables] == [4, 2]
    manager.audit()


def test_copies_keep_both_ends_until_completed() -> None:
    manager = BlockManager([GroupSpec(3, 4)])
    parent = grown(manager, 2)
    child = manager.fork(parent)
    (item,) = manager.prepare_append(child, 1)
    assert {item.source, item.destination} == {parent.tables[0].refs[0], child.tables[0].refs[0]}
    manager.free(parent)
    manager.free(child)
    assert manager.pools[0].stats().draining == 2
    other = manager.create()
    assert not manager.can_append(other, 5)
    assert manager.can_append(other, 4)
    manager.audit()
    manager.complete(item.ticket)
    assert manager.pools[0].num_free == 3
    for ticket in (item.ticket, item.ticket + 1, -1):
        with pytest.raises(BlockError, match=f"ticket {ticket} "):
            manager.complete(ticket)
    manager.audit()


def test_a_freed_parent_leaves_the_child_to_write_in_place() -> None:
    manager = BlockManager([GroupSpec(3, 4)])
    parent = grown(manager, 2)
    child = manager.fork(parent)
    manager.free(parent)
    assert manager.blocks_needed(child, 1) == (0,)
    assert manager.prepare_append(child, 1) == []


def test_preparing_again_extends_and_copies_once() -> None:
    manager = BlockManager([GroupSpec(8, 4)])
    parent = grown(manager, 2)
    child = manager.fork(parent)
    assert len(manager.prepare_append(child, 1)) == 1
    assert manager.prepare_append(child, 5) == []
    assert manager.prepare_append(child, 2) == []
    assert child.num_prepared == 7
    manager.commit_append(child, 5)
    manager.audit()


def test_commit_of_a_part_ends_the_preparation() -> None:
    manager = BlockManager([GroupSpec(8, 4)])
    tables = manager.create()
    manager.prepare_append(tables, 12)
    for wrong in (-1, 13):
        with pytest.raises(BlockError, match=f"commit of {wrong} tokens, 12 are prepared"):
            manager.commit_append(tables, wrong)
    manager.commit_append(tables, 2)
    with pytest.raises(BlockError, match="0 are prepared"):
        manager.commit_append(tables, 1)
    with pytest.raises(BlockError, match="positions 0 to 2 have slots"):
        manager.slot(tables, 0, 2)
    assert manager.stats().groups[0].waste_slots == 10
    child = manager.fork(tables)  # takes the stored tokens only
    assert child.tables[0].refs == tables.tables[0].refs[:1]
    assert manager.stats().groups[0].waste_slots == 10  # the shared block is counted once
    manager.audit()
    assert manager.blocks_needed(tables, 10) == (1,)  # the copy; the blocks left over serve


def test_no_fork_while_slots_are_being_written() -> None:
    manager = BlockManager([GroupSpec(8, 4)])
    tables = grown(manager, 2)
    manager.prepare_append(tables, 1)
    before = state(manager)
    with pytest.raises(BlockError, match="2 tokens stored, 3 prepared"):
        manager.fork(tables)
    assert state(manager) == before
    manager.commit_append(tables, 0)
    manager.fork(tables)


def test_appending_nothing_takes_nothing() -> None:
    manager = BlockManager([GroupSpec(2, 4)])
    parent = grown(manager, 2)
    child = manager.fork(parent)
    assert manager.blocks_needed(child, 0) == (0,)
    assert manager.prepare_append(child, 0) == []
    with pytest.raises(OptionError, match="-1 new tokens"):
        manager.prepare_append(child, -1)
    assert manager.slots(child, 0, 1, 1) == []


def test_slots_follow_the_table_and_not_each_other() -> None:
    manager = BlockManager([GroupSpec(8, 4), GroupSpec(16, 2)])
    first = [grown(manager, 4) for _ in range(5)]
    for tables in (first[3], first[0], first[2]):
        manager.free(tables)
    tables = grown(manager, 10)
    assert tables.tables[0].refs == [2, 0, 3]
    assert manager.slots(tables, 0, 2, 9) == [10, 11, 0, 1, 2, 3, 12]
    for group in (0, 1):
        spread = [manager.slot(tables, group, position) for position in range(10)]
        assert spread == manager.slots(tables, group, 0, 10)
    for start, stop in ((-1, 2), (3, 2), (0, 11)):
        with pytest.raises(BlockError, match="positions 0 to 10 have slots"):
            manager.slots(tables, 0, start, stop)


def test_a_block_on_the_host_has_no_slot() -> None:
    manager = BlockManager([GroupSpec(8, 4)])
    tables = grown(manager, 4)
    tables.tables[0].refs[0] = make_ref(3, Pool.PINNED_HOST)
    with pytest.raises(BlockError, match="position 1 is in pinned_host block 3"):
        manager.slot(tables, 0, 1)


def test_sequences_of_another_manager_are_refused() -> None:
    manager, other = BlockManager([GroupSpec(8, 4)]), BlockManager([GroupSpec(8, 4)])
    stranger = grown(other, 3)
    for call in (manager.free, manager.fork):
        with pytest.raises(BlockError, match="not of this block manager"):
            call(stranger)
    for verb in (manager.prepare_append, manager.commit_append, manager.can_append, manager.blocks_needed):
        with pytest.raises(BlockError, match="not of this block manager"):
            verb(stranger, 1)
    with pytest.raises(BlockError, match="not of this block manager"):
        manager.slot(stranger, 0, 0)
    assert manager.pools[0].num_free == 8


@pytest.mark.parametrize(
    "groups", [[], [GroupSpec(0, 4)], [GroupSpec(4, 0)], [GroupSpec(4, 4), GroupSpec(4, 4, max_blocks=0)]]
)
def test_bad_groups(groups: list[GroupSpec]) -> None:
    with pytest.raises(OptionError, match=r"at least|are allowed"):
        BlockManager(groups)


def test_stats() -> None:
    manager = BlockManager([GroupSpec(8, 4), GroupSpec(8, 8)])
    parent = grown(manager, 6)
    child = manager.fork(parent)
    manager.prepare_append(child, 1)
    manager.commit_append(child, 1)
    stats = manager.stats()
    assert (stats.copies, stats.sequences, stats.unfinished_items) == (2, 2, 2)
    small, large = (group.pool for group in stats.groups)
    assert (small.used, small.free, small.cached, small.shared) == (3, 5, 0, 1)
    assert (large.used, large.free, large.cached, large.shared) == (2, 6, 0, 0)
    assert [group.waste_slots for group in stats.groups] == [2 + 1, 2 + 1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda manager, tables: manager.pools[0].fork(tables.tables[0].refs[0]),
        lambda manager, tables: manager.pools[0].allocate(),
        lambda manager, tables: manager.pools[0].pin(tables.tables[0].refs[0]),
        lambda manager, tables: manager.pools[0].mark_ready(tables.tables[0].refs[1]),
        lambda manager, tables: tables.tables[0].refs.pop(),
        lambda manager, tables: setattr(tables, "num_tokens", 3),
        lambda manager, tables: setattr(tables, "num_tokens", 8),
        lambda manager, tables: setattr(tables, "num_prepared", 9),
        lambda manager, tables: setattr(tables.tables[0], "max_blocks", 1),
        lambda manager, tables: (manager.fork(tables), setattr(tables, "num_prepared", 7)),
    ],
)
def test_audit_sees_damage(damage) -> None:
    manager = BlockManager([GroupSpec(8, 4)])
    tables = grown(manager, 6)
    manager.audit()
    damage(manager, tables)
    with pytest.raises(BlockError):
        manager.audit()
