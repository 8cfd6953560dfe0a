"""KV groups with a window: a token sees the last W positions only, so older blocks can go, and need not be found again.

A table keeps its entries, NO_BLOCK where a block is gone: those are always the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from cupaged.memory.blockref import NO_BLOCK
from cupaged.memory.prefix import Match
from cupaged.memory.sequence import GroupSpec, SequenceTables
from cupaged.memory.table import BlockTable, blocks_for


def give_up_passed(spec: GroupSpec, table: BlockTable, num_tokens: int) -> list[int]:
    """Take the blocks that no token from position `num_tokens` on sees out of a table; returns them."""
    passed = spec.first_seen(num_tokens) // spec.block_size
    first = passed
    while first and table.refs[first - 1] != NO_BLOCK:
        first -= 1
    gone = table.refs[first:passed]
    table.refs[first:passed] = [NO_BLOCK] * len(gone)
    return gone


def hold_window(groups: Sequence[GroupSpec], tables: SequenceTables, num_tokens: int) -> bool:
    """Whether the tables have all blocks that the token at position `num_tokens` sees of those before it."""
    return all(
        NO_BLOCK
        not in table.refs[spec.first_seen(num_tokens) // spec.block_size : blocks_for(num_tokens, spec.block_size)]
        for spec, table in zip(groups, tables.tables, strict=True)
    )


def blocks_of_match(spec: GroupSpec, group: int, match: Match) -> list[int]:
    """See `BlockManager.shared_blocks`."""
    refs = [ref for node in match.nodes for ref in node.blocks[group]]
    if match.partial is not None:
        refs += match.partial.blocks[group][: match.partial_tokens // spec.block_size]
    passed = min(spec.first_seen(match.num_tokens) // spec.block_size, len(refs))
    return [NO_BLOCK] * passed + refs[passed:]
