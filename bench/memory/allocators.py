"""The contenders: contiguous reservations from a buddy allocator, and blocks from the real manager.

Each admits a group of sequences (one request: 1, n samples, or a beam), grows it by a token per sequence and step, and
says what its memory holds. Sizes are in token slots.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from cupaged.bench.memory.buddy import Buddy
from cupaged.bench.memory.traces import Lengths
from cupaged.errors import OutOfBlocks
from cupaged.memory import BlockManager, GroupSpec, SequenceTables


@dataclass(eq=False, slots=True)
class Group:
    """A request: `width` sequences over one prompt. `done`: output tokens so far; `held`: what its allocator keeps."""

    lengths: Lengths
    width: int
    done: int = 0
    held: list[Any] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of each sequence now."""
        return self.lengths.prompt + self.done


@dataclass(frozen=True, slots=True)
class Holding:
    """Where all slots are: `stored` hold a token; `reserved` will, for a running sequence; `internal` are given away
    and never will; `external` are free though requests wait. `logical`: tokens of all sequences, shared ones counted
    for each."""

    stored: int
    reserved: int
    internal: int
    external: int
    logical: int


class Allocator(Protocol):
    name: str
    slots: int
    copied_slots: int  # slots copied because sequences branched

    def admit(self, group: Group) -> bool: ...
    def branch(self, group: Group, parents: list[int]) -> None: ...
    def grow(self, group: Group) -> bool: ...
    def release(self, group: Group) -> None: ...
    def holding(self, running: Iterable[Group]) -> Holding: ...
    def largest(self, lengths: Lengths, width: int) -> int: ...


def power_of_two(size: int) -> int:
    return Buddy.rounded(size)


class Contiguous:
    """One piece of memory per sequence, reserved when it is admitted. `policy` is "max" (max_len slots), "pow2" (prompt
    and the output rounded up to a power of two: at most twice what is needed) or "oracle" (just what is needed), the
    three of Kwon et al. 2023, section 6.1. The buddy allocator rounds each up to a power of two."""

    def __init__(self, slots: int, policy: str, max_len: int) -> None:
        self.name = f"contiguous, {policy}"
        self.slots = slots
        self.copied_slots = 0
        self._policy = policy
        self._max_len = max_len
        self._buddy = Buddy(slots)

    def reservation(self, lengths: Lengths) -> int:
        if self._policy == "max":
            return self._max_len
        output = lengths.output if self._policy == "oracle" else power_of_two(lengths.output)
        return min(self._max_len, lengths.prompt + output)

    def largest(self, lengths: Lengths, width: int) -> int:
        return width * Buddy.rounded(self.reservation(lengths))

    def admit(self, group: Group) -> bool:
        for _ in range(group.width):
            address = self._buddy.allocate(self.reservation(group.lengths))
            if address is None:
                self.release(group)
                return False
            group.held.append(address)
        return True

    def branch(self, group: Group, parents: list[int]) -> None:
        """A beam that goes on from another one is a copy of all its tokens."""
        self.copied_slots += sum(parent != own for own, parent in enumerate(parents)) * group.tokens

    def grow(self, group: Group) -> bool:
        return True

    def release(self, group: Group) -> None:
        for address in group.held:
            self._buddy.free(address)
        group.held.clear()

    def holding(self, running: Iterable[Group]) -> Holding:
        stored = reserved = internal = 0
        for group in running:
            stored += group.width * group.tokens
            reserved += group.width * (group.lengths.output - group.done)
            given = Buddy.rounded(self.reservation(group.lengths))
            internal += group.width * (given - group.lengths.total)
        return Holding(stored, reserved, internal, self._buddy.free_units, stored)


class Paged:
    """The real block manager: blocks on demand, prompts shared by reference, copies on write.

    A request is admitted while `watermark` of the blocks stay free (1 %, so that runners can grow); when none is left,
    the request admitted last is preempted and computed anew later.
    """

    def __init__(self, slots: int, block_size: int, watermark: float = 0.01) -> None:
        self.name = f"paged, block {block_size}"
        self.block_size = block_size
        self.manager = BlockManager([GroupSpec(slots // block_size, block_size)])
        self.slots = slots
        self.copied_slots = 0
        self._reserve = int(watermark * (slots // block_size))

    def largest(self, lengths: Lengths, width: int) -> int:
        return width * -(-lengths.total // self.block_size) * self.block_size

    @property
    def _free(self) -> int:
        return self.manager.pools[0].num_free

    def admit(self, group: Group) -> bool:
        """Room for the prompt, and for what a preempted group had before."""
        prompt_blocks = -(-group.lengths.prompt // self.block_size)
        own_blocks = -(-(group.tokens + 1) // self.block_size) - group.lengths.prompt // self.block_size
        needed = prompt_blocks + group.width * own_blocks
        alone = self._free == self.manager.pools[0].num_blocks
        if needed + (0 if alone else self._reserve) > self._free:
            return False
        first = self.manager.create()
        self._append(first, group.lengths.prompt)
        group.held = [first] + [self.manager.fork(first) for _ in range(group.width - 1)]
        for tables in group.held:
            self._append(tables, group.done)
        return True

    def _append(self, tables: SequenceTables, count: int) -> None:
        for item in self.manager.prepare_append(tables, count):
            self.copied_slots += self.block_size
            self.manager.complete(item.ticket)
        self.manager.commit_append(tables, count)

    def grow(self, group: Group) -> bool:
        """A token more for each sequence; False where blocks lack, and those that have grown keep theirs."""
        for tables in group.held:
            if tables.num_tokens == group.tokens:
                try:
                    self._append(tables, 1)
                except OutOfBlocks:
                    return False
        return True

    def branch(self, group: Group, parents: list[int]) -> None:
        """Beams go on from their parents: children are forked before those that nobody follows are freed."""
        held: list[SequenceTables] = group.held
        children = []
        followed: set[int] = set()  # parents whose own tables a child has taken over
        for parent in parents:
            children.append(self.manager.fork(held[parent]) if parent in followed else held[parent])
            followed.add(parent)
        for own, tables in enumerate(held):
            if own not in followed:
                self.manager.free(tables)
        group.held = children

    def release(self, group: Group) -> None:
        for tables in group.held:
            self.manager.free(tables)
        group.held.clear()

    def holding(self, running: Iterable[Group]) -> Holding:
        stats = self.manager.stats().groups[0]
        given = stats.pool.used * self.block_size
        reserved = logical = 0
        for group in running:
            logical += group.width * group.tokens
            room = -group.tokens % self.block_size
            reserved += group.width * min(room, group.lengths.output - group.done)
        reserved = min(reserved, stats.waste_slots)  # a partial block that is shared is counted once there
        stored = given - stats.waste_slots
        return Holding(stored, reserved, stats.waste_slots - reserved, self.slots - given, logical)


def beam_parents(rng: random.Random, width: int, churn: float) -> list[int]:
    """Each beam goes on from itself, or with probability `churn` from another one, chosen evenly."""
    return [rng.randrange(width) if rng.random() < churn else own for own in range(width)]
