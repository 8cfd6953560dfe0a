"""What an engine counts, always: how full its memory is, and what sharing and shortage have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupaged.memory import GroupStats

if TYPE_CHECKING:
    from cupaged.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state now, and counters since the engine was made.

    groups: per KV group its blocks now (free, cached, used, of which shared) and the slots wasted in used ones.
    peak_blocks: per KV group the most blocks that were in use in one step; peak_waste: slots of used blocks without a
    token after that step.
    running, waiting: requests. sequences: with blocks of their own. steps: forward passes and empty steps.
    forks: sequences that began by sharing another one's blocks. copies: blocks copied because a shared one was to be
    written. preemptions: requests (or samples of one) that had to stop for lack of blocks; by_swap: that kept theirs,
    or had them moved to the host; by_recompute: whose K/V were dropped, while they ran or waited. swapped_out,
    swapped_in: blocks moved to the host pool and back. read_in_place: blocks that steps read on the host, each time.
    held_back: requests that fitted and yet had to wait, because blocks were expected to run out (see foresight.py);
    preemptions_avoided: those of them for which blocks did run out while they waited, had they been let in.
    taken_ahead: blocks that sequences took before they needed them (see ahead.py); in_vain: those of them that went
    back without a token; vain_share: of all blocks of the device, the part held in vain, averaged over all steps.
    reused_tokens: found in cached blocks instead of computed. evicted: units of cached blocks given up for room.
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
    peak_waste: tuple[int, ...] = ()
    preemptions_by_swap: int = 0
    preemptions_by_recompute: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    read_in_place: int = 0
    reused_tokens: int = 0
    evicted: int = 0
    held_back: int = 0
    preemptions_avoided: int = 0
    taken_ahead: int = 0
    in_vain: int = 0
    vain_share: float = 0.0


def stats_of(engine: Engine, peaks: Sequence[int], peak_waste: Sequence[int]) -> EngineStats:
    """An engine's counters and the state of its memory; O(sequences). peaks, peak_waste: per KV group."""
    memory, scheduler = engine.manager.stats(), engine.scheduler
    foresight, ahead = scheduler.foresight, scheduler.ahead
    return EngineStats(
        groups=memory.groups,
        peak_blocks=tuple(peaks),
        peak_waste=tuple(peak_waste),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        sequences=memory.sequences,
        steps=engine.num_steps,
        forks=scheduler.forks,
        copies=memory.copies,
        reused_tokens=memory.adopted_tokens,
        evicted=memory.evicted,
        preemptions=scheduler.preemptions,
        preemptions_by_swap=scheduler.room.by_swap,
        preemptions_by_recompute=scheduler.room.by_recompute,
        swapped_out=memory.swapped_out,
        swapped_in=memory.swapped_in,
        read_in_place=scheduler.room.read_in_place,
        held_back=0 if foresight is None else foresight.held_back,
        preemptions_avoided=0 if foresight is None else foresight.avoided,
        taken_ahead=0 if ahead is None else ahead.taken,
        in_vain=0 if ahead is None else ahead.in_vain,
        vain_share=0.0 if ahead is None else ahead.share_in_vain(scheduler.step),
    )
