"""Block tables: which block holds which positions of a sequence, for the layers of one KV group."""

from __future__ import annotations

from collections.abc import Iterable

from cupaged.errors import BlockError, CapacityError, OptionError
from cupaged.memory.blockref import NO_BLOCK


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: ceil(num_tokens / block_size); 0 tokens take none."""
    return -(-num_tokens // block_size)


def last_block_fill(num_tokens: int, block_size: int) -> int:
    """Tokens in the last of `blocks_for(num_tokens)` blocks: 1 .. block_size, and 0 only where there is no block.

    Not ``num_tokens % block_size``, which calls a full last block empty.
    """
    return (num_tokens - 1) % block_size + 1 if num_tokens else 0


def distinct_blocks(refs: Iterable[int]) -> list[int]:
    """Each block of a table once, in order of first appearance, without NO_BLOCK.

    A table may list a block twice (a sliding window that reuses its blocks) or have holes (blocks that slid out of the
    window); reference counts are kept per distinct block.
    """
    return [ref for ref in dict.fromkeys(refs) if ref != NO_BLOCK]


class BlockTable:
    """The page table of one sequence in one KV group: entry i holds positions i*block_size .. (i+1)*block_size - 1.

    `refs` is the row that kernels read (as int32); it is never longer than `max_blocks`, the width of that row. Entries
    may be NO_BLOCK: positions there are no longer kept. The table owns no counts: `BlockPool` does.
    """

    __slots__ = ("block_size", "group", "max_blocks", "refs")

    def __init__(self, block_size: int, group: int = 0, max_blocks: int | None = None) -> None:
        if block_size < 1:
            raise OptionError(f"block_size is {block_size}: at least 1 token is needed")
        if max_blocks is not None and max_blocks < 1:
            raise OptionError(f"max_blocks is {max_blocks}: at least 1 block is needed, or None for no limit")
        self.block_size = block_size
        self.group = group
        self.max_blocks = max_blocks
        self.refs: list[int] = []

    @property
    def num_blocks(self) -> int:
        """Entries of the table, NO_BLOCK ones included."""
        return len(self.refs)

    @property
    def capacity(self) -> int:
        """Tokens that the table's entries span."""
        return len(self.refs) * self.block_size

    def append_block(self, ref: int) -> None:
        """Add a block behind the last one. CapacityError when the table holds `max_blocks`; BlockError for NO_BLOCK."""
        if self.max_blocks is not None and len(self.refs) >= self.max_blocks:
            raise CapacityError(f"block {len(self.refs) + 1} for a block table of at most {self.max_blocks}")
        if ref < 0:
            raise BlockError(f"{ref} refers to no block: a block table grows by blocks only")
        self.refs.append(ref)

    def locate(self, position: int) -> tuple[int, int]:
        """(block reference, offset in the block) of a position. BlockError outside the table or in a dropped block."""
        if not 0 <= position < self.capacity:
            raise BlockError(f"position {position} is outside a block table of {self.capacity} positions")
        index, offset = divmod(position, self.block_size)
        ref = self.refs[index]
        if ref == NO_BLOCK:
            raise BlockError(f"position {position} is in a block that the table no longer holds")
        return ref, offset
