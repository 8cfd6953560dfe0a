"""Progress on stderr: plain lines here, since pytest's stderr is no terminal (terminals: test_cli_signals.py)."""

import time

import pytest
from fake_llm import Event

from cupaged.cli.progress import Progress

DELAY = 0.05


def wait_for(capsys: pytest.CaptureFixture[str], text: str) -> None:
    deadline = time.monotonic() + 10
    seen = ""
    while text not in seen:
        assert time.monotonic() < deadline, f"{text!r} did not come; {seen!r} did"
        seen += capsys.readouterr().err
        time.sleep(0.01)


def test_a_long_stage_is_one_plain_line_even_if_no_event_follows(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(delay=DELAY) as progress:
        progress(Event("compiling kernels", 0, 40))
        wait_for(capsys, "cupaged: compiling kernels ...\n")
        for done in range(1, 40):
            progress(Event("compiling kernels", done, 40))
        progress(Event("loading weights", 0))
        wait_for(capsys, "cupaged: loading weights ...\n")
    assert capsys.readouterr().err == ""


def test_short_stages_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(delay=DELAY) as progress:
        progress(Event("reading", 0, 2))
        progress(Event("reading", 2, 2))
        time.sleep(3 * DELAY)
        progress(Event("loading", 0, 2))
        progress.clear()
        time.sleep(3 * DELAY)
        progress(Event("packing", 0, 2))
    time.sleep(3 * DELAY)
    assert capsys.readouterr().err == ""


def test_a_stage_that_comes_again_is_shown_again(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(delay=DELAY) as progress:
        for _ in range(2):
            progress(Event("compiling", 0, 2))
            wait_for(capsys, "cupaged: compiling ...\n")
            progress(Event("compiling", 2, 2))
