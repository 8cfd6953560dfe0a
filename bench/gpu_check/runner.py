"""Sections one after another, each in a process of its own, within its limit and the time there is in all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupaged.bench.gpu_check.report import Result, Row
from cupaged.bench.gpu_check.sizes import Sizes

_NOTE = 300  # characters of a note


class Skipped(Exception):
    """A section cannot run here: a tool is not installed. Says which."""


class Failed(Exception):
    """A section ran, and found a fault. Says what."""


@dataclass(frozen=True, slots=True)
class Section:
    """run(sizes) yields rows, each as soon as it is known. limit: seconds."""

    name: str
    title: str
    limit: float
    run: Callable[[Sizes], Iterator[Row]]


Launch = Callable[[Section, float], Result]


def run_all(
    sections: Iterable[Section], launch: Launch, budget: float, publish: Callable[[Sequence[Result]], None]
) -> list[Result]:
    """Run each by `launch(section, seconds)`; `publish` gets what there is after each. No time left: skipped."""
    results: list[Result] = []
    end = time.monotonic() + budget
    for section in sections:
        left = end - time.monotonic()
        if left < 1:
            results.append(Result(section.name, section.title, "skipped", 0.0, note="no time was left"))
        else:
            results.append(launch(section, min(left, section.limit)))
        publish(results)
    return results


def in_process(arguments: Sequence[str], section: Section, seconds: float) -> Result:
    """Run a section as ``python -m cupaged.bench.gpu_check --section NAME --rows FILE``, and whatever it starts."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        rows = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-m", "cupaged.bench.gpu_check", *arguments]
        command += ["--section", section.name, "--rows", str(rows)]
        with open(Path(folder) / "output", "w+b") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
            output.seek(0)
            said = output.read().decode(errors="replace")
        found = read_rows(rows)
    return outcome(section, code, found, said, time.monotonic() - began, seconds)


def outcome(
    section: Section, code: int | None, lines: Sequence[dict[str, Any]], said: str, taken: float, limit: float
) -> Result:
    """A section's result from its process: exit code (None: the limit was passed), what it wrote, what it said."""
    rows = [Row.of(line) for line in lines if "case" in line]
    notes = [line for line in lines if "state" in line]
    if notes:
        state, note = notes[-1]["state"], notes[-1]["note"]
    elif code is None:
        state, note = "failed", f"took more than {limit:.0f} s and was ended"
    else:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "no word")
        state, note = "failed", f"its process ended with {_code(code)}: {last}"
    return Result(section.name, section.title, state, taken, rows, " ".join(note.split())[:_NOTE])


def run_here(section: Section, sizes: Sizes, rows: Path) -> int:
    """The other end of `in_process`: run the section, write rows as they come, last how it ended."""
    with open(rows, "a", encoding="utf-8") as file:

        def put(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            for row in section.run(sizes):
                put(row.as_object())
        except Skipped as why:
            put({"state": "skipped", "note": str(why)})
        except Failed as why:
            put({"state": "failed", "note": str(why)})
            return 1
        except Exception as error:
            traceback.print_exc()
            put({"state": "failed", "note": f"{type(error).__name__}: {error}"})
            return 1
        else:
            put({"state": "done", "note": ""})
    return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What a section wrote; its last line may be cut off where it was killed."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            found.append(json.loads(line))
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that runs on, and all that it started (its session)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
