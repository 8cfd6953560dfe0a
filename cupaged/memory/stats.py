"""How full the memory is: counters and the state of every pool, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupaged.memory.pool import PoolStats

if TYPE_CHECKING:
    from cupaged.memory.manager import BlockManager


@dataclass(frozen=True, slots=True)
class GroupStats:
    """`pool`, `host`: counts of blocks (host None: there is no such pool). `waste_slots`: slots of the sequences'
    blocks, wherever they lie, that hold no token; those of shared blocks once."""

    pool: PoolStats
    block_size: int
    waste_slots: int
    host: PoolStats | None = None


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Per KV group the state now. Since the manager was made: `copies` blocks copied on write, `swapped_out` and
    `swapped_in` blocks moved to the host pool and back; `adopted_tokens` found in cached blocks by sequences that
    began, `evicted` units of those (see prefix.py) given up for room."""

    groups: tuple[GroupStats, ...]
    copies: int
    sequences: int
    unfinished_items: int
    swapped_out: int = 0
    swapped_in: int = 0
    adopted_tokens: int = 0
    evicted: int = 0


def group_stats(manager: BlockManager, group: int) -> GroupStats:
    """One KV group's state. O(sequences), not O(blocks)."""
    size = manager.groups[group].block_size
    fill: dict[int, int] = {}  # of blocks that are not full: only behind the last multiple of block_size
    for tables in manager.sequences():
        full = tables.num_tokens // size
        for index, ref in enumerate(tables.tables[group].refs[full:], full):
            fill[ref] = max(0, tables.num_tokens - index * size)
    host = manager.host_pools[group]
    waste = sum(size - tokens for tokens in fill.values())
    return GroupStats(manager.pools[group].stats(), size, waste, None if host is None else host.stats())
