"""The block manager: sequences' memory as blocks, taken on demand, shared on fork, copied on write, moved to the host.

The scheme is Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention",
sections 4.2 to 4.5. A device pool, a host pool if wanted, and one table per KV group. No arrays: see plans.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

from cupaged.errors import BlockError, CapacityError, OptionError, OutOfBlocks
from cupaged.memory.appending import must_copy, next_slot_is_own
from cupaged.memory.audit import audit
from cupaged.memory.blockref import NO_BLOCK, Pool, frame_of, pool_of
from cupaged.memory.moving import move
from cupaged.memory.plans import CopyBlock, PlanItem, SwapIn, SwapOut
from cupaged.memory.pool import BlockPool
from cupaged.memory.prefix import Match, PrefixIndex
from cupaged.memory.sequence import GroupSpec, SequenceTables
from cupaged.memory.stats import MemoryStats, group_stats
from cupaged.memory.table import BlockTable, blocks_for, distinct_blocks
from cupaged.memory.windows import blocks_of_match, give_up_passed, hold_window


class BlockManager:
    """Memory of all sequences of an engine. Not thread-safe: one engine thread owns it.

    A step appends tokens to a sequence in this order: `prepare_append` (take blocks, get the plan), hand the plan to
    the device, write K/V to `slots`, `commit_append`; `complete` once for each plan item, when it is done or later.

    A table may list blocks of both pools; only where tokens are written the block must be on the device. `in_place`:
    kernels read host blocks where they lie, so a sequence may be longer than the device pool. `prefix_reuse`: complete
    blocks stay findable by their tokens when nobody uses them, until room is needed (see `prefix.PrefixIndex`).
    """

    def __init__(self, groups: Sequence[GroupSpec], in_place: bool = False, prefix_reuse: bool = False) -> None:
        if not groups:
            raise OptionError("a block manager needs at least one KV group")
        self.groups = tuple(groups)
        self.in_place = in_place
        self.pools = tuple(BlockPool(spec.num_blocks, Pool.DEVICE, index) for index, spec in enumerate(self.groups))
        self.host_pools = tuple(
            BlockPool(spec.host_blocks, Pool.PINNED_HOST, index) if spec.host_blocks else None
            for index, spec in enumerate(self.groups)
        )
        for index in range(len(self.groups)):
            self._new_table(index)  # refuses a bad block_size or max_blocks now, not at the first request
        self._sequences: dict[SequenceTables, None] = {}
        self._unfinished: dict[int, PlanItem] = {}
        self.arriving: dict[tuple[int, int], bool] = {}  # (group, destination of a move under way): is it a full block
        self.next_ticket = 0
        self.prefixes = PrefixIndex(self.pools, self.groups) if prefix_reuse else None
        self._copies = 0
        self._adopted = 0
        self._swapped_out = 0
        self._swapped_in = 0

    # Sequences

    def create(self) -> SequenceTables:
        """A sequence without tokens and blocks."""
        tables = SequenceTables(tuple(self._new_table(group) for group in range(len(self.groups))))
        self._sequences[tables] = None
        return tables

    def fork(self, tables: SequenceTables, num_tokens: int | None = None) -> SequenceTables:
        """A sequence with the same tokens in the same blocks, wherever they lie; takes no new block. O(blocks).

        `num_tokens`: only so many of the first ones; they must end with a block in every KV group, so that the child
        begins a block of its own. BlockError between `prepare_append` and `commit_append` of the original if all its
        tokens are asked for: its blocks are being written in place; or if a window has passed what `num_tokens` needs.
        """
        self._check_live(tables)
        count = tables.num_tokens if num_tokens is None else num_tokens
        if not 0 <= count <= tables.num_tokens:
            raise BlockError(f"fork of {count} tokens of a sequence that has {tables.num_tokens}")
        if count < tables.num_tokens and any(count % spec.block_size for spec in self.groups):
            raise BlockError(f"fork of {count} of {tables.num_tokens} tokens: they end within a block")
        if count == tables.num_tokens < tables.num_prepared:
            raise BlockError(
                f"fork of a sequence that is being appended to: {tables.num_tokens} tokens stored, "
                f"{tables.num_prepared} prepared; commit_append comes first"
            )
        if count < tables.num_tokens and not hold_window(self.groups, tables, count):
            raise BlockError(f"fork of {count} of {tables.num_tokens} tokens: their window's blocks were given up")
        child = self.create()
        child.num_tokens = child.num_prepared = count
        for group, (old, new) in enumerate(zip(tables.tables, child.tables, strict=True)):
            # Blocks behind the last token (prepared once, not used) stay the original's own.
            new.refs = old.refs[: blocks_for(count, old.block_size)]
            for pool, refs in self._by_pool(group, new.refs):
                pool.fork(refs)
        return child

    def trim(self, tables: SequenceTables) -> None:
        """Give back blocks that hold no token: left over from what was prepared and not used."""
        self._check_live(tables)
        tables.num_prepared = tables.num_tokens
        for group, table in enumerate(tables.tables):
            kept = blocks_for(tables.num_tokens, table.block_size)
            table.refs, empty = table.refs[:kept], table.refs[kept:]
            for pool, refs in self._by_pool(group, empty):
                pool.free(refs)

    def free(self, tables: SequenceTables) -> None:
        """Give up a sequence: each distinct block of it once. BlockError if it was freed before.

        Allowed at any time: blocks that unfinished plan items read or write drain first.
        """
        self._check_live(tables)
        del self._sequences[tables]
        if self.prefixes is not None:
            self.prefixes.forget_sequence(tables)
        for group, table in enumerate(tables.tables):
            for pool, refs in self._by_pool(group, table.refs):
                pool.free(refs)
            table.refs = []
        tables.num_tokens = tables.num_prepared = 0

    def adopt(self, match: Match) -> tuple[SequenceTables, list[PlanItem]]:
        """A sequence that begins with the tokens of a match, in the same blocks, and the plan for it.

        A unit that is matched in part is shared as far as its blocks are whole; the block within which the match ends
        is copied. Blocks that a window has passed are not taken. OutOfBlocks if there is none for the copy: nothing has
        changed.
        """
        tables = self.create()
        plan: list[PlanItem] = []
        borrowed: list[tuple[BlockPool, int]] = []
        try:
            for group, (spec, pool, table) in enumerate(zip(self.groups, self.pools, tables.tables, strict=True)):
                refs = self.shared_blocks(group, match)
                pool.fork(refs)
                table.refs = refs
                whole, rest = divmod(match.partial_tokens, spec.block_size)
                if rest:
                    assert match.partial is not None
                    last = match.partial.blocks[group][whole]
                    pool.fork(last)  # not to be evicted for its own copy
                    borrowed.append((pool, last))
                    table.append_block(pool.allocate())
                    plan.append(CopyBlock(self.next_ticket, group, last, table.refs[-1]))
                    self.hold(plan[-1])
            tables.num_tokens = tables.num_prepared = match.num_tokens
        except OutOfBlocks:
            for item in plan:
                self.complete(item.ticket)
            self.free(tables)
            raise
        finally:
            for pool, ref in borrowed:
                pool.free(ref)
        self._adopted += match.num_tokens
        return tables, plan

    def shared_blocks(self, group: int, match: Match) -> list[int]:
        """The whole blocks that a sequence which begins with a match shares; NO_BLOCK where the window has passed."""
        return blocks_of_match(self.groups[group], group, match)

    def in_use(self, group: int, match: Match) -> int:
        """Blocks of a match's nodes that take no room: somebody uses them, or a window has passed them."""
        blocks = self.shared_blocks(group, match)[: len(match.nodes) * (match.unit // self.groups[group].block_size)]
        return sum(ref == NO_BLOCK or self.pools[group].count(ref) > 0 for ref in blocks)

    def slide(self, tables: SequenceTables) -> None:
        """Give up the blocks that no later token of the sequence sees, in KV groups with a window.

        To be called after `remember`, so that they stay findable until room is needed.
        """
        self._check_live(tables)
        for group, (spec, table) in enumerate(zip(self.groups, tables.tables, strict=True)):
            if spec.window is None:
                continue
            for pool, refs in self._by_pool(group, give_up_passed(spec, table, tables.num_tokens)):
                pool.free(refs)

    # Appending

    def blocks_needed(self, tables: SequenceTables, num_new: int) -> tuple[int, ...]:
        """Free blocks that `prepare_append` would take, per KV group: new ones, and one where it must copy on write.

        CapacityError if so long a sequence never fits; BlockError if the block that would be written is on the host.
        """
        self._check_live(tables)
        if num_new < 0:
            raise OptionError(f"{num_new} new tokens: 0 or more are allowed")
        end = tables.num_tokens + num_new
        self.check_fits(end)
        return tuple(
            max(0, blocks_for(end, table.block_size) - table.num_blocks)
            + (num_new > 0 and must_copy(self.pools[group], tables.tables[group], tables.num_tokens))
            for group, table in enumerate(tables.tables)
        )

    def can_append(self, tables: SequenceTables, num_new: int) -> bool:
        """Whether `prepare_append` would succeed now. False means not now; CapacityError means never."""
        needed = self.blocks_needed(tables, num_new)
        return all(need <= pool.num_available for need, pool in zip(needed, self.pools, strict=True))

    def prepare_append(self, tables: SequenceTables, num_new: int) -> list[PlanItem]:
        """Make the slots of positions num_tokens .. num_tokens + num_new - 1 exist and writable; the plan for it.

        A last block that is partly filled and shared is replaced by a fresh one, and the plan copies it (in every KV
        group where it is so); with count 1 it is written in place. May be called again before the commit. OutOfBlocks
        (for the first group that lacks some) or CapacityError: nothing has changed.
        """
        needed = self.blocks_needed(tables, num_new)
        for need, pool in zip(needed, self.pools, strict=True):
            if need > pool.num_available:
                raise OutOfBlocks(need, pool.num_available)
        plan = []
        for group, (need, pool, table) in enumerate(zip(needed, self.pools, tables.tables, strict=True)):
            fresh = pool.allocate_many(need)
            if num_new and must_copy(self.pools[group], tables.tables[group], tables.num_tokens):
                plan.append(self._copy_on_write(group, table, tables.num_tokens // table.block_size, fresh.pop(0)))
            for ref in fresh:
                table.append_block(ref)
        tables.num_prepared = max(tables.num_prepared, tables.num_tokens + num_new)
        return plan

    def append_in_place(self, tables: SequenceTables) -> bool:
        """`prepare_append` of one token where that takes no block and no copy; False elsewhere, and nothing is done."""
        self._check_live(tables)
        if not next_slot_is_own(self.pools, tables):
            return False
        tables.num_prepared = max(tables.num_prepared, tables.num_tokens + 1)
        return True

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

    def remember(self, tables: SequenceTables, tokens: Sequence[int], salt: Hashable = None) -> None:
        """Make the complete blocks of a sequence findable by its tokens. To be called after commit_append."""
        if self.prefixes is not None:
            self.prefixes.insert(tokens, tables, salt)

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
        full = self.arriving.pop((item.group, item.destination), False)
        for ref in (item.source, item.destination):
            self.pool(item.group, pool_of(ref)).unpin(ref)
        pool = self.pool(item.group, pool_of(item.destination))
        if full and pool.count(item.destination):  # 0: freed, or moved on, while it was on its way
            pool.mark_ready(item.destination)

    # Moving between device and host

    def swap_out(self, group: int, refs: Iterable[int]) -> list[PlanItem]:
        """Move device blocks to the host pool, for all sequences that list them: tables change now, counts survive.

        The device frames drain until their tickets are completed. OutOfBlocks if the host pool lacks room, BlockError
        if a block is not in use on the device, holds no token (see `trim`), or is being written: nothing has changed.
        """
        items = move(self, group, refs, Pool.DEVICE, Pool.PINNED_HOST, SwapOut)
        self._swapped_out += len(items)
        return items

    def swap_in(self, group: int, refs: Iterable[int]) -> list[PlanItem]:
        """Move host blocks back to the device: `swap_out` the other way round. The sequences may be scheduled when the
        tickets are completed."""
        items = move(self, group, refs, Pool.PINNED_HOST, Pool.DEVICE, SwapIn)
        self._swapped_in += len(items)
        return items

    def is_arriving(self, group: int, ref: int) -> bool:
        """Whether the block is the destination of a move that is not completed."""
        return (group, ref) in self.arriving

    def settled(self, tables: SequenceTables) -> bool:
        """Whether no block of the sequence is on its way."""
        return not self.arriving or not any(
            (group, ref) in self.arriving for group, table in enumerate(tables.tables) for ref in table.refs
        )

    def blocks_in(self, where: Pool, group: int, sequences: Iterable[SequenceTables]) -> list[int]:
        """The distinct blocks of some sequences that lie in one pool, by their place in the tables."""
        places: dict[int, int] = {}
        for tables in sequences:
            for index, ref in enumerate(tables.tables[group].refs):
                if ref >= 0 and pool_of(ref) is where:
                    places[ref] = min(index, places.get(ref, index))
        return sorted(places, key=places.__getitem__)

    def own_blocks(self, group: int, sequences: Iterable[SequenceTables]) -> list[int]:
        """Those of `blocks_in` the device that no other sequence uses and that hold tokens: what can be swapped out
        without touching anybody else."""
        members = list(sequences)
        size = self.groups[group].block_size
        users: dict[int, int] = {}
        for tables in members:
            stored = tables.tables[group].refs[: blocks_for(tables.num_tokens, size)]
            for ref in distinct_blocks(stored):
                users[ref] = users.get(ref, 0) + 1
        pool = self.pools[group]
        return [ref for ref in self.blocks_in(Pool.DEVICE, group, members) if users.get(ref) == pool.count(ref)]

    def pool(self, group: int, where: Pool) -> BlockPool:
        """A group's device or host pool. BlockError if it has no such pool."""
        pool = self.pools[group] if where is Pool.DEVICE else self.host_pools[group]
        if pool is None:
            raise BlockError(f"KV group {group} has no {where.name.lower()} pool")
        return pool

    def copies_due(self, group: int, sequences: Iterable[SequenceTables]) -> int:
        """Copies on write that these sequences will take if each appends a token: of a shared last block all users but
        the last to write copy it, wherever it lies now."""
        writers: dict[int, int] = {}
        for tables in sequences:
            index, offset = divmod(tables.num_tokens, self.groups[group].block_size)
            if offset:
                ref = tables.tables[group].refs[index]
                writers[ref] = writers.get(ref, 0) + 1
        return sum(min(count, self.pool(group, pool_of(ref)).count(ref) - 1) for ref, count in writers.items())

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
        return MemoryStats(
            groups=tuple(group_stats(self, group) for group in range(len(self.groups))),
            copies=self._copies,
            sequences=len(self._sequences),
            unfinished_items=len(self._unfinished),
            swapped_out=self._swapped_out,
            swapped_in=self._swapped_in,
            adopted_tokens=self._adopted,
            evicted=0 if self.prefixes is None else self.prefixes.evicted,
        )

    def audit(self) -> None:
        """Check everything against everything, O(blocks of all sequences). BlockError names the first inconsistency."""
        audit(self)

    def sequences(self) -> Collection[SequenceTables]:
        """All that were created and not freed."""
        return self._sequences.keys()

    def unfinished(self) -> Collection[PlanItem]:
        """Plan items whose tickets are not completed, in ticket order."""
        return self._unfinished.values()

    # Internals

    def _new_table(self, group: int) -> BlockTable:
        spec = self.groups[group]
        return BlockTable(spec.block_size, group, spec.max_blocks)

    def _limit(self, group: int) -> int:
        """Blocks that one sequence can have in a group."""
        host = self.host_pools[group]
        usable = self.pools[group].num_blocks + (host.num_blocks if host is not None and self.in_place else 0)
        max_blocks = self.groups[group].max_blocks
        return usable if max_blocks is None else min(usable, max_blocks)

    def _copy_on_write(self, group: int, table: BlockTable, index: int, fresh: int) -> PlanItem:
        shared = table.refs[index]
        item = CopyBlock(self.next_ticket, group, shared, fresh)
        self.hold(item)
        self.pools[group].free(shared)
        table.refs[index] = fresh
        self._copies += 1
        return item

    def hold(self, item: PlanItem) -> None:
        """Keep both ends of a new plan item, of ticket `next_ticket`, until that is completed."""
        self.next_ticket = item.ticket + 1
        self._unfinished[item.ticket] = item
        for ref in (item.source, item.destination):
            self.pool(item.group, pool_of(ref)).pin(ref)

    def _by_pool(self, group: int, refs: Sequence[int]) -> list[tuple[BlockPool, list[int]]]:
        """The blocks of a table, apart by pool."""
        if self.host_pools[group] is None:
            return [(self.pools[group], list(refs))]
        parts: dict[Pool, list[int]] = {}
        for ref in refs:
            if ref >= 0:
                parts.setdefault(pool_of(ref), []).append(ref)
        return [(self.pool(group, where), part) for where, part in parts.items()]

    def _check_live(self, tables: SequenceTables) -> None:
        if tables not in self._sequences:
            raise BlockError("the sequence is not of this block manager, or was freed before")
