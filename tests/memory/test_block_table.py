"""BlockTable and its arithmetic."""

import pytest

from cupaged.errors import BlockError, CapacityError, OptionError
from cupaged.memory import NO_BLOCK, BlockTable, blocks_for, distinct_blocks, last_block_fill


def test_A01_exact_multiples() -> None:
    assert (blocks_for(8, 4), last_block_fill(8, 4)) == (2, 4)
    assert (blocks_for(0, 4), last_block_fill(0, 4)) == (0, 0)
    assert [blocks_for(n, 16) for n in (1, 15, 16, 17, 32, 33)] == [1, 1, 1, 2, 2, 3]
    assert [last_block_fill(n, 16) for n in (1, 15, 16, 17, 32, 33)] == [1, 15, 16, 1, 16, 1]


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 100])
def test_A01_blocks_and_fill_give_the_tokens_back(block_size: int) -> None:
    for n in range(1, 4 * block_size + 2):
        assert (blocks_for(n, block_size) - 1) * block_size + last_block_fill(n, block_size) == n
        assert 1 <= last_block_fill(n, block_size) <= block_size


def test_A03_a_table_is_never_longer_than_its_row() -> None:
    table = BlockTable(block_size=16, max_blocks=blocks_for(64, 16))
    for ref in (7, 0, 4, 1):
        table.append_block(ref)
    with pytest.raises(CapacityError, match="block 5 for a block table of at most 4"):
        table.append_block(9)
    assert table.refs == [7, 0, 4, 1]
    assert (table.num_blocks, table.capacity) == (4, 64)


def test_locate() -> None:
    table = BlockTable(block_size=4)
    for ref in (7, 0, 4):
        table.append_block(ref)
    expected = [(ref, offset) for ref in (7, 0, 4) for offset in range(4)]
    assert [table.locate(position) for position in range(12)] == expected
    for position in (-1, 12):
        with pytest.raises(BlockError, match=f"position {position} is outside .* 12 positions"):
            table.locate(position)


def test_locate_in_a_dropped_block() -> None:
    table = BlockTable(block_size=4)
    table.append_block(7)
    table.append_block(5)
    table.refs[0] = NO_BLOCK
    with pytest.raises(BlockError, match="position 3 is in a block that the table no longer holds"):
        table.locate(3)
    assert table.locate(4) == (5, 0)
    assert (table.num_blocks, table.capacity) == (2, 8)


def test_a_table_grows_by_blocks_only() -> None:
    table = BlockTable(block_size=4)
    with pytest.raises(BlockError, match="-1 refers to no block"):
        table.append_block(NO_BLOCK)
    assert table.num_blocks == 0


def test_distinct_blocks() -> None:
    assert distinct_blocks([NO_BLOCK, 5, 3, 5, NO_BLOCK, 9]) == [5, 3, 9]


@pytest.mark.parametrize(("block_size", "max_blocks"), [(0, None), (-4, None), (4, 0)])
def test_bad_sizes(block_size: int, max_blocks: int | None) -> None:
    with pytest.raises(OptionError, match="at least 1"):
        BlockTable(block_size, max_blocks=max_blocks)
