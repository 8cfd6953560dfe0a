"""Drives the block manager with random operations, against two judges that share no code with it.

`Ledger` knows who holds which block and so every count, plan and refusal that must follow. `Device` holds the tokens:
it runs plans as late as the rules in `cupaged.memory.plans` allow, writes through slots, and reads every sequence back.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

from cupaged.errors import BlockError, CapacityError, OutOfBlocks
from cupaged.memory import BlockManager, GroupSpec, PlanItem, SequenceTables, frame_of

POISON = -1
MAX_SEQUENCES = 12


class Divergence(AssertionError):
    """The manager did something else than the rules say."""


def require(condition: bool, message: str, *values: object) -> None:
    if not condition:
        raise Divergence(message.format(*values))


class Block:
    """A block as the rules see it: held by sequences, held by unfinished copies."""

    __slots__ = ("frame", "holders", "pins")

    def __init__(self, frame: int) -> None:
        self.frame, self.holders, self.pins = frame, 1, 0


class Live:
    """A sequence: the manager's handle, the tokens it must read back, how many slots are prepared, its blocks."""

    def __init__(self, handle: SequenceTables, num_groups: int) -> None:
        self.handle = handle
        self.tokens: list[int] = []
        self.prepared = 0
        self.blocks: list[list[Block]] = [[] for _ in range(num_groups)]


class Device:
    """Slots that hold one token each, and a queue of copies that run when something needs them, or by chance."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.stores = [[POISON] * (spec.num_blocks * spec.block_size) for spec in manager.groups]
        self.queue: deque[PlanItem] = deque()
        self.done: list[int] = []  # tickets of copies that ran, not yet reported

    def run(self, count: int) -> None:
        for _ in range(count):
            item = self.queue.popleft()
            store, size = self.stores[item.group], self.manager.groups[item.group].block_size
            source, destination = frame_of(item.source) * size, frame_of(item.destination) * size
            store[destination : destination + size] = store[source : source + size]
            self.done.append(item.ticket)

    def sync(self, handle: SequenceTables) -> None:
        """Run what a step with this sequence needs: the queue up to the last copy into one of its blocks."""
        needed = 0
        for place, item in enumerate(self.queue, 1):
            if item.destination in handle.tables[item.group].refs:
                needed = place
        self.run(needed)

    def write(self, handle: SequenceTables, tokens: Sequence[int]) -> None:
        self.sync(handle)
        start = handle.num_tokens
        for group, store in enumerate(self.stores):
            slots = self.manager.slots(handle, group, start, start + len(tokens))
            for slot, token in zip(slots, tokens, strict=True):
                store[slot] = token

    def check(self, live: Live) -> None:
        self.sync(live.handle)
        for group, store in enumerate(self.stores):
            slots = self.manager.slots(live.handle, group, 0, len(live.tokens))
            found = [store[slot] for slot in slots]
            require(found == live.tokens, "tokens in group {}: {} read, {} written", group, found, live.tokens)

    def poison(self, group: int, frame: int) -> None:
        size = self.manager.groups[group].block_size
        self.stores[group][frame * size : (frame + 1) * size] = [POISON] * size


class Ledger:
    """Who holds which block. Predicts what each call must do, and compares."""

    def __init__(self, manager: BlockManager, device: Device) -> None:
        self.manager = manager
        self.device = device
        self.in_use: list[dict[int, Block]] = [{} for _ in manager.groups]  # frame -> block; draining ones too
        self.ends: dict[int, list[tuple[int, Block]]] = {}  # ticket -> the blocks that it holds
        self.copies = 0
        self.drained = 0  # blocks whose last user left before a copy was reported

    def free(self, group: int) -> int:
        return self.manager.groups[group].num_blocks - len(self.in_use[group])

    def copies_on_write(self, live: Live, group: int) -> bool:
        size = self.manager.groups[group].block_size
        return len(live.tokens) % size != 0 and live.blocks[group][len(live.tokens) // size].holders > 1

    def expect_append(self, live: Live, num_new: int) -> list[int] | type[Exception]:
        """Blocks that each group must take, or the error that must come."""
        needed = []
        end = len(live.tokens) + num_new
        for group, spec in enumerate(self.manager.groups):
            blocks = (end + spec.block_size - 1) // spec.block_size
            if blocks > min(spec.num_blocks, spec.max_blocks or spec.num_blocks):
                return CapacityError
            fresh = max(0, blocks - len(live.blocks[group]))
            needed.append(fresh + (1 if num_new and self.copies_on_write(live, group) else 0))
        return OutOfBlocks if any(need > self.free(group) for group, need in enumerate(needed)) else needed

    def take(self, group: int, ref: int) -> Block:
        frame = frame_of(ref)
        require(frame not in self.in_use[group], "frame {} of group {} handed out while in use", frame, group)
        block = self.in_use[group][frame] = Block(frame)
        return block

    def release(self, group: int, block: Block) -> None:
        if not block.holders and not block.pins:
            del self.in_use[group][block.frame]
            self.device.poison(group, block.frame)

    def appended(self, live: Live, num_new: int, plan: list[PlanItem]) -> None:
        items = iter(plan)
        for group, spec in enumerate(self.manager.groups):
            refs, blocks = live.handle.tables[group].refs, live.blocks[group]
            known = len(blocks)
            if num_new and self.copies_on_write(live, group):
                index = len(live.tokens) // spec.block_size
                old, new = blocks[index], self.take(group, refs[index])
                item = next(items, None)
                require(item is not None, "no copy planned for block {} of group {}", index, group)
                assert item is not None
                ends = (item.group, frame_of(item.source), frame_of(item.destination))
                require(ends == (group, old.frame, new.frame), "{} does not copy {} to {}", item, old.frame, new.frame)
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
            stored = (len(parent.tokens) + spec.block_size - 1) // spec.block_size
            child.blocks[group] = parent.blocks[group][:stored]
            for block in child.blocks[group]:
                block.holders += 1

    def freed(self, live: Live) -> None:
        for group, blocks in enumerate(live.blocks):
            for block in blocks:
                block.holders -= 1
                self.drained += not block.holders and block.pins > 0
                self.release(group, block)

    def completed(self, ticket: int) -> None:
        for group, block in self.ends.pop(ticket):
            block.pins -= 1
            self.release(group, block)

    def check(self, live: Live | None) -> None:
        """After every operation: the free blocks, and the tables of the sequence that it was about."""
        for group, pool in enumerate(self.manager.pools):
            require(pool.num_free == self.free(group), "{} free, {} should be", pool.num_free, self.free(group))
        if live is not None:
            for table, blocks in zip(live.handle.tables, live.blocks, strict=True):
                right = [block.frame for block in blocks]
                require(table.refs == right, "table {} of group {} should be {}", table.refs, table.group, right)

    def check_all(self, sequences: list[Live]) -> None:
        self.manager.audit()
        stats = self.manager.stats()
        require(stats.copies == self.copies, "{} copies counted, {} made", stats.copies, self.copies)
        require(stats.unfinished_items == len(self.ends), "{} items unfinished", stats.unfinished_items)
        for group, (spec, found) in enumerate(zip(self.manager.groups, stats.groups, strict=True)):
            held = [block for block in self.in_use[group].values() if block.holders]
            shared = sum(block.holders > 1 for block in held)
            require(found.pool.shared == shared, "{} blocks shared, {} should be", found.pool.shared, shared)
            require(found.pool.draining == len(self.in_use[group]) - len(held), "{} draining", found.pool.draining)
            filled = {
                (block.frame, offset)
                for live in sequences
                for index, block in enumerate(live.blocks[group])
                for offset in range(min(spec.block_size, len(live.tokens) - index * spec.block_size))
            }
            waste = len(held) * spec.block_size - len(filled)
            require(found.waste_slots == waste, "{} slots wasted, {} are", found.waste_slots, waste)


class Driver:
    """`use_ledger=False` leaves the device as the only judge, so that its power shows by itself."""

    def __init__(self, seed: int, groups: Sequence[GroupSpec], use_ledger: bool = True) -> None:
        self.rng = random.Random(seed)
        self.manager = BlockManager(groups)
        self.device = Device(self.manager)
        self.ledger = Ledger(self.manager, self.device) if use_ledger else None
        self.sequences: list[Live] = []
        self.touched: Live | None = None
        self.seen: Counter[str] = Counter()
        self.next_token = 0

    def run(self, operations: int) -> None:
        """So many operations that reach the manager or the device; verbs with nothing to work on do not count."""
        verbs: dict[Callable[[], bool], int] = {
            self.create: 5, self.append: 30, self.write: 24, self.fork: 18, self.free: 16, self.complete: 12,
            self.run_copies: 2,
        }  # fmt: skip
        for number in range(1, operations + 1):
            while not self.rng.choices(list(verbs), list(verbs.values()))[0]():
                pass
            if self.ledger:
                self.ledger.check(self.touched)
            if number % 250 == 0:
                self.check_all()
        self.drain()

    def check_all(self) -> None:
        if self.ledger:
            self.ledger.check_all(self.sequences)
        for live in self.sequences:
            self.device.check(live)

    def refused(self, error: type[Exception], call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except error:
            self.seen[call.__name__ + " refused"] += 1
        else:
            raise Divergence(f"{call.__name__} was not refused")

    def pick(self, sequences: list[Live]) -> Live | None:
        self.touched = self.rng.choice(sequences) if sequences else None
        return self.touched

    def create(self) -> bool:
        if len(self.sequences) >= MAX_SEQUENCES:
            return False
        self.sequences.append(Live(self.manager.create(), len(self.manager.groups)))
        return True

    def append(self) -> bool:
        live = self.pick(self.sequences)
        if live is None:
            return False
        num_new = self.rng.choice((0, 1, 1, 1, 1, 1, 1, 2, 3, 5, 8, 30))
        expected = self.ledger.expect_append(live, num_new) if self.ledger else None
        try:
            can = self.manager.can_append(live.handle, num_new)
            needed = list(self.manager.blocks_needed(live.handle, num_new))
            plan = self.manager.prepare_append(live.handle, num_new)
        except (OutOfBlocks, CapacityError) as error:
            self.seen[type(error).__name__] += 1
            require(expected in (None, type(error)), "{!r} instead of {}", error, expected)
            require(isinstance(error, CapacityError) or not can, "can_append promised what cannot be")
            return True
        require(can, "can_append denied what can be")
        live.prepared = max(live.prepared, len(live.tokens) + num_new)
        self.device.queue.extend(plan)
        self.seen["copies"] += len(plan)
        if self.ledger:
            require(needed == expected, "{} blocks needed, {} should be", needed, expected)
            self.ledger.appended(live, num_new, plan)
        return True

    def write(self) -> bool:
        live = self.pick([live for live in self.sequences if live.prepared > len(live.tokens)])
        if live is None:
            return False
        num_new = live.prepared - len(live.tokens)
        self.refused(BlockError, self.manager.commit_append, live.handle, num_new + 1)
        if self.rng.random() < 0.2:
            num_new = self.rng.randint(0, num_new)
        tokens = list(range(self.next_token, self.next_token + num_new))  # every token written is another
        self.next_token += num_new
        self.device.write(live.handle, tokens)
        self.manager.commit_append(live.handle, num_new)
        live.tokens += tokens
        live.prepared = len(live.tokens)
        if self.rng.random() < 0.1:
            self.device.check(live)
        return True

    def fork(self) -> bool:
        parent = self.pick(self.sequences)
        if parent is None or len(self.sequences) >= MAX_SEQUENCES:
            return False
        if parent.prepared > len(parent.tokens):
            self.refused(BlockError, self.manager.fork, parent.handle)
            return True
        child = Live(self.manager.fork(parent.handle), len(self.manager.groups))
        child.tokens = list(parent.tokens)
        child.prepared = parent.prepared
        if self.ledger:
            self.ledger.forked(parent, child)
        self.sequences.append(child)
        self.touched = child
        self.seen["forks"] += 1
        return True

    def free(self) -> bool:
        live = self.pick(self.sequences)
        if live is None:
            return False
        if self.rng.random() < 0.1:
            self.device.check(live)
        self.touched = None
        self.sequences.remove(live)
        self.manager.free(live.handle)
        if self.ledger:
            self.ledger.freed(live)
        self.refused(BlockError, self.manager.free, live.handle)
        return True

    def complete(self) -> bool:
        if not self.device.done:
            return False
        ticket = self.device.done.pop(self.rng.randrange(len(self.device.done)))
        self.manager.complete(ticket)
        if self.ledger:
            self.ledger.completed(ticket)
        self.refused(BlockError, self.manager.complete, ticket)
        self.seen["completions"] += 1
        return True

    def run_copies(self) -> bool:
        if not self.device.queue:
            return False
        self.device.run(self.rng.randint(1, len(self.device.queue)))
        return True

    def drain(self) -> None:
        self.check_all()
        while self.sequences:
            self.free()
        self.device.run(len(self.device.queue))
        while self.device.done:
            self.complete()
        for pool in self.manager.pools:
            require(pool.num_free == pool.num_blocks, "{} of {} free at the end", pool.num_free, pool.num_blocks)
        if self.ledger:
            self.ledger.check_all([])
