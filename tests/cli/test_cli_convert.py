"""`cupaged convert` on small models."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from cupaged.cli import main

LLAMA = Path(__file__).resolve().parent.parent / "golden_data" / "llama"


def test_a_folder_in_another_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    assert main(["convert", str(LLAMA), str(target), "--dtype", "bfloat16"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{target}: ") and captured.out.endswith(" MB in bfloat16\n")
    assert captured.out.count("\n") == 1 and captured.err == ""
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    count = len(load_file(LLAMA / "model.safetensors"))
    assert f"{count} tensors" in captured.out


def test_U04_what_cannot_be_converted_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    out = str(tmp_path / "out")
    for args, code, words in (
        ([str(LLAMA), str(tmp_path / "full")], 2, ["target", "full", "not empty"]),
        ([str(LLAMA), ""], 2, ["target ''", "a folder is needed"]),
        ([str(tmp_path / "absent"), out], 1, ["absent", "no such file or folder"]),
        ([str(tmp_path / "full"), out], 1, ["no config.json"]),
        ([str(LLAMA), out, "--dtype", "int8"], 2, ["--dtype", "int8", "float16", "bfloat16", "float32"]),
        ([str(LLAMA)], 2, ["TARGET"]),
        ([str(LLAMA), out, "--dtyp", "float16"], 2, ["--dtyp", "--dtype"]),
        (["pypi:no package", str(tmp_path / "full")], 2, ["not empty"]),  # said before anything is fetched
    ):
        assert main(["convert", *args]) == code
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("cupaged: error: ")
        assert [word for word in words if word.lower() not in captured.err.lower()] == []
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 GB of zeros, which take seconds to be converted and, as a hole in a file, no room on the disk."""
    folder = tmp_path_factory.mktemp("large")
    hidden, vocab = 64, 4_000_000
    config = json.loads((LLAMA / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 1, "vocab_size": vocab}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": hidden, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {f"layers.0.self_attn.{name}_proj": [hidden, hidden] for name in "qkvo"}
    shapes |= {f"layers.0.mlp.{name}_proj": [hidden, hidden] for name in ("gate", "up", "down")}
    shapes |= {f"layers.0.{name}_layernorm": [hidden] for name in ("input", "post_attention")}
    shapes |= {"norm": [hidden], "embed_tokens": [vocab, hidden]}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[f"model.{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    return folder


def begin(env: dict[str, str], *args: str, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cupaged", "convert", *args]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, **(pipes | options))  # type: ignore[call-overload]


@pytest.mark.skipif(os.name != "posix", reason="file size limits are POSIX's")
def test_a_file_that_cannot_grow_is_one_line_and_leaves_nothing(
    large: Path, tmp_path: Path, checkout_env: dict[str, str]
) -> None:
    """What a full disk does, by the process's own limit of 8 MB a file."""
    import resource

    process = begin(
        checkout_env, str(large), str(tmp_path / "out"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20)),
    )  # fmt: skip
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, b"") and list(tmp_path.iterdir()) == []
    assert err == f"cupaged: error: {tmp_path / 'out'}: cannot be written (File too large)\n".encode()


def test_U02_interrupt_leaves_nothing(large: Path, tmp_path: Path, checkout_env: dict[str, str]) -> None:
    target = tmp_path / "out"
    process = begin(checkout_env, str(large), str(target), "--dtype", "bfloat16")
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".out.partial-*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"cupaged: interrupted\n")
    assert time.monotonic() - began < 2 and list(tmp_path.iterdir()) == []


def test_U01_a_reader_that_left_does_not_undo_the_work(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    read, write = os.pipe()
    process = start("convert", str(LLAMA), str(tmp_path / "out"), stdout=write)
    os.close(write)
    os.close(read)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141 and err == b"" and (tmp_path / "out" / "model.safetensors").exists()
