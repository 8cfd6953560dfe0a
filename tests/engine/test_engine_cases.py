"""The engine through the faults of others: lengths, refusals, ends, and what is held when nothing is left."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA, with_config
from engine_support import CONTEXT, VOCAB, Job, block_bytes, greedy, mix, prompt, script, tiny
from recording import alone, assert_same_bits, run

from cupaged import LLM, SamplingParams
from cupaged.errors import BlockError, CapacityError, RequestError


def small_pool(blocks: int, **options: Any) -> LLM:
    """A tiny model with `blocks` KV blocks of 16 tokens."""
    with tiny(**options) as probe:
        size = block_bytes(probe)
    return tiny(kv_memory=blocks * size, **options)


# -- lengths and blocks


def test_A03_a_table_never_outgrows_its_row() -> None:
    """Context 64, blocks of 16, prompt 60: ends with "length" at 64 tokens, in 4 blocks."""
    with tiny(max_model_len=64) as llm:
        most = 0
        request_id = llm.engine.add_request(prompt(60), greedy(None))
        while llm.engine.has_work:
            llm.engine.step()
            tables = llm.engine.request(request_id).sequences[0].tables
            most = max(most, 0 if tables is None else tables.tables[0].num_blocks)
        (completion,) = llm.engine.request(request_id).output().outputs
        assert (len(completion.token_ids), completion.finish_reason) == (4, "length")
        assert most == 4
        assert llm.engine.manager.groups[0].max_blocks == 4
        llm.engine.check_idle()


def test_A04_needing_all_blocks_finishes_and_one_token_more_is_refused_with_both_numbers() -> None:
    with small_pool(blocks=5) as llm:
        engine = llm.engine
        assert engine.max_model_len == 80
        with pytest.raises(CapacityError, match=r"81 positions \(6 blocks\).* 80 .*\(5 blocks, 5 in all\)"):
            engine.add_request(prompt(60), greedy(21))
        jobs = {"all": Job(prompt(60), greedy(20))} | {f"behind{n}": Job(prompt(5, n), greedy(5)) for n in range(3)}
        outputs = run(engine, jobs).outputs
    assert {name: len(output.token_ids) for name, output in outputs.items()} == {
        "all": 20, "behind0": 5, "behind1": 5, "behind2": 5,
    }  # fmt: skip


def test_R04_without_a_limit_generation_ends_at_the_context_length() -> None:
    with tiny() as llm:
        (output,) = llm.generate([prompt(8)], greedy(None))
        assert (len(output.token_ids), output.finish_reason) == (CONTEXT - 8, "length")
        assert output.outputs[0].stop_reason is None
        assert (output.usage.prompt_tokens, output.usage.completion_tokens, output.usage.total_tokens) == (8, 248, 256)
        llm.engine.check_idle()


def test_S01_a_thrashed_engine_finishes_everything_with_bounded_preemptions() -> None:
    jobs = {f"r{n}": Job(prompt(6 + n, n), greedy(70)) for n in range(8)}
    with tiny() as llm:
        whole = alone(llm.engine, jobs)
    with small_pool(blocks=7) as llm:
        together = run(llm.engine, jobs)
        assert_same_bits(together, whole)
        counts = [output.metrics.preemptions for output in together.outputs.values()]
        assert sum(counts) == llm.engine.scheduler.preemptions > 4
        assert all(count <= place for place, count in enumerate(counts))


def test_S06_no_tokens_at_all_gives_an_empty_text() -> None:
    with tiny() as llm:
        ask = SamplingParams(max_tokens=0, logprobs=2)
        for ids in (prompt(5), prompt(CONTEXT)):
            (output,) = llm.generate([ids], ask)
            assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
            assert output.outputs[0].logprobs == []
            assert output.usage.total_tokens == len(ids)
        assert [piece.finish_reason for piece in llm.stream(prompt(5), ask)] == ["length"]
        assert llm.engine.num_steps <= 3  # nothing was computed
        llm.engine.check_idle()


@pytest.mark.parametrize(
    ("length", "params", "numbers"),
    [
        (CONTEXT, greedy(None), "256 tokens and 1 to generate need 257 positions"),
        (200, greedy(57), "200 tokens and 57 to generate need 257 positions"),
        (CONTEXT + 1, greedy(0), "257 tokens and 0 to generate need 257 positions"),
        (1, greedy(2**31 - 1), "need 2147483648 positions"),
    ],
)
def test_S06_what_is_too_long_is_refused_with_both_numbers(length: int, params: SamplingParams, numbers: str) -> None:
    with tiny() as llm:
        with pytest.raises(CapacityError, match=f"{numbers}.*this engine has 256"):
            llm.generate([prompt(length)], params)
        assert not llm.engine.has_work


def test_S07_chunks_of_60_and_40_beside_decodes_and_the_same_tokens_as_in_one() -> None:
    jobs = {f"decode{n}": Job(prompt(4, n), greedy(30)) for n in range(4)}
    jobs["long"] = Job(prompt(100, 9), greedy(8), arrives=3)
    with tiny() as llm:
        whole = alone(llm.engine, jobs)
    with tiny(max_batch_tokens=64) as llm:
        together = run(llm.engine, jobs)
    assert_same_bits(together, whole)
    steps = [{name: (start, count) for name, start, count in step} for step in together.chunks]
    assert [step["long"] for step in steps if "long" in step][:3] == [(0, 60), (60, 40), (100, 1)]
    for step in steps:
        if "long" in step:
            assert all(step[f"decode{n}"][1] == 1 for n in range(4))
    (first,) = [piece for piece in together.pieces if piece.request_id == "long"][:1]
    assert first.token_ids == whole.outputs["long"].token_ids[:1]


# -- refusals


def test_S05_an_empty_prompt_is_its_caller_s_error_alone() -> None:
    with tiny() as llm:
        neighbour = llm.stream(prompt(3), greedy(5))
        for empty in ([], np.array([], np.int32)):
            with pytest.raises(RequestError, match="empty"):
                llm.stream(empty, greedy(5))
        assert len([token for piece in neighbour for token in piece.token_ids]) == 5
        with pytest.raises(RequestError, match=r"prompt 1 of 2: .*empty"):
            llm.generate([[1], []], greedy(5))
        assert llm.generate([[1]], greedy(5))[0].finish_reason == "length"  # a prompt of BOS alone is fine
        llm.engine.check_idle()


IMPOSSIBLE = {"-1": -1, "320": VOCAB, "2147483648": 2**31, "5279552648203111001": 5279552648203111001}
NO_IDS: dict[str, Any] = {"<int>": 10**5000, "1.0": 1.0, "True": True, "'7'": "7", "None": None}


@pytest.mark.parametrize("shown", [*IMPOSSIBLE, *NO_IDS])
def test_T09_impossible_token_ids_are_refused_by_name(shown: str) -> None:
    token = {**IMPOSSIBLE, **NO_IDS}[shown]
    with tiny() as llm:
        neighbour = llm.stream(prompt(3), greedy(5))
        next(neighbour)
        with pytest.raises(RequestError, match="prompt: ") as caught:
            llm.generate([[5, token, 6]], greedy(5))
        assert shown in str(caught.value)
        assert re.search("(item|index) 1", str(caught.value))
        assert len([token for piece in neighbour for token in piece.token_ids]) == 4
        llm.engine.check_idle()


def test_T09_stop_token_ids_outside_the_vocabulary_are_refused() -> None:
    with tiny() as llm:
        with pytest.raises(RequestError, match=r"stop_token_ids: token id 320 is not in 0\.\.319"):
            llm.generate([prompt(3)], SamplingParams(stop_token_ids=[5, VOCAB]))


def test_numpy_ids_are_taken_like_python_s() -> None:
    with tiny() as llm:
        ids = prompt(9)
        plain = llm.generate([ids], greedy(4))[0]
        for other in (np.array(ids), np.array(ids, np.int32), tuple(ids), [np.int64(i) for i in ids]):
            assert llm.generate(other, greedy(4))[0].token_ids == plain.token_ids
            assert llm.generate([other], greedy(4))[0].prompt_token_ids == ids


def test_an_id_in_use_is_refused_and_automatic_ids_avoid_it() -> None:
    with tiny() as llm:
        engine = llm.engine
        engine.add_request(prompt(3), greedy(2), request_id="request-1")
        with pytest.raises(RequestError, match="'request-1' is in use"):
            engine.add_request(prompt(3), greedy(2), request_id="request-1")
        names = [engine.add_request(prompt(3), greedy(2)) for _ in range(3)]
        assert len({*names, "request-1"}) == 4
        while engine.has_work:
            engine.step()
        engine.check_idle()


# -- ends


def test_S09_aborting_what_is_not_running_is_a_no_op() -> None:
    with tiny(max_sequences=1) as llm:
        engine = llm.engine
        assert engine.abort("nobody") is False
        running = engine.add_request(prompt(4), greedy(3))
        waiting = engine.add_request(prompt(4), greedy(3))
        assert engine.abort(waiting) is True  # never scheduled
        assert engine.abort(waiting) is False
        pieces = engine.step() + engine.step() + engine.step()
        assert engine.request(running).output().finish_reason == "length"
        assert engine.abort(running) is False  # finished in the step before
        assert [p.finish_reason for p in pieces if p.request_id == waiting] == ["abort"]
        engine.forget(running)
        assert engine.abort(running) is False
        engine.check_idle()


def test_P04_S09_aborted_before_its_first_step_and_asked_again_it_is_computed_afresh() -> None:
    with tiny() as llm:
        expected = llm.generate([prompt(40)], greedy(4))[0].token_ids
    with tiny() as llm:
        stream = llm.stream(prompt(40), greedy(4))
        assert llm.abort(stream.request_id) is True
        (end,) = list(stream)
        assert (end.finish_reason, end.usage is not None) == ("abort", True)
        again = llm.generate([prompt(40)], greedy(4))[0]
        assert (again.token_ids, again.usage.cached_tokens) == (expected, 0)


@pytest.mark.parametrize("seed", range(6))
def test_S11_every_id_gets_exactly_one_end(seed: int) -> None:
    """Random submissions, aborts and refusals; `run` counts the ends. Aborting from within the loop, at any step."""
    rng = random.Random(seed)
    with small_pool(blocks=8, max_batch_tokens=rng.choice([3, 20, 64])) as llm:
        engine = llm.engine
        ends: dict[str, list[str]] = {}
        for step in range(120):
            if rng.random() < 0.4:
                length = rng.choice([0, 1, 9, 60, 127, 128, 300])
                try:
                    name = engine.add_request(prompt(length, step), greedy(rng.choice([0, 1, 5, 40])))
                    ends[name] = []
                except RequestError:
                    assert length in (0, 127, 128, 300) or length + 40 > engine.max_model_len
            if ends and rng.random() < 0.3:
                engine.abort(rng.choice(list(ends)))
            for piece in engine.step():
                if piece.finish_reason is not None:
                    ends[piece.request_id].append(piece.finish_reason)
        while engine.has_work:
            for piece in engine.step():
                if piece.finish_reason is not None:
                    ends[piece.request_id].append(piece.finish_reason)
        assert len(ends) > 20
        assert all(len(reasons) == 1 for reasons in ends.values())
        assert {reason for reasons in ends.values() for reason in reasons} == {"length", "abort"}
        for name in ends:
            assert engine.request(name).output().finish_reason == ends[name][0]
        engine.check_idle()


def test_M13_each_end_token_of_the_union_stops_and_ignore_eos_ignores_all(tmp_path: Path) -> None:
    """config.json says 2, generation_config.json a list of two more."""
    folder = with_config(DATA / "llama", tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9], "temperature": 0.6}')
    with tiny(folder) as llm:
        assert llm.engine.eos_ids == {2, 7, 9}
        for token in (2, 7, 9):
            forward = llm.engine._forward
            script(llm.engine, [30, 31, token, 32])
            (stopped,) = llm.generate([prompt(3)], SamplingParams(max_tokens=6, temperature=0))
            assert (stopped.token_ids, stopped.finish_reason) == ([30, 31, token], "stop")
            assert stopped.outputs[0].stop_reason == token
            (ignored,) = llm.generate([prompt(3)], greedy(6))
            assert (ignored.token_ids, ignored.finish_reason) == ([30, 31, token, 32, 3, 3], "length")
            (own,) = llm.generate([prompt(3)], greedy(6, stop_token_ids=[31]))
            assert (own.token_ids, own.finish_reason, own.outputs[0].stop_reason) == ([30, 31], "stop", 31)
            llm.engine._forward = forward  # type: ignore[method-assign]


def test_M13_a_model_without_end_tokens_goes_on_to_its_length(tmp_path: Path) -> None:
    with tiny(with_config(DATA / "llama", tmp_path / "model", eos_token_id=None)) as llm:
        assert llm.engine.eos_ids == frozenset()
        script(llm.engine, [2, 2, 2, 2])
        (output,) = llm.generate([prompt(3)], SamplingParams(max_tokens=4, temperature=0))
        assert (output.token_ids, output.finish_reason) == ([2, 2, 2, 2], "length")


# -- nothing is left behind


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("chunk", [4, 16, 1000])
def test_P09_an_idle_engine_holds_no_block(block_size: int, chunk: int) -> None:
    with tiny(block_size=block_size, max_batch_tokens=chunk) as llm:
        run(llm.engine, {"short": Job(prompt(3), greedy(1))})
        run(llm.engine, mix(seed=block_size * chunk, count=5, longest=60, new=9))
        pool = llm.engine.stats().groups[0].pool
        assert (pool.free + pool.cached, pool.used) == (pool.total, 0)


def test_P09_the_idle_check_sees_a_leak() -> None:
    with tiny() as llm:
        llm.engine.check_idle()
        tables = llm.engine.manager.create()
        llm.engine.manager.prepare_append(tables, 1)
        with pytest.raises(BlockError, match="free"):
            llm.engine.check_idle()
