"""What an engine counts, always: how full its memory is, and what sharing and shortage have cost."""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.memory import GroupStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state now, and counters since the engine was made.

    groups: per KV group its blocks now (free, cached, used, of which shared) and the slots wasted in used ones.
    peak_blocks: per KV group the most blocks that were in use in one step.
    running, waiting: requests. sequences: with blocks of their own. steps: forward passes and empty steps.
    forks: sequences that began by sharing another one's blocks. copies: blocks copied because a shared one was to be
    written. preemptions: requests (or samples of one) that had to give up their blocks.
    """

    groups: tuple[GroupStats, ...]
    peak_blocks: tuple[int, ...]
    running: int
    waiting: int
    sequences: int
    steps: int
    forks: int
    copies: int
    preemptions: int
