"""What a KV group is made of, and the memory of one sequence in all of them."""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.memory.table import BlockTable


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Size of one KV group: device blocks, tokens per block, the most blocks that one table may list, host blocks.

    window: a token sees so many, itself included, so that older blocks can go; None: all before it.
    """

    num_blocks: int
    block_size: int
    max_blocks: int | None = None
    host_blocks: int = 0
    window: int | None = None

    def first_seen(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(eq=False, slots=True)
class SequenceTables:
    """The memory of one sequence: a block table per KV group. Made, changed and freed by its BlockManager alone.

    `num_tokens` tokens are stored; slots of positions below `num_prepared` (>= num_tokens) may be used.
    """

    tables: tuple[BlockTable, ...]
    num_tokens: int = 0
    num_prepared: int = 0
