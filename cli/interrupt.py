"""Ctrl-C ends the program within two seconds, wherever it is.

Python runs a signal handler only between two bytecodes of the main thread, and that thread may sit in a compiled kernel
for long. The interpreter's C handler, however, writes the signal's number to a "wakeup" file at once. A thread reads
it: if the main thread has not ended the process in time, or at a second Ctrl-C, the thread does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType

from cupaged.cli.errors import INTERRUPTED
from cupaged.cli.output import Output

GRACE_SECONDS = 1.2
MESSAGE = "cupaged: interrupted\n"


class Interrupt:
    """Context manager. Inside, the first SIGINT raises KeyboardInterrupt once; what follows cannot raise another.

    Does nothing outside the main thread, or where SIGINT is ignored (a background job of a script).
    """

    def __init__(self) -> None:
        self._active = False
        self.hit = False
        self._announced = threading.Lock()  # taken for good by whoever prints

    def __enter__(self) -> Interrupt:
        main_thread = threading.current_thread() is threading.main_thread()
        self._active = main_thread and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        if self._active:
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._old_handler = signal.signal(signal.SIGINT, self._on_signal)
            self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._old_hook = sys.unraisablehook
            sys.unraisablehook = self._on_unraisable
            self._watcher = threading.Thread(target=self._watch, name="cupaged-interrupt", daemon=True)
            self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an interrupt everything stays armed, so that a shutdown that hangs is cut short too.
        if self._active and not self.hit:
            signal.set_wakeup_fd(self._old_wakeup)
            signal.signal(signal.SIGINT, self._old_handler)
            sys.unraisablehook = self._old_hook
            self._writer.close()
            self._watcher.join()
            self._reader.close()

    def finish(self) -> int:
        """The KeyboardInterrupt has arrived: print the one line and end the process; returns the code if not active.

        The interpreter is not taken down: the interrupt may come out of LLVM or from the middle of an import, and what
        was made halfway there is not safe to destroy. (It also would die by SIGINT, not with a code, once a
        KeyboardInterrupt has passed through exec(), as in the making of a dataclass.)
        """
        self._print_once()
        if self._active:
            os._exit(INTERRUPTED)
        return INTERRUPTED

    def _print_once(self) -> None:
        if self._announced.acquire(blocking=False):
            mid_line = Output.line_is_open and sys.stdout is not None and sys.stdout.isatty()
            with contextlib.suppress(OSError):
                os.write(2, (f"\n{MESSAGE}" if mid_line else MESSAGE).encode())

    def _on_unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        """A KeyboardInterrupt that came up in a callback from C, or in a __del__, goes nowhere: end here."""
        if lost.exc_type is KeyboardInterrupt:
            self.finish()
        self._old_hook(lost)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.hit:
            self.hit = True
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
