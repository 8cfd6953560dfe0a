"""The two judges of random operations on the block manager; they share no code with it.

`Ledger` knows who holds which block and so every count, plan and refusal that must follow. `Device` holds the tokens:
it runs plans as late as the rules in `cupaged.memory.plans` allow, writes through slots, and reads every sequence back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from cupaged.errors import BlockError, CapacityError, OutOfBlocks
from cupaged.memory import BlockManager, GroupSpec, PlanItem, Pool, SequenceTables, SwapIn, SwapOut, frame_of, pool_of

POISON = -1
NO_BLOCK = -1


def first_seen(spec: GroupSpec, position: int) -> int:
    """The first position that a token at `position` sees: the window counts the token itself."""
    return 0 if spec.window is None else max(0, position + 1 - spec.window)


class Divergence(AssertionError):
    """The manager did something else than the rules say."""


def require(condition: bool, message: str, *values: object) -> None:
    if not condition:
        raise Divergence(message.format(*values))


class Block:
    """A block as the rules see it: held by sequences, held by unfinished plan items."""

    __slots__ = ("holders", "pins", "ref")

    def __init__(self, ref: int) -> None:
        self.ref, self.holders, self.pins = ref, 1, 0


class Live:
    """A sequence: the manager's handle, the tokens it must read back, how many slots are prepared, its blocks (None for
    those that a window has passed), and per group how many these are."""

    def __init__(self, handle: SequenceTables, num_groups: int) -> None:
        self.handle = handle
        self.tokens: list[int] = []
        self.prepared = 0
        self.blocks: list[list[Block | None]] = [[] for _ in range(num_groups)]
        self.passed = [0] * num_groups


class Device:
    """Slots that hold one token each, and a queue of plan items that run when something needs them, or by chance."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.stores = [
            {
                Pool.DEVICE: [POISON] * (spec.num_blocks * spec.block_size),
                Pool.PINNED_HOST: [POISON] * (spec.host_blocks * spec.block_size),
            }
            for spec in manager.groups
        ]
        self.queue: deque[PlanItem] = deque()
        self.done: list[int] = []  # tickets of items that ran, not yet reported

    def contents(self, group: int, ref: int) -> list[int]:
        size = self.manager.groups[group].block_size
        return self.stores[group][pool_of(ref)][frame_of(ref) * size : (frame_of(ref) + 1) * size]

    def put(self, group: int, ref: int, tokens: list[int]) -> None:
        size = self.manager.groups[group].block_size
        self.stores[group][pool_of(ref)][frame_of(ref) * size : (frame_of(ref) + 1) * size] = tokens

    def run(self, count: int) -> None:
        for _ in range(count):
            item = self.queue.popleft()
            self.put(item.group, item.destination, self.contents(item.group, item.source))
            self.done.append(item.ticket)

    def sync(self, handle: SequenceTables) -> None:
        """Run what a step with this sequence needs: the queue up to the last item into one of its blocks."""
        needed = 0
        for place, item in enumerate(self.queue, 1):
            if item.destination in handle.tables[item.group].refs:
                needed = place
        self.run(needed)

    def write(self, handle: SequenceTables, tokens: Sequence[int]) -> None:
        self.sync(handle)
        start = handle.num_tokens
        for group, stores in enumerate(self.stores):
            slots = self.manager.slots(handle, group, start, start + len(tokens))
            for slot, token in zip(slots, tokens, strict=True):
                stores[Pool.DEVICE][slot] = token

    def check(self, live: Live) -> None:
        """What attention would read: the blocks of the table, wherever they lie."""
        self.sync(live.handle)
        for group in range(len(self.stores)):
            spec, passed = self.manager.groups[group], live.passed[group]
            refs = live.handle.tables[group].refs
            require(set(refs[:passed]) <= {NO_BLOCK}, "{} of group {}: {} are passed", refs, group, passed)
            found = [token for ref in refs[passed:] for token in self.contents(group, ref)]
            right = live.tokens[passed * spec.block_size :]
            require(found[: len(right)] == right, "tokens in group {}: {} read, {} written", group, found, right)
            require(passed * spec.block_size <= first_seen(spec, len(live.tokens)), "group {} lacks blocks", group)

    def poison(self, group: int, ref: int) -> None:
        self.put(group, ref, [POISON] * self.manager.groups[group].block_size)


class Ledger:
    """Who holds which block. Predicts what each call must do, and compares."""

    def __init__(self, manager: BlockManager, device: Device) -> None:
        self.manager = manager
        self.device = device
        self.in_use: list[dict[int, Block]] = [{} for _ in manager.groups]  # reference -> block; draining ones too
        self.ends: dict[int, list[tuple[int, Block]]] = {}  # ticket -> the blocks that it holds
        self.copies = self.swapped_out = self.swapped_in = 0
        self.drained = 0  # blocks whose last user left before a copy was reported

    def free(self, group: int, where: Pool = Pool.DEVICE) -> int:
        spec = self.manager.groups[group]
        used = sum(pool_of(ref) is where for ref in self.in_use[group])
        return (spec.num_blocks if where is Pool.DEVICE else spec.host_blocks) - used

    def last_block(self, live: Live, group: int) -> Block | None:
        """The block that the next token goes into, if that block has tokens already."""
        size = self.manager.groups[group].block_size
        return live.blocks[group][len(live.tokens) // size] if len(live.tokens) % size else None

    def copies_on_write(self, live: Live, group: int) -> bool:
        block = self.last_block(live, group)
        return block is not None and block.holders > 1

    def expect_append(self, live: Live, num_new: int) -> list[int] | type[Exception]:
        """Blocks that each group must take, or the error that must come."""
        needed = []
        end = len(live.tokens) + num_new
        for spec in self.manager.groups:
            usable = spec.num_blocks + (spec.host_blocks if self.manager.in_place else 0)
            if (end + spec.block_size - 1) // spec.block_size > min(usable, spec.max_blocks or usable):
                return CapacityError
        for group, spec in enumerate(self.manager.groups):
            last = self.last_block(live, group)
            if num_new and last is not None and pool_of(last.ref) is Pool.PINNED_HOST:
                return BlockError
            fresh = max(0, (end + spec.block_size - 1) // spec.block_size - len(live.blocks[group]))
            needed.append(fresh + (1 if num_new and self.copies_on_write(live, group) else 0))
        return OutOfBlocks if any(need > self.free(group) for group, need in enumerate(needed)) else needed

    def expect_move(self, group: int, blocks: Sequence[Block], sequences: Sequence[Live], target: Pool) -> Any:
        """The error that moving blocks must bring, or None."""
        size = self.manager.groups[group].block_size
        for live in sequences:
            first_written = len(live.tokens) // size if live.prepared > len(live.tokens) else len(live.blocks[group])
            empty = (len(live.tokens) + size - 1) // size
            if any(block in live.blocks[group][min(first_written, empty) :] for block in blocks):
                return BlockError
        return OutOfBlocks if len(blocks) > self.free(group, target) else None

    def take(self, group: int, ref: int) -> Block:
        require(ref not in self.in_use[group], "block {:#x} of group {} handed out while in use", ref, group)
        block = self.in_use[group][ref] = Block(ref)
        return block

    def release(self, group: int, block: Block) -> None:
        if not block.holders and not block.pins:
            del self.in_use[group][block.ref]
            self.device.poison(group, block.ref)

    def moved(self, group: int, blocks: Sequence[Block], sequences: Sequence[Live], items: list[PlanItem]) -> None:
        require(len(items) == len(blocks), "{} blocks to move, {} items", len(blocks), len(items))
        for block, item in zip(blocks, items, strict=True):
            require((item.group, item.source) == (group, block.ref), "{} does not move {:#x}", item, block.ref)
            outward = pool_of(item.source) is Pool.DEVICE
            where = Pool.PINNED_HOST if outward else Pool.DEVICE
            require(isinstance(item, SwapOut if outward else SwapIn), "{} of the wrong kind", item)
            require(pool_of(item.destination) is where, "{} leads to the wrong pool", item)
            new = self.take(group, item.destination)
            new.holders, block.holders = block.holders, 0
            self.ends[item.ticket] = [(group, block), (group, new)]
            block.pins += 1
            new.pins += 1
            self.swapped_out += outward
            self.swapped_in += not outward
            for live in sequences:
                live.blocks[group] = [new if held is block else held for held in live.blocks[group]]

    def appended(self, live: Live, num_new: int, plan: list[PlanItem]) -> None:
        items = iter(plan)
        for group, spec in enumerate(self.manager.groups):
            refs, blocks = live.handle.tables[group].refs, live.blocks[group]
            known = len(blocks)
            if num_new and self.copies_on_write(live, group):
                index = len(live.tokens) // spec.block_size
                old, new = blocks[index], self.take(group, refs[index])
                assert old is not None
                item = next(items, None)
                require(item is not None, "no copy planned for block {} of group {}", index, group)
                assert item is not None
                ends = (item.group, item.source, item.destination)
                require(ends == (group, old.ref, new.ref), "{} does not copy {:#x} to {:#x}", item, old.ref, new.ref)
                old.holders -= 1
                old.pins += 1
                new.pins += 1
                self.ends[item.ticket] = [(group, old), (group, new)]
                blocks[index] = new
                self.copies += 1
            blocks.extend(self.take(group, ref) for ref in refs[known:])
        require(next(items, None) is None, "copies planned that no rule asks for: {}", plan)

    def forked(self, parent: Live, child: Live) -> None:
        for group, spec in enumerate(self.manager.groups):
            stored = (len(child.tokens) + spec.block_size - 1) // spec.block_size
            child.blocks[group] = parent.blocks[group][:stored]
            child.passed[group] = min(parent.passed[group], stored)
            for block in child.blocks[group]:
                if block is not None:
                    block.holders += 1

    def slid(self, live: Live) -> None:
        for group, blocks in enumerate(live.blocks):
            for index in range(live.passed[group]):
                if (block := blocks[index]) is not None:
                    blocks[index] = None
                    block.holders -= 1
                    self.release(group, block)

    def trimmed(self, live: Live) -> None:
        for group, spec in enumerate(self.manager.groups):
            stored = (len(live.tokens) + spec.block_size - 1) // spec.block_size
            live.blocks[group], empty = live.blocks[group][:stored], live.blocks[group][stored:]
            for block in empty:
                assert block is not None
                block.holders -= 1
                self.release(group, block)

    def freed(self, live: Live) -> None:
        for group, blocks in enumerate(live.blocks):
            for block in filter(None, blocks):
                block.holders -= 1
                self.drained += not block.holders and block.pins > 0
                self.release(group, block)

    def completed(self, ticket: int) -> None:
        for group, block in self.ends.pop(ticket):
            block.pins -= 1
            self.release(group, block)

    def check(self, live: Live | None) -> None:
        """After every operation: the free blocks, and the tables of the sequence that it was about."""
        for group, pools in enumerate(zip(self.manager.pools, self.manager.host_pools, strict=True)):
            for pool in pools:
                if pool is not None:
                    free = self.free(group, pool.pool)
                    require(pool.num_free == free, "{} free, {} should be", pool.num_free, free)
        if live is not None:
            for table, blocks in zip(live.handle.tables, live.blocks, strict=True):
                right = [NO_BLOCK if block is None else block.ref for block in blocks]
                require(table.refs == right, "table {} of group {} should be {}", table.refs, table.group, right)

    def check_all(self, sequences: list[Live]) -> None:
        self.manager.audit()
        stats = self.manager.stats()
        counted = (stats.copies, stats.swapped_out, stats.swapped_in)
        right = (self.copies, self.swapped_out, self.swapped_in)
        require(counted == right, "copies, swaps out and in counted {}, made {}", counted, right)
        require(stats.unfinished_items == len(self.ends), "{} items unfinished", stats.unfinished_items)
        for live in sequences:
            self.check(live)
        for group, (spec, found) in enumerate(zip(self.manager.groups, stats.groups, strict=True)):
            for pool, where in ((found.pool, Pool.DEVICE), (found.host, Pool.PINNED_HOST)):
                if pool is not None:
                    there = [block for ref, block in self.in_use[group].items() if pool_of(ref) is where]
                    held = sum(block.holders > 0 for block in there)
                    shared = sum(block.holders > 1 for block in there)
                    require(pool.shared == shared, "{} blocks shared, {} should be", pool.shared, shared)
                    require(pool.draining == len(there) - held, "{} draining", pool.draining)
            filled = {
                (block.ref, offset)
                for live in sequences
                for index, block in enumerate(live.blocks[group])
                if block is not None
                for offset in range(min(spec.block_size, len(live.tokens) - index * spec.block_size))
            }
            held = sum(block.holders > 0 for block in self.in_use[group].values())
            waste = held * spec.block_size - len(filled)
            require(found.waste_slots == waste, "{} slots wasted, {} are", found.waste_slots, waste)
