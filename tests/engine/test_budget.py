"""The token budget of a step: chunks cut so that decodes keep their pace, by a clock that tests wind."""

from __future__ import annotations

import math
import random

import pytest
from engine_support import greedy, prompt, tiny
from test_scheduler import Bench

from cupaged.budget import FLOOR, GRAIN, RECENT, TokenBudget
from cupaged.errors import OptionError


def test_a_chunk_is_what_fits_beside_the_decodes() -> None:
    budget = TokenBudget(2.0)
    budget.note(16, 0, 0.100)
    budget.note(16, 50, 0.200)  # 2 ms a token
    assert budget.prompt_tokens(16, 512) == 48  # 50, in whole groups of rows
    assert budget.prompt_tokens(16, 20) == 20
    assert budget.prompt_tokens(0, 512) == 512
    assert TokenBudget(math.inf).prompt_tokens(16, 512) == 512
    wide = TokenBudget(4.0)
    wide.note(16, 0, 0.100)
    wide.note(16, 80, 0.260)
    assert wide.prompt_tokens(16, 512) == 144


def test_before_anything_is_measured_chunks_are_full_and_the_first_beside_decodes_is_small() -> None:
    budget = TokenBudget(2.0)
    assert budget.prompt_tokens(4, 512) == 512
    budget.note(4, 0, 0.010)
    assert budget.prompt_tokens(4, 512) == FLOOR
    budget.note(0, 500, 0.050)  # 0.1 ms a token, without decodes
    assert budget.prompt_tokens(4, 512) == 96
    budget.note(4, 96, 0.01384)  # 0.04 ms: they cost less beside decodes
    assert budget.prompt_tokens(4, 512) == 192  # twice as many as before
    budget.note(4, 192, 0.01768)
    assert budget.prompt_tokens(4, 512) == 248


def test_a_prompt_gets_on_whatever_it_costs() -> None:
    for pace in (1.0, 1.01, 2.0):
        budget = TokenBudget(pace)
        budget.note(4, 0, 0.001)
        budget.note(4, 100, 10.0)
        assert budget.prompt_tokens(4, 512) == FLOOR
        assert budget.prompt_tokens(4, 5) == 5


def test_a_slow_step_now_and_then_changes_nothing() -> None:
    budget, disturbed = TokenBudget(2.0), TokenBudget(2.0)
    for index in range(4 * RECENT):
        for each in (budget, disturbed):
            slow = 50 if each is disturbed and index % 4 == 3 else 1
            each.note(8, 0, 0.010 * slow)
            each.note(8, 64, 0.016 * slow)
    assert budget.prompt_tokens(8, 512) == disturbed.prompt_tokens(8, 512) == 104


def test_other_numbers_of_decodes_are_judged_by_the_nearest() -> None:
    budget = TokenBudget(2.0)
    budget.note(2, 0, 0.010)
    budget.note(16, 0, 0.040)
    assert [budget.alone(decodes) for decodes in (1, 2, 8, 10, 64)] == [0.010, 0.010, 0.010, 0.040, 0.040]


@pytest.mark.parametrize("pace", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_steps_of_a_long_prompt_beside_16_decodes_keep_the_pace(pace: float, seed: int) -> None:
    """The scheduler and a clock with noise, contexts that make tokens dearer, and a step in ten that is slow by
    itself."""
    rng = random.Random(seed)
    weights, decode, token = rng.uniform(2, 10), rng.uniform(0.1, 1), rng.uniform(0.05, 0.2)  # milliseconds
    bench = Bench(blocks=2000, block_size=4, max_tokens=512)
    budget = bench.scheduler.budget = TokenBudget(pace)
    for _ in range(16):
        bench.add(prompt=4, new=400)
    long = None
    worst, steps = [], 0
    while long is None or long.sequences[0].num_computed < 2000:
        steps += 1
        if steps == 30:
            long = bench.add(prompt=2000, new=5)
        took = bench.step()
        decodes = sum(count == 1 for _, count in took.values())
        others = sum(count for _, count in took.values()) - decodes
        context = 0 if long is None else long.sequences[0].num_computed
        true = weights + decode * decodes + token * (1 + context / 4000) * others
        budget.note(
            decodes, others, true * (rng.uniform(3, 9) if rng.random() < 0.1 else rng.uniform(0.97, 1.03)) / 1e3
        )
        if long is not None and others:
            assert decodes == 16
            worst.append(true / (weights + decode * decodes))
    assert len(worst) >= 4
    assert sorted(worst)[len(worst) // 2] <= pace * 1.1
    grain = 1 + token * 1.5 * GRAIN / (weights + decode * 16)
    assert max(worst) <= max(pace * 1.25, grain)
    assert max(worst) >= min(pace, 1 + 400 * token / (weights + 16 * decode)) * 0.8  # what may be used is


def test_what_nobody_reads_as_it_comes_keeps_no_pace() -> None:
    """Prompts beside requests of `LLM.generate` are computed as fast as they can, until a stream decodes too."""
    bench = Bench(blocks=200, block_size=4, max_tokens=64)
    budget = bench.scheduler.budget = TokenBudget(2.0)
    budget.note(1, 0, 0.001)
    budget.note(1, 10, 1.0)  # so dear that a chunk is FLOOR tokens
    silent = bench.add(prompt=4, new=60)
    silent.watched = False
    bench.step()
    first = bench.add(prompt=63, new=1)
    took = bench.step()
    assert (took[silent.request_id][1], took[first.request_id][1]) == (1, 63)
    stream = bench.add(prompt=1, new=60)
    bench.step()
    second = bench.add(prompt=62, new=1)
    took = bench.step()
    assert (took[silent.request_id][1], took[stream.request_id][1], took[second.request_id][1]) == (1, 1, FLOOR)
    bench.drain()


def test_generate_is_not_watched_and_a_stream_is() -> None:
    llm = tiny()
    seen = {}
    add = llm.engine.add_request

    def note(ids: list[int], *args: object, **options: bool) -> str:
        name = add(ids, *args, **options)  # type: ignore[arg-type]
        seen[len(ids)] = llm.engine.request(name).watched
        return name

    llm.engine.add_request = note  # type: ignore[method-assign, assignment]
    llm.generate([prompt(3), prompt(4)], greedy(2))
    list(llm.stream(prompt(5), greedy(2)))
    assert seen == {3: False, 4: False, 5: True}


def test_a_refused_head_does_not_stop_the_runners_nor_a_prompt_that_is_under_way() -> None:
    bench = Bench(blocks=40, block_size=4, max_tokens=64)
    budget = bench.scheduler.budget = TokenBudget(2.0)
    budget.note(1, 0, 0.001)
    budget.note(1, 10, 1.0)
    decode = bench.add(prompt=4, new=60)
    bench.step()
    long = bench.add(prompt=60, new=2)
    refused = bench.add(prompt=100, new=2)  # does not fit beside the two
    for _ in range(4):
        took = bench.step()
        assert took[decode.request_id][1] == 1
        assert took[long.request_id][1] in (FLOOR, 60 % FLOOR)
        assert refused.request_id not in took
    bench.drain()


def test_the_engine_measures_its_steps_and_results_do_not_depend_on_it() -> None:
    answers = []
    for pace in (1000, 2.0, 1.0):
        with tiny(kv_memory="1MiB", prefix_cache=False, pace=pace) as llm:
            engine, longest = llm.engine, 0
            names = [engine.add_request(prompt(6, seed), greedy(60)) for seed in range(4)]
            for _ in range(12):
                engine.step()
            names.append(engine.add_request(prompt(180, 9), greedy(5)))
            late = engine.request(names[-1]).sequences[0]
            steps = 0
            while engine.has_work:
                before = late.num_computed
                engine.step()
                if late.num_computed > before + 1:
                    longest, steps = max(longest, late.num_computed - before), steps + 1
            answers.append([engine.request(name).output().token_ids for name in names])
            if pace == 1.0:
                assert longest == FLOOR
                assert steps == math.ceil(180 / FLOOR)
            assert pace != 1000 or longest == 180
            assert (engine.scheduler.budget.alone(4) is None) is (pace == 1000)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("pace", [0.99, -1, 1001, math.nan, math.inf, "2", True])
def test_a_pace_out_of_range_is_refused(pace: object) -> None:
    with pytest.raises(OptionError, match=r"^pace: .* is not a number in 1\.\.1000$"):
        tiny(pace=pace)
