"""One way to time: rounds in which every contender runs once, in turn; medians. Ratios within a round cancel drift."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def interleaved(contenders: Sequence[Callable[[], object]], seconds: float, warm: int = 2) -> list[float]:
    """Median seconds of a call of each contender, run A B C A B C ... for about `seconds` in all, 5 rounds at least."""
    for _ in range(warm):
        for run in contenders:
            run()
    times: list[list[float]] = [[] for _ in contenders]
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times[0]) < 5:
        for run, taken in zip(contenders, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]
