"""What `--stats` prints: counts, rates and memory of one run, on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cupaged.cli.errors import note

if TYPE_CHECKING:
    from cupaged.outputs import RequestOutput
    from cupaged.stats import EngineStats


class Statistics:
    """Made before the model is loaded; `start` when it is; results are added as they come."""

    def __init__(self) -> None:
        self._made = time.monotonic()
        self._started = self._made
        self._first_tokens: list[float] = []
        self._prompt = self._cached = self._completion = 0

    def start(self) -> None:
        self._started = time.monotonic()

    def add(self, result: RequestOutput) -> None:
        first = result.metrics.first_token_time
        if first is not None:
            self._first_tokens.append(first - result.metrics.arrival_time)
        self._prompt += result.usage.prompt_tokens
        self._cached += result.usage.cached_tokens
        self._completion += result.usage.completion_tokens

    def print(self, engine: EngineStats, kept: Mapping[str, int]) -> None:
        """Three lines on stderr, a fourth with a host pool. kept: bytes of weights by what they are kept as.

        tokens/s counts generated tokens over all the time since the model was loaded."""
        seconds = time.monotonic() - self._started
        rate = self._completion / seconds if seconds > 0 else 0.0
        line = f"{self._prompt} prompt tokens ({self._cached} cached), {self._completion} generated in {seconds:.2f} s"
        line += f" ({rate:.1f} tokens/s)"
        if self._first_tokens:
            low, high = min(self._first_tokens), max(self._first_tokens)
            line += f", first token after {low:.2f} s" + (f" to {high:.2f} s" if len(self._first_tokens) > 1 else "")
        note(line)
        peak = peak_memory()
        memory = "" if peak is None else f", peak memory of the process {peak / 2**20:.0f} MiB"
        weights = ", ".join(f"{size / 2**20:.1f} MiB of {kind}" for kind, size in kept.items())
        note(f"model loaded in {self._started - self._made:.2f} s: weights in {weights}{memory}")
        pools = (f"{peak} of {group.pool.total}" for peak, group in zip(engine.peak_blocks, engine.groups, strict=True))
        note(
            f"KV blocks: at most {' and '.join(pools)} in use, {engine.forks} forks, {engine.copies} copied on write, "
            f"{engine.preemptions} preemptions"
            + (f", {sum(engine.peak_waste)} slots without a token" if engine.peak_waste else "")
        )
        hosts = [group.host for group in engine.groups if group.host is not None]
        if hosts:
            note(
                f"host pool of {sum(host.total for host in hosts)} blocks: {engine.swapped_out} swapped out, "
                f"{engine.swapped_in} in, {engine.read_in_place} read in place; preemptions: "
                f"{engine.preemptions_by_swap} by swap, {engine.preemptions_by_recompute} by recompute"
            )


def peak_memory() -> int | None:
    """Largest resident set of this process so far, in bytes; None where the system does not tell (Windows)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):  # getrusage would count what the process that started us had before
                return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
