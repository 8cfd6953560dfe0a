"""Allocation and copy-on-write cases that broke other systems, each named after its id."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from memory_bytes import Bytes, grown, state

from cupaged.errors import BlockError, CapacityError
from cupaged.memory import NO_BLOCK, BlockManager, CopyBlock, FrameState, GroupSpec, blocks_for


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
