"""Progress of long work on stderr: a bar on a terminal, one plain line a stage elsewhere, nothing if it is quick."""

from __future__ import annotations

import sys
import threading
from typing import Any, Protocol

from cupaged.cli.errors import note

DELAY_SECONDS = 1.0
TITLES = {"kernels": "compiling kernels, once for this processor and kind of model", "weights": "loading weights"}


def say_round(number: int, rounds: int) -> None:
    """A line before each round of a measurement, 0 being one that warms: a bar that moves would be measured, too."""
    note(f"round {number} of {rounds} ..." if number else "a round to warm up ...")


class Event(Protocol):
    """What LLM reports: `done` of `total` (None: unknown) `unit`s of a stage: a key of TITLES, or a line of its own."""

    @property
    def stage(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int | None: ...
    @property
    def unit(self) -> str: ...


class Progress:
    """A callable for LLM's `progress`, and a context manager.

    Each stage becomes visible once it has run for `delay` seconds. A timer makes it visible, since a
    stage may report its start and then nothing until its end.
    """

    def __init__(self, delay: float = DELAY_SECONDS) -> None:
        self._delay = delay
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._lock = threading.Lock()
        self._latest: Event | None = None
        self._timer: threading.Timer | None = None
        self._bar: Any = None  # rich.progress.Progress while one is on screen
        self._task: Any = None

    def __call__(self, event: Event) -> None:
        with self._lock:
            new_stage = self._latest is None or self._latest.stage != event.stage
            if new_stage:
                self._hide()
            self._latest = event
            if event.total is not None and event.done >= event.total:
                self._hide()
                self._latest = None
            elif new_stage:
                self._timer = threading.Timer(self._delay, self._show, args=[event.stage])
                self._timer.daemon = True
                self._timer.start()
            elif self._bar is not None:
                self._bar.update(self._task, completed=event.done, total=event.total)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Take everything off the screen; a later event starts anew. Call before writing to the same terminal."""
        with self._lock:
            self._hide()
            self._latest = None

    def _hide(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, stage: str) -> None:
        with self._lock:
            event = self._latest
            if self._timer is None or event is None or event.stage != stage:
                return  # it ended while the timer went off
            if self._is_terminal:
                self._bar = _make_bar(event.unit)
                title = TITLES.get(stage, stage).partition(",")[0]  # a line of 80 columns has bar and numbers, too
                self._task = self._bar.add_task(title, total=event.total, completed=event.done)
                self._bar.start()
            else:
                note(f"{TITLES.get(stage, stage)} ...")


def _make_bar(unit: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    amount: Any = DownloadColumn(binary_units=True) if unit in ("bytes", "B") else MofNCompleteColumn()
    label = TextColumn("" if unit in ("bytes", "B") else unit)
    # transient: the bar leaves no trace, so that what follows starts on a clean line
    return Bar(
        TextColumn("{task.description}"), BarColumn(), amount, label, TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
