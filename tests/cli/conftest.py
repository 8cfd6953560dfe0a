"""`cupaged` in this process or in another, on a stand-in for LLM."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM

from cupaged.cli import main, runtime

sys.path.append(str(Path(__file__).resolve().parent.parent / "model"))  # their builders of model files

SCRIPT = Path(__file__).with_name("fake_llm.py")


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that fails between starting a process and its end does not leave it running."""
    started: list[subprocess.Popen[Any]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    yield
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


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
