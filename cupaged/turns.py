"""A lock for threads that share one engine: those who wait get their turn."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from cupaged.errors import DeviceError
from cupaged.interrupts import shield

_POLL = 0.05  # seconds between looks at interrupts while waiting


class TurnLock:
    """A reentrant lock, held over a step and taken again at once for the next one.

    With a plain lock the thread that steps would nearly always win that race against a waiting one, which then stood
    still until the other's requests were done. Here whoever waits holds the gate, and the last holder queues behind it.

    What is done under it is not interrupted in the middle (see interrupts.py); waiting for it is.

    A process forked while another thread held the lock has what it guards in the middle of a change, and no thread that
    would finish it: DeviceError there, instead of waiting for ever.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._pid = os.getpid()

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds the lock. Only that thread ever writes its own number here."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        while True:
            shield.__enter__()
            try:
                if self.mine or self._acquired():
                    self._depth += 1
                    return
            except BaseException:
                shield.__exit__()
                raise
            shield.__exit__()  # the interrupt that came while we waited, and held nothing

    def _acquired(self) -> bool:
        """Wait for the lock; False, without it, if an interrupt came meanwhile."""
        if self._pid != os.getpid():
            if self._gate.locked() or self._lock.locked():
                raise DeviceError("this process was forked while another thread was generating; load the LLM anew")
            self._pid = os.getpid()
        while not self._gate.acquire(timeout=_POLL):
            if shield.pending:
                return False
        try:
            while not self._lock.acquire(timeout=_POLL):
                if shield.pending:
                    return False
        finally:
            self._gate.release()
        self._owner = threading.get_ident()
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()
        shield.__exit__()
