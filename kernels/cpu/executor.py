"""Host side of the thread team: builds operation records and runs them.

`launch` runs one operation at once (eager). Between `begin_capture` and `end_capture` it only records, and
`run_records` later runs the whole list in one native call, the arguments (addresses of preallocated buffers, sizes)
unchanged: the CPU's form of a captured graph.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupaged.errors import DeviceError
from cupaged.kernels.cpu.library import KernelLibrary

RECORD_WORDS = 32
_LINE_WORDS = 8
_SPINS = 2000  # pauses before a waiting thread sleeps: about 50-100 microseconds

_packers = {n: struct.Struct(f"<{n + 2}q") for n in range(RECORD_WORDS - 1)}


class Pace:
    """Whether lists of about one size go faster on the whole team or on the caller's thread alone.

    On a machine that is busy with other things a barrier waits for whichever thread was taken off its core, at every
    operation: then one thread is faster than two, by a factor of two and more. Both ways are timed, by the second of a
    unit of work. One thread, if it seems slower, is tried again after PROBE runs, and after twice as many each time it
    proves slower, up to MOST; and soon after two runs of the team that were half as slow again. The team is tried after
    FIRST runs, twice as many, and then every PROBE: it may have seemed slower by what came before it.
    One such run is an accident, of which nothing is learnt: where the two ways differ by a fifth, as they do where
    memory is the bound, accidents had half of all runs take the slower one. The bits are the same.
    """

    FIRST, PROBE, MOST = 4, 32, 1024
    SLOWER = 1.5
    WEIGHT = 1 / 8  # of a run in what is known of its way

    def __init__(self) -> None:
        self._seconds: dict[bool, float] = {}
        self._runs = 0
        self._probe = self._until = self.PROBE
        self._accident = False  # the last run of the better way was a slow one

    def alone(self) -> bool:
        """How to run next time."""
        self._runs += 1
        if len(self._seconds) < 2:
            return self._runs > 2 and False in self._seconds  # first the team, twice (caches), then alone
        self._until -= 1
        return self._better if self._until > 0 else not self._better

    @property
    def _better(self) -> bool:
        return self._seconds[True] <= self._seconds[False]

    def note(self, alone: bool, seconds: float, work: int = 1) -> None:
        """What a run of so many units took."""
        each = seconds / max(1, work)
        if len(self._seconds) < 2:
            self._seconds[alone] = each
            if len(self._seconds) == 2:
                self._changed()
            return
        better = self._better
        known = self._seconds[alone]
        slow, twice = each > self.SLOWER * known, self._accident
        if alone is not better:
            self._seconds[alone] = min(each, (known + each) / 2)
        elif slow:
            self._accident = not twice
            self._seconds[alone] = each if twice else known
        else:
            self._accident = False
            self._seconds[alone] = known + (each - known) * self.WEIGHT
        if self._better is not better:
            self._changed()
        elif self._until <= 0:  # tried in vain
            self._probe = min(2 * self._probe, self.PROBE if better else self.MOST)
            self._until = self._probe
        elif slow and twice:
            self._until, self._probe = min(self._until, 2), self.PROBE

    def _changed(self) -> None:
        self._probe = self._until = self.FIRST if self._better else self.PROBE


@dataclass(slots=True)
class AttentionCall:
    """Where an attention call stands in a captured list: the indices of its two records, and what they were made of."""

    parts: int
    merge: int
    plan: Any
    heads: int
    kv_heads: int
    head_dim: int


class Records:
    """Operation records in a growing int64 array."""

    def __init__(self, capacity: int = 64) -> None:
        self.array = np.zeros((capacity, RECORD_WORDS), np.int64)
        self.count = 0
        self.keep: list[Any] = []  # what the addresses in the records point into
        self.attention: list[AttentionCall] = []
        # Of calls with the same plan: its index, query heads, head_dim, records of the parts and of the merges.
        self.bindings: list[tuple[int, int, int, np.ndarray, np.ndarray]] | None = None
        self.pace = Pace()
        self.work = 1  # in whatever units others that share the pace count in

    @property
    def address(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def append(self, kernel: int, chunks: int, arguments: tuple[int, ...]) -> None:
        if self.count == len(self.array):
            self.array = np.concatenate([self.array, np.zeros_like(self.array)])
        _packers[len(arguments)].pack_into(self.array[self.count], 0, kernel, chunks, *arguments)
        self.count += 1


class Team:
    """`threads` threads, the caller's among them, that run operation records. One submission at a time.

    After `os.fork()` the child has no helper threads: it starts its own at its first launch. A team that is dropped
    without `close` stops its threads too.
    """

    def __init__(self, library: KernelLibrary, threads: int) -> None:
        self.library = library
        self.threads = threads
        self._lock = threading.Lock()
        self._pid = -1
        self._closed = False
        self._one = Records(1)
        self._capture: Records | None = None

    def _start(self) -> None:
        memory, self._control, self._address = _control_block(self.threads)
        _, self._alone, self._alone_address = _control_block(1)
        self._workers = [
            threading.Thread(
                target=_work, args=(self.library, memory, self._address, i), daemon=True, name=f"cupaged-{i}"
            )
            for i in range(1, self.threads)
        ]
        for worker in self._workers:
            worker.start()
        self._pid = os.getpid()
        self._stop = weakref.finalize(self, _stop_workers, self.library, self._control, self._address, self._pid)
        self._stop.atexit = False  # threads end with the process; another one may be in the middle of a submission

    def _submit(self, records: Records, alone: bool = False) -> None:
        if self._closed:
            raise DeviceError("the CPU device was closed")
        if self._pid != os.getpid():
            self._start()
        control, address = (self._alone, self._alone_address) if alone else (self._control, self._address)
        control[3 * _LINE_WORDS] = records.address
        control[4 * _LINE_WORDS] = records.count
        self.library.call("team_submit", address)

    @property
    def capturing(self) -> Records | None:
        """The list being recorded, if a capture is running."""
        return self._capture

    def launch(self, kernel: str, chunks: int, *arguments: int, keep: Any = None) -> None:
        """Run `chunks` chunks of a kernel, or record the operation while capturing. No chunks: nothing to run, but
        recorded, for a replay may have some.

        `keep`: an object whose memory the operation reads and that nobody else holds on to; a capture keeps it alive.
        """
        address = self.library.addresses[kernel]
        with self._lock:
            if self._capture is not None:
                self._capture.append(address, chunks, arguments)
                if keep is not None:
                    self._capture.keep.append(keep)
                return
            if chunks <= 0:
                return
            self._one.count = 0
            self._one.append(address, chunks, arguments)
            self._submit(self._one)

    def hold(self, owner: Any) -> None:
        """Keep `owner` alive for as long as the capture that is running, if one is."""
        with self._lock:
            if self._capture is not None:
                self._capture.keep.append(owner)

    def begin_capture(self) -> None:
        with self._lock:
            if self._capture is not None:
                raise DeviceError("a capture is already running on this device")
            self._capture = Records()

    def end_capture(self) -> Records:
        with self._lock:
            records, self._capture = self._capture, None
        if records is None:
            raise DeviceError("no capture is running on this device")
        return records

    def run_records(self, records: Records) -> None:
        """Run a captured list in one native call, on the whole team or, where that proves faster, alone."""
        with self._lock:
            if not records.count:
                return
            alone = self.threads > 1 and records.pace.alone()
            began = time.perf_counter()
            self._submit(records, alone)
            records.pace.note(alone, time.perf_counter() - began, records.work)

    def close(self) -> None:
        """Stop the helper threads. Launches afterwards raise DeviceError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._pid == os.getpid():
                self._stop()
                for worker in self._workers:
                    worker.join()


def _control_block(threads: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(memory, the control block in it, its address): ten words on cache lines of their own; see team.py."""
    memory = np.zeros((10 + 1) * _LINE_WORDS, np.int64)
    offset = (-memory.ctypes.data % 64) // 8
    control = memory[offset : offset + 10 * _LINE_WORDS]
    control[6 * _LINE_WORDS] = _SPINS
    control[7 * _LINE_WORDS] = threads
    return memory, control, int(control.ctypes.data)


def _work(library: KernelLibrary, memory: np.ndarray, address: int, thread: int) -> None:
    """A helper thread. It holds the control block's `memory`, which native code watches, for as long as it runs."""
    library.call("team_worker", address, thread)


def _stop_workers(library: KernelLibrary, control: np.ndarray, address: int, pid: int) -> None:
    """End the helper threads. Nobody submits any more: the team is closed, or gone."""
    if pid == os.getpid():  # a forked child has none
        control[5 * _LINE_WORDS] = 1
        control[4 * _LINE_WORDS] = 0
        library.call("team_submit", address)
