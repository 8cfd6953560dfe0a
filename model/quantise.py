"""Float weights narrowed to a block format (`--quantize`): ggml's rounding, bit for bit.

Each block of 32 values gets one float16 scale d. The rules are those of quantize_row_q8_0_ref and quantize_row_q4_0_ref
in ggml-quants.c, computed in float32; the result is what a GGUF converter would have written into a file.

    Q8_0    d = max|x| / 127;  q = x / d rounded half away from zero
    Q4_0    d = m / -8, m the value of largest magnitude;  q = min(15, trunc(x / d + 8.5)): m itself becomes -8
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupaged.kernels.interface import QUANT_BLOCK
from cupaged.model.quants_blocks import Bytes, Float32


def quantise(kind: str, values: Float32) -> Bytes:
    """float32 [rows, columns] as stored bytes uint8 [rows, row bytes] of `kind`, "Q8_0" or "Q4_0"."""
    rows, columns = values.shape
    blocks = values.reshape(rows, columns // QUANT_BLOCK, QUANT_BLOCK)
    # A value that is not finite makes its block NaN, as it would make the products of a float matrix.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        return _RULES[kind](blocks).reshape(rows, -1)


def _q8_0(blocks: Float32) -> Bytes:
    scale = np.abs(blocks).max(axis=-1, keepdims=True)
    scale /= np.float32(127)
    doubled = blocks * _inverse(scale)
    doubled += doubled
    halves = doubled.astype(np.int16)  # towards zero; twice 127 at most
    halves += halves > 0
    halves >>= 1  # half away from zero: 1 -> 1, -1 -> -1
    out = np.empty((*blocks.shape[:-1], 34), np.uint8)
    out[..., :2] = _halves(scale)
    out[..., 2:] = halves.astype(np.int8).view(np.uint8)
    return out


def _q4_0(blocks: Float32) -> Bytes:
    largest = np.abs(blocks).argmax(axis=-1, keepdims=True)
    scale = np.take_along_axis(blocks, largest, axis=-1) / np.float32(-8)
    shifted = blocks * _inverse(scale)
    shifted += np.float32(8.5)
    q = shifted.astype(np.uint8)  # towards zero; x / d is never below -8
    np.minimum(q, np.uint8(15), out=q)
    out = np.empty((*blocks.shape[:-1], 18), np.uint8)
    out[..., :2] = _halves(scale)
    out[..., 2:] = q[..., :16] | q[..., 16:] << np.uint8(4)
    return out


def _inverse(scale: Float32) -> Float32:
    inverse: Float32 = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    return inverse


def _halves(scale: Float32) -> Bytes:
    return scale.astype("<f2").view(np.uint8)


_RULES: dict[str, Callable[[Float32], Bytes]] = {"Q8_0": _q8_0, "Q4_0": _q4_0}
QUANTISED_AS = tuple(_RULES)
