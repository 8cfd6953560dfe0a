"""Moving blocks between the device's pool and the host's, for all sequences that list them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cupaged.errors import BlockError
from cupaged.memory.blockref import Pool, frame_of
from cupaged.memory.plans import PlanItem
from cupaged.memory.pool import BlockPool, FrameState
from cupaged.memory.table import blocks_for, distinct_blocks

if TYPE_CHECKING:
    from cupaged.memory.manager import BlockManager


def move(
    manager: BlockManager, group: int, refs: Iterable[int], source: Pool, target: Pool, kind: type[PlanItem]
) -> list[PlanItem]:
    """The plan that moves some blocks; tables, counts and the prefix index change at once. See `manager.swap_out`."""
    old_pool, new_pool = manager.pool(group, source), manager.pool(group, target)
    blocks = distinct_blocks(refs)
    _check_movable(manager, group, blocks, old_pool)
    moved = dict(zip(blocks, new_pool.allocate_many(len(blocks)), strict=True))
    if manager.prefixes is not None and source is Pool.DEVICE:
        manager.prefixes.discard(group, blocks)
    for tables in manager.sequences():
        table = tables.tables[group]
        if not moved.keys().isdisjoint(table.refs):
            table.refs = [moved.get(ref, ref) for ref in table.refs]
    items: list[PlanItem] = []
    for old, new in moved.items():
        full = old_pool.state(old) is FrameState.READY or manager.arriving.get((group, old), False)
        items.append(kind(manager.next_ticket, group, old, new))
        manager.hold(items[-1])
        manager.arriving[group, new] = full
        for user in range(old_pool.count(old)):
            if user:
                new_pool.fork(new)
            old_pool.free(old)
    return items


def _check_movable(manager: BlockManager, group: int, blocks: list[int], pool: BlockPool) -> None:
    for ref in blocks:
        if not pool.count(ref):
            raise BlockError(f"block {frame_of(ref)} of group {group} cannot move: it is not in use")
    wanted = set(blocks)
    for tables in manager.sequences():
        refs = tables.tables[group].refs
        if wanted.isdisjoint(refs):
            continue
        size = manager.groups[group].block_size
        stored = blocks_for(tables.num_tokens, size)
        if not wanted.isdisjoint(refs[stored:]):
            raise BlockError(f"a block of group {group} cannot move: it holds no token yet")
        if tables.num_prepared > tables.num_tokens and not wanted.isdisjoint(refs[tables.num_tokens // size :]):
            raise BlockError(f"a block of group {group} cannot move: it is being written")
