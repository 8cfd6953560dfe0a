"""Tens of thousands of damaged files of each format: each loads or gives one of our errors, soon and in little memory.

The work is done by fuzz_files.py in a process of its own, so that a hang, a signal or an abort is seen as what it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "fuzz_files.py"


def fuzz(kind: str, seed: int, count: int, timeout: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), kind, str(seed), str(count)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "RUST_BACKTRACE": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, float] = json.loads(done.stdout)
    print(kind, result)
    # Neither harmless damage alone nor such that nothing gets past the first check.
    assert result["loaded"] > count // 200
    assert result["refused"] > count // 2
    return result


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_L01_L06_20000_damaged_files(kind: str) -> None:
    fuzz(kind, 1, 20_000, 120)


@pytest.mark.parametrize("kind", ["gguf-metadata", "hub"])
def test_L06_odd_values_in_sound_files(kind: str) -> None:
    """Metadata of a GGUF, and the JSON files of a Hub folder, with values of wrong types, ranges and lengths."""
    fuzz(kind, 1, 1500, 120)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gguf-metadata", "hub"])
def test_L06_odd_values_in_sound_files_at_length(kind: str) -> None:
    fuzz(kind, 2, 20_000, 600)
