"""Weights as the CUDA kernels read them: a part's blocks cut into planes, each read with whole, aligned loads.

GGUF's blocks mix scales and values (34, 18, 20, 144 and 210 bytes), which no 16-byte load fits. The planes are the same
bits, apart: see weights.cuh. Nothing is rounded here but float weights to their storage type.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels import bfloat16
from cupaged.kernels.interface import PACKED_BLOCK_BYTES, STORAGE_BYTES, Array, WeightSource, kept_type

FORMATS = {"float32": 0, "float16": 1, "bfloat16": 2, "Q8_0": 3, "Q4_0": 4, "Q4_1": 5, "Q4_K": 6, "Q6_K": 7}  # -DFORMAT
UNITS = {"float32": 4, "float16": 8, "bfloat16": 8, "Q8_0": 16, "Q4_0": 32, "Q4_1": 32, "Q4_K": 32, "Q6_K": 32}
# Bytes of all planes for 32 weights; other block formats are kept as float16.
_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q4_K": 18, "Q6_K": 26.25}
PIECE_BYTES = 16 << 20  # of float32 rows packed at a time: of a large matrix the host holds a few such beside its file
_PACKERS = 8  # threads at most
PLANES = ("quants", "high", "scales", "deltas")


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of one format as host arrays (uint8, flat), None for a plane that the format does not have."""

    format: str
    rows: int
    cols: int
    planes: dict[str, Array | None]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a matrix in one format, on the device."""

    format: str
    rows: int
    planes: dict[str, Array | None]


@dataclass(frozen=True, slots=True)
class CudaMatrix:
    """A weight matrix [rows, cols]; a join of files' tensors in different formats has several parts."""

    rows: int
    cols: int
    dtype: str
    nbytes: int
    parts: tuple[Part, ...]


def unpacked_bytes(kind: str, packed: int) -> int:
    """Bytes here of matrices that take `packed` bytes for the CPU's kernels (`interface.packed_bytes`).

    Of the formats that have units there (`interface.UNIT_FORMATS`) a little more, 1.25 % for rows of 16 blocks: how
    many of the bytes are units depends on the rows' length.
    """
    if kind in STORAGE_BYTES:
        return packed
    return int(packed / PACKED_BLOCK_BYTES[kind] * _BLOCK_BYTES.get(kind, 64))


def unit_blocks(kind: str, cols: int) -> int:
    """Blocks of 128 threads for a row of a format, a unit for each thread."""
    return -(-cols // (UNITS[kind] * 128))


def pack_part(source: WeightSource, dtype: str, first: int = 0, stop: int | None = None) -> Packed:
    """Rows first..stop-1 of a part of a weight [N, K] as `dtype` (a storage type, or "quantised": its own format).
    Planes of all rows are those of some rows one after another.

    A format without a kernel here (Q5_0, Q5_1, Q5_K, IQ4_NL) is kept as float16. KernelError for another dtype.
    """
    stop = source.shape[0] if stop is None else stop
    rows, cols = stop - first, source.shape[1]
    kind = kept_type(source.dtype, cols) if dtype == "quantised" else dtype
    raw = source.blocks(first, stop) if kind in _SPLIT else None
    if raw is not None:
        return Packed(kind, rows, cols, dict.fromkeys(PLANES) | _SPLIT[kind](np.asarray(raw), rows))
    if kind not in ("float32", "float16", "bfloat16"):
        if dtype != "quantised":
            raise KernelError(f"dtype: {dtype!r} is not float32, float16, bfloat16 or quantised")
        kind = "float16"
    wide = np.zeros((rows, -(-cols // 32) * 32), np.float32)
    wide[:, :cols] = source.float32(first, stop)
    if kind == "bfloat16":
        stored = bfloat16.from_float32(wide)
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # too large for float16: infinite, as the reference has it
            stored = wide.astype(kind)
    return Packed(kind, rows, cols, dict.fromkeys(PLANES) | {"quants": _bytes(stored)})


def packed_pieces(source: WeightSource, dtype: str) -> Iterator[tuple[int, Packed]]:
    """(first row, some rows packed) of a part of a weight, in order; at least one piece, were it of no rows.

    Threads pack the next pieces meanwhile: NumPy does the work without the GIL, and a piece is one thread's business.
    """
    rows, cols = source.shape
    step = max(1, PIECE_BYTES // (4 * max(1, cols)))
    starts = range(0, max(1, rows), step)
    if len(starts) == 1:
        yield 0, pack_part(source, dtype)
        return
    workers = min(_PACKERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[tuple[int, Future[Packed]]] = deque()
        for first in starts:
            waiting.append((first, pool.submit(pack_part, source, dtype, first, min(rows, first + step))))
            if len(waiting) > workers:
                done, piece = waiting.popleft()
                yield done, piece.result()
        for done, piece in waiting:
            yield done, piece.result()


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _q8_0(raw: Array, rows: int) -> dict[str, Array]:
    blocks = raw.reshape(rows, -1, 34)
    return {"quants": _bytes(blocks[..., 2:]), "scales": _bytes(blocks[..., :2])}


def _q4_0(raw: Array, rows: int) -> dict[str, Array]:
    blocks = raw.reshape(rows, -1, 18)
    return {"quants": _bytes(blocks[..., 2:]), "scales": _bytes(blocks[..., :2])}


def _q4_1(raw: Array, rows: int) -> dict[str, Array]:
    blocks = raw.reshape(rows, -1, 20)
    return {"quants": _bytes(blocks[..., 4:]), "scales": _bytes(blocks[..., :4])}


def _q4_k(raw: Array, rows: int) -> dict[str, Array]:
    blocks = raw.reshape(rows, -1, 144)
    return {"quants": _bytes(_by_32(_nibbles(blocks[..., 16:], 32))), "scales": _bytes(blocks[..., :16])}


def _q6_k(raw: Array, rows: int) -> dict[str, Array]:
    blocks = raw.reshape(rows, -1, 210)
    low, two = _nibbles(blocks[..., :128], 64), blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
    upper = np.stack([two >> np.uint8(2 * i) & np.uint8(3) for i in range(4)], axis=3)  # [.., 2, 4, 32]: value order
    units = upper.reshape(*blocks.shape[:2], 8, 4, 8)
    high = units[..., 0, :] | units[..., 1, :] << np.uint8(2) | units[..., 2, :] << np.uint8(4)
    high |= units[..., 3, :] << np.uint8(6)
    return {
        "quants": _bytes(_by_32(low)),
        "high": _bytes(high),
        "scales": _bytes(blocks[..., 192:208]),
        "deltas": _bytes(blocks[..., 208:210]),
    }


def _nibbles(packed: Array, run: int) -> Array:
    """4-bit values in order, [.., values]: of each `run` bytes first the low halves, then the high ones."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    return np.stack([runs & np.uint8(15), runs >> np.uint8(4)], axis=-2).reshape(*packed.shape[:-1], -1)


def _by_32(values: Array) -> Array:
    """4-bit values packed as Q4_0 has them: byte j of 16 holds value j of 32 low and value j + 16 high."""
    units = values.reshape(*values.shape[:-1], -1, 2, 16)
    packed: Array = units[..., 0, :] | units[..., 1, :] << np.uint8(4)
    return packed


_SPLIT = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q6_K": _q6_k}
