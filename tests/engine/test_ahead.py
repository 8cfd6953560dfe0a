"""Blocks taken ahead: a few at once, where they will be needed and are there; the first to go back."""

from __future__ import annotations

import random

import pytest
from engine_support import greedy, prompt, tiny
from test_foresight import taught
from test_scheduler import Bench

from cupaged.ahead import AT_ONCE, Ahead
from cupaged.foresight import FEWEST
from cupaged.memory import GroupSpec
from cupaged.request import Request, RequestState


def blocks(request: Request) -> int:
    tables = request.sequences[0].tables
    return 0 if tables is None else tables.tables[0].num_blocks


def ahead(bench: Bench) -> Ahead:
    assert bench.scheduler.ahead is not None
    return bench.scheduler.ahead


def test_blocks_are_taken_a_few_at_once_and_counted_where_they_were_not_needed() -> None:
    bench = Bench(blocks=100, block_size=4)
    taught(bench, 30)
    first = bench.add(prompt=4, new=20)
    bench.step()
    assert blocks(first) == 1  # the prompt takes what it needs
    bench.step()
    assert blocks(first) == 1 + AT_ONCE
    bench.drain()  # 23 tokens are stored: 6 blocks, all used
    assert ahead(bench).taken == AT_ONCE - 1  # the sixth was needed at once, and would be the last
    assert ahead(bench).in_vain == 0
    second = bench.add(prompt=4, new=90)
    for _ in range(3):
        bench.step()
    assert blocks(second) == 1 + AT_ONCE
    bench.end(second, RequestState.ABORTED)  # 3 blocks without a token, since two steps
    assert ahead(bench).in_vain == 3
    assert ahead(bench).vain_steps == 3
    assert ahead(bench).share_in_vain(bench.scheduler.step) == 3 / (100 * bench.scheduler.step)


def test_none_are_taken_without_a_prediction_or_without_slack() -> None:
    bench = Bench(blocks=100, block_size=4)
    request = bench.add(prompt=4, new=20)
    for _ in range(3):
        bench.step()
    assert blocks(request) == 2
    small = Bench(blocks=7, block_size=4)
    taught(small, 24)
    request = small.add(prompt=16, new=12)
    for _ in range(3):
        small.step()
    assert blocks(request) == 5
    assert ahead(small).taken == 0


def test_a_waiting_request_gets_them() -> None:
    bench = Bench(blocks=10, block_size=4)
    taught(bench, 18)
    first = bench.add(prompt=4, new=20)
    bench.step()
    bench.step()
    assert blocks(first) == 5
    second = bench.add(prompt=20, new=1)  # 6 blocks: one more than there are
    bench.step()
    assert second.state is RequestState.FINISHED
    assert blocks(first) == 2
    assert ahead(bench).in_vain == 3
    bench.drain()
    assert bench.scheduler.preemptions == 0


def test_they_go_back_before_anybody_is_stopped() -> None:
    bench = Bench(blocks=16, block_size=4)
    taught(bench, 16)
    one, two = bench.add(prompt=4, new=28), bench.add(prompt=4, new=28)  # 8 blocks each
    stopped = 0
    while bench.scheduler.has_work:
        bench.step()
        stopped += one.preemptions + two.preemptions
    assert ahead(bench).taken > 0
    assert stopped == 0


@pytest.mark.parametrize("seed", range(12))
def test_S01_everybody_gets_on_whatever_is_taken_ahead(seed: int) -> None:
    """Small pools of two KV groups; what a step writes stays, whoever gives back (the bench looks at every slot)."""
    rng = random.Random(seed)
    groups = [GroupSpec(rng.randint(20, 40), 4), GroupSpec(rng.randint(12, 24), 8)]
    bench = Bench(groups, max_tokens=rng.choice([8, 64]))
    for _ in range(2 * FEWEST):
        bench.scheduler.foresight.predictor.add(rng.randint(1, 16), rng.randint(1, 60))  # type: ignore[union-attr]
    longest = min(spec.num_blocks * spec.block_size for spec in groups)
    for _ in range(60):
        if rng.random() < 0.4:
            length = rng.randint(1, min(20, longest - 1))
            bench.add(length, rng.randint(1, longest - length))
        live = [request for request in bench.requests if not request.state.terminal]
        if live and rng.random() < 0.05:
            bench.end(rng.choice(live), RequestState.ABORTED)
        bench.step()
    bench.drain()
    assert ahead(bench).taken >= ahead(bench).in_vain
    assert len(bench.ended) == len(bench.requests)


def test_A03_blocks_taken_ahead_stay_within_the_row() -> None:
    with tiny(block_size=16, max_model_len=64, kv_memory="1MiB") as llm:
        for _ in range(FEWEST):
            llm.engine.scheduler.foresight.predictor.add(60, 50)  # type: ignore[union-attr]
        (out,) = llm.generate([prompt(40)], greedy(24))
        assert (len(out.token_ids), out.finish_reason) == (24, "length")
        assert llm.engine.stats().taken_ahead >= 0
        llm.engine.check_idle()


def test_tokens_are_the_same_with_and_without() -> None:
    answers = []
    for wanted in (False, True):
        with tiny(block_size=4, kv_memory="1MiB", prefix_cache=False) as llm:
            llm.engine.scheduler.look_ahead(wanted)
            prompts = [prompt(5 + index, index) for index in range(FEWEST + 4)]
            answers.append([out.token_ids for out in llm.generate(prompts, greedy(30))])
            answers.append([out.token_ids for out in llm.generate(prompts, greedy(30))])
            assert (llm.engine.stats().taken_ahead > 0) is wanted
            llm.engine.check_idle()
    assert answers[0] == answers[1] == answers[2] == answers[3]
