"""What the tests of quantised weights share: rows of every format, and their product with all roundings written out."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
from gguf.quants import quantize

from cupaged.kernels.interface import PACKED_BLOCK_BYTES, UNIT_FORMATS, segments
from cupaged.kernels.reference.quantised import QuantisedMatrix, in_units, quantise_rows
from cupaged.model.quants import FORMATS, dequantise

KINDS = tuple(PACKED_BLOCK_BYTES)
WRITABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # the package quantises to these
SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}


class BlockSource:
    """Rows of one format as a file would give them."""

    def __init__(self, kind: str, raw: np.ndarray) -> None:
        self.dtype, self.raw = kind, raw
        self.shape = (len(raw), raw.shape[1] // FORMATS[kind].block_bytes * FORMATS[kind].block)

    def float32(self, start: int, stop: int) -> np.ndarray:
        return dequantise(self.dtype, self.raw[start:stop])

    def blocks(self, start: int, stop: int) -> np.ndarray:
        return self.raw[start:stop]

    @property
    def parts(self) -> tuple[BlockSource]:
        return (self,)


class JoinedSource:
    """Several sources, rows in order."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])  # type: ignore[attr-defined]
        self.dtype = "+".join(dict.fromkeys(part.dtype for part in parts))  # type: ignore[attr-defined]

    def float32(self, start: int, stop: int) -> np.ndarray:
        whole = [part.float32(0, part.shape[0]) for part in self.parts]  # type: ignore[attr-defined]
        return np.concatenate(whole)[start:stop]

    def blocks(self, start: int, stop: int) -> None:
        return None


def blocks_of(kind: str, rows: int, cols: int, seed: int = 0) -> BlockSource:
    """Normal weights where the format can be written, else blocks of random bits with scales around 0.01."""
    rng = np.random.default_rng(seed)
    if kind in WRITABLE:
        values = rng.standard_normal((rows, cols), np.float32) * np.float32(0.1)
        return BlockSource(kind, quantize(values, gguf.GGMLQuantizationType[kind]))
    size, block = FORMATS[kind].block_bytes, FORMATS[kind].block
    raw = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        set_half(raw, at, (0.005 + 0.01 * rng.random(raw.shape[:2])) * rng.choice([-1, 1], raw.shape[:2]))
    return BlockSource(kind, raw.reshape(rows, -1))


def set_half(raw: np.ndarray, at: int, values: np.ndarray | float) -> None:
    """The float16 at byte `at` of each block of uint8 [rows, blocks, bytes]."""
    halves = np.broadcast_to(np.asarray(values, np.float16), raw.shape[:2])
    raw[..., at : at + 2] = np.ascontiguousarray(halves)[..., None].view(np.uint8)


def columns_for(kind: str, blocks: int) -> int:
    """The least number of columns of at least so many blocks of 32 that the format can have."""
    return -(-32 * blocks // FORMATS[kind].block) * FORMATS[kind].block


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of float32 arrays, rounded once (Boldo & Melquiond 2008: the sum in float64 is rounded to odd)."""
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)  # the product is exact
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # of the sum, exactly (Knuth's TwoSum)
    bits = np.ascontiguousarray(total).view(np.int64).copy()
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    bits[inexact] += np.where((error > 0) == (total > 0), 1, -1)[inexact]
    return bits.view(np.float64).astype(np.float32)


def product_by_the_chain(
    x: np.ndarray, weight: QuantisedMatrix, bias: np.ndarray | None = None, precise: bool = False
) -> np.ndarray:
    """What the CPU kernels compute, every float32 rounding in its place: see kernels/cpu/quant_tile.py."""
    if weight.dtype in UNIT_FORMATS:
        return product_in_units(x, weight, bias, precise)
    values, scales = quantise_rows(x, precise)
    parts = weight.scales.shape[1] // scales.shape[1]
    each = 32 // parts
    out = np.zeros((len(x), weight.rows), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = scales * values.sum(axis=2).astype(np.float32)
        for block in range(scales.shape[1]):
            for part in range(parts):
                places = slice(32 * block + each * part, 32 * block + each * (part + 1))
                dots = values[:, block, each * part : each * (part + 1)] @ weight.integers[:, places].T
                factors = scales[:, block, None] * weight.scales[None, :, parts * block + part]
                out = fma(dots.astype(np.float32), factors, out)
            if weight.minima is not None:
                shape = out.shape
                out = fma(
                    np.broadcast_to(weight.minima[None, :, block], shape),
                    np.broadcast_to(sums[:, block, None], shape),
                    out,
                )
        return out if bias is None else out + bias


def as_kept(weight: QuantisedMatrix) -> QuantisedMatrix:
    """The weight with the scales and minima that the CPU keeps."""
    if weight.dtype not in UNIT_FORMATS:
        return weight
    whole, units = in_units(weight)
    assert whole.minima is not None
    return replace(whole, scales=whole.scales * units, minima=whole.minima * units)


def product_in_units(
    x: np.ndarray, weight: QuantisedMatrix, bias: np.ndarray | None = None, precise: bool = False
) -> np.ndarray:
    """The same of formats whose scales and minima are multiples of a unit."""
    values, scales = quantise_rows(x, precise)
    whole, units = in_units(weight)
    blocks = scales.shape[1]
    length = -(-blocks // segments(blocks))
    out = np.zeros((len(x), weight.rows), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        totals = values.sum(axis=2)
        sums = scales * totals.astype(np.float32)
        for first in range(0, blocks, length):
            part = np.zeros_like(out)
            for block in range(first, min(blocks, first + length)):
                dots = values[:, block] @ whole.integers[:, 32 * block : 32 * block + 32].T
                scale, minimum = whole.scales[None, :, block], whole.minima[None, :, block]
                if precise:
                    part = fma(dots.astype(np.float32), scales[:, block, None] * scale, part)
                    part = fma(
                        np.broadcast_to(minimum, part.shape), np.broadcast_to(sums[:, block, None], part.shape), part
                    )
                else:
                    both = dots * scale.astype(np.int64) + totals[:, block, None] * minimum.astype(np.int64)
                    assert np.abs(both).max() < 2**31
                    part = fma(both.astype(np.float32), np.broadcast_to(scales[:, block, None], part.shape), part)
            out = fma(part, np.broadcast_to(units[None, :, first], out.shape), out)
    return out if bias is None else out + bias
