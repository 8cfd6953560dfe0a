"""The scheduler over a block manager, without a model: budgets, order, chunks, preemption, progress."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cupaged.memory import BlockManager, GroupSpec
from cupaged.request import Request, RequestState, make_request
from cupaged.sampling import SamplingParams
from cupaged.scheduler import Scheduler
from cupaged.step_plan import StepPlan


class Bench:
    """A scheduler whose forward pass always succeeds: chunks are committed, each sample adds a token."""

    def __init__(
        self, blocks: int | Sequence[GroupSpec], block_size: int = 4, max_tokens: int = 64, max_sequences: int = 64
    ) -> None:
        groups = [GroupSpec(blocks, block_size)] if isinstance(blocks, int) else blocks
        self.manager = BlockManager(groups)
        self.scheduler = Scheduler(self.manager, max_tokens, max_sequences)
        self.requests: list[Request] = []
        self.ended: list[str] = []

    def add(self, prompt: int, new: int) -> Request:
        number = len(self.requests)
        ids = [number] * prompt
        params = SamplingParams(max_tokens=new)
        request = make_request(f"r{number}", None, ids, params, prompt + new, frozenset(), (0, number), None)
        assert self.manager.fits_ever(prompt + new)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, tuple[int, int]]:
        """One step; (start, count) of each request that took part."""
        plan = self.scheduler.schedule()
        self.check(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.tables is not None
            self.manager.commit_append(sequence.tables, chunk.count)
            if chunk.samples:
                sequence.tokens.append(7)
                if len(sequence.tokens) == sequence.request.max_total:
                    self.end(sequence.request, RequestState.FINISHED)
        self.manager.audit()
        return {chunk.sequence.request.request_id: (chunk.start, chunk.count) for chunk in plan.chunks}

    def check(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.scheduler.max_tokens
        assert len(plan.chunks) <= self.scheduler.max_sequences
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.request.state is RequestState.RUNNING
            assert sequence.tables is not None
            assert chunk.start == sequence.num_computed
            assert chunk.count > 0
            assert chunk.samples == (chunk.start + chunk.count == len(sequence.tokens))
            for group in range(len(self.manager.groups)):  # every position has its slot
                self.manager.slots(sequence.tables, group, chunk.start, chunk.start + chunk.count)
        for queue in (self.scheduler.waiting, self.scheduler.running):
            assert [r.rank for r in queue] == sorted(r.rank for r in queue)

    def end(self, request: Request, state: RequestState) -> None:
        request.state = state
        request.sequences[0].finish_reason = "length" if state is RequestState.FINISHED else "abort"
        self.scheduler.remove(request)
        self.ended.append(request.request_id)

    def drain(self, limit: int = 10_000) -> int:
        """Step until nothing is left; every step must do something."""
        for steps in range(limit):
            if not self.scheduler.has_work:
                assert all(pool.num_free == pool.num_blocks for pool in self.manager.pools)
                return steps
            assert self.step(), "a step without a token, though there is work"
        raise AssertionError(f"not done after {limit} steps")


def test_S07_a_prompt_of_100_beside_4_decodes_takes_60_then_40() -> None:
    bench = Bench(blocks=200, max_tokens=64)
    decodes = [bench.add(prompt=5, new=50) for _ in range(4)]
    bench.step()
    long = bench.add(prompt=100, new=5)
    first, second, third = bench.step(), bench.step(), bench.step()
    assert (first[long.request_id], second[long.request_id]) == ((0, 60), (60, 40))
    assert third[long.request_id] == (100, 1)  # the first token came with the last chunk, and not before
    for step in (first, second, third):
        assert all(step[request.request_id][1] == 1 for request in decodes)


def test_prompts_are_served_in_order_of_arrival() -> None:
    bench = Bench(blocks=200, max_tokens=10)
    a, b, c = (bench.add(prompt=12, new=3) for _ in range(3))
    assert bench.step() == {a.request_id: (0, 10)}
    assert bench.step() == {a.request_id: (10, 2), b.request_id: (0, 8)}
    assert bench.step() == {a.request_id: (12, 1), b.request_id: (8, 4), c.request_id: (0, 5)}


def test_no_more_sequences_run_than_allowed() -> None:
    bench = Bench(blocks=200, max_tokens=32, max_sequences=3)
    for _ in range(7):
        bench.add(prompt=2, new=4)
    assert len(bench.step()) == 3
    bench.drain()
    assert bench.ended == [f"r{i}" for i in range(7)]


def test_A04_what_needs_all_blocks_runs_and_those_behind_it_too() -> None:
    bench = Bench(blocks=8, block_size=4)
    bench.add(prompt=20, new=12)  # 32 tokens: all 8 blocks
    for _ in range(3):
        bench.add(prompt=3, new=3)
    bench.drain()
    assert sorted(bench.ended) == ["r0", "r1", "r2", "r3"]
    assert bench.requests[0].preemptions == 0


def test_a_request_waits_until_the_whole_of_it_and_one_token_more_fit() -> None:
    bench = Bench(blocks=8, block_size=4)
    bench.add(prompt=14, new=6)  # 4 blocks now, 5 at its end
    second = bench.add(prompt=16, new=4)  # 4 blocks, and a fifth for the next token: one too many
    bench.step()
    assert second.state is RequestState.WAITING
    bench.drain()
    assert bench.scheduler.preemptions == 0


def test_the_last_to_arrive_is_preempted_and_comes_back_first() -> None:
    bench = Bench(blocks=8, block_size=4, max_tokens=64)
    old = bench.add(prompt=7, new=20)
    young = bench.add(prompt=7, new=20)
    steps = 0
    while not young.preemptions:
        bench.step()
        steps += 1
        assert steps < 50
    late = bench.add(prompt=1, new=1)
    assert young.state is RequestState.WAITING
    assert old.state is RequestState.RUNNING
    assert young.sequences[0].num_computed == 0
    assert len(young.sequences[0].tokens) > 7  # what it had generated is kept
    assert bench.scheduler.waiting == [young, late]
    bench.drain()
    assert bench.ended[0] == "r0"
    assert (old.preemptions, young.preemptions) == (0, 1)


def test_a_victim_that_is_scheduled_already_leaves_the_step() -> None:
    """Decodes are scheduled first; then an older prompt's chunk needs such a one's blocks."""
    bench = Bench(blocks=6, block_size=4, max_tokens=8)
    old = bench.add(prompt=20, new=2)
    bench.step()
    young = make_request("y", None, [1] * 15, SamplingParams(max_tokens=2), 17, frozenset(), (0, 99), None)
    young.state = RequestState.RUNNING  # as if let in before the promise to `old` was counted
    young.sequences[0].tables = bench.manager.create()
    bench.manager.prepare_append(young.sequences[0].tables, 16)
    bench.manager.commit_append(young.sequences[0].tables, 14)
    bench.scheduler.running.append(young)
    assert bench.step() == {old.request_id: (8, 7)}  # the eighth token was the victim's, whose chunk is gone
    assert young.state is RequestState.WAITING
    assert young.preemptions == 1


@pytest.mark.parametrize("seed", range(6))
def test_S01_preemptions_are_bounded_by_the_number_of_other_requests(seed: int) -> None:
    """A pool that holds about two of twelve requests: everybody gets on, nobody is sent back again and again."""
    rng = random.Random(seed)
    bench = Bench(blocks=12, block_size=4, max_tokens=rng.choice([4, 16, 64]))
    for _ in range(12):
        prompt = rng.randint(1, 20)
        bench.add(prompt, rng.randint(1, 48 - prompt))
    bench.drain()
    assert len(bench.ended) == 12
    for place, request in enumerate(bench.requests):
        assert request.preemptions <= place, "only an older request can take one's blocks, each once"


def test_S01_the_thrash_test_does_preempt() -> None:
    bench = Bench(blocks=12, block_size=4)
    for _ in range(12):
        bench.add(prompt=4, new=40)
    bench.drain()
    assert bench.scheduler.preemptions > 5
    assert bench.scheduler.preemptions == sum(request.preemptions for request in bench.requests)


@pytest.mark.parametrize("seed", range(40))
def test_random_arrivals_and_aborts_end_with_nothing_held(seed: int) -> None:
    """Two KV groups of different block sizes; every step does something, the oldest request is never sent back."""
    rng = random.Random(1000 + seed)
    groups = [GroupSpec(rng.randint(8, 20), 4), GroupSpec(rng.randint(8, 20), 8)]
    bench = Bench(groups, max_tokens=rng.choice([1, 2, 7, 32, 200]), max_sequences=rng.choice([1, 3, 16]))
    longest = bench.manager.longest_sequence
    for _ in range(150):
        live = [request for request in bench.requests if not request.state.terminal]
        if rng.random() < 0.3 and len(live) < 12:
            prompt = rng.randint(1, longest - 1)
            bench.add(prompt, rng.randint(1, longest - prompt))
        if live and rng.random() < 0.05:
            bench.end(rng.choice(live), RequestState.ABORTED)
        oldest = min((r for r in bench.requests if not r.state.terminal), key=lambda r: r.rank, default=None)
        before = None if oldest is None else oldest.preemptions
        taken = bench.step()
        assert bool(taken) == (oldest is not None)
        if oldest is not None:
            assert oldest.preemptions == before
    bench.drain()
    assert len(bench.ended) == len(set(bench.ended)) == len(bench.requests)


def test_removing_what_is_not_there_any_more_changes_nothing() -> None:
    bench = Bench(blocks=8)
    request = bench.add(prompt=3, new=3)
    bench.step()
    bench.scheduler.remove(request)
    bench.scheduler.remove(request)
    assert not bench.scheduler.has_work
    assert bench.manager.pools[0].num_free == 8
