"""`cupaged warmup`: what it compiles, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import DATA

from cupaged.cli import main
from cupaged.kernels.cpu import compile, compile_apart, library
from cupaged.kernels.cpu.catalog import GROUP_OF, groups_for

LLAMA = str(DATA / "llama")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An empty cache folder, and a compiler that only writes files down: the groups that it was asked for."""
    asked: list[str] = []

    def compiled(groups: list[str], progress: library.Progress | None) -> list[tuple[str, str, bytes]]:
        asked.extend(groups)
        objects = [(name, name, bytes(64)) for name, group in GROUP_OF.items() if group in groups]
        if progress is not None:
            progress(0, len(objects))
            progress(len(objects), len(objects))
        for group in groups:
            library._write(library._paths(group)[0], [item for item in objects if GROUP_OF[item[0]] == group])
        return objects

    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_compiled", compiled)
    monkeypatch.setattr(library.KernelLibrary, "_link", lambda self, objects: None)
    monkeypatch.setattr(library, "_loaded", None)
    return asked


def test_what_a_model_needs_is_compiled_once(
    compiler: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "kernels"
    arguments = ["warmup", "-w", LLAMA, "--device", "cpu", "--dtype", "float16", "--kv-dtype", "bfloat16"]
    assert main(arguments) == 0
    needed = groups_for(["float16"], "bfloat16")
    assert sorted(compiler) == sorted(needed)
    count = sum(group in needed for group in GROUP_OF.values())
    out = capsys.readouterr().out
    assert out.startswith(f"{count} kernels compiled for ") and out.endswith(f" s, kept in {folder}\n")
    assert " (cpu) in 0." in out
    monkeypatch.setattr(library, "_loaded", None)  # as in another process
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("nothing to do: the kernels for ") and out.endswith(f" are in {folder}\n")
    assert sorted(compiler) == sorted(needed)


def test_kernels_that_cannot_be_kept_are_an_error(
    compiler: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert main(["warmup", "-w", LLAMA, "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "could not all be kept: no folder for them can be written" in captured.err


def test_a_disk_that_is_full_halfway_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(groups: list[str], progress: library.Progress | None) -> list[tuple[str, str, bytes]]:
        return [(name, name, bytes(64)) for name, group in GROUP_OF.items() if group in groups]

    write = library._write
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "compile_kernels", compiled)
    monkeypatch.setattr(compile_apart, "processors", lambda: 1)
    monkeypatch.setattr(library, "_write", lambda path, objects: "basic" not in path.name and write(path, objects))
    monkeypatch.setattr(library.KernelLibrary, "_link", lambda self, objects: None)
    monkeypatch.setattr(library, "_loaded", None)
    assert main(["warmup", "-w", LLAMA, "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "could not all be kept" in captured.err
    assert list((tmp_path / "kernels").glob("*.bin"))


def test_only_options_that_matter_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "-w", LLAMA, "--kv-memory", "1MiB"]) == 2
    assert "no such option: --kv-memory" in capsys.readouterr().err
    assert main(["warmup", "-w", str(DATA / "nothing")]) == 1
    assert main(["warmup", "--help"]) == 0 and "--debug" in capsys.readouterr().out


def test_a_bad_level_of_the_processor_is_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cupaged.kernels.cpu import processor

    processor.target.cache_clear()
    library.key.cache_clear()
    monkeypatch.setenv("CUPAGED_CPU", "sse9")
    monkeypatch.setattr(library, "_loaded", None)
    try:
        assert main(["warmup", "-w", LLAMA, "--device", "cpu"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("cupaged: error: CUPAGED_CPU: 'sse9' is not one of native, ") and err.count("\n") == 1
    finally:
        processor.target.cache_clear()
        library.key.cache_clear()
