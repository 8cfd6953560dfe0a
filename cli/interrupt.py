"""Ctrl-C ends the program within two seconds, wherever it is.

Python runs a signal handler only between two bytecodes of the main thread, and that thread may sit in a compiled kernel
for long. The interpreter's C handler, however, writes the signal's number to a "wakeup" file at once. A thread reads
it: if the main thread has not ended the process in time, or at a second Ctrl-C, the thread does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from types import FrameType, TracebackType

from cupaged.cli.errors import INTERRUPTED

GRACE_SECONDS = 1.2
MESSAGE = "cupaged: interrupted\n"


class Interrupt:
    """Context manager. Inside, the first SIGINT raises KeyboardInterrupt once; what follows cannot raise another.

    Does nothing outside the main thread, or where SIGINT is ignored (a background job of a script).
    """

    def __init__(self) -> None:
        self._active = False
        self._hit = False
        self._announced = threading.Lock()  # taken for good by whoever prints

    def __enter__(self) -> Interrupt:
        main_thread = threading.current_thread() is threading.main_thread()
        self._active = main_thread and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        if self._active:
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._old_handler = signal.signal(signal.SIGINT, self._on_signal)
            self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, name="cupaged-interrupt", daemon=True)
            self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an interrupt everything stays armed, so that a shutdown that hangs is cut short too.
        if self._active and not self._hit:
            signal.set_wakeup_fd(self._old_wakeup)
            signal.signal(signal.SIGINT, self._old_handler)
            self._writer.close()
            self._watcher.join()
            self._reader.close()

    def finish(self) -> None:
        """The KeyboardInterrupt has arrived: print the one line and have further Ctrl-C do nothing.

        The interpreter would give SIGINT its default action back while it shuts down, but leaves an ignored one alone.
        """
        if self._active:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._print_once()

    def _print_once(self) -> None:
        if self._announced.acquire(blocking=False):
            os.write(2, MESSAGE.encode())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._hit:
            self._hit = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        if not self._next_signal(None):
            return
        self._next_signal(GRACE_SECONDS)  # time is up, or the user insists
        self._print_once()
        os._exit(INTERRUPTED)

    def _next_signal(self, timeout: float | None) -> bool:
        """True once SIGINT's number arrives; False when the writer is closed or after `timeout` seconds."""
        while select.select([self._reader], [], [], timeout)[0]:
            received = self._reader.recv(64)
            if not received:
                return False
            if signal.SIGINT in received:
                return True
        return False
