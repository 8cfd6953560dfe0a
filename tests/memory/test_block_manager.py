"""BlockManager: appending, sharing, copying on write and refusing, by the cases that broke other systems."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from cupaged.errors import BlockError, CapacityError, OptionError, OutOfBlocks
from cupaged.memory import (
    NO_BLOCK,
    BlockManager,
    CopyBlock,
    FrameState,
    GroupSpec,
    PlanItem,
    Pool,
    SequenceTables,
    blocks_for,
    frame_of,
    make_ref,
)


class Bytes:
    """Blocks of bytes, one byte a token: executes plans at once and completes them."""

    def __init__(self, manager: BlockManager, group: int = 0) -> None:
        self.manager = manager
        self.group = group
        self.block_size = manager.groups[group].block_size
        self.store = bytearray(b"?" * (manager.groups[group].num_blocks * self.block_size))

    def block(self, ref: int) -> bytes:
        start = frame_of(ref) * self.block_size
        return bytes(self.store[start : start + self.block_size])

    def execute(self, plan: list[PlanItem]) -> None:
        for item in plan:
            start = frame_of(item.destination) * self.block_size
            self.store[start : start + self.block_size] = self.block(item.source)
            self.manager.complete(item.ticket)

    def write(self, tables: SequenceTables, tokens: bytes) -> None:
        """Write prepared positions and commit them."""
        start = tables.num_tokens
        for slot, token in zip(self.manager.slots(tables, self.group, start, start + len(tokens)), tokens, strict=True):
            self.store[slot] = token
        self.manager.commit_append(tables, len(tokens))

    def append(self, tables: SequenceTables, tokens: bytes) -> int:
        """A whole step; the number of copies it took."""
        plan = self.manager.prepare_append(tables, len(tokens))
        self.execute(plan)
        self.write(tables, tokens)
        return len(plan)

    def read(self, tables: SequenceTables) -> bytes:
        return bytes(self.store[slot] for slot in self.manager.slots(tables, self.group, 0, tables.num_tokens))


def grown(manager: BlockManager, num_tokens: int) -> SequenceTables:
    tables = manager.create()
    for item in manager.prepare_append(tables, num_tokens):
        manager.complete(item.ticket)
    manager.commit_append(tables, num_tokens)
    return tables


def state(manager: BlockManager) -> object:
    """What a failed call must not change."""
    return (
        [{k: v.copy() if hasattr(v, "copy") else v for k, v in vars(pool).items()} for pool in manager.pools],
        [
            (s.num_tokens, s.num_prepared, [list(table.refs) for table in s.tables])
            for s in manager._sequences  # the tables of sequences that the caller may have dropped too
        ],
        manager.stats(),
    )


def test_A01_blocks_on_demand_at_exact_multiples() -> None:
    for tokens, blocks in {0: 0, 1: 1, 15: 1, 16: 1, 17: 2, 32: 2, 33: 3}.items():
        manager = BlockManager([GroupSpec(8, 16)])
        tables = grown(manager, tokens)
        assert tables.tables[0].num_blocks == manager.pools[0].num_used == blocks
        assert manager.stats().groups[0].waste_slots == blocks * 16 - tokens
        manager.audit()


def test_A01_eight_tokens_fill_two_blocks_of_four() -> None:
    manager = BlockManager([GroupSpec(4, 4)])
    tables = grown(manager, 8)
    assert [manager.slot(tables, 0, p) for p in range(8)] == list(range(8))
    assert manager.blocks_needed(tables, 0) == (0,)
    assert manager.blocks_needed(tables, 1) == (1,)
    assert [manager.pools[0].state(ref) for ref in tables.tables[0].refs] == [FrameState.READY] * 2


def test_A02_freeing_twice_raises_and_a_drained_manager_is_empty() -> None:
    manager = BlockManager([GroupSpec(8, 4)])
    parent = grown(manager, 9)
    child = manager.fork(parent)
    assert [manager.pools[0].count(ref) for ref in child.tables[0].refs] == [2, 2, 2]
    manager.free(parent)
    with pytest.raises(BlockError, match="freed before"):
        manager.free(parent)
    assert manager.pools[0].num_used == 3
    manager.free(child)
    assert manager.pools[0].num_free == 8
    manager.audit()


def test_A02_a_window_that_reuses_and_drops_blocks_frees_each_once() -> None:
    manager = BlockManager([GroupSpec(8, 4)])
    tables = grown(manager, 16)
    refs = tables.tables[0].refs
    manager.pools[0].free(refs[:2])
    refs[:2] = [NO_BLOCK, refs[3]]
    manager.audit()
    child = manager.fork(tables)
    assert [manager.pools[0].count(ref) for ref in refs[2:]] == [2, 2]
    manager.audit()
    assert manager.prepare_append(child, 1) == []
    manager.commit_append(child, 1)
    with pytest.raises(BlockError, match="no longer holds"):
        manager.slot(child, 0, 3)
    manager.free(child)
    manager.free(tables)
    assert manager.pools[0].num_free == 8
    manager.audit()


def test_A03_a_sequence_never_outgrows_its_table_row() -> None:
    manager = BlockManager([GroupSpec(100, 16, max_blocks=blocks_for(64, 16))])
    tables = grown(manager, 60)
    before = state(manager)
    for verb in (manager.prepare_append, manager.can_append, manager.blocks_needed):
        with pytest.raises(CapacityError, match="65 tokens need 5 KV blocks of 16 tokens, one sequence can have 4"):
            verb(tables, 5)
    assert state(manager) == before
    for _ in range(4):
        assert manager.prepare_append(tables, 1) == []
        manager.commit_append(tables, 1)
    assert (tables.num_tokens, tables.tables[0].num_blocks) == (64, 4)
    with pytest.raises(CapacityError):
        manager.prepare_append(tables, 1)
    with pytest.raises(BlockError, match="positions 0 to 64 have slots"):
        manager.slot(tables, 0, 64)


def test_A04_needs_equal_to_usable_fits_and_one_more_is_refused_with_both_numbers() -> None:
    manager = BlockManager([GroupSpec(50, 16)])
    assert manager.pools[0].num_free == manager.pools[0].num_blocks == 50  # no block is set aside
    assert manager.longest_sequence == 800
    assert manager.fits_ever(800) and not manager.fits_ever(801)
    manager.check_fits(800)
    with pytest.raises(CapacityError, match="1002 tokens need 63 KV blocks of 16 tokens, one sequence can have 50"):
        manager.check_fits(1002)
    with pytest.raises(CapacityError, match="need 51 KV blocks"):
        manager.can_append(manager.create(), 801)  # never, and not merely not now
    tables = grown(manager, 784)
    assert manager.can_append(tables, 16)
    manager.prepare_append(tables, 16)
    manager.commit_append(tables, 16)
    assert manager.pools[0].num_free == 0
    behind = manager.create()
    assert not manager.can_append(behind, 1)
    manager.free(tables)
    assert manager.can_append(behind, 800)


def test_A04_the_smallest_group_limits() -> None:
    manager = BlockManager([GroupSpec(50, 16), GroupSpec(10, 32), GroupSpec(50, 16, max_blocks=30)])
    assert manager.longest_sequence == 320
    with pytest.raises(CapacityError, match=r"321 tokens need 11 KV blocks of 32 .* have 10 \(KV group 1\)"):
        manager.check_fits(321)


def test_A08_four_samples_of_a_partly_filled_block_cost_three_copies() -> None:
    for order in permutations(range(4)):  # whoever writes first, the last one writes in place
        manager = BlockManager([GroupSpec(8, 16)])
        device = Bytes(manager)
        parent = manager.create()
        prompt = bytes(range(17))
        device.append(parent, prompt)
        samples = [parent, *(manager.fork(parent) for _ in range(3))]
        assert manager.pools[0].num_used == 2
        source = parent.tables[0].refs[1]
        before = device.block(source)
        for writer in order[:3]:
            assert device.append(samples[writer], b"%d" % writer) == 1
            assert device.block(source) == before
            assert samples[writer].tables[0].refs[1] != source
        last = samples[order[3]]
        assert manager.pools[0].count(source) == 1
        assert device.append(last, b"%d" % order[3]) == 0
        assert last.tables[0].refs[1] == source
        assert manager.stats().copies == 3
        assert manager.pools[0].num_used == 5
        for number, sample in enumerate(samples):
            assert device.read(sample) == prompt + b"%d" % number
        manager.audit()


def test_A08_all_prepared_before_any_copy_runs() -> None:
    manager = BlockManager([GroupSpec(8, 16)])
    device = Bytes(manager)
    parent = manager.create()
    device.append(parent, bytes(range(17)))
    samples = [parent, *(manager.fork(parent) for _ in range(3))]
    plan = [item for sample in samples for item in manager.prepare_append(sample, 1)]
    source = parent.tables[0].refs[1]
    assert len(plan) == 3
    assert {type(item) for item in plan} == {CopyBlock}
    destinations = {item.destination for item in plan}
    assert len(destinations) == 3 and not destinations & {item.source for item in plan}
    device.write(samples[3], b"z")  # in place, before the copies out of the same block
    device.execute(plan)
    for number, sample in enumerate(samples[:3]):
        device.write(sample, b"%d" % number)
    assert [device.read(sample)[16:] for sample in samples] == [b"\x100", b"\x101", b"\x102", b"\x10z"]
    assert manager.pools[0].count(source) == 1


@pytest.mark.parametrize("seed", range(5))
def test_A10_beams_count_each_shared_block_once(seed: int) -> None:
    rng = random.Random(seed)
    manager = BlockManager([GroupSpec(64, 4)])
    device = Bytes(manager)
    root = manager.create()
    device.append(root, b"prompt")
    beams, texts = [root], [b"prompt"]
    for step in range(50):
        parents = [rng.randrange(len(beams)) for _ in range(4)]
        children = [manager.fork(beams[parent]) for parent in parents]
        for dead in beams:
            manager.free(dead)
        beams, texts = children, [texts[parent] for parent in parents]
        letters = [b"%c" % rng.randrange(97, 123) for _ in beams]
        device.execute([item for beam in beams for item in manager.prepare_append(beam, 1)])
        for beam, letter in zip(beams, letters, strict=True):
            device.write(beam, letter)
        texts = [text + letter for text, letter in zip(texts, letters, strict=True)]
        assert [device.read(beam) for beam in beams] == texts
        live = {ref for beam in beams for ref in beam.tables[0].refs}
        assert manager.pools[0].num_used == len(live)
        assert blocks_for(7 + step, 4) <= len(live) <= 4 * blocks_for(7 + step, 4)
        manager.audit()
    for beam in beams:
        manager.free(beam)
    assert manager.pools[0].num_free == 64
    manager.audit()


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


class Reference:
    """An allocator told again from the rules alone, without plans: blocks are objects, counted by their holders."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.sequences: list[list[object]] = []
        self.lengths: list[int] = []
        self.copies = 0

    def new(self, num_tokens: int) -> None:
        self.sequences.append([object() for _ in range(0, num_tokens, self.block_size)])
        self.lengths.append(num_tokens)

    def fork(self, parent: int) -> None:
        self.sequences.append(list(self.sequences[parent]))
        self.lengths.append(self.lengths[parent])

    def append(self, number: int) -> None:
        blocks = self.sequences[number]
        if self.lengths[number] == len(blocks) * self.block_size:
            blocks.append(object())
        elif sum(blocks[-1] in other for other in self.sequences) > 1:
            blocks[-1] = object()
            self.copies += 1
        self.lengths[number] += 1

    @property
    def used(self) -> int:
        return len({block for blocks in self.sequences for block in blocks})


# B, prompt, samples, steps; then what the rules give: blocks after the fork, copies, blocks in use.
SCENARIOS = [
    (16, 17, 4, 1, 2, 3, 5),
    (16, 16, 4, 1, 1, 0, 5),
    (16, 15, 4, 1, 1, 3, 4),
    (16, 15, 4, 2, 1, 3, 8),
    (16, 1, 2, 1, 1, 1, 2),
    (4, 7, 3, 5, 2, 2, 7),
    (16, 48, 8, 16, 3, 0, 11),
    (16, 48, 8, 17, 3, 0, 19),
]


@pytest.mark.parametrize(("block_size", "prompt", "samples", "steps", "after_fork", "copies", "in_use"), SCENARIOS)
def test_A08_parallel_samples_take_the_blocks_that_the_rules_say(
    block_size: int, prompt: int, samples: int, steps: int, after_fork: int, copies: int, in_use: int
) -> None:
    manager, reference = BlockManager([GroupSpec(100, block_size)]), Reference(block_size)
    pool = manager.pools[0]
    sequences = [grown(manager, prompt)]
    reference.new(prompt)
    for _ in range(samples - 1):
        sequences.append(manager.fork(sequences[0]))
        reference.fork(0)
    assert pool.num_used == reference.used == after_fork
    for _ in range(steps):
        for number, sequence in enumerate(sequences):
            for item in manager.prepare_append(sequence, 1):
                manager.complete(item.ticket)
            manager.commit_append(sequence, 1)
            reference.append(number)
            assert (pool.num_used, manager.stats().copies) == (reference.used, reference.copies)
    assert (manager.stats().copies, pool.num_used) == (copies, in_use)
    for sequence in sequences:
        manager.free(sequence)
    assert pool.num_free == 100
    manager.audit()
