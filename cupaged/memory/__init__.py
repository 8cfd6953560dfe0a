"""Paged memory as pure bookkeeping: block references, pools, tables, plans, and the manager of all sequences' blocks.

Standard library alone: nothing here touches an array or a device. `BlockPool` and `BlockTable` serve alone too.
"""

from cupaged.memory.blockref import MAX_FRAMES, NO_BLOCK, Format, Pool, format_of, frame_of, make_ref, pool_of
from cupaged.memory.manager import BlockManager
from cupaged.memory.plans import CopyBlock, PackBlock, PlanItem, SwapIn, SwapOut
from cupaged.memory.pool import BlockPool, FrameState, PoolStats
from cupaged.memory.prefix import Match, PrefixIndex
from cupaged.memory.sequence import GroupSpec, SequenceTables
from cupaged.memory.stats import GroupStats, MemoryStats, group_stats
from cupaged.memory.table import BlockTable, blocks_for, distinct_blocks, last_block_fill

__all__ = [
    "MAX_FRAMES",
    "NO_BLOCK",
    "BlockManager",
    "BlockPool",
    "BlockTable",
    "CopyBlock",
    "Format",
    "FrameState",
    "GroupSpec",
    "GroupStats",
    "Match",
    "MemoryStats",
    "PackBlock",
    "PlanItem",
    "Pool",
    "PoolStats",
    "PrefixIndex",
    "SequenceTables",
    "SwapIn",
    "SwapOut",
    "blocks_for",
    "distinct_blocks",
    "format_of",
    "frame_of",
    "group_stats",
    "last_block_fill",
    "make_ref",
    "pool_of",
]
