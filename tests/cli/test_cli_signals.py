"""Ctrl-C, closed pipes and terminals, on a process of its own."""

import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

Start = Callable[..., subprocess.Popen[bytes]]
GENERATE = ("generate", "-p", "a", "-n", "8", "-w")


def interrupt(process: subprocess.Popen[bytes], times: int = 1) -> tuple[bytes, bytes, float]:
    """SIGINT, `times` over; returns the rest of stdout and stderr, and the seconds until the process had ended."""
    started = time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    out, err = process.communicate(timeout=20)
    return out, err, time.monotonic() - started


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("mode", ["slow-load", "stuck-load", "wrapped-load", "lost-load"])
def test_U02_interrupt_while_loading(start: Start, mode: str, times: int) -> None:
    process = start(*GENERATE, f"fake:{mode}")
    assert process.stderr is not None and process.stderr.readline() == b"loading\n"
    out, err, seconds = interrupt(process, times)
    assert (process.returncode, out, err) == (130, b"", b"cupaged: interrupted\n")
    assert seconds < 2


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("mode", ["slow-decode", "stuck-decode"])
def test_U02_interrupt_while_decoding_keeps_the_text(start: Start, mode: str, times: int) -> None:
    process = start(*GENERATE, f"fake:{mode}")
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 4) == b" one"  # shown although stdout is a pipe and more is to come
    time.sleep(0.3)
    out, err, seconds = interrupt(process, times)
    assert process.returncode == 130 and err == b"cupaged: interrupted\n"
    assert out.rstrip(b"\n") == b" two three"
    assert seconds < 2


def test_U02_interrupt_ends_a_shutdown_that_hangs(start: Start) -> None:
    process = start("generate", "-w", "fake:slow-close", "-p", "a", "-n", "1")
    assert process.stdout is not None and process.stdout.readline() == b" one\n"
    _, err, seconds = interrupt(process)
    assert (process.returncode, err) == (130, b"cupaged: interrupted\n") and seconds < 2


def test_U01_a_reader_that_leaves_is_no_error(start: Start) -> None:
    read, write = os.pipe()
    process = start("generate", "-w", "fake", "-p", "a", "-n", "100000", stdout=write)
    os.close(write)
    assert os.read(read, 4) == b" one"
    os.close(read)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("args", [["--help"], ["info"], ["generate", "-w", "fake", "-p", "a", "--json"]])
def test_U01_a_reader_that_never_was(start: Start, args: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start(*args, stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (141, b"")


def test_U01_a_closed_stdout_is_one_line(start: Start) -> None:
    process = start("generate", "-w", "fake", "-p", "a", preexec_fn=lambda: os.close(1))
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (1, b"cupaged: error: standard output is closed\n")


def test_a_full_disk_is_one_line(start: Start) -> None:
    with open("/dev/full", "wb") as full:
        process = start("generate", "-w", "fake", "-p", "a", stdout=full)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (1, b"cupaged: error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_any_encoding_of_stdout_gives_json(start: Start, checkout_env: dict[str, str], encoding: str) -> None:
    env = {**checkout_env, "PYTHONIOENCODING": encoding}
    process = start("generate", "-w", "fake", "-p", "naïve ☕", "-n", "1", "--json", env=env)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, b"")
    assert ("naïve ☕".encode() if encoding == "utf-8" else rb"na\u00efve \u2615") in out


def on_terminal(start: Start, *args: str) -> tuple[int, bytes]:
    """Run with stdout and stderr on a terminal; returns the exit code and all that it showed."""
    master, slave = pty.openpty()
    process = start(*args, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 4096):
            shown += chunk
    except OSError:  # how Linux reports that the last user of a terminal has closed it
        pass
    os.close(master)
    return process.wait(timeout=20), shown


def test_a_terminal_shows_a_bar_for_long_work_and_the_text_on_a_clean_line(start: Start) -> None:
    code, shown = on_terminal(start, "generate", "-w", "fake:staged", "-p", "a", "-n", "2")
    assert code == 0
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown)
    assert b"loading weights" in plain and b"1/4 files" in plain
    assert shown.endswith(b"\x1b[2K one two\r\n")  # the bar's line is erased, then the text comes


def test_a_bar_has_room_for_its_numbers_in_80_columns(start: Start) -> None:
    _, shown = on_terminal(start, "generate", "-w", "fake:compiling", "-p", "a", "-n", "2")
    assert re.search(rb"compiling kernels .*21/44 kernels 0:00:0\d\s", re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown))


def test_a_terminal_shows_no_bar_for_short_work(start: Start) -> None:
    assert on_terminal(start, "generate", "-w", "fake", "-p", "a", "-n", "2") == (0, b" one two\r\n")


def test_a_terminal_gets_no_escape_sequence_of_a_prompt(start: Start) -> None:
    _, shown = on_terminal(start, "generate", "-w", "fake", "-p", "\x1b[2Jx", "-p", "b", "-n", "1")
    assert b"\x1b" not in shown and "=== 1 of 2: ␛[2Jx".encode() in shown
