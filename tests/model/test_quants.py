"""Dequantisation is bit-equal to the public package's, whole or by row ranges."""

from __future__ import annotations

import gguf as public
import numpy as np
import pytest

from cupaged.errors import UnsupportedModelError
from cupaged.model.quants import FORMATS, dequantise
from cupaged.model.weights import StoredWeight, UnpermutedHeads, concat_rows

ROWS, COLUMNS = 13, 512
BLOCK_FORMATS = [name for name, kind in FORMATS.items() if kind.block > 1]
# Where a block's float16 numbers lie: a scale, and perhaps a minimum.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
}


def blocks(name: str, rows: int = ROWS, columns: int = COLUMNS, seed: int = 0, scale: float = 3) -> np.ndarray:
    """Rows of random bits of a format, uint8 [rows, blocks, block bytes]; the float16 numbers are finite."""
    rng = np.random.default_rng(seed)
    kind = FORMATS[name]
    raw = rng.integers(0, 256, (rows, columns // kind.block, kind.block_bytes), dtype=np.uint8)
    for at in HALVES.get(name, ()):
        numbers = (rng.standard_normal((*raw.shape[:2], 1)) * scale).astype(np.float16)
        raw[..., at : at + 2] = numbers.view(np.uint8)
    return raw


def stored(name: str, seed: int = 0) -> np.ndarray:
    return blocks(name, seed=seed).reshape(ROWS, -1)


def same_bits(name: str, raw: np.ndarray) -> np.ndarray:
    """Compare with the public package as bits: the sign of zero and NaN payloads count. Returns the values."""
    with np.errstate(all="ignore"):
        theirs = np.ascontiguousarray(public.dequantize(raw, public.GGMLQuantizationType[name]))
    ours = dequantise(name, raw)
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    different = ours.view(np.uint32) != theirs.view(np.uint32)
    # Where an infinite product meets a NaN minimum, which of the two NaN survives is the processor's choice.
    assert not (different & ~(np.isnan(ours) & np.isnan(theirs))).any()
    return ours


@pytest.mark.parametrize("name", FORMATS)
def test_dequantisation_is_bit_equal_to_the_public_package(name: str) -> None:
    assert same_bits(name, stored(name)).shape == (ROWS, COLUMNS)


def test_every_block_format_is_compared() -> None:
    assert list(HALVES) == BLOCK_FORMATS
    assert {FORMATS[name].block_bytes for name in FORMATS} == {
        public.GGML_QUANT_SIZES[public.GGMLQuantizationType[name]][1] for name in FORMATS
    }


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_byte_at_every_place_of_a_block_is_read_as_the_public_package_reads_it(name: str) -> None:
    """Row r has byte r everywhere but in one place of each block, where it has 255 - r; the scales are finite."""
    kind = FORMATS[name]
    raw = np.repeat(np.arange(256, dtype=np.uint8)[:, None, None], kind.block_bytes, axis=2)
    raw = np.ascontiguousarray(np.repeat(raw, kind.block_bytes, axis=1))
    for place in range(kind.block_bytes):
        raw[:, place, place] = np.arange(256)[::-1]
    for at in HALVES[name]:
        raw[..., at : at + 2] = np.float16(0.37).reshape(1).view(np.uint8)
    values = same_bits(name, raw.reshape(256, -1))
    assert np.isfinite(values).all()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("scale", [0.0, -0.0, 6e-8, 65504.0, -65504.0, np.inf, -np.inf, np.nan])
def test_extreme_scales_and_empty_blocks(name: str, scale: float) -> None:
    raw = blocks(name)
    for at in HALVES[name]:
        raw[..., at : at + 2] = np.float16(scale).reshape(1).view(np.uint8)
    raw[0] = 0
    assert not same_bits(name, raw.reshape(ROWS, -1))[0].any()


@pytest.mark.parametrize("name", FORMATS)
def test_row_ranges_give_the_same_bits(name: str) -> None:
    raw = stored(name)
    weight = StoredWeight("w", (ROWS, COLUMNS), name, raw)
    whole = dequantise(name, raw)
    for start, stop in ((0, ROWS), (0, 0), (3, 4), (5, ROWS), (ROWS, ROWS)):
        part = weight.float32(start, stop)
        assert part.shape == (stop - start, COLUMNS)
        assert part.tobytes() == whole[start:stop].tobytes()
    with pytest.raises(IndexError, match=r"3\.\.14"):
        weight.float32(3, 14)


def test_K20_bfloat16_bits_widen_exactly() -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0xFF80, 0x0001, 0x8000, 0x7FC1], dtype="<u2")
    values = dequantise("BF16", bits.view(np.uint8).reshape(1, -1))[0]
    assert values[:4].tolist() == [1.0, -2.0, np.inf, -np.inf]
    assert values.view(np.uint32).tolist() == [int(b) << 16 for b in bits]


def test_an_unsupported_format_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"IQ2_XS.*supported: F32, F16, BF16, Q8_0, Q4_0, "):
        dequantise("IQ2_XS", np.zeros((1, 74), np.uint8))


def test_vectors_are_read_by_elements() -> None:
    values = np.arange(10, dtype=np.float32)
    weight = StoredWeight("b", (10,), "F32", values.view(np.uint8).reshape(1, -1))
    assert weight.float32(3, 6).tolist() == [3.0, 4.0, 5.0]
    assert weight.float32(0, 0).shape == (0,)


def test_M06_rows_of_a_permuted_head_come_back_in_order() -> None:
    # Head of 8 rows: the file's order is 0,4,1,5,2,6,3,7; the second head the same, eight further.
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    file_rows = np.array([head * 8 + row for head in range(2) for row in order], dtype=np.float32)
    matrix = np.repeat(file_rows[:, None], 3, axis=1)
    source = UnpermutedHeads(StoredWeight("q", (16, 3), "F32", np.ascontiguousarray(matrix).view(np.uint8)), 2)
    for start in range(17):
        for stop in range(start, 17):
            assert source.float32(start, stop)[:, 0].tolist() == list(range(start, stop))
    bias = UnpermutedHeads(StoredWeight("b", (16,), "F32", file_rows.view(np.uint8).reshape(1, -1)), 2)
    assert bias.float32(5, 12).tolist() == list(range(5, 12))


def test_concatenated_rows_are_the_rows_in_order() -> None:
    arrays = [np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) + 100 * rows for rows in (3, 1, 4)]
    sources = [StoredWeight("w", a.shape, "F32", a.view(np.uint8)) for a in arrays]
    fused = concat_rows(sources)
    expected = np.concatenate(arrays)
    assert fused.shape == (8, 2)
    assert fused.dtype == "F32"
    for start in range(9):
        for stop in range(start, 9):
            assert np.array_equal(fused.float32(start, stop), expected[start:stop])
    with pytest.raises(ValueError, match="columns"):
        concat_rows([sources[0], StoredWeight("w", (1, 3), "F32", np.zeros((1, 12), np.uint8))])
