"""Beam search in the engine: blocks shared as a tree, ends of every kind, company, pressure. (Truth: golden beams.)"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import Job, block_bytes, greedy, ids_of, poison, prompt, scatter, script, tiny, with_tokenizer
from recording import run

from cupaged import LLM, SamplingParams
from cupaged.beam_search import BeamSearch, Candidate, best_candidates
from cupaged.engine import Engine
from cupaged.errors import OptionError, RequestError
from cupaged.outputs import RequestOutput
from cupaged.step_logits import StepLogits
from cupaged.step_plan import Chunk


def beams(width: int, new: int = 20, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": new, "beam_width": width, "n": width, "ignore_eos": True, **options})


def lines(output: RequestOutput) -> list[tuple[list[int], float | None, str | None]]:
    return [(completion.token_ids, completion.score, completion.finish_reason) for completion in output.outputs]


def small_pool(blocks: int, **options: Any) -> LLM:
    with tiny(**options) as probe:
        size = block_bytes(probe)
    return tiny(kv_memory=blocks * size, **options)


# -- arithmetic


@pytest.mark.parametrize("seed", range(30))
def test_the_best_candidates_are_those_of_a_full_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 5)), int(rng.integers(1, 700)))
    sums = rng.integers(-9, 9, shape).astype(np.float64) if seed % 2 else rng.standard_normal(shape)  # ties, or none
    sums[rng.random(shape) < 0.2] = -np.inf
    count = int(rng.integers(1, 60))
    found = best_candidates(sums, count)
    every = sorted((-value, index) for index, value in enumerate(sums.reshape(-1).tolist()) if value != -np.inf)
    truth = [(index // shape[1], index % shape[1], -value) for value, index in every[:count]]
    assert [(c.beam, c.token, c.total) for c in found] == truth


def test_ties_go_to_the_better_beam_then_the_lower_id() -> None:
    found = best_candidates(np.zeros((2, 3)), 4)
    assert found == [Candidate(0, 0, 0.0), Candidate(0, 1, 0.0), Candidate(0, 2, 0.0), Candidate(1, 0, 0.0)]


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "best", "over"),
    [(True, 1.0, -0.1, True), (False, 1.0, -4.0, False), (False, 1.0, -8.0, True), (False, 1.0, -8.1, True),
     ("never", 1.0, -8.1, False), ("never", 1.0, -20.0, True), ("never", 0.0, -2.1, True), ("never", -1.0, -2.0, True)],
)  # fmt: skip
def test_when_the_search_is_over(early_stopping: Any, penalty: float, best: float, over: bool) -> None:
    """Two finished outputs, the worst with score -2; running beams of 4 tokens, 10 at most."""
    search: BeamSearch[str] = BeamSearch(2, penalty, early_stopping, 10, 1)
    search.finish("first", -1.0, 1)
    assert not search.over(-1e9, 4)  # one is missing
    search.finish("second", -2.0, 1)
    assert search.over(best, 4) is over
    search.finish("third", -2.0, 1)  # of one score, the earlier stays
    search.finish("fourth", -1.0, 1)
    assert search.finished == [(-1.0, "first"), (-1.0, "fourth")]


# -- blocks


def test_A10_a_tree_of_beams_uses_the_distinct_blocks_of_its_beams_and_no_other() -> None:
    """4 beams, 50 steps, blocks of 4 tokens, random logits (so that beams die and branch); all slots start as NaN."""
    rng = np.random.default_rng(5)
    with tiny(block_size=4, kv_memory="1MiB") as llm:
        engine = llm.engine
        poison(engine)
        scatter(engine, seed=1)
        noise(engine, rng)
        name = engine.add_request(prompt(30), beams(4, 50))
        while engine.has_work:
            engine.step()
            engine.manager.audit()
            request = engine.request(name)
            held = {ref for beam in request.live_sequences for ref in beam.tables.tables[0].refs}  # type: ignore[union-attr]
            assert engine.manager.pools[0].num_used == len(held)
            assert all(beam.num_remaining == 1 for beam in request.live_sequences)
        assert len(engine.request(name).output().outputs) == 4
        assert engine.stats().forks > 20 and engine.stats().copies > 10
        engine.check_idle()


def noise(engine: Engine, rng: np.random.Generator) -> None:
    """Random logits instead of the model's; computed all the same, so that K/V are written and read."""
    forward = engine._forward

    def noisy(chunks: Sequence[Chunk]) -> Any:
        logits = forward(chunks).host
        assert np.isfinite(logits).all()
        made = rng.standard_normal(logits.shape).astype(np.float32)
        return StepLogits(engine.device, engine.device.upload(made))

    engine._forward = noisy  # type: ignore[method-assign]


def test_four_beams_store_the_prompt_once() -> None:
    with tiny() as llm:
        llm.generate([prompt(160)], beams(4, 16))
        assert llm.engine.stats().peak_blocks[0] <= 160 // 16 + 4  # and one block more for each beam
        llm.engine.check_idle()


def test_children_share_until_they_write_and_one_of_them_writes_in_place() -> None:
    with tiny() as llm:
        engine = llm.engine
        name = engine.add_request(prompt(17), beams(4))
        engine.step()
        stats = engine.stats()
        assert (stats.forks, stats.copies, stats.groups[0].pool.used, stats.groups[0].pool.shared) == (3, 0, 2, 2)
        engine.step()
        stats = engine.stats()
        assert (stats.copies, stats.peak_blocks) == (3, (5,))
        while engine.has_work:
            engine.step()
        metrics = engine.request(name).output().metrics
        assert (metrics.forks, metrics.copies_on_write) == (engine.stats().forks, engine.stats().copies)


# -- the same whatever else happens


JOBS = {
    "beams": Job(prompt(20), beams(4, 30)),
    "wide": Job(prompt(45, 1), beams(6, 20, length_penalty=0.5, ignore_eos=False), arrives=2),
    "samples": Job(prompt(33, 2), SamplingParams(n=3, max_tokens=40, seed=3, ignore_eos=True), arrives=1),
    "never": Job(prompt(9, 3), beams(3, 30, early_stopping="never", stop_token_ids=list(range(100))), arrives=4),
    "single": Job(prompt(60, 4), greedy(50), arrives=3),
}


def test_beams_are_the_same_alone_in_company_in_pieces_and_preempted() -> None:
    with tiny() as llm:
        alone = {name: run(llm.engine, {name: Job(job.ids, job.params)}).outputs[name] for name, job in JOBS.items()}
    for options in ({}, {"max_batch_tokens": 16, "threads": 2}, {"block_size": 4}):
        with tiny(**options) as llm:
            together = run(llm.engine, JOBS).outputs
        assert {name: lines(output) for name, output in together.items()} == {n: lines(o) for n, o in alone.items()}
    with small_pool(17, max_batch_tokens=24) as llm:
        pressed = run(llm.engine, JOBS).outputs
        assert sum(output.metrics.preemptions for name, output in pressed.items() if name != "single") > 1
        assert pressed["wide"].metrics.preemptions or pressed["never"].metrics.preemptions
    assert {name: lines(output) for name, output in pressed.items()} == {n: lines(o) for n, o in alone.items()}


def test_beams_that_outgrow_the_pool_end_with_what_they_have() -> None:
    """10 blocks for one request of 5 beams that diverge at once: it cannot go on, and says so by its length."""
    with small_pool(10) as llm:
        engine = llm.engine
        noise(engine, np.random.default_rng(2))
        behind = engine.add_request(prompt(5), greedy(3))
        name = engine.add_request(prompt(20), beams(5, 120))
        while engine.has_work:
            engine.step()
            assert engine.num_steps < 300
        output = engine.request(name).output()
        assert [completion.finish_reason for completion in output.outputs] == ["length"] * 5
        assert 10 < len(output.outputs[0].token_ids) < 120
        scores = [completion.score for completion in output.outputs]
        assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
        assert engine.request(behind).output().finish_reason == "length"
        engine.check_idle()


# -- ends


def test_one_beam_is_greedy_decoding() -> None:
    with tiny() as llm:
        for seed in range(4):
            params = SamplingParams(max_tokens=20, beam_width=1)
            (beam,) = llm.generate([prompt(9, seed)], params)
            (one,) = llm.generate([prompt(9, seed)], SamplingParams(max_tokens=20, temperature=0))
            assert beam.token_ids == one.token_ids


def test_beams_arrive_whole_at_the_end_of_a_stream(tmp_path: Path) -> None:
    with tiny(with_tokenizer(tmp_path / "model")) as llm:
        (output,) = llm.generate("abc", beams(3, 6, n=2, logprobs=1))
        pieces = list(llm.stream("abc", beams(3, 6, n=2, logprobs=1)))
        assert [
            (piece.index, piece.text, piece.token_ids, piece.logprobs, piece.finish_reason) for piece in pieces
        ] == [
            (0, output.outputs[0].text, output.outputs[0].token_ids, output.outputs[0].logprobs, "length"),
            (1, output.outputs[1].text, output.outputs[1].token_ids, output.outputs[1].logprobs, "length"),
        ]
        assert [piece.usage is not None for piece in pieces] == [False, True]
        assert output.usage.completion_tokens == 12
        for completion in output.outputs:
            assert completion.text == llm.tokenizer.decode(completion.token_ids)  # type: ignore[union-attr]
            entries = zip(completion.logprobs or [], completion.token_ids, strict=True)
            logprobs = [entry[token] for entry, token in entries]
            assert completion.cumulative_logprob == pytest.approx(sum(logprobs))
            assert completion.score == pytest.approx(sum(logprobs) / 6)  # nothing changes the log-probabilities here


def test_stop_strings_end_a_beam_as_an_end_token_does(tmp_path: Path) -> None:
    """The model writes "AB", "CD", "EFG", ...; the best beam ends inside EFG, the text of the other goes on."""
    with tiny(with_tokenizer(tmp_path / "model")) as llm:
        script(llm.engine, ids_of("AB", "CD", "EFG", "ok"))
        (output,) = llm.generate("x", beams(2, 5, stop="DEF", early_stopping=True))
        first, second = output.outputs
        assert (first.text, first.finish_reason, first.stop_reason) == ("ABC", "stop", "DEF")
        assert first.token_ids == ids_of("AB", "CD", "EFG")
        assert "DEF" not in second.text
        (shown,) = llm.generate("x", beams(2, 5, stop="DEF", include_stop_str_in_output=True, n=1))
        assert shown.text == "ABCDEF"
        (later,) = llm.generate("x", beams(2, 5, stop="DEF", min_tokens=5, n=1))
        assert later.text.startswith("ABCDEFG") and later.finish_reason == "length"
        llm.engine.check_idle()


def test_end_tokens_of_the_model_and_the_request_end_a_beam() -> None:
    with tiny() as llm:
        script(llm.engine, [30, 31, 2, 32])
        (output,) = llm.generate([prompt(3)], beams(3, 6, ignore_eos=False, n=1))
        assert (output.token_ids, output.finish_reason, output.outputs[0].stop_reason) == ([30, 31, 2], "stop", 2)
        (own,) = llm.generate([prompt(3)], beams(3, 6, stop_token_ids=[31], n=1))
        assert (own.token_ids, own.outputs[0].stop_reason) == ([30, 31], 31)


def test_processors_work_on_log_probabilities() -> None:
    """As in Hugging Face: a repetition penalty multiplies them, for they are below 0."""
    seen: list[np.ndarray] = []

    def processor(tokens: list[int], scores: Any) -> None:
        seen.append(scores.copy())

    with tiny() as llm:
        (biased,) = llm.generate([prompt(5)], beams(2, 4, n=1, logit_bias={7: 50.0}))
        assert biased.token_ids == [7] * 4
        (penalised,) = llm.generate([prompt(5)], beams(1, 1, repetition_penalty=2.0, logits_processor=processor))
        name = llm.engine.add_request(prompt(5), greedy(1, logprobs=20))
        while llm.engine.has_work:
            llm.engine.step()
        (plain,) = llm.engine.request(name).output().outputs[0].logprobs or []
        for token, value in plain.items():
            factor = 2.0 if token in prompt(5) else 1.0
            assert seen[0][token] == pytest.approx(factor * value, rel=1e-5)
        assert penalised.outputs[0].score == pytest.approx(float(seen[0].max()), rel=1e-6)


@pytest.mark.parametrize("step", range(5))
def test_an_abort_ends_all_beams_with_what_they_have(step: int) -> None:
    with tiny(max_batch_tokens=16) as llm:
        engine = llm.engine
        name = engine.add_request(prompt(30), beams(4, 40, n=2))
        for _ in range(step):
            assert engine.step() == []
        assert engine.abort(name) is True
        ends = engine.step()
        many = 2 if step > 1 else 1  # before the end of the prompt there is one beam
        assert [(piece.index, piece.finish_reason) for piece in ends] == [(index, "abort") for index in range(many)]
        assert [len(piece.token_ids) for piece in ends] == [max(0, step - 1)] * many
        assert ends[-1].usage is not None
        engine.check_idle()


@pytest.mark.parametrize("failing_at", [30, 31, 33])
def test_S04_a_failing_step_ends_the_beams_and_no_other_request(failing_at: int) -> None:
    jobs = {"bad": Job(prompt(30), beams(3)), "good": Job(prompt(9, 1), beams(3))}
    with tiny() as llm:
        whole = run(llm.engine, {"good": jobs["good"]}).outputs["good"]
    with tiny() as llm:
        engine = llm.engine
        forward = engine._forward

        def failing(chunks: Sequence[Chunk]) -> Any:
            for chunk in chunks:
                sequence = chunk.sequence
                if (sequence.request.request_id, len(sequence.tokens), sequence.index) == (
                    "bad", failing_at, 0 if failing_at == 30 else 2,
                ):  # fmt: skip
                    raise ValueError("the cosmic ray")
            return forward(chunks)

        engine._forward = failing  # type: ignore[method-assign]
        outputs = run(engine, jobs).outputs
        assert {completion.finish_reason for completion in outputs["bad"].outputs} == {"error"}
        assert "the cosmic ray" in str(outputs["bad"].error)
        assert lines(outputs["good"]) == lines(whole)


def test_S04_a_function_that_raises_ends_its_beams_alone() -> None:
    def raising(tokens: list[int], scores: Any) -> Any:
        if len(tokens) == 7:
            raise ValueError("no such thing")

    with tiny() as llm:
        bad, good = llm.generate([prompt(5), prompt(6)], [beams(3, logits_processor=raising), beams(3)])
        assert bad.error is not None and "no such thing" in bad.error
        assert [completion.finish_reason for completion in good.outputs] == ["length"] * 3
        llm.engine.check_idle()


def test_S06_no_tokens_give_an_empty_output() -> None:
    with tiny() as llm:
        (output,) = llm.generate([prompt(5)], beams(3, 0))
        assert lines(output) == [([], 0.0, "length")]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"beam_width": 0}, r"beam_width=0 .*1 \.\. 256"),
    ({"beam_width": 2, "n": 3}, r"n=3 is out of range: 1 \.\. beam_width \(2\)"),
    ({"beam_width": 2, "best_of": 2}, "best_of=2: beam search does not sample"),
    ({"beam_width": 2, "temperature": 0.7}, "temperature=0.7: beam search does not sample; 0 or 1"),
    ({"beam_width": 2, "top_k": 5}, "top_k=5: beam search does not sample; 0 is allowed"),
    ({"beam_width": 2, "top_p": 0.9}, "top_p=0.9: beam search does not sample; 1 is allowed"),
    ({"beam_width": 2, "min_p": 0.1}, "min_p=0.1: beam search does not sample; 0 is allowed"),
    ({"beam_width": 2, "length_penalty": 11}, r"length_penalty=11 .*-10 \.\. 10"),
    ({"beam_width": 2, "early_stopping": 1}, 'early_stopping=1: True, False or "never"'),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(o) for o, _ in REFUSED])
def test_Q09_what_beams_cannot_use_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SamplingParams(**options)


def test_more_beams_than_a_step_takes_are_refused_with_both_numbers() -> None:
    with tiny(max_sequences=4) as llm:
        with pytest.raises(RequestError, match=r"beam_width: 5 beams .* 4 sequences \(max_sequences\)"):
            llm.generate([prompt(3)], beams(5))
        assert len(llm.generate([prompt(3)], beams(4))[0].outputs) == 4
