"""A copy stream for memory that the host can reach: a queue of copies, worked off by a thread of its own.

So that on the CPU too copies overlap with compute, and finish late and in an order that only events tell, as on a GPU.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np

from cupaged.device.base import Event
from cupaged.errors import DeviceError
from cupaged.kernels.interface import Array


class HostTransfer:
    """Copies under way, or a point in the stream if there are none. `seconds` and `error` are known once it is done."""

    def __init__(self, pairs: Sequence[tuple[Array, Array]] = (), after: Event | None = None) -> None:
        self._pairs = pairs
        self._after = after
        self._finished = threading.Event()
        self.seconds: float | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> None:
        self._finished.wait()

    def run(self) -> None:
        """In the stream's thread."""
        try:
            if self._after is not None:
                self._after.wait()
            began = time.perf_counter()
            for source, destination in self._pairs:
                copy_array(source, destination)
            self.seconds = time.perf_counter() - began
        except BaseException as error:
            self.error = error
        self.end()

    def end(self) -> None:
        self._pairs, self._after = (), None
        self._finished.set()


def copy_array(source: Array, destination: Array) -> None:
    """One contiguous copy; NumPy lets go of the GIL for it."""
    np.copyto(destination, source, casting="no")


class _Jobs:
    """What the thread works on. It holds this and not the stream, so that a stream that is dropped stops its thread."""

    def __init__(self, waiting: Sequence[HostTransfer] = ()) -> None:
        self.waiting = deque(waiting)  # the first one is being done; it leaves when it is finished
        self.running: HostTransfer | None = None
        self.changed = threading.Condition()
        self.closed = False

    def work(self) -> None:
        while True:
            with self.changed:
                while not self.waiting and not self.closed:
                    self.changed.wait()
                if self.closed:
                    return
                self.running = job = self.waiting[0]
            job.run()
            with self.changed:
                self.running = None
                self.waiting.popleft()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            rest = [job for job in self.waiting if job is not self.running]  # that one ends by itself
            self.changed.notify()
        for job in rest:
            job.error = DeviceError("the device was closed before a copy was done")
            job.end()


class HostStream:
    """Copies in the order issued, beside the calling thread. The thread starts with the first copy.

    A forked child has no such thread: it starts its own at its first use of the stream, which does again what was not
    finished at the fork (a copy may be repeated: both its ends are held until it is reported).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: _Jobs | None = None
        self._pid = -1
        self._closed = False

    def copy(self, pairs: Sequence[tuple[Array, Array]]) -> HostTransfer:
        """Copy (source, destination) pairs of equal type and shape. DeviceError if the device was closed."""
        return self._put(HostTransfer(list(pairs)))

    def record(self) -> HostTransfer:
        """A point behind all that was issued so far."""
        return self._put(HostTransfer())

    def wait(self, event: Event) -> None:
        """What is issued from now on runs after the event."""
        if not event.done():
            self._put(HostTransfer(after=event))

    def synchronize(self) -> None:
        if self._jobs is not None and not self._closed:
            self.record().wait()

    def close(self) -> None:
        """End the thread; copies that have not begun end with an error."""
        if self._jobs is not None and not self._closed and self._pid == os.getpid():
            self._jobs.close()
            self._thread.join()
        self._closed = True

    def _put(self, transfer: HostTransfer) -> HostTransfer:
        if self._closed:
            raise DeviceError("the device was closed")
        if self._jobs is None or self._pid != os.getpid():
            self._jobs = _Jobs(() if self._jobs is None else self._jobs.waiting)
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._jobs.work, daemon=True, name=f"cupaged-{self.name}")
            self._thread.start()
            weakref.finalize(self, self._jobs.close).atexit = False  # the thread ends with the process
        with self._jobs.changed:
            self._jobs.waiting.append(transfer)
            self._jobs.changed.notify()
        return transfer
