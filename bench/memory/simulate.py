"""A trace through an allocator, step by step. One step: a token more for every running sequence, then admissions.

All requests wait from the start, so that memory alone limits how many run. What is averaged is the steady part: from
when as many requests have finished as are running, until the queue is empty.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cupaged.bench.memory.allocators import Allocator, Group, Holding, beam_parents
from cupaged.bench.memory.traces import Lengths
from cupaged.errors import OptionError


@dataclass(frozen=True, slots=True)
class Outcome:
    """One allocator's figures, averaged over the steady part. Shares are of all slots. `sequences` counts samples and
    beams one by one. `sharing_saved`: slots of stored tokens saved by sharing, of those that separate copies would
    hold. `history`: sequences running at each of at most 2,000 evenly spaced steps, from the first to the last."""

    name: str
    slots: int
    sequences: float
    most_sequences: int
    used: float
    reserved: float
    internal: float
    external: float
    sharing_saved: float
    steps: int
    steady_steps: int
    preemptions: int
    copied_slots: int
    history: tuple[tuple[int, int], ...]

    @property
    def waste(self) -> float:
        return self.reserved + self.internal + self.external


def simulate(
    allocator: Allocator, trace: Sequence[Lengths], width: int = 1, churn: float | None = None, seed: int = 0,
    progress: Callable[[int, int], None] = lambda finished, total: None,
) -> Outcome:  # fmt: skip
    """Run `trace` to its end. width: samples or beams of a request; churn: None for samples, see `beam_parents`.

    OptionError if a request can never fit, or the trace is too short to have a steady part.
    """
    for lengths in trace:
        if allocator.largest(lengths, width) > allocator.slots:
            raise OptionError(
                f"{allocator.name}: a request of {width} x {lengths.total} tokens takes "
                f"{allocator.largest(lengths, width):,} slots, the budget holds {allocator.slots:,}"
            )
    rng = random.Random(seed)
    waiting = deque(Group(lengths, width) for lengths in trace)
    running: list[Group] = []
    finished = preemptions = most = steps = 0
    sums = _Sums()
    history: list[tuple[int, int]] = []
    while waiting or running:
        running, preempted = _grow_all(allocator, running, width, churn, rng)
        waiting.extendleft(preempted)  # the one admitted last comes first here: so the oldest ends up in front
        preemptions += len(preempted)
        for group in [group for group in running if group.done == group.lengths.output]:
            allocator.release(group)
            running.remove(group)
            finished += 1
        while waiting and not preempted and allocator.admit(waiting[0]):
            running.append(waiting.popleft())
        steps += 1
        most = max(most, width * len(running))
        history.append((steps, width * len(running)))
        if waiting and finished >= len(running):
            sums.add(allocator.holding(running), width * len(running))
        progress(finished, len(trace))
    if sums.steps < 20:
        raise OptionError(
            f"{allocator.name}: {len(trace)} requests are too few, give more: {most // width} run at once, and when "
            f"those that start together are through, the queue is empty within {sums.steps} steps"
        )
    total = allocator.slots * sums.steps
    return Outcome(
        allocator.name, allocator.slots, sums.sequences / sums.steps, most, sums.stored / total, sums.reserved / total,
        sums.internal / total, sums.external / total, 1 - sums.stored / max(1, sums.logical), steps, sums.steps,
        preemptions, allocator.copied_slots, tuple(history[:: -(-len(history) // 2000)]),
    )  # fmt: skip


def _grow_all(
    allocator: Allocator, running: list[Group], width: int, churn: float | None, rng: random.Random
) -> tuple[list[Group], list[Group]]:
    """(those still running, those preempted, the one admitted last first). `running` is in order of admission."""
    running = list(running)
    preempted: list[Group] = []
    index = 0
    while index < len(running):
        group = running[index]
        if churn is not None and group.done:
            allocator.branch(group, beam_parents(rng, width, churn))
        while not allocator.grow(group):
            victim = running.pop()
            allocator.release(victim)
            preempted.append(victim)
            if victim is group:
                break
        else:
            group.done += 1
            index += 1
    return running, preempted


@dataclass(slots=True)
class _Sums:
    stored: int = 0
    reserved: int = 0
    internal: int = 0
    external: int = 0
    logical: int = 0
    sequences: int = 0
    steps: int = 0

    def add(self, holding: Holding, sequences: int) -> None:
        self.stored += holding.stored
        self.reserved += holding.reserved
        self.internal += holding.internal
        self.external += holding.external
        self.logical += holding.logical
        self.sequences += sequences
        self.steps += 1
