"""The steps before temperature: penalties, bias, min_tokens, bad words, a user's function; prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import expected
from engine_support import VOCAB, block_bytes, greedy, ids_of, prompt, script, tiny, with_tokenizer
from recording import Job, run

from cupaged import LLM, SamplingParams
from cupaged.errors import OptionError, RequestError
from cupaged.logits import adjust, completes, penalise


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with tiny(with_tokenizer(tmp_path / "model")) as model:
        yield model
        model.engine.check_idle()


def adjusted(logits: list[float], prompt_ids: list[int], output: list[int], stop_ids: Any = (), **options: Any) -> Any:
    """`adjust` on a row, for a sequence of so many tokens."""
    params = SamplingParams(**options)
    request = SimpleNamespace(params=params, prompt_ids=prompt_ids, stop_ids=frozenset(stop_ids), bad_words=())
    sequence = SimpleNamespace(request=request, output_ids=output, tokens=prompt_ids + output)
    return adjust(np.array(logits, np.float32), sequence)  # type: ignore[arg-type]


def reference(logits: Any, prompt_ids: list[int], output: list[int], rep: float, pres: float, freq: float) -> Any:
    """Penalties one token at a time in float64."""
    row = np.array(logits, np.float64)
    for token in set(prompt_ids) | set(output):
        row[token] = row[token] / rep if row[token] > 0 else row[token] * rep
    for token in set(output):
        row[token] -= pres + freq * output.count(token)
    return row


def test_Q01_repetition_penalty_lowers_negative_logits_too() -> None:
    row = adjusted([2, -2, 0, 1], [0, 1, 2], [], repetition_penalty=1.5)
    assert row.tolist() == pytest.approx([4 / 3, -3, 0, 1])


def test_Q02_repetition_counts_prompt_and_output_once_the_others_the_output_alone() -> None:
    assert adjusted([0] * 4, [1], [2, 2], presence_penalty=0.5, frequency_penalty=0.25).tolist() == [0, 0, -1, 0]
    assert adjusted([4] * 4, [1, 1], [1, 2], repetition_penalty=2.0).tolist() == [4, 2, 2, 4]


@pytest.mark.parametrize("seed", range(20))
def test_Q02_penalties_are_those_of_an_independent_count(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(50).astype(np.float32) * 5
    prompt_ids, output = rng.integers(0, 50, 30).tolist(), rng.integers(0, 50, 20).tolist()
    rep, pres, freq = float(rng.uniform(0.5, 2)), float(rng.uniform(-2, 2)), float(rng.uniform(-2, 2))
    row = logits.copy()
    params = SamplingParams(repetition_penalty=rep, presence_penalty=pres, frequency_penalty=freq)
    penalise(row, params, prompt_ids, output)
    assert np.allclose(row, reference(logits, prompt_ids, output, rep, pres, freq), atol=1e-4)


def test_the_order_is_penalties_bias_then_the_user_s_function() -> None:
    seen = []

    def processor(tokens: list[int], logits: Any) -> None:
        seen.append((tokens, logits.copy()))
        logits[3] = 9

    row = adjusted([4, 4, 4, 4], [0], [1], repetition_penalty=2.0, logit_bias={0: 1.5}, logits_processor=processor)
    assert row.tolist() == [3.5, 2, 4, 9]
    assert seen[0][0] == [0, 1] and seen[0][1].tolist() == [3.5, 2, 4, 4]


def test_bias_makes_and_forbids_tokens(llm: LLM) -> None:
    ids = prompt(9)
    (free,) = llm.generate([ids], greedy(5))
    (forced,) = llm.generate([ids], greedy(5, logit_bias={7: 100}))
    assert forced.token_ids == [7] * 5 != free.token_ids
    (without,) = llm.generate([ids], greedy(5, logit_bias={free.token_ids[0]: -100}))
    assert without.token_ids[0] != free.token_ids[0]


def test_T09_bias_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=rf"logit_bias: token id {VOCAB} is not in 0\.\.{VOCAB - 1}"):
        llm.generate([[5]], SamplingParams(logit_bias={VOCAB: 1.0}))


def test_min_tokens_holds_back_every_end(llm: LLM) -> None:
    script(llm.engine, ids_of("</s>", "</s>", "</s>", "</s>"))
    (ended,) = llm.generate([[5]], SamplingParams(max_tokens=9, temperature=0))
    (later,) = llm.generate([[5]], SamplingParams(max_tokens=9, temperature=0, min_tokens=3))
    assert (len(ended.token_ids), len(later.token_ids)) == (1, 4)
    assert later.token_ids[-1] == 2 and 2 not in later.token_ids[:-1] and later.finish_reason == "stop"


def test_min_tokens_holds_back_stop_strings(llm: LLM) -> None:
    script(llm.engine, ids_of("ok", "AB", "ok", "abc"))
    params = SamplingParams(max_tokens=4, temperature=0, stop="ok", min_tokens=2)
    (out,) = llm.generate([[5]], params)
    assert (out.text, out.finish_reason, out.outputs[0].stop_reason) == ("okAB", "stop", "ok")


def test_bad_words_are_never_completed(llm: LLM) -> None:
    script(llm.engine, ids_of("q", "x", "y", "z"))
    (out,) = llm.generate([[5]], SamplingParams(max_tokens=4, temperature=0, bad_words=["q", "xy"]))
    assert "q" not in out.text and "xy" not in out.text and out.text.endswith("z")
    (free,) = llm.generate([[5]], SamplingParams(max_tokens=4, temperature=0))
    assert free.text == "qxyz"


def test_bad_words_end_at_the_last_token() -> None:
    assert completes([5], []) and completes([4, 5], [1, 4]) and not completes([4, 5], [4, 1])
    assert not completes([4, 5], [])


def test_bad_words_need_a_tokenizer() -> None:
    with tiny() as llm, pytest.raises(RequestError, match="bad_words: this model has no tokenizer"):
        llm.generate([[5]], SamplingParams(bad_words=["x"]))


def test_a_function_chooses_the_tokens_and_its_neighbours_are_left_alone(llm: LLM) -> None:
    def only(token: int) -> Any:
        def processor(tokens: list[int], logits: Any) -> Any:
            forced = np.full_like(logits, -np.inf)
            forced[token + len(tokens)] = 0
            return forced

        return processor

    alone = llm.generate([prompt(6)], greedy(4))[0].token_ids
    both = llm.generate([[9, 9], prompt(6)], [greedy(4, logits_processor=only(50)), greedy(4)])
    assert both[0].token_ids == [52, 53, 54, 55] and both[1].token_ids == alone


def raising(tokens: list[int], logits: Any) -> Any:
    raise ValueError("no such thing")


BAD_FUNCTIONS = {
    "raises": (raising, "ValueError: no such thing"),
    "other shape": (lambda tokens, logits: logits[:-1], r"shape \(319,\)"),
    "no numbers": (lambda tokens, logits: "abc", "returned str"),
    "NaN": (lambda tokens, logits: logits * np.nan, "NaN or infinity"),
    "nothing left": (lambda tokens, logits: logits - np.inf, "no token is left"),
}


@pytest.mark.parametrize("name", BAD_FUNCTIONS)
def test_S04_a_failing_function_ends_its_request_alone(llm: LLM, name: str) -> None:
    processor, message = BAD_FUNCTIONS[name]
    alone = llm.generate([prompt(6)], greedy(4))[0].token_ids
    bad, good = llm.generate([[9, 9], prompt(6)], [greedy(4, logits_processor=processor), greedy(4)])
    assert (bad.finish_reason, good.finish_reason, good.token_ids) == ("error", "length", alone)
    assert bad.error is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(bad.error)


def test_logprobs_are_those_before_any_step(llm: LLM) -> None:
    ids = prompt(9)
    plain = llm.generate([ids], greedy(1, logprobs=3))[0].outputs[0].logprobs
    biased = llm.generate([ids], greedy(1, logprobs=3, logit_bias={7: 100}))[0].outputs[0].logprobs
    assert plain is not None and biased is not None
    assert {token: biased[0][token] for token in plain[0]} == plain[0] and 7 in biased[0]


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 7}, {"max_batch_tokens": 33, "block_size": 8}], ids=str)
def test_prompt_logprobs_are_those_of_the_golden_logits(options: dict[str, Any]) -> None:
    for ids, logits, _ in expected("llama"):
        with tiny(**options) as llm:
            (out,) = llm.generate([ids], greedy(2, prompt_logprobs=4))
            llm.engine.check_idle()
        assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == len(ids)
        assert out.prompt_logprobs[0] is None
        wide = logits.astype(np.float64)
        truth = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        for position, entry in enumerate(out.prompt_logprobs[1:], 1):
            assert entry is not None and ids[position] in entry
            assert set(np.argsort(-truth[position - 1], kind="stable")[:4]) <= set(entry)
            assert all(abs(value - truth[position - 1, token]) < 1e-3 for token, value in entry.items())


def test_prompt_logprobs_are_the_same_in_company_in_pieces_and_after_preemption() -> None:
    jobs = {str(i): Job(prompt(40 + i, seed=i), greedy(80, prompt_logprobs=i % 4)) for i in range(6)}
    with tiny() as llm:
        alone = {name: run(llm.engine, {name: job}).outputs[name] for name, job in jobs.items()}
        small = 20 * block_bytes(llm)
    with tiny(kv_memory=small, max_model_len=128) as llm:
        together = run(llm.engine, jobs).outputs
        assert sum(output.metrics.preemptions for output in together.values())
        llm.engine.check_idle()
    for name, output in together.items():
        assert output.prompt_logprobs == alone[name].prompt_logprobs
        assert output.token_ids == alone[name].token_ids


def test_penalties_and_seeds_give_the_same_text_alone_and_in_company() -> None:
    options = [
        {"repetition_penalty": 1.3}, {"presence_penalty": 1.0, "seed": 3, "temperature": 1.0},
        {"frequency_penalty": 0.7, "min_tokens": 5}, {"logit_bias": {9: 3.0}, "seed": 4, "temperature": 0.8}, {},
    ]  # fmt: skip
    params = [SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **o}) for o in options]
    ids = [prompt(10 + i, seed=i) for i in range(len(params))]
    with tiny() as llm:
        alone = [llm.generate([p], q)[0].token_ids for p, q in zip(ids, params, strict=True)]
        together = [out.token_ids for out in llm.generate(ids, params)]
    assert together == alone


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"repetition_penalty": 0}, r"repetition_penalty=0 .*0\.01 \.\. 100"),
    ({"repetition_penalty": float("nan")}, r"repetition_penalty=nan .*0\.01 \.\. 100"),
    ({"presence_penalty": 2.5}, r"presence_penalty=2.5 .*-2 \.\. 2"),
    ({"frequency_penalty": "1"}, r"frequency_penalty='1'.*-2 \.\. 2"),
    ({"logit_bias": [1, 2]}, "logit_bias=.*mapping"),
    ({"logit_bias": {-1: 1.0}}, r"logit_bias: id 0=-1 .*0 \.\. 2147483647"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias: id 0='5'"),
    ({"logit_bias": {5: float("inf")}}, r"logit_bias\[5\]=inf .*-100 \.\. 100"),
    ({"logit_bias": dict.fromkeys(range(4097), 1.0)}, "4097 ids, at most 4096"),
    ({"min_tokens": -1}, r"min_tokens=-1 .*0 \.\."),
    ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens=9 .*max_tokens \(8\)"),
    ({"bad_words": [5]}, r"bad_words\[0\]=5"),
    ({"bad_words": [""]}, r"bad_words\[0\] has 0 characters"),
    ({"prompt_logprobs": 21}, r"prompt_logprobs=21 .*0 \.\. 20"),
    ({"prompt_logprobs": -1}, r"prompt_logprobs=-1 .*0 \.\. 20"),
    ({"logits_processor": 5}, "logits_processor=5: a function"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(o)[:40] for o, _ in REFUSED])
def test_Q09_R01_bad_values_are_refused_with_name_and_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        SamplingParams(**options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
