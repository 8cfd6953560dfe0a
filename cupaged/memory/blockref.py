"""Block references: page-table entries of the KV cache, plain ints that fit an int32.

::

    bit 31      sign: set means no block (NO_BLOCK, -1)
    bit 30      format: 0 plain, 1 packed
    bits 28-29  pool: 0 device, 1 pinned host; 2 and 3 are not given out
    bits 0-27   frame: the block's place in its pool

A kernel resolves pool and format once per block, so that one table may list blocks of several kinds. The same numbers
stand in `cupaged.kernels.interface`; they are written twice because memory imports nothing, and a test compares them.
"""

from __future__ import annotations

from enum import IntEnum

from cupaged.errors import BlockError

FRAME_BITS = 28
MAX_FRAMES = 1 << FRAME_BITS
FRAME_MASK = MAX_FRAMES - 1
POOL_SHIFT = FRAME_BITS
POOL_MASK = 3
FORMAT_SHIFT = 30
NO_BLOCK = -1


class Pool(IntEnum):
    """Where a frame lies."""

    DEVICE = 0
    PINNED_HOST = 1


class Format(IntEnum):
    """How a frame's K/V are stored: as the cache's dtype says, or packed to fewer bits."""

    PLAIN = 0
    PACKED = 1


def make_ref(frame: int, pool: Pool = Pool.DEVICE, format: Format = Format.PLAIN) -> int:
    """The reference of `frame` (0 .. MAX_FRAMES - 1) in `pool`. BlockError if the frame does not fit its 28 bits."""
    if not 0 <= frame < MAX_FRAMES:
        raise BlockError(f"frame {frame} does not fit a block reference: 0 to {MAX_FRAMES - 1} are allowed")
    return format << FORMAT_SHIFT | pool << POOL_SHIFT | frame


def _checked(ref: int) -> int:
    if not 0 <= ref < 1 << 31:
        raise BlockError(f"{ref} refers to no block")
    return ref


def frame_of(ref: int) -> int:
    """The frame inside the pool. BlockError for NO_BLOCK and anything else that is no reference."""
    return _checked(ref) & FRAME_MASK


def pool_of(ref: int) -> Pool:
    """The pool a reference points into. BlockError for NO_BLOCK and for pool numbers that do not exist."""
    number = _checked(ref) >> POOL_SHIFT & POOL_MASK
    if number > Pool.PINNED_HOST:
        raise BlockError(f"block reference {ref:#x} names pool {number}; pools 0 and 1 exist")
    return Pool(number)


def format_of(ref: int) -> Format:
    """Whether the block is plain or packed. BlockError for NO_BLOCK."""
    return Format(_checked(ref) >> FORMAT_SHIFT)
