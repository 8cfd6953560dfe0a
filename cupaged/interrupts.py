"""Ctrl-C held back while something is half done.

Python runs signal handlers between any two instructions, and the usual one raises KeyboardInterrupt there. In the
middle of a step that would leave blocks without owner, a lock held, or tokens that nobody was told of. Within the
shield the handlers of SIGINT, SIGTERM and SIGALRM (those in Python, whoever set them) are noted, and run when it ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Shield:
    """A reentrant context manager. In other threads than the main one it does nothing: handlers do not run there."""

    def __init__(self) -> None:
        self._depth = 0
        self._saved: dict[int, Any] = {}
        self._noted: dict[int, FrameType | None] = {}

    @property
    def pending(self) -> bool:
        """Whether a handler waits to be run, in this thread."""
        return bool(self._noted) and in_main_thread()

    def __enter__(self) -> None:
        if not in_main_thread():
            return
        if self._depth == 0:
            # An interrupt before a handler is replaced is raised here, where nothing has begun yet.
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._note:
                    self._saved[number] = handler
                    signal.signal(number, self._note)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if not in_main_thread():
            return
        self._depth -= 1
        if self._depth:
            return
        saved, self._saved = self._saved, {}
        for number, handler in saved.items():
            signal.signal(number, handler)
        noted, self._noted = self._noted, {}
        for number, frame in noted.items():
            if number in saved:
                saved[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted[number] = frame


class Owned(list[T]):
    """A list that hands its items to `release` when it is dropped with some left in it.

    A `finally` is not enough for them: an interrupt may come when it has begun and done nothing yet.
    """

    def __init__(self, release: Callable[[list[T]], None]) -> None:
        super().__init__()
        self._release = release

    def __del__(self) -> None:
        if self:
            self._release(self)


def in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


shield = Shield()


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the function runs within the shield."""

    @wraps(function)
    def shielded(*args: P.args, **options: P.kwargs) -> R:
        with shield:
            return function(*args, **options)

    return shielded
