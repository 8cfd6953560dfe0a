"""Kernels that several processes compile are those that one compiles; whatever becomes of them, none is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupaged.kernels.cpu import compile_apart, library
from cupaged.kernels.cpu.catalog import MEMBERS, groups_for
from cupaged.kernels.cpu.compile_apart import compile_together, shares

FEW = ["records-nibble", "blocks-Q4_0", "blocks-Q8_0"]  # quickly compiled
NAMES = {member[0] for group in FEW for member in MEMBERS[group]}


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, each worth the while."""
    monkeypatch.setattr(compile_apart, "processors", lambda: 2)
    monkeypatch.setattr(compile_apart, "_WORTH", 0.0)


def test_shares_are_whole_and_alike() -> None:
    groups = groups_for(["Q4_1", "Q8_0"], "bfloat16")
    for processes in (1, 2, 3, 64):
        dealt = shares(groups, processes)
        assert 1 <= len(dealt) <= processes
        assert sorted(group for members in dealt for group in members) == sorted(groups)
    first, second = shares(groups, 2)
    assert ("basic" in first) != ("basic" in second)  # the two longest are not in one share
    assert ("cache-bfloat16" in first) != ("cache-bfloat16" in second)
    assert shares(["blocks-Q4_0"], 8) == [["blocks-Q4_0"]]
    assert shares([], 4) == [[]]


def test_helped_or_alone_the_kernels_are_the_same(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    helped = compile_together(FEW, lambda done, total: told.append((done, total)), library.key())
    assert told == sorted(told) and told[-1] == (len(NAMES), len(NAMES))
    monkeypatch.setattr(compile_apart, "processors", lambda: 1)
    alone = compile_together(FEW, None, library.key())
    assert {name for name, _, _ in helped} == {name for name, _, _ in alone} == NAMES
    assert {symbol for _, symbol, _ in helped} == {symbol for _, symbol, _ in alone}
    assert len({symbol for _, symbol, _ in helped}) == len(NAMES)


@pytest.mark.parametrize("fault", ["another key", "no program", "ends at once", "half of it"])
def test_what_a_process_does_not_deliver_is_compiled_here(
    fault: str, two: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, program = library.key(), tmp_path / "python"
    if fault == "another key":
        key = "0" * 32
    elif fault != "no program":
        program.write_text("#!/bin/sh\n" + ("printf 'k\\040\\000\\000\\000abc'" if fault == "half of it" else "exit 3"))
        program.chmod(0o755)
    if fault != "another key":
        monkeypatch.setattr(sys, "executable", str(program))
    assert {name for name, _, _ in compile_together(FEW, None, key)} == NAMES


def test_a_program_that_holds_python_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_apart.interpreter() == sys.executable
    for path in ("/usr/bin/uwsgi", "", None):
        monkeypatch.setattr(sys, "executable", path)
        assert compile_apart.interpreter() is None
    monkeypatch.setattr(sys, "executable", "/opt/app/python")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert compile_apart.interpreter() is None


def test_an_interrupt_ends_the_processes_that_help(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_apart.subprocess, "Popen", noted)
    monkeypatch.setattr(compile_apart, "_compile_here", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_together(FEW, None, library.key())
    assert len(started) == 1 and started[0].returncode is not None


def test_groups_compiled_in_processes_of_their_own_go_together(tmp_path: Path, checkout_env: dict[str, str]) -> None:
    """Each process counts its kernels from the same number: symbols that hold it were once the same of two kernels."""
    env = {**checkout_env, "CUPAGED_CACHE_DIR": str(tmp_path)}
    script = (
        "import sys; from cupaged.kernels.cpu import library; from cupaged.kernels.cpu.compile import compile_kernels\n"
        "group = sys.argv[1]; found = list(compile_kernels([group]))\n"
        "assert all(library._write(path, found) for path in library._paths(group))"
    )
    groups = ["blocks-Q4_0", "blocks-Q8_0"]
    for group in groups:
        subprocess.run([sys.executable, "-c", script, group], env=env, check=True, cwd=tmp_path, timeout=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "CUPAGED_CACHE_DIR", str(tmp_path))
        objects = [item for group in groups for item in library._kept(group) or []]
    assert len(objects) == 2 and len({symbol for _, symbol, _ in objects}) == 2


def test_kernels_of_a_level_that_is_asked_for_are_found_again(checkout_env: dict[str, str], tmp_path: Path) -> None:
    """Each process orders its sets anew; what kernels are kept under must not hang on that."""
    script = "from cupaged.kernels.cpu.library import key; print(key())"
    keys = {
        subprocess.run(
            [sys.executable, "-c", script], env={**checkout_env, "CUPAGED_CPU": "plain", "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True, cwd=tmp_path,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(keys) == 1
