"""Where prompts come from, and what is refused."""

import io
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from cupaged.cli import prompts
from cupaged.cli.prompts import Prompt, collect
from cupaged.errors import OptionError


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))


def test_order_is_texts_ids_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("first\r\n\n  \nzweite Zeile\u2028mit Absatz\n".encode())
    found = collect(["a", ""], ["1,2", "-1, 5279552648203111001"], str(file))
    assert [prompt.content for prompt in found] == [
        "a", "", [1, 2], [-1, 5279552648203111001], "first", "zweite Zeile\u2028mit Absatz",
    ]  # fmt: skip
    assert found[-1].where == f"{file}, line 4"


@pytest.mark.parametrize(
    ("data", "text"), [(b"two\nlines\n", "two\nlines"), (b"x\r\n", "x"), (b"x\n\n", "x\n"), (b"x", "x"), (b"", "")]
)
def test_standard_input_loses_one_final_line_break(monkeypatch: pytest.MonkeyPatch, data: bytes, text: str) -> None:
    give_stdin(monkeypatch, data)
    assert collect(["-"], [], None) == [Prompt(text, "standard input")]


def test_standard_input_may_hold_a_prompt_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, b"one\ntwo\n")
    assert [prompt.content for prompt in collect([], [], "-")] == ["one", "two"]


@pytest.mark.parametrize(
    ("texts", "ids", "file", "message"),
    [
        ([], [], None, "no prompt: give --prompt, --token-ids or --prompts-file (--prompt - reads standard input)"),
        (["-", "-"], [], None, "standard input (-) can be read only once"),
        (["-"], [], "-", "standard input (-) can be read only once"),
        (["caf\udce9"], [], None, "--prompt: the text is not valid UTF-8"),
        ([], ["1,x"], None, "--token-ids: 'x' is not a token id; ids look like 504,3575"),
        ([], ["1.5"], None, "--token-ids: '1.5' is not a token id; ids look like 504,3575"),
        ([], ["²"], None, "--token-ids: '²' is not a token id; ids look like 504,3575"),
        ([], ["9" * 5000], None, f"--token-ids: '{'9' * 40}' is not a token id; ids look like 504,3575"),
    ],
)
def test_unusable_options_are_named(texts: list[str], ids: list[str], file: str | None, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        collect(texts, ids, file)
    assert str(caught.value) == message


def test_bytes_that_are_no_utf8_are_named_by_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    give_stdin(monkeypatch, b"caf\xe9")
    with pytest.raises(OptionError, match=r"^standard input: not valid UTF-8 \(byte 0xe9 at offset 3\)$"):
        collect(["-"], [], None)
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"fine\n\xff\n")
    with pytest.raises(OptionError, match=r"prompts\.txt, line 2: not valid UTF-8 \(byte 0xff at offset 0\)$"):
        collect([], [], str(file))


def test_a_file_must_be_readable_and_hold_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot read .*absent\.txt: No such file"):
        collect([], [], str(tmp_path / "absent.txt"))
    with pytest.raises(OptionError, match=r"cannot read .*: Is a directory"):
        collect([], [], str(tmp_path))
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(OptionError, match=r"empty\.txt holds no prompt"):
        collect([], [], str(tmp_path / "empty.txt"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"prompt": "a", "temperature": NaN}', "line 1: not JSON: NaN is not a number of JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ('"a"', 'line 1: expected an object with "prompt"'),
        ('{"text": "a"}', 'line 1: expected an object with "prompt"'),
        ('{"prompt": [1, true]}', 'line 1: "prompt" is neither a string nor a list of token ids'),
        ('{"prompt": {}}', 'line 1: "prompt" is neither a string nor a list of token ids'),
        ('{"prompt": "\\ud800"}', "line 1: the text is not valid UTF-8"),
        ('{"prompt": "a", "top_k": 1, "top_k": 2}', "line 1: 'top_k' is given twice"),
        ('{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "line 1: '5' is given twice"),
    ],
)
def test_a_bad_object_is_named_by_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(OptionError) as caught:
        collect([], [], str(file))
    assert message in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes in the file system")
def test_a_prompts_file_may_be_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"one\ntwo\n",))
    writer.start()
    try:
        found = collect([], [], str(tmp_path / "pipe"))
    finally:
        writer.join()
    assert [prompt.content for prompt in found] == ["one", "two"]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a device without an end")
def test_prompts_without_an_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_BYTES", 3 << 20)
    with pytest.raises(OptionError, match=r"^--prompts-file: cannot read /dev/zero: larger than 3145728 bytes$"):
        collect([], [], "/dev/zero")
    with open("/dev/zero", "rb") as zeros:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=zeros, isatty=lambda: False))
        for texts, file in ((["-"], None), ([], "-")):
            with pytest.raises(OptionError, match=r"^standard input: cannot be read: larger than 3145728 bytes$"):
                collect(texts, [], file)


def test_objects_may_come_through_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, b'{"prompt": "a", "max_tokens": 3}\n{"prompt": [1, 2], "logit_bias": {"5": -1}}\n')
    first, second = collect([], [], "-", jsonl=True)
    assert (first.content, first.params, second.content) == ("a", {"max_tokens": 3}, [1, 2])
