"""Block references: bits, limits, and the same numbers as the kernels have."""

import pytest

from cupaged.errors import BlockError
from cupaged.kernels import interface
from cupaged.memory import MAX_FRAMES, NO_BLOCK, Format, Pool, blockref, format_of, frame_of, make_ref, pool_of


@pytest.mark.parametrize("name", ["FRAME_BITS", "FRAME_MASK", "POOL_SHIFT", "POOL_MASK", "FORMAT_SHIFT", "NO_BLOCK"])
def test_same_numbers_as_kernels(name: str) -> None:
    assert getattr(blockref, name) == getattr(interface, name)


@pytest.mark.parametrize("frame", [0, 1, 131072, MAX_FRAMES - 1])
@pytest.mark.parametrize("pool", list(Pool))
@pytest.mark.parametrize("format", list(Format))
def test_reference_takes_apart_as_kernels_do(frame: int, pool: Pool, format: Format) -> None:
    ref = make_ref(frame, pool, format)
    assert 0 <= ref < 2**31
    assert (frame_of(ref), pool_of(ref), format_of(ref)) == (frame, pool, format)
    assert ref & interface.FRAME_MASK == frame
    assert ref >> interface.POOL_SHIFT & interface.POOL_MASK == pool
    assert ref >> interface.FORMAT_SHIFT == format


def test_plain_device_reference_is_its_frame() -> None:
    assert make_ref(7) == 7
    assert make_ref(7, Pool.PINNED_HOST) == 7 + (1 << 28)
    assert make_ref(7, format=Format.PACKED) == 7 + (1 << 30)


@pytest.mark.parametrize("frame", [-1, MAX_FRAMES])
def test_frame_out_of_range(frame: int) -> None:
    with pytest.raises(BlockError, match=f"frame {frame} .* 0 to 268435455"):
        make_ref(frame)


@pytest.mark.parametrize("ref", [NO_BLOCK, -(2**31), 2**31])
@pytest.mark.parametrize("part", [frame_of, pool_of, format_of])
def test_no_block_has_no_parts(ref: int, part) -> None:
    with pytest.raises(BlockError, match="no block"):
        part(ref)


@pytest.mark.parametrize("number", [2, 3])
def test_pools_that_do_not_exist(number: int) -> None:
    with pytest.raises(BlockError, match=f"names pool {number}"):
        pool_of(number << 28 | 5)
