"""`cupaged` in this process or in another, on a stand-in for LLM."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM

from cupaged.cli import main, runtime

sys.path.append(str(Path(__file__).resolve().parent.parent / "model"))  # their builders of model files

SCRIPT = Path(__file__).with_name("fake_llm.py")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """run("generate", ...) returns exit code, stdout and stderr."""

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(runtime, "open_llm", FakeLLM)
        code = main(args)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def start(checkout_env: dict[str, str]) -> Callable[..., subprocess.Popen[bytes]]:
    """start("generate", ..., stdout=...) starts a process of its own; its pipes are stdout and stderr."""

    def call(*args: str, **options: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, str(SCRIPT), *args], **{**pipes, "env": checkout_env, **options})

    return call
