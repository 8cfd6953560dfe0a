"""The block manager: sequences' memory as blocks, taken on demand, shared on fork, copied on write.

The scheme is Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention",
sections 4.2 to 4.4. One pool and one table per KV group, everything in lockstep over the groups. No arrays: see plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cupaged.errors import BlockError, CapacityError, OptionError, OutOfBlocks
from cupaged.memory.blockref import Pool, frame_of, make_ref, pool_of
from cupaged.memory.plans import CopyBlock, PlanItem
from cupaged.memory.pool import BlockPool, FrameState, PoolStats
from cupaged.memory.table import BlockTable, blocks_for, distinct_blocks


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Size of one KV group: device blocks, tokens per block, and the most blocks that one table may list."""

    num_blocks: int
    block_size: int
    max_blocks: int | None = None


@dataclass(eq=False, slots=True)
class SequenceTables:
    """The memory of one sequence: a block table per KV group. Made, changed and freed by its BlockManager alone.

    `num_tokens` tokens are stored; slots of positions below `num_prepared` (>= num_tokens) may be used.
    """

    tables: tuple[BlockTable, ...]
    num_tokens: int = 0
    num_prepared: int = 0


@dataclass(frozen=True, slots=True)
class GroupStats:
    """`pool`: counts of blocks. `waste_slots`: slots of the sequences' blocks that hold no token, shared ones once."""

    pool: PoolStats
    block_size: int
    waste_slots: int


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Per KV group the state now; `copies`: blocks copied on write since the manager was made."""

    groups: tuple[GroupStats, ...]
    copies: int
    sequences: int
    unfinished_items: int


class BlockManager:
    """Memory of all sequences of an engine. Not thread-safe: one engine thread owns it.

    A step appends tokens to a sequence in this order: `prepare_append` (take blocks, get the plan), hand the plan to
    the device, write K/V to `slots`, `commit_append`; `complete` once for each plan item, when it is done or later.
    """

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        if not groups:
            raise OptionError("a block manager needs at least one KV group")
        self.groups = tuple(groups)
        self.pools = tuple(BlockPool(spec.num_blocks, Pool.DEVICE, index) for index, spec in enumerate(self.groups))
        for index in range(len(self.groups)):
            self._new_table(index)  # refuses a bad block_size or max_blocks now, not at the first request
        self._sequences: dict[SequenceTables, None] = {}
        self._unfinished: dict[int, PlanItem] = {}
        self._next_ticket = 0
        self._copies = 0

    # Sequences

    def create(self) -> SequenceTables:
        """A sequence without tokens and blocks."""
        tables = SequenceTables(tuple(self._new_table(group) for group in range(len(self.groups))))
        self._sequences[tables] = None
        return tables

    def fork(self, tables: SequenceTables) -> SequenceTables:
        """A sequence with the same tokens in the same blocks; takes no new block. O(blocks).

        BlockError between `prepare_append` and `commit_append` of the original: its blocks are being written in place.
        """
        self._check_live(tables)
        if tables.num_prepared > tables.num_tokens:
            raise BlockError(
                f"fork of a sequence that is being appended to: {tables.num_tokens} tokens stored, "
                f"{tables.num_prepared} prepared; commit_append comes first"
            )
        child = self.create()
        child.num_tokens = child.num_prepared = tables.num_tokens
        for pool, old, new in zip(self.pools, tables.tables, child.tables, strict=True):
            # Blocks behind the last token (prepared once, not used) stay the original's own.
            new.refs = old.refs[: blocks_for(tables.num_tokens, old.block_size)]
            pool.fork(new.refs)
        return child

    def free(self, tables: SequenceTables) -> None:
        """Give up a sequence: each distinct block of it once. BlockError if it was freed before.

        Allowed at any time: blocks that unfinished plan items read or write drain first.
        """
        self._check_live(tables)
        del self._sequences[tables]
        for pool, table in zip(self.pools, tables.tables, strict=True):
            pool.free(table.refs)
            table.refs = []
        tables.num_tokens = tables.num_prepared = 0

    # Appending

    def blocks_needed(self, tables: SequenceTables, num_new: int) -> tuple[int, ...]:
        """Free blocks that `prepare_append` would take, per KV group: new ones, and one where it must copy on write.

        CapacityError if so long a sequence never fits.
        """
        self._check_live(tables)
        if num_new < 0:
            raise OptionError(f"{num_new} new tokens: 0 or more are allowed")
        end = tables.num_tokens + num_new
        self.check_fits(end)
        return tuple(
            max(0, blocks_for(end, table.block_size) - table.num_blocks)
            + (num_new > 0 and self._must_copy(group, tables))
            for group, table in enumerate(tables.tables)
        )

    def can_append(self, tables: SequenceTables, num_new: int) -> bool:
        """Whether `prepare_append` would succeed now. False means not now; CapacityError means never."""
        needed = self.blocks_needed(tables, num_new)
        return all(need <= pool.num_free for need, pool in zip(needed, self.pools, strict=True))

    def prepare_append(self, tables: SequenceTables, num_new: int) -> list[PlanItem]:
        """Make the slots of positions num_tokens .. num_tokens + num_new - 1 exist and writable; the plan for it.

        A last block that is partly filled and shared is replaced by a fresh one, and the plan copies it (in every KV
        group where it is so); with count 1 it is written in place. May be called again before the commit. OutOfBlocks
        (for the first group that lacks some) or CapacityError: nothing has changed.
        """
        needed = self.blocks_needed(tables, num_new)
        for need, pool in zip(needed, self.pools, strict=True):
            if need > pool.num_free:
                raise OutOfBlocks(need, pool.num_free)
        plan = []
        for group, (need, pool, table) in enumerate(zip(needed, self.pools, tables.tables, strict=True)):
            fresh = pool.allocate_many(need)
            if num_new and self._must_copy(group, tables):
                plan.append(self._copy_on_write(group, table, tables.num_tokens // table.block_size, fresh.pop(0)))
            for ref in fresh:
                table.append_block(ref)
        tables.num_prepared = max(tables.num_prepared, tables.num_tokens + num_new)
        return plan

    def commit_append(self, tables: SequenceTables, num_new: int) -> None:
        """The first `num_new` prepared positions are written; the preparation of others ends (0 drops all of it).

        Blocks left over stay with the sequence for the next append. BlockError if fewer were prepared.
        """
        self._check_live(tables)
        start, end = tables.num_tokens, tables.num_tokens + num_new
        if not start <= end <= tables.num_prepared:
            raise BlockError(f"commit of {num_new} tokens, {tables.num_prepared - start} are prepared")
        tables.num_tokens = tables.num_prepared = end
        for pool, table in zip(self.pools, tables.tables, strict=True):
            for index in range(start // table.block_size, end // table.block_size):
                pool.mark_ready(table.refs[index])

    def slot(self, tables: SequenceTables, group: int, position: int) -> int:
        """frame * block_size + offset of a stored or prepared position. BlockError elsewhere."""
        return self.slots(tables, group, position, position + 1)[0]

    def slots(self, tables: SequenceTables, group: int, start: int, stop: int) -> list[int]:
        """The slots of positions start .. stop - 1 in one KV group, in order, as `write_kv` takes them.

        BlockError for positions that are neither stored nor prepared, and for blocks that are not on the device.
        """
        self._check_live(tables)
        if not 0 <= start <= stop <= tables.num_prepared:
            raise BlockError(f"slots of positions {start} to {stop}: positions 0 to {tables.num_prepared} have slots")
        table = tables.tables[group]
        slots: list[int] = []
        while start < stop:
            ref, offset = table.locate(start)
            if pool_of(ref) is not Pool.DEVICE:
                raise BlockError(f"position {start} is in {pool_of(ref).name.lower()} block {frame_of(ref)}: no slot")
            first = frame_of(ref) * table.block_size + offset
            length = min(table.block_size - offset, stop - start)
            slots.extend(range(first, first + length))
            start += length
        return slots

    def complete(self, ticket: int) -> None:
        """A plan item, of any kind, is done: its ends no longer need to be held. Tickets may come in any order.

        BlockError for a ticket that was never given or is completed already.
        """
        item = self._unfinished.pop(ticket, None)
        if item is None:
            raise BlockError(f"ticket {ticket} belongs to no unfinished plan item")
        for ref in (item.source, item.destination):
            self._pool(item.group, ref).unpin(ref)

    # What fits, and how full it is

    def fits_ever(self, num_tokens: int) -> bool:
        """Whether one sequence of so many tokens fits when it is alone."""
        return num_tokens <= self.longest_sequence

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that fits when it is alone."""
        return min(self._limit(group) * spec.block_size for group, spec in enumerate(self.groups))

    def check_fits(self, num_tokens: int) -> None:
        """CapacityError, naming blocks needed and blocks there are, if a sequence of so many tokens can never fit."""
        if num_tokens <= self.longest_sequence:
            return
        for group, spec in enumerate(self.groups):
            needed = blocks_for(num_tokens, spec.block_size)
            if needed > self._limit(group):
                raise CapacityError(
                    f"{num_tokens} tokens need {needed} KV blocks of {spec.block_size} tokens, one sequence can have "
                    f"{self._limit(group)} (KV group {group})"
                )

    def stats(self) -> MemoryStats:
        """Counters and the state of every group; O(sequences), not O(blocks)."""
        groups = []
        for group, (spec, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            fill: dict[int, int] = {}  # of blocks that are not full: only behind the last multiple of block_size
            for tables in self._sequences:
                full = tables.num_tokens // spec.block_size
                for index, ref in enumerate(tables.tables[group].refs[full:], full):
                    fill[ref] = max(0, tables.num_tokens - index * spec.block_size)
            groups.append(GroupStats(pool.stats(), spec.block_size, sum(spec.block_size - n for n in fill.values())))
        return MemoryStats(tuple(groups), self._copies, len(self._sequences), len(self._unfinished))

    def audit(self) -> None:
        """Check everything against everything, O(blocks of all sequences). BlockError names the first inconsistency."""
        for group, pool in enumerate(self.pools):
            pool.audit()
            counts: Counter[int] = Counter()
            pins: Counter[int] = Counter()
            for tables in self._sequences:
                counts.update(distinct_blocks(tables.tables[group].refs))
            for item in self._unfinished.values():
                if item.group == group:
                    pins.update(ref for ref in (item.source, item.destination) if pool_of(ref) is pool.pool)
            for frame in range(pool.num_blocks):
                ref = make_ref(frame, pool.pool)
                if pool.count(ref) != counts[ref] or pool.pins(ref) != pins[ref]:
                    raise BlockError(
                        f"block {frame} of group {group}: count {pool.count(ref)}, {counts[ref]} tables list it; "
                        f"{pool.pins(ref)} pins, {pins[ref]} ends of plan items"
                    )
        for tables in self._sequences:
            for pool, table in zip(self.pools, tables.tables, strict=True):
                self._audit_table(pool, table, tables)

    def _audit_table(self, pool: BlockPool, table: BlockTable, tables: SequenceTables) -> None:
        where = f"a sequence of {tables.num_tokens} tokens, prepared to {tables.num_prepared}, in group {table.group}"
        if not tables.num_tokens <= tables.num_prepared <= table.capacity:
            raise BlockError(f"{where} has a table of {table.capacity} positions")
        if table.max_blocks is not None and table.num_blocks > table.max_blocks:
            raise BlockError(f"{where} has a table of {table.num_blocks} blocks, {table.max_blocks} are allowed")
        full, partial = divmod(tables.num_tokens, table.block_size)
        for index, ref in enumerate(table.refs):
            if ref < 0:
                continue
            if (index < full) != (pool.state(ref) is FrameState.READY):
                raise BlockError(f"{where}: block {index} of the table is {pool.state(ref).name}")
            # Only stored tokens are shared, and never where the sequence is being appended to.
            own = index > full or (index == full and (not partial or tables.num_prepared > tables.num_tokens))
            if own and pool.count(ref) != 1:
                raise BlockError(
                    f"{where}: block {index} of the table is to be written and has {pool.count(ref)} users"
                )

    # Internals

    def _new_table(self, group: int) -> BlockTable:
        spec = self.groups[group]
        return BlockTable(spec.block_size, group, spec.max_blocks)

    def _limit(self, group: int) -> int:
        """Blocks that one sequence can have in a group."""
        max_blocks = self.groups[group].max_blocks
        usable = self.pools[group].num_blocks
        return usable if max_blocks is None else min(usable, max_blocks)

    def _must_copy(self, group: int, tables: SequenceTables) -> bool:
        """Whether the next token goes into a block that other sequences use too.

        That can only be a partly filled last block: a full one is not written again, and one without tokens is never
        shared. All users of a partly filled shared block hold equally many tokens in it, because it is not written
        while shared.
        """
        table = tables.tables[group]
        index, offset = divmod(tables.num_tokens, table.block_size)
        return offset != 0 and self.pools[group].count(table.refs[index]) > 1

    def _copy_on_write(self, group: int, table: BlockTable, index: int, fresh: int) -> PlanItem:
        shared = table.refs[index]
        item = CopyBlock(self._next_ticket, group, shared, fresh)
        self._hold(item)
        self.pools[group].free(shared)
        table.refs[index] = fresh
        self._copies += 1
        return item

    def _hold(self, item: PlanItem) -> None:
        """Keep both ends of a new plan item until its ticket is completed."""
        self._next_ticket = item.ticket + 1
        self._unfinished[item.ticket] = item
        for ref in (item.source, item.destination):
            self._pool(item.group, ref).pin(ref)

    def _pool(self, group: int, ref: int) -> BlockPool:
        pool = self.pools[group]
        if pool_of(ref) is not pool.pool:
            raise BlockError(f"block reference {ref:#x}: group {group} has no {pool_of(ref).name.lower()} pool")
        return pool

    def _check_live(self, tables: SequenceTables) -> None:
        if tables not in self._sequences:
            raise BlockError("the sequence is not of this block manager, or was freed before")
