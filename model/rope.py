"""Rotary embedding tables (Su et al. 2021, "RoFormer", eq. 15 and 34), as float32 rows of cosines and sines.

Frequencies and angles are float64: at position 15,962 a half-precision angle is off by whole radians, and even a
float32 product loses three digits. Only the finished cosine and sine are rounded to float32.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cupaged.model.config import RopeConfig

# Rows are computed in whole blocks aligned at position 0. A vectorised sine may round differently in the body and at
# the tail of its loop; with fixed blocks a row always lies at the same place of an equal array, so its bits depend on
# its position alone.
ROWS_PER_BLOCK = 1024


def inverse_frequencies(rope: RopeConfig) -> npt.NDArray[np.float64]:
    """Angle per position of each pair, float64 [rotary_dim / 2].

    default: theta^(-2i/R).
    linear: divided by `factor` (position interpolation, Chen et al. 2023).
    llama3: by wavelength w = 2 pi / f: as is below original/high_freq_factor, divided by `factor` above
    original/low_freq_factor, blended linearly in original/w in between (Llama 3.1; Transformers' modeling_rope_utils).
    divisors: divided pair by pair (ggml's frequency factors).
    """
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain = np.array([rope.theta**-exponent for exponent in exponents.tolist()], dtype=np.float64)
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "divisors":
        return plain / np.array(rope.divisors, dtype=np.float64)
    if rope.scaling == "llama3":
        return np.array([_llama3(frequency, rope) for frequency in plain.tolist()], dtype=np.float64)
    return plain


def _llama3(frequency: float, rope: RopeConfig) -> float:
    wavelength = 2 * math.pi / frequency
    original = rope.original_max_position
    if wavelength < original / rope.high_freq_factor:
        return frequency
    if wavelength > original / rope.low_freq_factor:
        return frequency / rope.factor
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - blend) * frequency / rope.factor + blend * frequency


def rope_rows(rope: RopeConfig, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Table rows of positions start..stop, float32 [stop - start, R]: cosines in columns 0..R/2-1, then sines.

    A row's bits depend on its position alone, however the range is cut.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"rope_rows: positions {start}..{stop}; expected 0 <= start <= stop")
    half = rope.rotary_dim // 2
    frequencies = inverse_frequencies(rope)
    out = np.empty((stop - start, 2 * half), dtype=np.float32)
    for first in range(start // ROWS_PER_BLOCK * ROWS_PER_BLOCK, stop, ROWS_PER_BLOCK):
        angles = np.outer(np.arange(first, first + ROWS_PER_BLOCK, dtype=np.float64), frequencies)
        low, high = max(start, first), min(stop, first + ROWS_PER_BLOCK)
        out[low - start : high - start, :half] = np.cos(angles)[low - first : high - first]
        out[low - start : high - start, half:] = np.sin(angles)[low - first : high - first]
    return out
