"""Predicted lengths, the peak of blocks to come, and admission by it: fewer preemptions, nobody starves."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from test_scheduler import Bench

from cupaged.bench.memory.traces import DISTRIBUTIONS, draw
from cupaged.foresight import FEWEST, Foresight, LengthPredictor, Lengths, Occupant, peak
from cupaged.memory import BlockManager, GroupSpec, blocks_for
from cupaged.request import Request, RequestState, make_request
from cupaged.sampling import SamplingParams
from cupaged.scheduler import Scheduler


@pytest.mark.parametrize("seed", range(20))
def test_quantiles_are_those_of_the_last_lengths(seed: int) -> None:
    rng = random.Random(seed)
    window = rng.randint(FEWEST, 40)
    lengths, seen = Lengths(window), []
    for _ in range(150):
        seen.append(rng.randint(1, 30))
        lengths.add(seen[-1])
        low, quantile = rng.randint(0, 30), rng.random()
        above = sorted(length for length in seen[-window:] if length > low)
        answer = lengths.quantile_above(low, quantile)
        if len(above) < FEWEST:
            assert answer is None
        else:
            assert answer in above
            assert sum(length < answer for length in above) <= quantile * len(above)
            assert sum(length <= answer for length in above) >= quantile * len(above)


def test_a_prediction_is_by_class_then_by_all_then_by_what_it_has_reached() -> None:
    predictor = LengthPredictor(quantile=0.5)
    for _ in range(FEWEST - 1):
        predictor.add(prompt=100, output=10)
    assert not predictor.ready
    assert predictor.remaining(prompt=100, done=0, most=500) == 500
    predictor.add(prompt=5, output=40)
    assert predictor.ready
    assert predictor.remaining(prompt=100, done=0, most=500) == 10  # too few of the class: of all
    for length in range(41, 41 + 2 * FEWEST):
        predictor.add(prompt=6, output=length)
    assert predictor.remaining(prompt=4, done=0, most=500) == 40 + FEWEST
    assert predictor.remaining(prompt=4, done=40, most=500) == 1 + FEWEST  # of those above 40
    assert predictor.remaining(prompt=4, done=40, most=3) == 3
    assert predictor.remaining(prompt=4, done=60, most=500) == 60  # few have ever been longer: as long again


@pytest.mark.parametrize("seed", range(30))
def test_the_peak_is_the_most_of_all_steps(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 4, 16])
    occupants = []
    for _ in range(rng.randint(1, 12)):
        tokens = rng.choice([0, rng.randint(1, 60)])
        listed = rng.randint(0, blocks_for(tokens, size) + 1)
        occupants.append(Occupant(rng.randint(0, listed or 5), rng.randint(0, 50), listed, tokens))
    brute = 0
    for step in range(51):
        used = 0
        for each in occupants:
            if step <= each.steps:
                used += each.own + (max(0, -(-(each.tokens + step) // size) - each.listed) if each.tokens else 0)
        brute = max(brute, used)
    assert peak(occupants, size) == brute


def taught(bench: Bench, length: int, prompt: int = 4) -> None:
    """So many tokens are what outputs are known to have."""
    assert bench.scheduler.foresight is not None
    for _ in range(FEWEST):
        bench.scheduler.foresight.predictor.add(prompt, length)


def test_a_request_waits_if_blocks_are_expected_to_run_out() -> None:
    for lesson, expected in ((16, RequestState.WAITING), (3, RequestState.RUNNING)):
        bench = Bench(blocks=8, block_size=4)
        taught(bench, lesson)
        bench.add(prompt=4, new=16)  # 5 blocks at its end
        bench.step()
        second = bench.add(prompt=4, new=16)
        bench.step()
        assert second.state is expected
        bench.drain()
        foresight = bench.scheduler.foresight
        assert foresight is not None
        waited = expected is RequestState.WAITING
        assert (bench.scheduler.preemptions, foresight.held_back) == ((0, 1) if waited else (1, 0))


def test_a_preemption_counts_as_avoided_when_the_blocks_have_run_out() -> None:
    bench = Bench(blocks=8, block_size=4)
    taught(bench, 28)
    foresight = bench.scheduler.foresight
    assert foresight is not None
    bench.add(prompt=4, new=28)  # all 8 blocks
    bench.step()
    bench.add(prompt=4, new=28)
    while foresight.avoided == 0:
        assert bench.scheduler.preemptions == 0
        bench.step()
    running = bench.requests[0].sequences[0]
    # Both would have 17 tokens, or one less and the next to come: 5 blocks each, or 5 and 4 in 8.
    assert len(running.tokens) in (16, 17, 18)
    assert bench.requests[1].state is RequestState.WAITING


def test_long_ones_of_unknown_length_do_not_keep_others_out_of_an_empty_pool() -> None:
    bench = Bench(blocks=100, block_size=4)
    taught(bench, 2)
    bench.add(prompt=4, new=390)
    for _ in range(10):
        bench.step()
    late = bench.add(prompt=4, new=2)
    bench.step()
    assert late.state is RequestState.RUNNING


def test_an_end_before_the_peak_makes_room() -> None:
    bench = Bench(blocks=8, block_size=4)
    taught(bench, 16)
    first = bench.add(prompt=4, new=16)
    while len(first.sequences[0].tokens) < 15:  # 4 of its 5 blocks
        bench.step()
    second = bench.add(prompt=4, new=16)  # they need 5 and 3 when the first one ends
    bench.step()
    assert second.state is RequestState.RUNNING
    bench.drain()
    assert bench.scheduler.preemptions == 0


def test_blocks_that_prompts_share_are_counted_once() -> None:
    """Two requests of 5 + 2 blocks fit in 9 if they share 5 of them, and not if each has its own."""
    for same in (True, False):
        manager = BlockManager([GroupSpec(10, 4)], prefix_reuse=True)
        scheduler = Scheduler(manager, 64, 8)
        assert scheduler.foresight is not None
        for _ in range(FEWEST):
            scheduler.foresight.predictor.add(21, 8)
        requests = []
        for number in range(2):
            ids = [*([5 if same else number] * 20), 9]
            params = SamplingParams(max_tokens=8)
            request = make_request(f"r{number}", None, ids, params, 29, frozenset(), (0, number), None)
            requests.append(request)
            scheduler.add(request)
            for chunk in scheduler.schedule().chunks:
                assert chunk.sequence.tables is not None
                manager.commit_append(chunk.sequence.tables, chunk.count)
                manager.remember(chunk.sequence.tables, chunk.sequence.tokens)
                chunk.sequence.tokens.append(7)
        assert requests[0].state is RequestState.RUNNING
        assert requests[1].state is (RequestState.RUNNING if same else RequestState.WAITING)


def test_the_head_is_let_in_when_nothing_runs_whatever_is_expected_of_it() -> None:
    bench = Bench(blocks=8, block_size=4)
    taught(bench, 10_000)
    alone = bench.add(prompt=4, new=28)
    assert bench.step()
    assert alone.state is RequestState.RUNNING
    bench.drain()


def test_who_waits_is_not_overtaken() -> None:
    bench = Bench(blocks=12, block_size=4)
    taught(bench, 30, prompt=4)
    taught(bench, 1, prompt=2)
    for _ in range(4):
        bench.add(prompt=4, new=30)
        bench.add(prompt=2, new=1)  # would fit at once
    begun: list[str] = []
    while bench.scheduler.has_work:
        begun += [name for name, (start, _) in bench.step().items() if start == 0 and name not in begun]
    assert begun == [f"r{number}" for number in range(8)]


@pytest.mark.parametrize("seed", range(8))
def test_S01_everybody_gets_on_under_predictions_of_any_kind(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(blocks=12, block_size=4, max_tokens=rng.choice([4, 16, 64]))
    for _ in range(30):
        bench.scheduler.foresight.predictor.add(rng.randint(1, 20), rng.choice([1, 10, 5000]))  # type: ignore[union-attr]
    for _ in range(25):
        prompt = rng.randint(1, 20)
        bench.add(prompt, rng.randint(1, 48 - prompt))
    bench.drain()
    assert len(bench.ended) == 25
    for place, request in enumerate(bench.requests):
        assert request.preemptions <= place


# -- lengths as ShareGPT's


@dataclass(frozen=True)
class Served:
    """How a mix went. throughput: generated tokens by time, for each of COSTS; what is computed anew takes its time."""

    preemptions: int
    throughput: tuple[float, ...]
    avoided: int = 0
    taken_ahead: int = 0
    vain_share: float = 0.0


# Time of a step: 1 + so much for each token that is generated, + so much for each other one. A token costs next to
# nothing beside the weights, as on a GPU; or much, as on a CPU.
COSTS = ((0.02, 0.006), (0.2, 0.05))


def serve(ahead: bool, blocks: int, count: int, seed: int) -> Served:
    """All requests at once, through the scheduler. Lengths of outputs are told to nobody: each may take the rest of
    2,048 tokens, and stops by itself before."""
    manager = BlockManager([GroupSpec(blocks, 16)])
    scheduler = Scheduler(manager, max_tokens=512, max_sequences=64)
    scheduler.look_ahead(ahead)
    outputs: dict[Request, int] = {}
    for number, lengths in enumerate(draw(DISTRIBUTIONS["sharegpt-like"], count, 2048, seed)):
        params = SamplingParams(max_tokens=2048 - lengths.prompt)
        ids = [number] * lengths.prompt
        request = make_request(f"r{number}", None, ids, params, 2048, frozenset(), (0, number), None)
        outputs[request] = lengths.output
        scheduler.add(request)
    steps = decodes = others = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        steps += 1
        samples = sum(chunk.samples for chunk in plan.chunks)
        decodes += samples
        others += plan.num_tokens - samples
        for chunk in plan.chunks:
            sequence, request = chunk.sequence, chunk.sequence.request
            assert sequence.tables is not None
            manager.commit_append(sequence.tables, chunk.count)
            if chunk.samples:
                sequence.tokens.append(7)
                if len(sequence.output_ids) == outputs[request]:
                    request.state = RequestState.FINISHED
                    sequence.finish_reason = "stop"
                    scheduler.remove(request)
    assert manager.pools[0].num_free == blocks
    generated = sum(outputs.values())
    throughput = tuple(generated / (steps + decode * decodes + other * others) for decode, other in COSTS)
    if scheduler.foresight is None or scheduler.ahead is None:
        return Served(scheduler.preemptions, throughput)
    vain = scheduler.ahead.share_in_vain(steps)
    return Served(scheduler.preemptions, throughput, scheduler.foresight.avoided, scheduler.ahead.taken, vain)


@pytest.mark.parametrize(
    ("blocks", "seed"),
    [
        (300, 1),
        *(pytest.param(blocks, seed, marks=pytest.mark.slow) for blocks, seed in ((300, 0), (800, 0), (800, 1))),
    ],
)
def test_foresight_halves_preemptions_and_costs_no_throughput(blocks: int, seed: int) -> None:
    plain, ahead = (serve(ahead, blocks, 400, seed) for ahead in (False, True))
    print(f"{blocks} blocks, seed {seed}: plain {plain}, with foresight {ahead}")
    assert plain.preemptions > 100
    assert ahead.preemptions <= plain.preemptions / 2
    assert ahead.avoided > 0
    assert ahead.taken_ahead > 0
    assert ahead.vain_share < 0.05
    for without, with_it in zip(plain.throughput, ahead.throughput, strict=True):
        assert with_it >= 0.98 * without


def test_a_predictor_that_knows_nothing_changes_nothing() -> None:
    manager = BlockManager([GroupSpec(8, 4)])
    foresight = Foresight(manager)
    assert not foresight.predictor.ready
    bench = Bench(blocks=8, block_size=4)
    a, b = bench.add(prompt=4, new=20), bench.add(prompt=4, new=20)
    bench.step()
    assert a.state is b.state is RequestState.RUNNING
