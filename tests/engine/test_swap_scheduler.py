"""The scheduler with a host pool, without a model: who gives blocks, how they come back, and that somebody gets on."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from test_scheduler import Bench

from cupaged.memory import BlockManager, CopyBlock, GroupSpec, Pool, pool_of
from cupaged.request import Request, RequestState, make_request
from cupaged.residency import Parked, Speeds, Victim, Way
from cupaged.sampling import SamplingParams
from cupaged.scheduler import Scheduler
from cupaged.step_plan import StepPlan


class SwapBench(Bench):
    """Copies take up to `delay` steps. A step that does nothing must have copies to wait for."""

    def __init__(
        self, groups: list[GroupSpec], *, in_place: bool = False, unified: bool = False, delay: int = 0,
        max_tokens: int = 64, max_sequences: int = 64, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(groups, max_tokens=max_tokens, max_sequences=max_sequences)
        self.manager = BlockManager(groups, in_place)
        self.scheduler = Scheduler(self.manager, max_tokens, max_sequences)
        self.scheduler.room.speeds = Speeds(unified=unified)
        self.rng = random.Random(seed)
        self.delay = delay
        self.clock = 0
        self.due: dict[int, int] = {}  # ticket -> when it is done
        self.moved: Counter[str] = Counter()

    def step(self) -> dict[str, tuple[int, int]]:
        self.clock += 1
        for ticket in [ticket for ticket, when in self.due.items() if when <= self.clock]:
            del self.due[ticket]
            self.manager.complete(ticket)
        waited = bool(self.due)
        took = super().step()
        assert took or self.due or waited or not self.scheduler.has_work, "nothing done, and nothing to wait for"
        return took

    def check(self, plan: StepPlan) -> None:
        super().check(plan)
        for chunk in plan.chunks:
            assert chunk.sequence.tables is not None
            assert self.manager.settled(chunk.sequence.tables)
        for item in plan.items:
            self.moved[type(item).__name__] += 1
            late = 0 if isinstance(item, CopyBlock) else self.rng.randint(0, self.delay)
            self.due[item.ticket] = self.clock + 1 + late
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            assert request.preemptions <= len(self.requests)

    def finish(self, limit: int = 20_000) -> int:
        for steps in range(limit):
            if not self.scheduler.has_work:
                while self.due:
                    self.step()
                for pool in (*self.manager.pools, *filter(None, self.manager.host_pools)):
                    assert pool.num_free == pool.num_blocks
                return steps
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def host_refs(self, request: Request) -> list[int]:
        tables = request.sequences[0].tables
        return [] if tables is None else [ref for ref in tables.tables[0].refs if pool_of(ref) is Pool.PINNED_HOST]


def pressed(bench: SwapBench) -> tuple[Request, Request]:
    """Two requests that together outgrow the pool, stepped until the younger one is stopped."""
    old, young = bench.add(prompt=9, new=20), bench.add(prompt=9, new=20)
    while not young.preemptions:
        bench.step()
        assert bench.clock < 60
    return old, young


def test_only_as_many_blocks_as_needed_are_swapped_and_the_last_ones_first() -> None:
    bench = SwapBench([GroupSpec(8, 4, host_blocks=8)])
    _, young = pressed(bench)
    tables = young.sequences[0].tables
    assert tables is not None and young.state is RequestState.WAITING
    refs = tables.tables[0].refs
    assert [pool_of(ref) for ref in refs] == [Pool.DEVICE] * (len(refs) - 1) + [Pool.PINNED_HOST]
    assert young.sequences[0].num_computed > 9  # nothing is computed anew
    bench.finish()
    assert bench.ended == ["r0", "r1"]
    assert bench.moved["SwapOut"] == bench.moved["SwapIn"] > 1
    assert bench.scheduler.room.by_recompute == 0
    assert young.preemptions == 1


def test_whoever_needs_the_blocks_sits_out_while_they_are_copied_and_others_go_on() -> None:
    bench = SwapBench([GroupSpec(9, 4, host_blocks=8)], delay=5, seed=3)
    small = bench.add(prompt=2, new=30)
    old, young = bench.add(prompt=9, new=22), bench.add(prompt=9, new=22)
    alone = 0
    while not young.state.terminal:
        took = bench.step()
        alone += small.request_id in took and old.request_id not in took and not old.state.terminal
    assert alone > 0
    bench.finish()
    assert small.preemptions == 0


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_A17_coming_back_takes_the_swapped_blocks_and_those_of_the_next_step(spare: int) -> None:
    """12 tokens and one more: 3 blocks on the host, and a new one. At exactly 4 it comes back, at 3 it waits."""
    bench = SwapBench([GroupSpec(10, 4, host_blocks=8)])
    request = bench.add(prompt=12, new=8)
    bench.scheduler.max_tokens = 12
    bench.step()
    tables = request.sequences[0].tables
    assert tables is not None and tables.num_tokens == 12
    for item in bench.manager.swap_out(0, list(tables.tables[0].refs)):
        bench.manager.complete(item.ticket)
    bench.scheduler.running.remove(request)
    request.state = RequestState.WAITING
    bench.scheduler.add(request)
    held = bench.manager.pools[0].allocate_many(10 - 4 - spare)
    runner = Runner(bench)  # somebody runs, so that nothing is done out of turn
    bench.scheduler.schedule()
    assert (request.state is RequestState.RUNNING) == (spare >= 0)
    if spare >= 0:
        for ticket in [item.ticket for item in bench.manager.unfinished()]:
            bench.manager.complete(ticket)
        plan = bench.scheduler.schedule()
        assert [chunk.start for chunk in plan.chunks if chunk.sequence.request is request] == [12]
        assert request.preemptions == 0
        bench.manager.commit_append(tables, 1)
    runner.stop()
    bench.manager.pools[0].free(held)
    bench.manager.audit()


class Runner:
    """A running request without blocks, whose turn never comes."""

    def __init__(self, bench: SwapBench) -> None:
        self.bench = bench
        self.request = make_request("runner", None, [1], SamplingParams(max_tokens=1), 1, frozenset(), (0, 999), None)
        self.request.sequences[0].finish_reason = "stop"
        self.request.state = RequestState.RUNNING
        bench.scheduler.running.append(self.request)

    def stop(self) -> None:
        self.bench.scheduler.running.remove(self.request)


@pytest.mark.parametrize("waiting", [True, False])
def test_A17_copies_on_write_of_a_group_count_too(waiting: bool) -> None:
    """Three samples share a last block: two of them copy it in the next step."""
    manager = BlockManager([GroupSpec(8, 4, host_blocks=8)])
    first = manager.create()
    manager.prepare_append(first, 6)
    manager.commit_append(first, 6)
    samples = [first, manager.fork(first), manager.fork(first)]
    if waiting:
        manager.swap_out(0, first.tables[0].refs)
    assert manager.copies_due(0, samples) == 2
    assert manager.copies_due(0, samples[:2]) == 2  # the third may write last
    assert manager.copies_due(0, samples[:1]) == 1
    manager.free(samples[2])
    assert manager.copies_due(0, samples[:2]) == 1


def test_a_request_longer_than_the_device_pool_runs_in_place() -> None:
    bench = SwapBench([GroupSpec(4, 4, host_blocks=20)], in_place=True)
    request = bench.add(prompt=50, new=40)
    bench.finish()
    assert bench.ended == ["r0"]
    assert request.preemptions == 0
    assert bench.scheduler.room.read_in_place > 40 * 12  # 12 to 18 blocks in each of 40 steps
    assert bench.moved["SwapIn"] == 0


def test_one_that_fills_both_pools_to_the_last_slot_ends_too() -> None:
    bench = SwapBench([GroupSpec(4, 4, host_blocks=6)], in_place=True)
    assert bench.manager.longest_sequence == 40
    bench.add(prompt=3, new=37)
    bench.add(prompt=39, new=1)
    bench.add(prompt=1, new=39)
    bench.finish()
    assert bench.ended == ["r0", "r1", "r2"]


def test_where_memory_is_one_a_victim_reads_its_first_blocks_on_the_host_and_goes_on() -> None:
    bench = SwapBench([GroupSpec(12, 4, host_blocks=8)], in_place=True, unified=True)
    old, young = bench.add(prompt=17, new=10), bench.add(prompt=17, new=10)
    bench.finish()
    assert (old.preemptions, young.preemptions) == (0, 0)
    assert bench.scheduler.room.read_in_place > 0
    assert bench.moved["SwapOut"] == 2


def test_blocks_read_over_a_link_are_fetched_when_there_is_room() -> None:
    bench = SwapBench([GroupSpec(12, 4, host_blocks=8)], in_place=True)
    young = bench.add(prompt=17, new=30)
    bench.step()
    tables = young.sequences[0].tables
    assert tables is not None
    for item in bench.manager.swap_out(0, tables.tables[0].refs[:3]):
        bench.manager.complete(item.ticket)
    bench.step()
    assert bench.moved["SwapIn"] == 3
    bench.finish()
    assert bench.scheduler.room.read_in_place == 0


def test_chunks_that_read_on_the_host_come_first() -> None:
    bench = SwapBench([GroupSpec(20, 4, host_blocks=8)], in_place=True, unified=True)
    first, second = bench.add(prompt=9, new=9), bench.add(prompt=9, new=9)
    bench.step()
    tables = second.sequences[0].tables
    assert tables is not None
    for item in bench.manager.swap_out(0, tables.tables[0].refs[:1]):
        bench.manager.complete(item.ticket)
    assert list(bench.step()) == [second.request_id, first.request_id]


def test_a_block_fetched_for_one_that_shares_it_keeps_its_other_users_out_of_the_step() -> None:
    bench = SwapBench([GroupSpec(20, 4, host_blocks=8)], in_place=True, unified=True)
    parent = bench.add(prompt=9, new=9)
    bench.step()
    tables = parent.sequences[0].tables
    assert tables is not None
    for item in bench.manager.swap_out(0, tables.tables[0].refs[:1]):
        bench.manager.complete(item.ticket)
    child = bench.add(prompt=9, new=9)
    child.sequences[0].tables = bench.manager.fork(tables)
    child.sequences[0].tokens.append(1)
    bench.scheduler.room.way_back = lambda parked, speeds, in_place: Way.SWAP
    assert bench.step() == {}  # `check` has seen that no chunk has a block on its way
    assert bench.moved["SwapIn"] == 1
    assert {parent.request_id, child.request_id} == set(bench.step())
    bench.finish()


def test_the_oldest_takes_host_blocks_of_those_that_wait() -> None:
    """The host pool is full of a younger one's blocks when the oldest, now alone, outgrows the device."""
    bench = SwapBench([GroupSpec(6, 4, host_blocks=8)], in_place=True)
    old = bench.add(prompt=9, new=44)
    bench.add(prompt=9, new=10)
    bench.finish()
    assert bench.ended == ["r0", "r1"]
    assert old.preemptions == 0
    assert bench.scheduler.room.by_recompute > 0


@pytest.mark.parametrize("seed", range(6))
def test_S01_preemptions_by_swap_are_bounded_by_the_number_of_other_requests(seed: int) -> None:
    rng = random.Random(seed)
    bench = SwapBench([GroupSpec(12, 4, host_blocks=40)], delay=rng.choice([0, 3]), max_tokens=rng.choice([4, 16, 64]))
    for _ in range(12):
        prompt = rng.randint(1, 20)
        bench.add(prompt, rng.randint(1, 48 - prompt))
    bench.finish()
    assert len(bench.ended) == 12
    assert bench.moved["SwapOut"] > 5
    for place, request in enumerate(bench.requests):
        assert request.preemptions <= place


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 200))])
def test_random_arrivals_aborts_and_ways_end_with_nothing_held(seed: int) -> None:
    """Two KV groups, groups of samples, late copies, any way out and back that is possible, aborts in between."""
    rng = random.Random(2000 + seed)
    groups = [
        GroupSpec(rng.randint(8, 20), 4, host_blocks=rng.choice([3, 10, 30])),
        GroupSpec(rng.randint(8, 20), 8, host_blocks=rng.choice([2, 10])),
    ]
    in_place, unified = rng.random() < 0.6, rng.random() < 0.5
    bench = SwapBench(
        groups, in_place=in_place, unified=unified, delay=rng.choice([0, 1, 6]), seed=seed,
        max_tokens=rng.choice([4, 7, 32, 200]), max_sequences=rng.choice([4, 16]),
    )  # fmt: skip

    def out(victim: Victim, needed: int, host_free: int, speeds: Speeds, in_place: bool) -> Way:
        ways = [Way.RECOMPUTE] + [Way.SWAP] * 2 * (host_free >= victim.blocks)
        moves = min(needed, victim.blocks)
        return rng.choice(ways + [Way.IN_PLACE] * 2 * (in_place and min(victim.old_blocks, host_free) >= moves))

    def back(parked: Parked, speeds: Speeds, in_place: bool) -> Way:
        ways = [Way.SWAP, Way.RECOMPUTE] * parked.fits + [Way.IN_PLACE] * (in_place and parked.fits_in_place)
        return rng.choice(ways) if ways else Way.WAIT

    if rng.random() < 0.7:
        bench.scheduler.room.way_out, bench.scheduler.room.way_back = out, back
    longest = min(bench.manager.longest_sequence, 90)
    for _ in range(150):
        live = [request for request in bench.requests if not request.state.terminal]
        if rng.random() < 0.3 and len(live) < 12:
            prompt = rng.randint(1, longest - 1)
            bench.add(prompt, rng.randint(1, longest - prompt))
        if live and rng.random() < 0.05:
            bench.end(rng.choice(live), RequestState.ABORTED)
        bench.step()
    bench.finish()
    assert len(bench.ended) == len(set(bench.ended)) == len(bench.requests)
