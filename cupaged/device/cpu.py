"""The CPU as a device: NumPy memory, Numba kernels, a team of threads. Compute is done when a call returns; copies
between the block pools are done by a thread for each direction."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.device.base import CopyStream, Device, Event, MemoryInfo, ModelShape, ProgressCallback, StreamName
from cupaged.device.host_memory import host_memory as host_memory  # others look for it here
from cupaged.device.host_stream import HostStream, HostTransfer
from cupaged.errors import OptionError
from cupaged.kernels.cpu.arrays import aligned
from cupaged.kernels.cpu.catalog import groups_for
from cupaged.kernels.cpu.executor import Pace, Records, Team
from cupaged.kernels.cpu.library import load_library
from cupaged.kernels.cpu.operations import CpuOperations
from cupaged.kernels.cpu.plan import advance
from cupaged.kernels.interface import Array, AttentionPlan, Operations, StorageType

MAX_THREADS = 256


class _Done:
    """The event of a stream that never lags behind."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class CpuCapture:
    """A recorded operation list; `replay` runs it in one native call, with nothing of Python in between."""

    def __init__(self, ops: CpuOperations, plans: Sequence[AttentionPlan]) -> None:
        self.records = Records()
        self._ops = ops
        self._plans = list(plans)

    def replay(self, plans: Sequence[AttentionPlan] | None = None) -> None:
        if plans is not None:
            self._ops.rebind(self.records, self._plans, plans)
            self._plans = list(plans)
        self._ops.team.run_records(self.records)

    def advance(self, changed: Sequence[bool]) -> bool:
        """See `MovingCapture`. The plans are changed where they are: nobody else may be using them."""
        return advance(self._plans, changed)


class CpuDevice(Device):
    """`threads`: None for the processors this process may use. `progress(done, total)` while kernels are compiled."""

    kind = "cpu"
    unified = True
    as_stored = True
    k_transposed = True  # one dim of 16 tokens is a vector: scores need no sums across lanes

    def __init__(self, threads: int | None = None, progress: ProgressCallback | None = None) -> None:
        allowed = usable_processors()
        self.threads = allowed if threads is None else threads
        if isinstance(self.threads, bool) or not isinstance(self.threads, int) or not 1 <= self.threads <= MAX_THREADS:
            raise OptionError(f"threads: {threads!r} is not a whole number in 1..{MAX_THREADS}")
        self.name = processor_name()
        self._progress = progress
        self.team = Team(load_library(progress), self.threads)
        self._ops = CpuOperations(self.team)
        self._paces: dict[int, Pace] = {}
        self._copies = {"to_host": HostStream("to-host"), "to_device": HostStream("to-device")}

    @property
    def ops(self) -> Operations:
        return self._ops

    def prepare(
        self, weights: Iterable[str], cache: StorageType, shape: ModelShape | None = None, exact: bool = False
    ) -> None:
        self.team.library.require(groups_for(weights, cache, exact), self._progress)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return aligned(int(np.prod(shape, dtype=np.int64)), dtype).reshape(shape)

    def empty_host(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.empty(shape, dtype)

    def copy(self, stream: CopyStream, pairs: Sequence[tuple[Array, Array]]) -> HostTransfer:
        return self._copies[stream].copy(pairs)

    def upload(self, host: Array, out: Array | None = None) -> Array:
        if out is None:
            out = self.empty(host.shape, host.dtype)
        out[...] = host
        return out

    def download(self, array: Array) -> Array:
        return array

    def record(self, stream: StreamName = "compute") -> Event:
        return _Done() if stream == "compute" else self._copies[stream].record()

    def wait(self, stream: StreamName, event: Event) -> None:
        if stream == "compute":
            event.wait()
        else:
            self._copies[stream].wait(event)

    def synchronize(self) -> None:
        for stream in self._copies.values():
            stream.synchronize()

    @contextmanager
    def capture(self, plans: Sequence[AttentionPlan] = ()) -> Iterator[CpuCapture]:
        captured = CpuCapture(self._ops, plans)
        self.team.begin_capture()
        try:
            yield captured
        finally:
            captured.records = records = self.team.end_capture()
            self._ops.keep_alive(records)
            if plans:  # lists of about as many tokens learn from each other how they run best
                records.work = max(plan.num_tokens for plan in plans)
                records.pace = self._paces.setdefault(records.work.bit_length(), records.pace)

    def memory(self) -> MemoryInfo:
        return MemoryInfo(*host_memory())

    def close(self) -> None:
        for stream in self._copies.values():
            stream.close()
        self.team.close()


def usable_processors() -> int:
    """Processors this process may run on, a container's CPU quota counted."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return min(count, MAX_THREADS)


def processor_name() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
