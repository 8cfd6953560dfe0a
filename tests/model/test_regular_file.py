"""Special files under the names of a model's files: refused at once, by every reader, with the file's name."""

from __future__ import annotations

import io
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from model_files import GOLDEN, gguf, gguf_model, llama_gguf, llama_weights, pair, write_folder
from test_tokenizer import folder_with

from cupaged.errors import CupagedError, ModelFileError, TokenizerError
from cupaged.model import config_values, regular_file
from cupaged.model.checkpoint import open_checkpoint
from cupaged.model.config_values import read_json
from cupaged.model.convert import convert
from cupaged.model.regular_file import map_regular, open_regular, read_bounded, read_regular
from cupaged.model.source import resolve_weights
from cupaged.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes and devices in the file system")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_pipe(path: Path) -> None:
    os.mkfifo(path.parent / "pipe")
    path.symlink_to("pipe")


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


SPECIAL = [(pipe, "a pipe"), (link_to_pipe, "a pipe"), (endless, "a device"), (folder, "a folder")]
special = pytest.mark.parametrize(("make", "kind"), SPECIAL, ids=[make.__name__ for make, _ in SPECIAL])
Make = Callable[[Path], None]


@contextmanager
def refused(error: type[CupagedError], path: Path, kind: str) -> Iterator[None]:
    start = time.perf_counter()
    with pytest.raises(error) as caught:
        yield
    assert time.perf_counter() - start < 5
    assert str(caught.value).endswith(f"{path}: cannot be read (it is {kind}, not a regular file)")


@special
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_config_files_must_be_regular(name: str, make: Make, kind: str, tmp_path: Path) -> None:
    write_folder(tmp_path, llama_weights())
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with refused(ModelFileError, tmp_path / name, kind):
        open_checkpoint(tmp_path)


@special
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_and_their_index_must_be_regular(name: str, make: Make, kind: str, tmp_path: Path) -> None:
    write_folder(tmp_path, llama_weights())
    (tmp_path / "model.safetensors").unlink()
    make(tmp_path / name)
    with refused(ModelFileError, tmp_path / name, kind):
        open_checkpoint(tmp_path)


@special
def test_a_shard_must_be_regular(make: Make, kind: str, tmp_path: Path) -> None:
    sharded = next(path.parent for path in sorted(GOLDEN.glob("*/model.safetensors.index.json")))
    shutil.copytree(sharded, tmp_path / "model")
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[-1]
    shard.unlink()
    make(shard)
    with refused(ModelFileError, shard, kind):
        open_checkpoint(tmp_path / "model")


@special
def test_a_gguf_and_each_of_its_parts_must_be_regular(make: Make, kind: str, tmp_path: Path) -> None:
    make(tmp_path / "model.gguf")
    with refused(ModelFileError, tmp_path / "model.gguf", kind):
        from cupaged.model.gguf_file import GGUFFile

        GGUFFile(tmp_path / "model.gguf")
    first, second = (tmp_path / f"m-0000{place}-of-00002.gguf" for place in (1, 2))
    first.write_bytes(gguf([pair("split.no", 2, 0), pair("split.count", 2, 2)], []))
    if make is link_to_pipe:
        second.symlink_to("pipe")
    else:
        make(second)
    with refused(ModelFileError, second, kind):
        open_checkpoint(first)


@special
@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
     "chat_template.jinja", "chat_template.json"],
)  # fmt: skip
def test_tokenizer_files_must_be_regular(name: str, make: Make, kind: str, tmp_path: Path) -> None:
    folder_with(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with refused(TokenizerError, tmp_path / name, kind):
        load_tokenizer(tmp_path, "hub", {})


@special
def test_files_that_conversion_only_copies_must_be_regular(make: Make, kind: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", llama_weights())
    make(source / "merges.txt")
    with refused(ModelFileError, source / "merges.txt", kind):
        convert(source, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("make", [pipe, endless])
def test_weights_that_are_no_regular_file_are_no_model(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="not a GGUF file; expected a model folder"):
        resolve_weights(str(tmp_path / "model.gguf"))


def test_L10_links_to_regular_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(gguf_model(*llama_gguf(llama_weights())))
    (tmp_path / "model.gguf").symlink_to("blob")
    assert open_checkpoint(tmp_path / "model.gguf").config.num_layers == 2


def test_a_pipe_that_takes_the_files_place_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sound").write_bytes(b"{}")
    os.mkfifo(tmp_path / "config.json")
    before = os.stat(tmp_path / "sound")
    monkeypatch.setattr(regular_file.os, "stat", lambda path: before)
    with pytest.raises(OSError, match="it is a pipe, not a regular file"):
        open_regular(tmp_path / "config.json")


def test_a_socket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name may have a hundred characters
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("config.json")
        with pytest.raises(ModelFileError, match="it is a socket, not a regular file"):
            read_json(Path("config.json"))


def test_no_more_than_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b'{"a": 1}')
    assert read_regular(file, 8) == b'{"a": 1}'
    with pytest.raises(OSError, match="larger than 7 bytes"):
        read_regular(file, 7)
    monkeypatch.setattr(config_values, "_MAX_JSON_BYTES", 7)
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read \(larger than 7 bytes\)"):
        read_json(file)


def test_a_sparse_file_of_a_terabyte_costs_nothing(tmp_path: Path) -> None:
    folder_with(tmp_path)
    os.truncate(tmp_path / "tokenizer.json", 1 << 40)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read \(larger than \d+ bytes\)"):
        load_tokenizer(tmp_path, "hub", {})


def test_a_stream_is_read_to_its_end_or_to_the_limit() -> None:
    class Drops(io.RawIOBase):
        """A byte at each call, as pipes may give them."""

        given = 0

        def read(self, size: int = -1, /) -> bytes:
            self.given += 1
            return b"x" if self.given <= 100 else b""

    assert read_bounded(Drops(), 100, "drops") == b"x" * 100
    drops = Drops()
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_bounded(drops, 10, "drops")
    assert drops.given == 11
    assert read_bounded(io.BytesIO(b""), 0, "empty") == b""


def test_an_empty_file_maps_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert map_regular(tmp_path / "empty") == b""
