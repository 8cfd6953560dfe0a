"""Weight formats: how a row of stored bytes becomes float32.

A row of a block format is cut into blocks of 32 or 256 values that share their scales; quants_blocks.py knows each.
Deliberately absent: narrowing, and formats that models are hardly ever shipped in (1- to 3-bit codebooks, ternary,
FP4); those are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupaged.errors import UnsupportedModelError
from cupaged.model import quants_blocks
from cupaged.model.quants_blocks import Bytes
from cupaged.model.quants_blocks import Float32 as Float32


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format: `block` values take `block_bytes` bytes; `widen` turns uint8 [n, blocks, block_bytes] into
    float32 [n, blocks, block]."""

    name: str
    block: int
    block_bytes: int
    widen: Callable[[Bytes], Float32]

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values; columns is a multiple of `block` (readers check it)."""
        return columns // self.block * self.block_bytes


def _f32(raw: Bytes) -> Float32:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: Bytes) -> Float32:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: Bytes) -> Float32:
    # bfloat16 is the upper half of a float32, so widening is a shift; infinities and NaN payloads stay as they are.
    return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        Format("F32", 1, 4, _f32),
        Format("F16", 1, 2, _f16),
        Format("BF16", 1, 2, _bf16),
        Format("Q8_0", 32, 34, quants_blocks.q8_0),
        Format("Q4_0", 32, 18, quants_blocks.q4_0),
        Format("Q4_1", 32, 20, quants_blocks.q4_1),
        Format("Q5_0", 32, 22, quants_blocks.q5_0),
        Format("Q5_1", 32, 24, quants_blocks.q5_1),
        Format("IQ4_NL", 32, 18, quants_blocks.iq4_nl),
        Format("Q2_K", 256, 84, quants_blocks.q2_k),
        Format("Q3_K", 256, 110, quants_blocks.q3_k),
        Format("Q4_K", 256, 144, quants_blocks.q4_k),
        Format("Q5_K", 256, 176, quants_blocks.q5_k),
        Format("Q6_K", 256, 210, quants_blocks.q6_k),
        Format("IQ4_XS", 256, 136, quants_blocks.iq4_xs),
    )
}


def format_of(name: str, where: str) -> Format:
    """The format called `name` in a file; UnsupportedModelError, naming `where`, if it is not implemented."""
    found = FORMATS.get(name)
    if found is None:
        raise UnsupportedModelError(f"{where}: weight type {name} is not supported; supported: {', '.join(FORMATS)}")
    return found


def dequantise(name: str, raw: Any) -> Float32:
    """Rows of stored bytes as a new float32 array.

    name: a key of FORMATS; raw: uint8 [rows, row bytes], C-contiguous rows. Returns [rows, columns].
    UnsupportedModelError for another format.
    """
    kind = format_of(name, "dequantise")
    rows = np.ascontiguousarray(raw)
    blocks = rows.shape[1] // kind.block_bytes
    if kind.block == 1:
        return kind.widen(rows)
    cut = rows.reshape(rows.shape[0], blocks, kind.block_bytes)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be infinite or NaN: so are its values
        return kind.widen(cut).reshape(rows.shape[0], blocks * kind.block)
