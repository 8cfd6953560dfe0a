"""Products with quantised weights: integer dot products by blocks of 32 inputs, in NumPy and without cleverness.

A stored block is integers q, a scale and perhaps a minimum: weight = scale * q + minimum (ggml-common.h has the bits;
one scale serves 32 inputs, 16 in Q6_K). The input x is quantised too, by rows and blocks of 32:

    d = max|x| / 120        p = round(x * (120 / max|x|)), ties to even          all in float32

(120 and not 127, so that an implementation may add 4-bit weights to p in 8 bits.)

A block of a row that holds no magnitude of 2^-100 or more counts as zero; one with a NaN or an infinity has d = NaN.
The product of a row and an output is then the sum over blocks of

    (scale * d) * sum(q * p)  +  minimum * (d * sum(p))

where scale * d and d * sum(p) are rounded to float32, the integer sums are exact, and the sum over blocks is what an
implementation may round: in float64 here, in one fixed order of fused multiply-adds on the CPU.

An implementation may keep the scales and minima of 4-bit formats with a minimum as multiples of a unit (`in_units`):
that changes them by 2^-16 of the largest near them, at most, where 4 bits change a weight by 2^-5 of its block's span.

For a precise product (`interface.Operations.matmul`) x is quantised to 15 bits, of which two int8 are made: p as above
and r = round(128 * (x * (120 / max|x|) - p)). In the formula 128 * p + r then stands for p, and d / 128 for d.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.interface import QUANT_BLOCK, QUANT_PANEL, Array, WeightSource, segments

TINY = np.float32(2.0**-100)
TOP, FINE = np.float32(120), np.float32(128)


@dataclass(slots=True)
class QuantisedMatrix:
    """Weights [rows, cols] of one format: integers int64, scales and minima (None: no minimum) float32
    [rows, cols / group]."""

    rows: int
    cols: int
    dtype: str
    nbytes: int
    integers: Array
    scales: Array
    minima: Array | None

    def values(self) -> Array:
        """The weights in float32, as the format dequantises them: product, then sum, each rounded."""
        group = self.cols // self.scales.shape[1]
        out = self.integers.astype(np.float32) * np.repeat(self.scales, group, axis=1)
        return out if self.minima is None else out + np.repeat(self.minima, group, axis=1)

    def select(self, rows: slice) -> QuantisedMatrix:
        """Some of the outputs."""
        integers, minima = self.integers[rows], None if self.minima is None else self.minima[rows]
        return replace(self, rows=len(integers), integers=integers, scales=self.scales[rows], minima=minima)


def plain_outputs(rows: int, precise: bool, precise_from: int) -> int:
    """How many of a part's outputs, the first ones, are not precise: whole panels of those before `precise_from`."""
    if not precise or precise_from >= rows:
        return rows
    return max(0, precise_from) // QUANT_PANEL * QUANT_PANEL


def matrix(source: WeightSource) -> QuantisedMatrix:
    """Keep a weight's blocks. KernelError if the source has none."""
    rows, cols = source.shape
    raw = source.blocks(0, rows)
    if raw is None:
        raise KernelError(f"matrix: a source of {source.dtype} gives no rows of blocks")
    size, widen = _FORMATS[source.dtype]
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be infinite or NaN
        integers, scales, minima = widen(np.ascontiguousarray(raw).reshape(rows, raw.shape[1] // size, size))
    flat = [None if part is None else part.reshape(rows, part.size // max(1, rows)) for part in (scales, minima)]
    return QuantisedMatrix(
        rows, cols, source.dtype, raw.nbytes, integers.reshape(rows, cols).astype(np.int64), flat[0], flat[1]
    )


def quantise_rows(x: Array, precise: bool = False) -> tuple[Array, Array]:
    """(integers as int64 [T, K/32, 32], scales float32 [T, K/32]) of float32 [T, K]: int8, or 15 bits if `precise`."""
    blocks = np.ascontiguousarray(x).reshape(x.shape[0], x.shape[1] // QUANT_BLOCK, QUANT_BLOCK)
    largest = np.abs(blocks).max(axis=2)
    used = np.where(np.isfinite(largest) & (largest >= TINY), largest, np.float32(1))
    inverse = np.where(largest >= TINY, TOP / used, np.float32(0))
    scales = np.where(largest >= TINY, used / TOP, np.float32(0))
    scales = np.where(np.isfinite(largest), scales, np.float32(np.nan))
    finite = np.where(np.isfinite(scales)[..., None], blocks, np.float32(0))
    stretched = finite * inverse[..., None]
    integers = np.rint(stretched)
    if not precise:
        return integers.astype(np.int64), scales
    rest = np.rint((stretched - integers) * FINE)
    return (FINE * integers + rest).astype(np.int64), scales / FINE


def matmul(x: Array, weight: QuantisedMatrix, out: Array, bias: Array | None, precise: bool = False) -> None:
    """out = x @ weight.T + bias as described above. x [T, K], out [T, N], bias [N], all float32."""
    groups = weight.scales.shape[1]
    each = weight.cols // groups  # inputs that share a scale: 32 or 16
    integers = weight.integers.reshape(weight.rows, groups, each)
    values, scales = quantise_rows(x, precise)
    sums = (scales * values.sum(axis=2).astype(np.float32)).astype(np.float64)
    for row in range(x.shape[0]):
        dots = np.einsum("ngk,gk->ng", integers, values[row].reshape(groups, each))
        factors = weight.scales * np.repeat(scales[row], groups // scales.shape[1])
        total = (dots * factors.astype(np.float64)).sum(axis=1)
        if weight.minima is not None:
            total = total + (weight.minima.astype(np.float64) * sums[row]).sum(axis=1)
        out[row] = total if bias is None else total.astype(np.float32) + bias


def in_units(weight: QuantisedMatrix) -> tuple[QuantisedMatrix, Array]:
    """(The matrix with integers q - 8, scales and minima being whole numbers of 16 bits; units float32 [rows, blocks]).

    weight: of a format of UNIT_FORMATS. Its values are then unit * (scale * (q - 8) + minimum). A unit serves a segment
    of a row (`interface.segments`): the largest of its |scale| and |minimum + 8 * scale|, over 32767, in float32; both
    are multiplied by the unit's inverse (32767 over the largest) and rounded, ties to even. All are 0 if the largest
    is, and in a segment that holds NaN or an infinity, whose unit is NaN.

    The error of a weight is at most 4.5 units, of its scale 0.5. Against the product's other errors: a block's inputs,
    if normal, are off by 0.5 % of their deviation for their 8 bits; a scale that is R times smaller than the segment's
    largest is off by 0.0009 R % (root mean square). Up to R = 500 that is the less, however large the inputs that
    such a block is there for.
    """
    assert weight.minima is not None
    blocks = weight.scales.shape[1]
    length = max(1, -(-blocks // max(1, segments(blocks))))
    starts = np.arange(0, blocks, length)
    with np.errstate(invalid="ignore", over="ignore"):
        middles = weight.minima + np.float32(8) * weight.scales
        sizes = np.maximum(np.abs(weight.scales), np.abs(middles))
        largest = np.repeat(np.maximum.reduceat(sizes, starts, axis=1), length, axis=1)[:, :blocks]  # NaN wins
    used = np.isfinite(largest) & (largest > 0)
    inverse = np.where(used, np.float32(32767) / np.where(used, largest, np.float32(1)), np.float32(0))
    scales, minima = (np.rint(np.where(used, part, np.float32(0)) * inverse) for part in (weight.scales, middles))
    units = np.where(np.isfinite(largest), largest / np.float32(32767), np.float32(np.nan))
    return replace(weight, integers=weight.integers - 8, scales=scales, minima=minima), units


Widened = tuple[Array, Array, Array | None]


def _half(raw: Array, at: int) -> Array:
    """The float16 at byte `at` of each block, as float32 [..., 1]."""
    return raw[..., at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(raw: Array, run: int) -> Array:
    """Of each `run` bytes the low halves, then the high ones."""
    cut = raw.reshape(*raw.shape[:-1], raw.shape[-1] // run, run)
    return np.concatenate([cut & 15, cut >> 4], axis=-1).reshape(*raw.shape[:-1], 2 * raw.shape[-1]).astype(np.int64)


def _bits(raw: Array) -> Array:
    """Every bit, the lowest of a byte first."""
    return np.unpackbits(raw, axis=-1, bitorder="little").astype(np.int64)


def _q8_0(raw: Array) -> Widened:
    return raw[..., 2:].view(np.int8).astype(np.int64), _half(raw, 0), None


def _q4_0(raw: Array) -> Widened:
    return _nibbles(raw[..., 2:], 16) - 8, _half(raw, 0), None


def _q4_1(raw: Array) -> Widened:
    return _nibbles(raw[..., 4:], 16), _half(raw, 0), _half(raw, 2)


def _q5_0(raw: Array) -> Widened:
    return _nibbles(raw[..., 6:], 16) + 16 * _bits(raw[..., 2:6]) - 16, _half(raw, 0), None


def _q5_1(raw: Array) -> Widened:
    return _nibbles(raw[..., 8:], 16) + 16 * _bits(raw[..., 4:8]), _half(raw, 0), _half(raw, 2)


def _iq4_nl(raw: Array) -> Widened:
    levels = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
    return levels[_nibbles(raw[..., 2:], 16)], _half(raw, 0), None


def _k_scales(raw: Array) -> tuple[Array, Array]:
    """The 8 scales d * s and minima -m * t of a superblock: s, t of 6 bits in the 12 bytes after d and m."""
    a, b, c = (raw[..., at : at + 4].astype(np.int64) for at in (4, 8, 12))
    s = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1).astype(np.float32)
    t = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1).astype(np.float32)
    return _half(raw, 0) * s, -(_half(raw, 2) * t)


def _q4_k(raw: Array) -> Widened:
    return _nibbles(raw[..., 16:], 32), *_k_scales(raw)


def _q5_k(raw: Array) -> Widened:
    # bit g of byte j is the fifth bit of value j of group g
    fifth = np.moveaxis(_bits(raw[..., 16:48]).reshape(*raw.shape[:-1], 32, 8), -1, -2)
    return _nibbles(raw[..., 48:], 32) + 16 * fifth.reshape(*raw.shape[:-1], 256), *_k_scales(raw)


def _q6_k(raw: Array) -> Widened:
    pairs = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32).astype(np.int64)
    upper = pairs >> np.array([0, 2, 4, 6])[:, None] & 3  # of 32 values each
    integers = _nibbles(raw[..., :128], 64) + 16 * upper.reshape(*raw.shape[:-1], 256) - 32
    return integers, _half(raw, 208) * raw[..., 192:208].view(np.int8).astype(np.float32), None


# Name -> (bytes of a block or superblock, how it is taken apart: integers, scales, minima).
_FORMATS: dict[str, tuple[int, Callable[[Array], Widened]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "IQ4_NL": (18, _iq4_nl),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
