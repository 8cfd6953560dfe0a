"""Every option of every command with nonsense: one line that names the option, the value and what is allowed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from cupaged.cli import main, runtime
from cupaged.cli.app import cli

Capture = pytest.CaptureFixture[str]

# Arguments with which a command line is complete, but for the option under test. None of them lets a command do a
# thing: all that is tested must be refused before anything is opened.
COMPLETE = {
    "bench attention": [],
    "bench generate": ["-w", "absent"],
    "bench kernels": [],
    "bench matmul": [],
    "bench memory": ["--budget", "1KiB"],
    "bench pace": ["-w", "absent"],
    "bench quality": ["-w", "absent", "--text", "absent.txt"],
    "convert": ["absent-source", "absent-target"],
    "detokenize": ["-w", "absent", "1"],
    "generate": ["-w", "absent", "-p", "a", "--json"],
    "info": ["-w", "absent"],
    "tokenize": ["-w", "absent", "a"],
    "warmup": ["-w", "absent"],
}
NUMBERS = ("nan", "inf", "-inf", "1e999", "9" * 40, "-" + "9" * 40, "9" * 5000, "", " ", "x", "1,5", "--", "0x1g", "½")
NOT_WHOLE = ("1.5", "1e3", "-0.0")
ABOVE_ZERO = ("-1", "0")

# Option -> what is refused, beside NUMBERS. An option that is missing here fails the test below.
REFUSED: dict[str, tuple[str, ...]] = {
    "--threads": (*NOT_WHOLE, *ABOVE_ZERO, "257"),
    "--seconds": (*ABOVE_ZERO, "61"),
    "--shape": ("64", "64x", "0x64", "64x131073", "131072x131072", "-1x64"),
    "--rows": (*NOT_WHOLE, *ABOVE_ZERO, "65537"),
    "--heads": (*NOT_WHOLE, *ABOVE_ZERO, "1025"),
    "--kv-heads": (*NOT_WHOLE, *ABOVE_ZERO, "1025"),
    "--head-dim": (*NOT_WHOLE, *ABOVE_ZERO, "513"),
    "--context": (*NOT_WHOLE, *ABOVE_ZERO, "1048577"),
    "--queries": (*NOT_WHOLE, *ABOVE_ZERO, "65537"),
    "--sequences": (*NOT_WHOLE, *ABOVE_ZERO, "4097"),
    "--shared": (*NOT_WHOLE, "-1", "1048577"),
    "--prompt-tokens": (*NOT_WHOLE, *ABOVE_ZERO, "1048577"),
    "--new-tokens": (*NOT_WHOLE, *ABOVE_ZERO, "1", "1048577"),
    "--streams": (*NOT_WHOLE, *ABOVE_ZERO, "4097"),
    "--rounds": (*NOT_WHOLE, *ABOVE_ZERO, "1001"),
    "--tokens": (*NOT_WHOLE, *ABOVE_ZERO, "1", "1048577"),
    "--window": (*NOT_WHOLE, *ABOVE_ZERO, "1", "1048577"),
    "--block-size": (*NOT_WHOLE, *ABOVE_ZERO, "257"),
    "--max-model-len": (*NOT_WHOLE, *ABOVE_ZERO, "2147483648"),
    "--max-batch-tokens": (*NOT_WHOLE, *ABOVE_ZERO, "65537"),
    "--pace": ("0.99", "-1", "1001"),
    "--max-sequences": (*NOT_WHOLE, *ABOVE_ZERO, "4097"),
    "--kv-memory": ("-1", "0", "0.5", "-1MiB", "101%", "1XB", "1e9"),
    "--swap-memory": ("-1", "0", "0.5", "-1MiB", "101%", "1XB", "1e9"),
    "--max-tokens": (*NOT_WHOLE, "-1", "2147483648"),
    "--min-tokens": (*NOT_WHOLE, "-1", "2147483648"),
    "--temperature": ("-1", "100.5"),
    "--top-k": (*NOT_WHOLE, "-2", "2147483648"),
    "--top-p": ("-0.1", "1.5"),
    "--min-p": ("-0.1", "2"),
    "--n": (*NOT_WHOLE, *ABOVE_ZERO, "1025"),
    "--best-of": (*NOT_WHOLE, *ABOVE_ZERO, "1025"),
    "--beams": (*NOT_WHOLE, *ABOVE_ZERO, "257"),
    "--length-penalty": ("-10.5", "11"),
    "--seed": (*NOT_WHOLE, "-1", "9223372036854775808"),
    "--repetition-penalty": ("0", "-1", "101"),
    "--presence-penalty": ("-2.5", "3"),
    "--frequency-penalty": ("-2.5", "3"),
    "--logit-bias": ("1", "1=", "=1", "x=1", "1.5=1", "-1=1", "1=nan", "1=-inf", "1=1e999", "1=101", "9" * 40 + "=1"),
    "--stop-token-id": (*NOT_WHOLE, "-1", "2147483648"),
    "--logprobs": (*NOT_WHOLE, "-1", "21"),
    "--prompt-logprobs": (*NOT_WHOLE, "-1", "21"),
    "--token-ids": ("1.5", "1;2"),
    "--decodes": (*NOT_WHOLE, *ABOVE_ZERO, "4096"),
    "--budget": ("-1", "0", "0.5", "-1MiB", "25%", "1XB", "1e9"),
    "--requests": (*NOT_WHOLE, *ABOVE_ZERO, "19", "1000001"),
    "--max-len": (*NOT_WHOLE, *ABOVE_ZERO, "15", "1048577"),
    "--beam-churn": ("-0.1", "1.5"),
}
TEXTS = {  # any text is good, if it is text
    "--prompt": ("\udcff",),
    "--system": ("\udcff",),
    "--stop": ("\udcff", "", "x" * 257),
    "--bad-word": ("\udcff", "", "x" * 257),
    "--prompts-file": ("absent.txt", "", ".", "x" * 5000, "a\0b"),
    "--text": ("absent.txt", "", ".", "x" * 5000, "a\0b", "\udcff"),
    "--trace": ("absent.csv", "", ".", "x" * 5000, "a\0b"),
    "--model": ("absent.json", "", ".", "x" * 5000, "a\0b"),
    "--picture": ("absent.txt", "", ".", "x" * 5000, "a\0b"),
}
FEWER = {"--token-ids": ("", " ", "1,5")}  # these are ids, or none: for the model to say
NO_NUMBERS = ("--prompt", "--system", "--stop", "--bad-word", "--prompts-file", "--weights")


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))
    else:
        yield " ".join(path), command


def options() -> list[tuple[str, click.Option]]:
    found = [(name, param) for name, command in commands(cli) for param in command.params]
    return [(name, param) for name, param in found if isinstance(param, click.Option) and param.name != "help"]


def long_name(option: click.Option) -> str:
    return next(name for name in option.opts if name.startswith("--"))


VALUED = [(command, option) for command, option in options() if not option.is_flag and long_name(option) != "--weights"]
FLAGS = [(command, long_name(option)) for command, option in options() if option.is_flag]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path) -> Callable[..., str]:
    """refused("info", "--threads=0") gives the one line, less its beginning."""

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was asked for")

    monkeypatch.setattr(runtime, "open_llm", never)
    monkeypatch.chdir(tmp_path)

    def call(command: str, *args: str) -> str:
        code = main([*command.split(), *COMPLETE[command], *args])
        captured = capsys.readouterr()
        assert code == 2 and captured.out == "", (args, captured)
        assert captured.err.count("\n") == 1 and captured.err.startswith("cupaged: error: "), (args, captured.err)
        assert len(captured.err) < 500 or "absent.txt" not in captured.err
        return captured.err.removeprefix("cupaged: error: ")

    return call


def test_every_command_and_option_is_tested() -> None:
    assert {command for command, _ in options()} == set(COMPLETE)
    choices = {long_name(option) for _, option in VALUED if isinstance(option.type, click.Choice)}
    assert {long_name(option) for _, option in VALUED} == choices | set(REFUSED) | set(TEXTS)


@pytest.mark.parametrize(("command", "option"), VALUED, ids=[f"{c} {long_name(o)}" for c, o in VALUED])
def test_Q09_U04_a_wrong_value_is_one_line_with_option_value_and_range(
    command: str, option: click.Option, refused: Callable[..., str]
) -> None:
    name = long_name(option)
    values = REFUSED.get(name, TEXTS.get(name, ()))
    if name not in TEXTS:
        values = tuple(value for value in (*NUMBERS, *values) if value not in FEWER.get(name, ()))
    for value in values:
        line = refused(command, f"{name}={value}")
        assert name in line, (value, line)
        if isinstance(option.type, click.Choice):
            assert all(choice in line for choice in option.type.choices), (value, line)
        elif name in TEXTS:
            assert re.search(r"UTF-8|cannot read|cannot write|1 \.\. 256", line), (value, line)
        else:
            # A range, or what a value looks like.
            assert re.search(r"-?\d+(\.\d+)? ?\.\. ?\d|look like|such as|all of the memory", line), (value, line)
        assert name in ("--prompt", "--stop", "--bad-word") or any(text in line for text in spellings(value)), (
            value,
            line,
        )


def spellings(value: str) -> list[str]:
    """How a message may show a value: its beginning, if it is long; a number as Python writes it."""
    texts = [value.partition("=")[0][:20], ascii(value)[1:-1][:20]]
    with contextlib.suppress(ValueError):
        texts.append(str(float(value)))
    return texts if value.strip() else ["''", "' '", "'.'", "cannot read", "cannot write"]


@pytest.mark.parametrize("command", COMPLETE)
def test_U04_what_is_no_option_is_named(command: str, refused: Callable[..., str]) -> None:
    for word in ("--frobnicate", "--frobnicate=1", "--debugg", "-Z", "-9"):
        line = refused(command, word)
        assert word.partition("=")[0] in line and "no such option" in line.lower(), line
    assert re.search(r"did you mean --debug( or --\w+)?\?", refused(command, "--debugg"))
    assert "unexpected extra argument" in refused(command, "one-too-many")


@pytest.mark.parametrize(("command", "flag"), FLAGS, ids=[" ".join(flag) for flag in FLAGS])
def test_U04_a_flag_takes_no_value(command: str, flag: str, refused: Callable[..., str]) -> None:
    line = refused(command, f"{flag}=1")
    assert flag in line and "does not take a value" in line


@pytest.mark.parametrize(("command", "option"), VALUED, ids=[f"{c} {long_name(o)}" for c, o in VALUED])
def test_U04_an_option_without_its_value_is_named(
    command: str, option: click.Option, refused: Callable[..., str]
) -> None:
    line = refused(command, long_name(option))
    assert long_name(option) in line and "requires an argument" in line


@pytest.mark.parametrize("weights", ["", " ", "\0", "pypi:", "pypi:x==", "x" * 5000, "\udcff", "absent/"])
@pytest.mark.parametrize("command", ["generate", "info", "tokenize", "detokenize", "convert", "warmup"])
def test_U04_weights_that_are_none_are_one_line(
    command: str, weights: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    rest = {"generate": ["-p", "a"], "info": [], "warmup": [], "convert": ["out"]}.get(command, ["1"])
    args = [weights, *rest] if command == "convert" else ["-w", weights, *rest]
    code = main([command, *args])
    captured = capsys.readouterr()
    assert code in (1, 2) and captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("cupaged: error: ") and "internal error" not in captured.err
    assert list(tmp_path.iterdir()) == []
