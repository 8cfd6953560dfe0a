"""One line on stderr and the right exit code, whatever goes wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cupaged.cli.errors import nearest, one_line

Run = Callable[..., tuple[int, str, str]]


def test_version_and_help(run: Run) -> None:
    assert run("--version")[:2] == (0, "cupaged 0.1.0\n")
    for args in ([], ["--help"], ["generate", "--help"], ["info", "-h"]):
        code, out, err = run(*args)
        assert code == 0 and out.startswith("Usage: cupaged") and err == ""


@pytest.mark.parametrize(
    ("args", "code", "line"),
    [
        (["generat"], 2, "no such command: generat; did you mean generate? (see cupaged --help)"),
        (
            ["frobnicate"], 2,
            "no such command: frobnicate; commands are bench, convert, detokenize, generate, info, tokenize, "
            "warmup (see cupaged --help)",
        ),
        (["generate"], 2, "Missing option '--weights' / '-w' (see cupaged generate --help)"),
        (["info", "--weight", "x"], 2, "no such option: --weight; did you mean --weights? (see cupaged info --help)"),
        (
            ["info", "-w", "fake", "--device", "tpu"], 2,
            "Invalid value for '--device': 'tpu' is not one of 'auto', 'cpu', 'cuda', 'gpu' (see cupaged info --help)",
        ),
        (
            ["generate", "-w", "fake", "-p", "a", "--max-tokens", "1.5"], 2,
            "Invalid value for '--max-tokens' / '-n': '1.5': an integer in 0 .. 2147483647 (or None) is "
            "needed (see cupaged generate --help)",
        ),
        (["generate", "-w", "fake", "-p", ""], 2, "the prompt is empty: at least one token is needed"),
        (["generate", "-w", "fake", "-p", "a", "--system", "s"], 2, "--system needs --chat"),
        (["generate", "-w", "fake", "--chat", "--token-ids", "1"], 2, "--chat takes text, not --token-ids"),
        (["generate", "-w", "fake", "-p", "a", "--logprobs", "2"], 2, "--logprobs needs --json"),
        (["info", "--kv-memory", "1GiB"], 2, "--kv-memory needs --weights"),
        (["generate", "-w", "fake:missing", "-p", "a"], 1, "no such folder: nowhere (looked for config.json)"),
        (
            ["generate", "-w", "fake:bug", "-p", "a"], 1,
            "internal error: TypeError: 'NoneType' object is not subscriptable (--debug shows where)",
        ),
    ],
)  # fmt: skip
def test_U04_an_error_is_one_line_and_a_code(run: Run, args: list[str], code: int, line: str) -> None:
    assert run(*args) == (code, "", f"cupaged: error: {line}\n")


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e6"])
def test_Q09_a_bad_temperature_is_refused_with_its_range(run: Run, value: str) -> None:
    code, out, err = run("generate", "-w", "fake", "-p", "a", "--temperature", value)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "--temperature" in err and f": {float(value)} is out of range: " in err and "0 .. 100" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "top_p": 1.5}', "line 1: top_p=1.5 is out of range: 0 .. 1 is allowed"),
        ('{"prompt": "a", "temperature": "0.7"}', "line 1: temperature='0.7': a number in 0 .. 100 is needed"),
        ('{"prompt": "a", "temprature": 1}', "line 1: unknown sampling option 'temprature'; did you mean temperature?"),
        ('{"prompt": "a", "logprobs": 2}', "--logprobs needs --json"),
    ],
)
def test_Q09_a_bad_parameter_of_a_json_line_is_refused(run: Run, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(line + "\n")
    code, out, err = run("generate", "-w", "fake", "--prompts-file", str(file))
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.endswith(message + "\n")


def test_U04_a_traceback_comes_only_with_debug(run: Run) -> None:
    code, out, err = run("generate", "-w", "fake:bug", "-p", "a", "--debug")
    assert (code, out) == (1, "")
    assert err.startswith("Traceback") and err.endswith("not subscriptable\n") and "(--debug" not in err


def test_a_message_stays_one_line() -> None:
    assert one_line("a\nb\tc\x1b[31m \x9bd\r\n") == "a b c\\x1b[31m \\x9bd"


def test_nearest_names_what_is_near() -> None:
    assert nearest("--tempratue", ["--temperature", "--top-k"]) == "; did you mean --temperature?"
    assert nearest("--zzz", ["--temperature", "--top-k"]) == ""
