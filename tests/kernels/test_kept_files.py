"""Compiled kernels that nobody uses any more go; what is said while kernels are compiled."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from cupaged.kernels.cpu import compile as compiler
from cupaged.kernels.cpu import library
from cupaged.kernels.kept_files import DAY, UNUSED_DAYS, mark_used, remove_unused

CODE = bytes(64)
OLD = time.time() - (UNUSED_DAYS + 1) * DAY


def put(path: Path, when: float, data: bytes = b"x") -> Path:
    path.write_bytes(data)
    os.utime(path, (when, when))
    return path


def test_only_our_files_that_are_long_unused_go(tmp_path: Path) -> None:
    gone = [
        put(tmp_path / name, OLD)
        for name in ("cpu-0123456789abcdef-weights-float16.bin", "cuda-matmul-00ff.cubin", "tmpab_12cd3")
    ]
    for name in ("cpu-0123-basic.bin", "cuda-merge_parts-12.cubin", "tmpabcdefgh"):
        put(tmp_path / name, time.time() - (UNUSED_DAYS - 1) * DAY)
    for name in ("notes.txt", "cpu-.bin", "model.gguf", "tmp", "cpu-12-basic.bin.bak"):
        put(tmp_path / name, OLD)
    (tmp_path / "cpu-77-basic.bin").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "cpu-78-basic.bin").mkdir()
    os.utime(tmp_path / "cpu-78-basic.bin", (OLD, OLD))
    before = set(tmp_path.iterdir())
    assert sorted(remove_unused(tmp_path)) == sorted(gone)
    assert set(tmp_path.iterdir()) == before - set(gone)
    assert remove_unused(tmp_path / "absent") == []


def test_reading_a_kept_file_marks_it_as_used_once_a_day(tmp_path: Path) -> None:
    path = tmp_path / "cpu-12-basic.bin"
    objects = [("add", "symbol", CODE)]
    assert library._write(path, objects)
    os.utime(path, (OLD, OLD))
    assert library._read(path) == objects and remove_unused(tmp_path) == []
    assert time.time() - path.stat().st_mtime < DAY
    hours_ago = time.time() - 3600
    os.utime(path, (hours_ago, hours_ago))
    mark_used(path)
    assert abs(path.stat().st_mtime - hours_ago) < 1


def compiled(monkeypatch: pytest.MonkeyPatch, folder: Path, progress: library.Progress | None) -> None:
    """`_compiled` of one group, the compiler left out."""
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(folder))
    monkeypatch.setattr(compiler, "compile_kernels", lambda groups, progress: iter([("add", "add", CODE)]))
    assert library._compiled([library.BASIC], progress) == [("add", "add", CODE)]


def test_new_kernels_take_the_place_of_unused_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    put(tmp_path / "kernels" / "cpu-12-basic.bin", OLD)
    compiled(monkeypatch, tmp_path, None)
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == [f"cpu-{library.key()}-basic.bin"]


def test_compiling_is_logged_and_shown_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="cupaged")
    compiled(monkeypatch, tmp_path, None)
    compiled(monkeypatch, tmp_path, lambda done, total: None)
    assert [(record.levelname, record.name) for record in caplog.records] == [
        ("WARNING", "cupaged"), ("INFO", "cupaged"), ("INFO", "cupaged"), ("INFO", "cupaged"),
    ]  # fmt: skip
    assert caplog.messages[0] == "compiling kernels, once for this processor and kind of model: 10 to 30 seconds"
    assert caplog.messages[1].startswith("1 kernels compiled in 0.")


def test_kernels_that_cannot_be_kept_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="cannot be kept, so each start compiles: .*file/kernels: not writable"):
        compiled(monkeypatch, tmp_path / "file", None)


def test_kernels_compiled_before_are_found_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container whose file systems are read-only: Python finds no temporary directory there."""

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.delenv("CUPAGED_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library.tempfile, "gettempdir", none)
    assert library.cache_folders() == [tmp_path / "cupaged" / "kernels"]


def test_the_first_kernel_that_is_asked_for_brings_the_basic_ones_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """One go of the compiler, one bar of progress, whatever comes first."""
    asked = []

    def compiled(groups: list[str], progress: object) -> list[tuple[str, str, bytes]]:
        asked.append(groups)
        return []

    monkeypatch.setattr(library, "_kept", lambda group: None)
    monkeypatch.setattr(library, "_compiled", compiled)
    fresh = library.KernelLibrary()
    fresh.require(["weights-float32", "cache-float16"])
    fresh.require(["weights-float32", "blocks-Q4_0"])
    assert asked == [["basic", "weights-float32", "cache-float16"], ["blocks-Q4_0"]]
