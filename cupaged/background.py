"""Work on a thread of its own while the caller does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Calls `work` at once on another thread; `result` waits for it, and raises what it raised."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._outcome: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cupaged-background")
        self._thread.start()

    def result(self) -> T:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._outcome

    def _run(self) -> None:
        try:
            self._outcome = self._work()
        except BaseException as error:  # raised again by `result`
            self._error = error
