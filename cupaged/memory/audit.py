"""Everything checked against everything: what a block manager's state must always fulfil."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cupaged.errors import BlockError
from cupaged.memory.blockref import make_ref, pool_of
from cupaged.memory.pool import BlockPool, FrameState
from cupaged.memory.sequence import SequenceTables
from cupaged.memory.table import BlockTable, distinct_blocks

if TYPE_CHECKING:
    from cupaged.memory.manager import BlockManager


def audit(manager: BlockManager) -> None:
    """O(blocks of all sequences). BlockError names the first inconsistency."""
    if manager.prefixes is not None:
        manager.prefixes.audit()
    for group, pools in enumerate(zip(manager.pools, manager.host_pools, strict=True)):
        listed = Counter(ref for tables in manager.sequences() for ref in distinct_blocks(tables.tables[group].refs))
        ends = Counter(
            ref for item in manager.unfinished() if item.group == group for ref in (item.source, item.destination)
        )
        for pool in pools:
            if pool is not None:
                pool.audit()
                _audit_counts(pool, listed, ends)
        for tables in manager.sequences():
            _audit_table(manager, group, tables)


def _audit_counts(pool: BlockPool, listed: Mapping[int, int], ends: Mapping[int, int]) -> None:
    for frame in range(pool.num_blocks):
        ref = make_ref(frame, pool.pool)
        if pool.count(ref) != listed.get(ref, 0) or pool.pins(ref) != ends.get(ref, 0):
            raise BlockError(
                f"block {frame} of the {pool.pool.name.lower()} pool of group {pool.group}: count {pool.count(ref)}, "
                f"{listed.get(ref, 0)} tables list it; {pool.pins(ref)} pins, {ends.get(ref, 0)} ends of plan items"
            )


def _audit_table(manager: BlockManager, group: int, tables: SequenceTables) -> None:
    table: BlockTable = tables.tables[group]
    where = f"a sequence of {tables.num_tokens} tokens, prepared to {tables.num_prepared}, in group {group}"
    if not tables.num_tokens <= tables.num_prepared <= table.capacity:
        raise BlockError(f"{where} has a table of {table.capacity} positions")
    if table.max_blocks is not None and table.num_blocks > table.max_blocks:
        raise BlockError(f"{where} has a table of {table.num_blocks} blocks, {table.max_blocks} are allowed")
    full, partial = divmod(tables.num_tokens, table.block_size)
    for index, ref in enumerate(table.refs):
        if ref < 0:
            continue
        pool = manager.pool(group, pool_of(ref))
        arriving = manager.is_arriving(group, ref)  # a full block on its way is filling until it is there
        if (index < full) != (pool.state(ref) is FrameState.READY) and not (arriving and index < full):
            raise BlockError(f"{where}: block {index} of the table is {pool.state(ref).name}")
        # Only stored tokens are shared, and never where the sequence is being appended to.
        written = tables.num_prepared > tables.num_tokens
        own = index > full or (index == full and (not partial or written))
        if own and pool.count(ref) != 1:
            raise BlockError(f"{where}: block {index} of the table is to be written and has {pool.count(ref)} users")
