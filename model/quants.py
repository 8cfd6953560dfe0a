"""Weight formats: how a row of stored bytes becomes float32.

Block formats are those of ggml (ggml-common.h and ggml-quants.c): a row is cut into blocks of 32 values that share a
float16 scale d (and, for Q4_1, a float16 minimum m).

    Q8_0  34 bytes: d, then 32 int8 q                    value = d * q
    Q4_1  20 bytes: d, m, then 16 bytes of 4-bit q       value = d * q + m; byte j holds q[j] low and q[j+16] high

Results are bit-equal to the `gguf` package's `dequantize`: product, then sum, each rounded once to float32.
Deliberately absent: narrowing, and every format that no kernel or test of ours covers; those are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupaged.errors import UnsupportedModelError

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]


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


def _q8_0(raw: Bytes) -> Float32:
    scale = raw[..., :2].copy().view("<f2").astype(np.float32)
    return raw[..., 2:].view(np.int8).astype(np.float32) * scale


def _q4_1(raw: Bytes) -> Float32:
    head = raw[..., :4].copy().view("<f2").astype(np.float32)
    packed = raw[..., 4:]
    out = np.empty((*raw.shape[:-1], 32), dtype=np.float32)
    out[..., :16] = packed & np.uint8(15)
    out[..., 16:] = packed >> np.uint8(4)
    out *= head[..., :1]
    out += head[..., 1:]
    return out


FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        Format("F32", 1, 4, _f32),
        Format("F16", 1, 2, _f16),
        Format("BF16", 1, 2, _bf16),
        Format("Q8_0", 32, 34, _q8_0),
        Format("Q4_1", 32, 20, _q4_1),
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
    return kind.widen(rows.reshape(rows.shape[0], blocks, kind.block_bytes)).reshape(rows.shape[0], blocks * kind.block)
