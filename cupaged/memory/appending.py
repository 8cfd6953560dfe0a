"""Where the next token of a sequence goes: into a block of its own, or into one that must be copied first."""

from __future__ import annotations

from collections.abc import Sequence

from cupaged.errors import BlockError
from cupaged.memory.blockref import Pool, pool_of
from cupaged.memory.pool import BlockPool
from cupaged.memory.sequence import SequenceTables
from cupaged.memory.table import BlockTable


def must_copy(pool: BlockPool, table: BlockTable, num_tokens: int) -> bool:
    """Whether token `num_tokens` goes into a block that other sequences use too. pool: the device's.

    That can only be a partly filled last block: a full one is not written again, and one without tokens is never
    shared. All users of a partly filled shared block hold equally many tokens in it, because it is not written while
    shared. BlockError for a block on the host.
    """
    index, offset = divmod(num_tokens, table.block_size)
    if offset == 0:
        return False
    ref = table.refs[index]
    if pool_of(ref) is not Pool.DEVICE:
        raise BlockError(f"position {num_tokens} is in a block on the host: swap_in comes before writing")
    return pool.count(ref) > 1


def next_slot_is_own(pools: Sequence[BlockPool], tables: SequenceTables) -> bool:
    """Whether the tables list the block of the next token in every KV group, on the device, and nobody shares it.

    pools: the device's. The usual case of decoding, without an exception and a list on the way.
    """
    for pool, table in zip(pools, tables.tables, strict=True):
        index = tables.num_tokens // table.block_size
        if index >= len(table.refs) or not pool.used_once(table.refs[index]):
            return False
    return True
