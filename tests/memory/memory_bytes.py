"""Blocks as bytes, for tests of the block manager."""

from __future__ import annotations

from cupaged.memory import BlockManager, PlanItem, SequenceTables, frame_of


class Bytes:
    """Blocks of bytes, one byte a token: executes plans at once and completes them."""

    def __init__(self, manager: BlockManager, group: int = 0) -> None:
        self.manager = manager
        self.group = group
        self.block_size = manager.groups[group].block_size
        self.store = bytearray(b"?" * (manager.groups[group].num_blocks * self.block_size))

    def block(self, ref: int) -> bytes:
        start = frame_of(ref) * self.block_size
        return bytes(self.store[start : start + self.block_size])

    def execute(self, plan: list[PlanItem]) -> None:
        for item in plan:
            start = frame_of(item.destination) * self.block_size
            self.store[start : start + self.block_size] = self.block(item.source)
            self.manager.complete(item.ticket)

    def write(self, tables: SequenceTables, tokens: bytes) -> None:
        """Write prepared positions and commit them."""
        start = tables.num_tokens
        for slot, token in zip(self.manager.slots(tables, self.group, start, start + len(tokens)), tokens, strict=True):
            self.store[slot] = token
        self.manager.commit_append(tables, len(tokens))

    def append(self, tables: SequenceTables, tokens: bytes) -> int:
        """A whole step; the number of copies it took."""
        plan = self.manager.prepare_append(tables, len(tokens))
        self.execute(plan)
        self.write(tables, tokens)
        return len(plan)

    def read(self, tables: SequenceTables) -> bytes:
        return bytes(self.store[slot] for slot in self.manager.slots(tables, self.group, 0, tables.num_tokens))


def grown(manager: BlockManager, num_tokens: int) -> SequenceTables:
    tables = manager.create()
    for item in manager.prepare_append(tables, num_tokens):
        manager.complete(item.ticket)
    manager.commit_append(tables, num_tokens)
    return tables


def state(manager: BlockManager) -> object:
    """What a failed call must not change."""
    return (
        [{k: v.copy() if hasattr(v, "copy") else v for k, v in vars(pool).items()} for pool in manager.pools],
        [
            (s.num_tokens, s.num_prepared, [list(table.refs) for table in s.tables])
            for s in manager._sequences  # the tables of sequences that the caller may have dropped too
        ],
        manager.stats(),
    )
