"""Drives the block manager with random operations, against the judges of memory_judges.py."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

from memory_judges import Block, Device, Divergence, Ledger, Live, first_seen, require

from cupaged.errors import BlockError, CapacityError, OutOfBlocks
from cupaged.memory import BlockManager, GroupSpec, PlanItem, Pool, pool_of

MAX_SEQUENCES = 12


class Driver:
    """`use_ledger=False` leaves the device as the only judge, so that its power shows by itself."""

    def __init__(self, seed: int, groups: Sequence[GroupSpec], use_ledger: bool = True, in_place: bool = False) -> None:
        self.rng = random.Random(seed)
        self.manager = BlockManager(groups, in_place)
        self.device = Device(self.manager)
        self.ledger = Ledger(self.manager, self.device) if use_ledger else None
        self.sequences: list[Live] = []
        self.touched: Live | None = None
        self.seen: Counter[str] = Counter()
        self.next_token = 0

    def run(self, operations: int, audit_every: int = 250) -> None:
        """So many operations that reach the manager or the device; verbs with nothing to work on do not count."""
        verbs: dict[Callable[[], bool], int] = {
            self.create: 5, self.append: 30, self.write: 24, self.fork: 18, self.free: 12, self.abort: 2,
            self.trim: 1, self.complete: 12, self.run_copies: 2,
        }  # fmt: skip
        if any(spec.window for spec in self.manager.groups):
            verbs |= {self.slide: 12}
        if any(self.manager.host_pools):
            verbs |= {self.swap_out: 12, self.swap_in: 12, self.complete: 24}
        names, weights = list(verbs), list(verbs.values())
        for number in range(1, operations + 1):
            while not (verb := self.rng.choices(names, weights)[0])():
                pass
            self.seen[verb.__name__] += 1
            if self.ledger:
                self.ledger.check(self.touched)
            if number % audit_every == 0:
                self.check_all()
                self.seen["audits"] += 1
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
        if num_new == 1 and self.rng.random() < 0.5:
            in_place = self.manager.append_in_place(live.handle)
            if self.ledger:
                free_of_charge = isinstance(expected, list) and not any(expected)
                require(in_place == free_of_charge, "in place: {}, needed: {}", in_place, expected)
            if in_place:
                self.seen["in place"] += 1
                live.prepared = max(live.prepared, len(live.tokens) + 1)
                if self.ledger:
                    self.ledger.appended(live, 1, [])
                return True
        try:
            can = self.manager.can_append(live.handle, num_new)
            needed = list(self.manager.blocks_needed(live.handle, num_new))
            plan = self.manager.prepare_append(live.handle, num_new)
        except (BlockError, CapacityError) as error:
            self.seen[f"append: {type(error).__name__}"] += 1
            require(expected in (None, type(error)), "{!r} instead of {}", error, expected)
            require(type(error) is not OutOfBlocks or not can, "can_append promised what cannot be")
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
        count = len(parent.tokens)
        if self.rng.random() < 0.3:
            whole = math.lcm(*(spec.block_size for spec in self.manager.groups))
            count = self.rng.randint(0, count // whole) * whole
            for wrong in {count + 1, len(parent.tokens) + whole} - {len(parent.tokens)}:
                if wrong % whole or wrong > len(parent.tokens):
                    self.refused(BlockError, self.manager.fork, parent.handle, wrong)
            self.seen["forks of a part"] += 1
            for spec, passed in zip(self.manager.groups, parent.passed, strict=True):
                needed = range(first_seen(spec, count) // spec.block_size, -(-count // spec.block_size))
                if count < len(parent.tokens) and needed and needed[0] < passed:
                    self.refused(BlockError, self.manager.fork, parent.handle, count)
                    return True
        child = Live(self.manager.fork(parent.handle, count), len(self.manager.groups))
        child.tokens = parent.tokens[:count]
        child.prepared = count
        if self.ledger:
            self.ledger.forked(parent, child)
        self.sequences.append(child)
        self.touched = child
        return True

    def slide(self) -> bool:
        live = self.pick(self.sequences)
        if live is None:
            return False
        self.manager.slide(live.handle)
        before = sum(live.passed)
        for group, spec in enumerate(self.manager.groups):
            live.passed[group] = max(live.passed[group], first_seen(spec, len(live.tokens)) // spec.block_size)
        self.seen["blocks passed"] += sum(live.passed) - before
        if self.ledger:
            self.ledger.slid(live)
        return True

    def trim(self) -> bool:
        live = self.pick(self.sequences)
        if live is None:
            return False
        self.manager.trim(live.handle)
        live.prepared = len(live.tokens)
        if self.ledger:
            self.ledger.trimmed(live)
        return True

    def swap_out(self) -> bool:
        return self.move(Pool.DEVICE, Pool.PINNED_HOST, self.manager.swap_out)

    def swap_in(self) -> bool:
        return self.move(Pool.PINNED_HOST, Pool.DEVICE, self.manager.swap_in)

    def move(self, source: Pool, target: Pool, call: Callable[[int, Sequence[int]], list[PlanItem]]) -> bool:
        """Move some of a sequence's blocks, whoever shares them; moves that must be refused are tried too."""
        live = self.pick(self.sequences)
        if live is None:
            return False
        group = self.rng.randrange(len(self.manager.groups))
        if self.manager.host_pools[group] is None:
            self.refused(BlockError, call, group, live.handle.tables[group].refs[-1:])
            return True
        there = [ref for ref in dict.fromkeys(live.handle.tables[group].refs) if ref >= 0 and pool_of(ref) is source]
        if not there:
            return False
        refs = self.rng.sample(there, self.rng.randint(1, len(there)))
        blocks: list[Block] = []
        expected = None
        if self.ledger:
            blocks = [self.ledger.in_use[group][ref] for ref in refs]
            expected = self.ledger.expect_move(group, blocks, self.sequences, target)
        before = [list(table.refs) for other in self.sequences for table in other.handle.tables]
        try:
            items = call(group, refs)
        except BlockError as error:
            self.seen[f"{call.__name__}: {type(error).__name__}"] += 1
            require(not self.ledger or expected is type(error), "{!r} instead of {}", error, expected)
            after = [list(table.refs) for other in self.sequences for table in other.handle.tables]
            require(before == after, "a refused move changed tables")
            return True
        require(expected is None, "a move was done that must bring {}", expected)
        self.device.queue.extend(items)
        self.seen["blocks moved while shared"] += sum(
            self.manager.pool(group, target).count(i.destination) > 1 for i in items
        )
        if self.ledger:
            self.ledger.moved(group, blocks, self.sequences, items)
        self.refused(BlockError, call, group, refs)  # they are no longer there
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

    def abort(self) -> bool:
        """Some sequences end at once, in the middle of anything."""
        if not self.sequences:
            return False
        for _ in range(self.rng.randint(1, min(3, len(self.sequences)))):
            live = self.rng.choice(self.sequences)
            self.seen["aborted while written"] += live.prepared > len(live.tokens)
            self.seen["aborted while moving"] += not self.manager.settled(live.handle)
            self.sequences.remove(live)
            self.manager.free(live.handle)
            if self.ledger:
                self.ledger.freed(live)
        self.touched = None
        return True

    def complete(self) -> bool:
        if not self.device.done:
            return False
        ticket = self.device.done.pop(self.rng.randrange(len(self.device.done)))
        self.manager.complete(ticket)
        if self.ledger:
            self.ledger.completed(ticket)
        self.refused(BlockError, self.manager.complete, ticket)
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
        for pool in (*self.manager.pools, *filter(None, self.manager.host_pools)):
            require(pool.num_free == pool.num_blocks, "{} of {} free at the end", pool.num_free, pool.num_blocks)
        if self.ledger:
            self.ledger.check_all([])
