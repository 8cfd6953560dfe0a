"""`cupaged generate` on a stand-in for LLM: what goes where, in which form."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_llm import FakeLLM

from cupaged.cli.statistics import Statistics
from cupaged.memory import GroupStats, PoolStats
from cupaged.stats import EngineStats

Run = Callable[..., tuple[int, str, str]]


def test_one_prompt_is_plain_text_that_ends_with_a_newline(run: Run) -> None:
    code, out, err = run("generate", "-w", "fake", "-p", "count", "--max-tokens", "3")
    assert (code, out, err) == (0, " one two three\n", "")


def test_no_tokens_are_an_empty_text(run: Run) -> None:
    assert run("generate", "-w", "fake", "-p", "count", "--max-tokens", "0") == (0, "", "")


def test_the_model_is_closed(run: Run) -> None:
    before = FakeLLM.closed
    run("generate", "-w", "fake", "-p", "count", "-n", "1")
    assert FakeLLM.closed == before + 1


def test_several_prompts_stand_in_order_under_headings(run: Run) -> None:
    code, out, _ = run("generate", "-w", "fake", "-p", "first\nline", "-p", "x" * 99, "--token-ids", "4,5", "-n", "1")
    assert code == 0
    assert out == (f"=== 1 of 3: first line\n one\n\n=== 2 of 3: {'x' * 57}...\n one\n\n=== 3 of 3: 4,5\n one\n")


def test_json_is_an_object_a_line_without_nan(run: Run) -> None:
    code, out, _ = run("generate", "-w", "fake", "-p", "a", "-p", "é\u2028", "--json", "-n", "2", "--logprobs", "1")
    assert code == 0
    lines = out.split("\n")
    assert len(lines) == 3 and lines[2] == ""
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines[:2])
    assert (first["index"], second["index"], second["prompt"]) == (0, 1, "é\u2028")
    assert first["text"] == " one two" and first["token_ids"] == [0, 1]
    assert first["finish_reason"] == "length" and first["stop_reason"] is None and first["error"] is None
    assert first["usage"] == {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2, "total_tokens": 5}
    assert first["metrics"]["first_token_seconds"] == 0.25 and first["metrics"]["preemptions"] == 0
    assert first["logprobs"] == [{"0": None, "7": None}, {"1": None, "7": None}]


def test_a_model_without_tokenizer_shows_ids_as_token_ids_takes_them(run: Run) -> None:
    assert run("generate", "-w", "fake:ids", "--token-ids", "3 4", "-n", "3") == (0, "0,1,2\n", "")
    _, out, _ = run("generate", "-w", "fake:ids", "--token-ids", "3", "--token-ids", "4", "-n", "2")
    assert "=== 2 of 2: 4\n0,1\n" in out


def test_chat_puts_prompts_into_messages(run: Run) -> None:
    _, out, _ = run("generate", "-w", "fake", "--chat", "--system", "be brief", "-p", "hi")
    assert out == "[{'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': 'hi'}]\n"
    _, out, _ = run("generate", "-w", "fake", "--chat", "-p", "hi", "-p", "ho", "--json", "-n", "1")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["hi", "ho"]


def test_a_failed_request_is_told_and_the_others_are_shown(run: Run) -> None:
    code, out, err = run("generate", "-w", "fake:failing", "-p", "a", "-p", "b", "-p", "c", "-n", "1", "--json")
    assert code == 1
    assert [json.loads(line)["finish_reason"] for line in out.splitlines()] == ["length", "error", "length"]
    assert err == "cupaged: error: prompt 2 of 3 (--prompt): step 5: logits are not finite\n"


def test_a_failed_stream_keeps_its_text_and_exits_with_1(run: Run) -> None:
    code, out, err = run("generate", "-w", "fake:failing", "-p", "a", "-p", "b", "-n", "2")
    assert (code, out) == (1, "=== 1 of 2: a\n one two\n\n=== 2 of 2: b\n one two\n")
    assert err == "cupaged: error: prompt 2 of 2 (--prompt): step 5: logits are not finite\n"


def test_S05_an_empty_prompt_among_others_is_named_before_anything_runs(run: Run) -> None:
    code, out, err = run("generate", "-w", "fake", "-p", "a", "-p", "", "--token-ids", "1")
    assert (code, out) == (2, "")
    assert err == "cupaged: error: prompt 2 of 3 (--prompt): the prompt is empty: at least one token is needed\n"


def test_several_outputs_stand_in_order_under_headings_whatever_order_they_come_in(run: Run) -> None:
    code, out, _ = run("generate", "-w", "fake", "-p", "a", "-n", "2", "--n", "3")
    assert (code, out) == (
        0, "--- output 1 of 3\n one two\n--- output 2 of 3\n two three\n--- output 3 of 3\n three four\n",
    )  # fmt: skip
    _, out, _ = run("generate", "-w", "fake", "-p", "a", "-p", "b", "-n", "1", "--n", "2")
    assert out == (
        "=== 1 of 2: a\n--- output 1 of 2\n one\n--- output 2 of 2\n two\n"
        "\n=== 2 of 2: b\n--- output 1 of 2\n one\n--- output 2 of 2\n two\n"
    )


def test_equal_outputs_are_said_to_be(run: Run) -> None:
    line = "cupaged: at temperature 0 the outputs of a prompt are all the same; --temperature 0.8 makes them differ\n"
    for given in (["--n", "3"], ["--best-of", "2"], ["--n", "2", "-p", "b", "-t", "0"]):
        assert run("generate", "-w", "fake", "-p", "a", "-n", "1", *given)[2] == line
    for given in (["--n", "3", "-t", "0.5"], ["--n", "2", "--beams", "2"], ["--n", "1", "--best-of", "1"]):
        assert run("generate", "-w", "fake", "-p", "a", "-n", "1", *given)[2] == ""


def test_picked_outputs_show_their_scores_unless_there_is_but_one(run: Run) -> None:
    _, out, _ = run("generate", "-w", "fake", "-p", "a", "-n", "1", "--beams", "4", "--n", "2")
    assert out == "--- output 1 of 2, score -0.2500\n one\n--- output 2 of 2, score -1.2500\n two\n"
    assert run("generate", "-w", "fake", "-p", "a", "-n", "1", "--best-of", "4")[1] == " one\n"


def test_json_of_several_outputs_holds_them_all(run: Run) -> None:
    _, out, _ = run("generate", "-w", "fake", "-p", "a", "-n", "1", "--beams", "4", "--n", "2", "--json")
    line = json.loads(out)
    assert (line["text"], line["score"]) == (" one", -0.25)
    assert [(each["index"], each["text"], each["score"]) for each in line["outputs"]] == [
        (0, " one", -0.25), (1, " two", -1.25),
    ]  # fmt: skip
    _, out, _ = run("generate", "-w", "fake", "-p", "a", "-n", "1", "--json")
    assert "outputs" not in json.loads(out) and json.loads(out)["score"] is None


def test_group_options_reach_the_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "params", [])
    run("generate", "-w", "fake", "-p", "a", "--beams", "3", "--n", "2", "--length-penalty", "0.5", "-n", "1")
    run("generate", "-w", "fake", "-p", "a", "--beams", "3", "--early-stopping", "never", "-n", "1")
    run("generate", "-w", "fake", "-p", "a", "--beams", "3", "--early-stopping", "true", "-n", "1")
    run("generate", "-w", "fake", "-p", "a", "--best-of", "3", "-n", "1")
    penalised, never, soon, best = FakeLLM.params
    assert (penalised.beam_width, penalised.n, penalised.length_penalty) == (3, 2, 0.5)
    assert (penalised.early_stopping, never.early_stopping, soon.early_stopping) == (False, "never", True)
    assert (best.beam_width, best.best_of, best.n) == (None, 3, 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--length-penalty", "2"], "length_penalty=2.0: this is for beam search; set beam_width"),
        (["--early-stopping", "never"], "early_stopping='never': this is for beam search; set beam_width"),
        (["--n", "3", "--beams", "2"], "n=3 is out of range: 1 .. beam_width (2) is allowed"),
        (["--n", "3", "--best-of", "2"], "best_of=2 is out of range: n (3) .. 1024 is allowed"),
        (["--beams", "2", "-t", "0.7"], "temperature=0.7: beam search does not sample; 0 or 1 is allowed"),
    ],
)
def test_Q09_groups_that_cannot_be_are_one_line(run: Run, args: list[str], message: str) -> None:
    assert run("generate", "-w", "fake", "-p", "a", *args) == (2, "", f"cupaged: error: {message}\n")


def test_stats_are_three_lines_on_stderr(run: Run) -> None:
    code, out, err = run("generate", "-w", "fake", "-p", "a", "-n", "4", "--stats")
    assert (code, out) == (0, " one two three four\n")
    counts, times, memory = err.splitlines()
    assert counts.startswith("cupaged: 3 prompt tokens (1 cached), 4 generated in ") and "first token after" in counts
    assert times.startswith("cupaged: model loaded in ") and "peak memory" in times
    assert "s: weights in 3.0 MiB of Q8_0, 0.5 MiB of float32, " in times
    assert memory == "cupaged: KV blocks: at most 4 of 10 in use, 3 forks, 2 copied on write, 1 preemptions"


def test_stats_tell_of_a_host_pool(capsys: pytest.CaptureFixture[str]) -> None:
    pools = [PoolStats(total=total, free=total, cached=0, used=0, shared=0, draining=0) for total in (8, 20)]
    group = GroupStats(pools[0], 16, 0, pools[1])
    counts = {"swapped_out": 7, "swapped_in": 5, "read_in_place": 90, "preemptions_by_swap": 2}
    stats = EngineStats((group,), (8,), 0, 0, 0, 9, 0, 0, 3, preemptions_by_recompute=1, **counts)
    Statistics().print(stats, {"float16": 1 << 20})
    assert capsys.readouterr().err.splitlines()[-1] == (
        "cupaged: host pool of 20 blocks: 7 swapped out, 5 in, 90 read in place; preemptions: 2 by swap, 1 by recompute"
    )


def test_options_reach_the_model(run: Run) -> None:
    _, out, _ = run(
        "info", "-w", "fake", "--json", "--device", "gpu", "--dtype", "float32", "--kv-dtype", "bfloat16",
        "--block-size", "8", "--kv-memory", "64MiB", "--max-model-len", "99", "--threads", "2", "--swap-memory", "1GiB",
    )  # fmt: skip
    facts = json.loads(out)
    assert facts["device"] == "cuda"  # gpu is another name for it
    assert (facts["dtype"], facts["kv_dtype"], facts["block_size"]) == ("float32", "bfloat16", 8)
    assert (facts["kv_memory"], facts["max_model_len"], facts["threads"]) == ("64MiB", 99, 2)
    assert facts["swap_memory"] == "1GiB"


def test_sampling_options_reach_the_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "params", [])
    run("generate", "-w", "fake", "-p", "a", "--json", "-n", "2")
    run(
        "generate", "-w", "fake", "-p", "a", "--json", "-n", "5", "-t", "0.5", "--top-k", "3", "--top-p", "0.9",
        "--min-p", "0.1", "--seed", "7", "--stop", "x", "--stop", "y", "--ignore-eos", "--logprobs", "2",
    )  # fmt: skip
    default, given = FakeLLM.params
    assert default.greedy and default.stop_strings == () and default.logprobs is None
    assert (given.max_tokens, given.temperature, given.top_k, given.top_p, given.min_p) == (5, 0.5, 3, 0.9, 0.1)
    assert (given.seed, given.stop_strings, given.ignore_eos, given.logprobs) == (7, ("x", "y"), True, 2)


def test_a_jsonl_file_sets_parameters_a_prompt(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n{"prompt": [5, 6], "max_tokens": 3, "temperature": 0.5}\n')
    code, out, _ = run("generate", "-w", "fake", "--prompts-file", str(file), "--json", "-n", "1")
    assert code == 0
    assert [json.loads(line)["text"] for line in out.splitlines()] == [" one", " one two three"]
