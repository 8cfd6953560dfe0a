"""`cupaged tokenize` and `detokenize`, with the tokenizer of a real model and files without weights."""

import io
import json
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_support import smollm2_metadata

from cupaged.cli import main

DATA = Path(__file__).resolve().parent.parent / "golden_data"
IDS = "504,3575,282,4649,2,216,33,34"
TEXT = "The capital of France<|im_end|> 12"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vocabulary of SmolLM2 in a GGUF file that has no tensor."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def pair(key: str, value: Any) -> bytes:
        if isinstance(value, bool):
            return text(key) + struct.pack("<IB", 7, value)
        if isinstance(value, int):
            return text(key) + struct.pack("<II", 4, value)
        if isinstance(value, str):
            return text(key) + struct.pack("<I", 8) + text(value)
        if isinstance(value[0], str):
            return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        return text(key) + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)

    path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
    pairs = [pair(key, value) for key, value in smollm2_metadata().items()]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub folder of a tokenizer alone, which puts <s> before a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    backend = Tokenizer(models.BPE(vocab={"<s>": 0, "a": 1, "b": 2, "ab": 3}, merges=[("a", "b")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
    return folder


def standard_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_ids_on_one_line_and_back(gguf: Path, capsys: Capture) -> None:
    assert main(["tokenize", "-w", str(gguf), TEXT]) == 0
    assert capsys.readouterr() == (f"{IDS}\n", "")
    assert main(["detokenize", "-w", str(gguf), IDS]) == 0
    assert capsys.readouterr() == (f"{TEXT}\n", "")


def test_standard_input_is_read_as_a_whole(gguf: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    standard_input(monkeypatch, b"one\n\ntwo \r\n")
    assert main(["tokenize", "-w", str(gguf), "-"]) == 0
    ids = capsys.readouterr().out
    standard_input(monkeypatch, ids.replace(",", " \n").encode())
    assert main(["detokenize", "-w", str(gguf), "-"]) == 0
    assert capsys.readouterr().out == "one\n\ntwo \n"
    standard_input(monkeypatch, b"")
    assert main(["tokenize", "-w", str(gguf), "-"]) == 0
    assert capsys.readouterr().out == "\n"


def test_special_tokens(folder: Path, capsys: Capture) -> None:
    for args, expected in (
        (["tokenize", "ab"], "0,3\n"),
        (["tokenize", "ab", "--no-special"], "3\n"),
        (["tokenize", "a<s>b", "--no-special"], "1,0,2\n"),
        (["detokenize", "0,3"], "<s>ab\n"),
        (["detokenize", "0,3", "--skip-special"], "ab\n"),
        (["detokenize", ""], ""),
    ):
        assert main([*args, "-w", str(folder)]) == 0
        assert capsys.readouterr().out == expected, args


def test_json_has_the_pieces(gguf: Path, capsys: Capture) -> None:
    for args in (["tokenize", " é<|im_end|>"], ["detokenize", "26411,2"]):
        assert main([*args, "-w", str(gguf), "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["text"] == " é<|im_end|>" and result["token_ids"] == [26411, 2]
        assert result["pieces"] == [
            {"id": 26411, "token": "ĠÃ©", "text": " é", "special": False},
            {"id": 2, "token": "<|im_end|>", "text": "<|im_end|>", "special": True},
        ]


@pytest.mark.parametrize(
    ("ids", "code", "message"),
    [
        ("49152", 2, "token id 49152 is not in the vocabulary: 0 .. 49151"),
        ("5279552648203111001", 2, "ids: '5279552648203111001' is not a token id; ids look like 504,3575"),
        ("1,x,2", 2, "ids: 'x' is not a token id; ids look like 504,3575"),
        ("1.5", 2, "ids: '1.5' is not a token id; ids look like 504,3575"),
    ],
)
def test_T09_ids_that_are_none(gguf: Path, capsys: Capture, ids: str, code: int, message: str) -> None:
    assert main(["detokenize", "-w", str(gguf), ids]) == code
    assert capsys.readouterr() == ("", f"cupaged: error: {message}\n")
    assert main(["detokenize", "-w", str(gguf), "--", f"-{ids}"]) == 2
    assert f"ids: '-{ids.split(',')[0]}" in capsys.readouterr().err


def test_U04_one_line(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "tokenizer.model").write_bytes(b"spm")
    standard_input(monkeypatch, b"\xff\xfe")
    for command in ("tokenize", "detokenize"):
        for args, code, words in (
            (["-w", str(DATA / "llama"), "1"], 1, ["llama", "no tokenizer"]),
            (["-w", str(tmp_path / "old"), "1"], 1, ["tokenizer.model", "no tokenizer.json"]),
            (["-w", str(tmp_path / "absent"), "1"], 1, ["absent", "no such file or folder"]),
            (["-w", str(DATA / "smollm2-135m.json"), "1"], 1, ["not a GGUF file"]),
            (["1"], 2, ["--weights"]),
            (["-w", "x"], 2, ["Missing argument"]),
            (["-w", "x", "--jsn", "1"], 2, ["--jsn", "--json"]),
            (["-w", "x", "-"], 2, ["standard input: not valid UTF-8 (byte 0xff at offset 0)"]),
        ):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
            assert main([command, *args]) == code, args
            captured = capsys.readouterr()
            assert captured.out == "" and captured.err.count("\n") == 1
            assert captured.err.startswith("cupaged: error: "), captured.err
            assert [word for word in words if word.lower() not in captured.err.lower()] == []


def test_U01_a_reader_that_left_is_no_error(gguf: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    read, write = os.pipe()
    process = start("tokenize", "-w", str(gguf), TEXT, stdout=write)
    os.close(write)
    os.close(read)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("command", ["tokenize", "detokenize"])
def test_U02_interrupt_while_waiting_for_input(
    gguf: Path, command: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    read, write = os.pipe()
    process = start(command, "-w", str(gguf), "-", stdin=read)
    time.sleep(0.7)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    os.close(read)
    os.close(write)
    assert (process.returncode, out, err) == (130, b"", b"cupaged: interrupted\n")
    assert time.monotonic() - began < 2


def test_the_weights_are_not_read(tmp_path: Path, folder: Path, capsys: Capture) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text('{"model_type": "of another program", "eos_token_id": 3}')
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert main(["tokenize", "-w", str(tmp_path), "ab"]) == 0
    assert capsys.readouterr() == ("0,3\n", "")
