"""Text as it leaves the engine: stop strings over several tokens, split characters, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import greedy, ids_of, prompt, script, tiny, with_tokenizer
from recording import Job, run

from cupaged import LLM, SamplingParams
from cupaged.errors import OptionError, RequestError, TemplateError
from cupaged.logprobs import best_logprobs


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with tiny(with_tokenizer(tmp_path / "model")) as model:
        yield model
        model.engine.check_idle()


STOP_CASES: dict[str, tuple[list[str], dict[str, Any], str, str, Any, str]] = {
    # what the model writes, options, text, finish and stop reason, what no piece may show
    "spans tokens": (["AB", "CD", "EFG", "H"], {"stop": "DEF"}, "ABC", "stop", "DEF", "D"),
    "spans tokens, included": (
        ["AB", "CD", "EFG", "H"],
        {"stop": "DEF", "include_stop_str_in_output": True},
        "ABCDEF",
        "stop",
        "DEF",
        "G",
    ),
    "false alarm is released": (["x", "DE", "Y", "Z"], {"stop": "DEF", "max_tokens": 4}, "xDEYZ", "length", None, "F"),
    "earliest wins": (["one two three"], {"stop": ["three", "two"]}, "one ", "stop", "two", "t"),
    "held text is released at the end": (["abc", "DE", "</s>"], {"stop": "DEF"}, "abcDE", "stop", 2, "F"),
    "held text is released at the length": (
        ["abc", "DE"],
        {"stop": "DEF", "max_tokens": 2},
        "abcDE",
        "length",
        None,
        "F",
    ),
    "a stop token wins over held text": (
        ["abc", "DE", "H"],
        {"stop": "DEF", "stop_token_ids": ids_of("H")},
        "abcDE",
        "stop",
        ids_of("H")[0],
        "H",
    ),
    "a stop token may be shown": (
        ["abc", "H"],
        {"stop_token_ids": ids_of("H"), "include_stop_str_in_output": True},
        "abcH",
        "stop",
        ids_of("H")[0],
        "I",
    ),
    "half a character": (["é", "🙂", "ok"], {"stop": "ok"}, "é🙂", "stop", "ok", "\ufffd"),
}


@pytest.mark.parametrize("name", STOP_CASES)
def test_T04_stop_strings_cut_the_text_and_are_never_shown(llm: LLM, name: str) -> None:
    written, options, text, finish, stop, hidden = STOP_CASES[name]
    whole = "".join(written)
    # Characters of several bytes come byte by byte.
    script(llm.engine, ids_of(*written) if whole.isascii() else [3 + byte for byte in whole.encode()])
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0, **options})
    pieces = list(llm.stream("say DEF two ok", params))
    assert "".join(piece.text for piece in pieces) == text
    assert not any(hidden in piece.text for piece in pieces)
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (finish, stop)
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    (output,) = llm.generate("say DEF two ok", params)
    assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == (text, finish, stop)
    assert output.token_ids == [token for piece in pieces for token in piece.token_ids]


def test_T01_half_a_character_is_never_shown(llm: LLM) -> None:
    written = [3 + byte for byte in "a🙂é".encode()]
    script(llm.engine, written)
    pieces = list(llm.stream("x", greedy(len(written))))
    assert "".join(piece.text for piece in pieces) == "a🙂é"
    assert [piece.text for piece in pieces] == ["a", "", "", "", "🙂", "", "é"]
    (cut,) = llm.generate("x", greedy(3))
    assert cut.text == "a\ufffd"  # the end came in the middle


def test_special_tokens_are_shown_if_asked(llm: LLM) -> None:
    script(llm.engine, ids_of("ok", "</s>"))
    hidden = llm.generate("x", SamplingParams(max_tokens=5, temperature=0))[0]
    assert (hidden.text, hidden.token_ids) == ("ok", ids_of("ok", "</s>"))
    shown = llm.generate("x", SamplingParams(max_tokens=2, temperature=0, skip_special_tokens=False, ignore_eos=True))[
        0
    ]
    assert shown.text == "ok</s>"


def test_each_prompt_keeps_its_own_text_and_order(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, seed=n) for n in (1, 9, 4)]
    texts = ["a", "some longer prompt", "bb"]
    together = llm.generate(texts, params)
    for text, one, output in zip(texts, params, together, strict=True):
        assert llm.tokenizer is not None
        assert output.prompt == text
        assert output.prompt_token_ids == llm.tokenizer.encode(text)
        assert output.text == llm.tokenizer.decode(output.token_ids) == llm.generate(text, one)[0].text
        assert len(output.token_ids) == one.max_tokens


def test_without_a_chat_template_chat_says_so(llm: LLM) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_a_model_without_tokenizer_works_with_ids_and_refuses_what_needs_text() -> None:
    with tiny() as llm:
        assert llm.tokenizer is None
        output = llm.generate([[4, 5, 6]], greedy(3))[0]
        assert (output.text, output.prompt, len(output.token_ids)) == ("", None, 3)
        with pytest.raises(RequestError, match="no tokenizer; give token ids, not text"):
            llm.generate("hello")
        with pytest.raises(RequestError, match="stop: this model has no tokenizer"):
            llm.generate([[4, 5, 6]], greedy(3, stop="x"))
        with pytest.raises(TemplateError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])
        llm.engine.check_idle()


def log_softmax(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.longdouble)
    return np.asarray(wide - wide.max() - np.log(np.exp(wide - wide.max()).sum()), np.float64)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_unmodified_logits(count: int) -> None:
    params = SamplingParams(
        max_tokens=12, temperature=1.7, top_k=30, top_p=0.9, min_p=0.01, seed=4, logprobs=count, ignore_eos=True
    )
    with tiny() as llm:
        result = run(llm.engine, {"r": Job(prompt(9), params)})
    output = result.outputs["r"].outputs[0]
    assert output.logprobs is not None
    total = 0.0
    for index, (token, mapping) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        exact = log_softmax(result.logits["r", 9 + index])
        best = [int(i) for i in np.lexsort((np.arange(len(exact)), -exact))[:count]]
        assert list(mapping) == best + [token] * (token not in best)
        for token_id, value in mapping.items():
            assert value == pytest.approx(exact[token_id], abs=1e-9)
        total += mapping[token]
    assert output.cumulative_logprob == pytest.approx(total)
    streamed = [piece.logprobs for piece in result.pieces]
    assert [mapping for listed in streamed for mapping in listed or []] == output.logprobs


def test_logprobs_are_absent_unless_asked() -> None:
    with tiny() as llm:
        output = llm.generate([prompt(3)], greedy(3))[0].outputs[0]
        assert (output.logprobs, output.cumulative_logprob) == (None, None)
        assert all(piece.logprobs is None for piece in llm.stream(prompt(3), greedy(3)))


def test_logprobs_of_equal_logits_go_by_id() -> None:
    row = np.array([1, 3, 2, 3, 2, 2, 0, 2], np.float32)
    assert list(best_logprobs(row, 7, 4)) == [1, 3, 2, 4, 7]
    assert list(best_logprobs(row, 3, 3)) == [1, 3, 2]
    assert list(best_logprobs(row, 6, 0)) == [6]
    assert list(best_logprobs(row, 0, 20)) == [1, 3, 2, 4, 5, 7, 0, 6]
    flat = best_logprobs(np.zeros(100, np.float32), 50, 3)
    assert list(flat) == [0, 1, 2, 50]
    assert flat[50] == pytest.approx(-np.log(100))


def test_sampling_options_given_to_chat_are_not_taken_for_template_variables(llm: LLM) -> None:
    with pytest.raises(OptionError, match="temperature: this is a sampling option; put it into params"):
        llm.chat([{"role": "user", "content": "hi"}], temperature=0.1)


@pytest.mark.parametrize("stop", [(), ("EFGH",)])
def test_a_request_that_nobody_follows_has_its_text_at_any_time(llm: LLM, stop: tuple[str, ...]) -> None:
    written = [3 + byte for byte in "aé🙂EFb".encode()]
    script(llm.engine, written)
    engine = llm.engine
    params = SamplingParams(max_tokens=len(written), temperature=0, stop=list(stop))
    alone = engine.add_request([5, 6], params, followed=False)
    read = engine.add_request([5, 6], params)
    texts, pieces = "", []
    while engine.has_work:
        pieces += engine.step()
        texts = "".join(piece.text for piece in pieces if piece.request_id == read)
        if len(pieces) % 2:  # asked for now and then
            assert engine.request(alone).output().text == texts
    mine = [piece for piece in pieces if piece.request_id == alone]
    assert len(mine) == 1 and mine[0].finish_reason == "length" and mine[0].usage is not None
    assert engine.request(alone).output().text == engine.request(read).output().text == texts == "aé🙂EFb"
    for name in (alone, read):
        engine.forget(name)
