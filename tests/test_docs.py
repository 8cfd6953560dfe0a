"""Every command and snippet of README.md and docs/ that can run here is run, and says what the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(kind: str) -> list[tuple[str, str]]:
    """(page and line, text) of every fenced block of a kind."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S):
            line = text.count("\n", 0, match.start()) + 1
            found.append((f"{page.name}:{line}", match.group(1)))
    return found


def commands() -> list[tuple[str, str, str]]:
    """(where, command, expected output) of every `$ ` line of the console blocks."""
    found = []
    for where, text in blocks("console"):
        for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
            command, _, expected = part.partition("\n")
            found.append((where, command, expected))
    return found


def test_the_pages_have_snippets_and_commands() -> None:
    assert len(blocks("python")) >= 2 and len(commands()) >= 4


@pytest.mark.parametrize(("where", "command", "expected"), commands(), ids=[c[0] + " " + c[1][:40] for c in commands()])
def test_command_prints_what_the_page_says(
    where: str, command: str, expected: str, checkout_env: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "cupaged"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m cupaged "$@"\n')
    program.chmod(0o755)
    env = {**checkout_env, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{where}: {done.stderr}"
    assert done.stdout == expected, where


@pytest.mark.parametrize(("where", "code"), blocks("python"), ids=[b[0] for b in blocks("python")])
def test_python_snippet_runs(where: str, code: str, checkout_env: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", code], env=checkout_env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{where}: {done.stderr}"
