"""bfloat16 in NumPy, which has no such type: a bfloat16 is the upper half of a float32, kept as uint16."""

from __future__ import annotations

import numpy as np

from cupaged.kernels.interface import Array


def to_float32(bits: Array) -> Array:
    """Widen, exactly. bits: uint16 of any shape; gives float32 of that shape (0x3F80 -> 1.0, 0x7F80 -> inf)."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(values: Array) -> Array:
    """Narrow to the nearest bfloat16, ties to even. values: float32 of any shape; gives uint16 of that shape.

    Adding 0x7FFF plus the lowest kept bit carries into the kept half exactly when the dropped half is above one half,
    or equal to it with an odd kept bit (the rounding of IEEE 754, which also takes the largest finite values to
    infinity). A NaN might carry into a zero or lose its payload that way: it is cut instead, its quiet bit set.
    """
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    kept = bits >> np.uint32(16)
    rounded = (bits + (np.uint32(0x7FFF) + (kept & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), kept | np.uint32(0x40), rounded).astype(np.uint16)
