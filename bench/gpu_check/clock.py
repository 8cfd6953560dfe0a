"""Times on the device: medians between events of the compute stream, with no host in between where that matters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupaged.device.cuda import CudaDevice
from cupaged.kernels.interface import Array

_LEAST = 3  # calls of each contender that count
_MOST_FILLED = 8 << 20  # bytes that are made on the host; the rest is copies of them

Work = Callable[[], None]


class Clock:
    """Times work queued on a device's compute stream. seconds: about how long one timing goes on."""

    def __init__(self, device: CudaDevice, seconds: float) -> None:
        self.device = device
        self._runtime = device.runtime
        self._stream = device.backend.stream
        self._seconds = seconds

    def medians(self, contenders: Sequence[Work]) -> list[float]:
        """Median seconds of a call of each, A B C A B C ..., two rounds before them to warm."""
        for _ in range(2):
            for work in contenders:
                work()
        pairs: list[list[tuple[Any, Any]]] = [[] for _ in contenders]
        times: list[list[float]] = [[] for _ in contenders]
        stop = time.monotonic() + self._seconds * len(contenders)
        while time.monotonic() < stop or len(times[0]) < _LEAST:
            for work, mine in zip(contenders, pairs, strict=True):
                first = self._runtime.record(self._stream, timed=True)
                work()
                mine.append((first, self._runtime.record(self._stream, timed=True)))
            self._runtime.synchronize(pairs[-1][-1][1])  # each round: the queue does not grow
            for mine, taken in zip(pairs, times, strict=True):
                taken.append(self._runtime.seconds(*mine.pop()))
        return [statistics.median(taken) for taken in times]

    def median(self, work: Work) -> float:
        (found,) = self.medians([work])
        return found

    def captured(self, work: Work) -> Work:
        """The same launches as one CUDA graph, so that the host's own time is not in what is measured."""
        with self.device.capture() as step:
            work()
        step.replay()  # call by call: kernels are loaded, and scratch is there
        return step.replay

    def copied(self, source: Array, target: Array) -> float:
        """Bytes a second that a copy on the device moves, those read and those written counted."""
        seconds = self.median(lambda: self._runtime.copy(target, source, self._stream))
        return 2 * source.nbytes / seconds


def filled(device: CudaDevice, count: int, dtype: Any) -> Array:
    """`count` random numbers on the device: a stretch made on the host, over and over."""
    out = device.empty((count,), dtype)
    some = min(count, _MOST_FILLED // np.dtype(dtype).itemsize)
    values = np.random.default_rng(0).standard_normal(some, np.float32).astype(dtype)
    device.upload(values, out[:some])
    for start in range(some, count, some):
        piece = out[start : start + some]
        device.runtime.copy(piece, out[: piece.size], device.backend.stream)
    return out
