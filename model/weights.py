"""Weights as they lie in a file, read row by row: the implementations of `kernels.interface.WeightSource`.

Nothing is read before `float32` or `blocks` is called, and then only the pages of the rows asked for: the files are
memory-mapped. `release` gives those pages back: a file and the matrices made of it are never in memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupaged.errors import OptionError
from cupaged.kernels.interface import QUANT_BLOCK, WeightSource
from cupaged.model.quantise import quantise
from cupaged.model.quants import FORMATS, dequantise
from cupaged.model.quants_blocks import Bytes, Float32

_SLICE = 1 << 18  # values narrowed at a time: the arrays in between stay in the processor's cache


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor of a file. shape: (rows, columns), or (elements,) for a vector; `raw`: read-only view of its stored
    bytes, uint8 [rows, row bytes] (a vector is one row); `name` is the file's own; `drop` lets go of the memory behind
    `raw`, which is read from the file again when it is looked at again."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    raw: Any
    drop: Callable[[], None] = _nothing

    @property
    def nbytes(self) -> int:
        return int(self.raw.nbytes)

    def float32(self, start: int, stop: int) -> Float32:
        """Rows (of a vector: elements) start..stop as a new float32 array [stop - start, ...]."""
        _check_range(self, start, stop)
        if len(self.shape) == 1:
            return dequantise(self.dtype, self.raw)[0, start:stop].copy()
        return dequantise(self.dtype, self.raw[start:stop])

    def blocks(self, start: int, stop: int) -> Any | None:
        """Rows start..stop as they lie in the file, uint8 [stop - start, row bytes]; None of a vector or of floats."""
        _check_range(self, start, stop)
        return None if len(self.shape) == 1 or FORMATS[self.dtype].block == 1 else self.raw[start:stop]

    @property
    def parts(self) -> tuple[WeightSource, ...]:
        return (self,)


@dataclass(frozen=True, slots=True)
class UnpermutedHeads:
    """The rows of `source` in Hugging Face's order, where the file has them in the order of GGUF's architecture llama.

    llama.cpp rotates pairs (2i, 2i+1) of a head, Hugging Face pairs (i, i + d/2). Its converter therefore stores
    row i + c*d/2 (c = 0, 1) of each head of d rows at place 2i + c; here the rows are put back. Serves Q with the query
    heads, K with the KV heads, and their biases.
    """

    source: WeightSource
    heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def float32(self, start: int, stop: int) -> Float32:
        stored, first, last = self._stored(start, stop)
        whole: Float32 = self.source.float32(first, last)
        out: Float32 = whole[stored]
        return out

    def blocks(self, start: int, stop: int) -> Any | None:
        """A copy, unlike a stored weight's."""
        stored, first, last = self._stored(start, stop)
        whole = self.source.blocks(first, last)
        return None if whole is None else whole[stored]

    @property
    def parts(self) -> tuple[WeightSource, ...]:
        return (self,)

    def _stored(self, start: int, stop: int) -> tuple[Any, int, int]:
        """Rows start..stop lie within rows first..last of the source, at these places from the first."""
        _check_range(self, start, stop)
        head_dim = self.shape[0] // self.heads
        half = head_dim // 2
        rows = np.arange(start, stop)
        within = rows % head_dim
        stored = rows - within + 2 * (within % half) + within // half
        first = start // head_dim * head_dim
        return stored - first, first, -(-stop // head_dim) * head_dim


@dataclass(frozen=True, slots=True)
class ConcatenatedRows:
    """Several sources with equal columns as one, rows in order. `dtype` joins the distinct names with '+'."""

    sources: tuple[WeightSource, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(source.shape[0] for source in self.sources), *self.sources[0].shape[1:])

    @property
    def dtype(self) -> str:
        return "+".join(dict.fromkeys(source.dtype for source in self.sources))

    def float32(self, start: int, stop: int) -> Float32:
        _check_range(self, start, stop)
        parts: list[Float32] = []
        first = 0
        for source in self.sources:
            count = source.shape[0]
            low, high = max(start - first, 0), min(stop - first, count)
            if low < high:
                parts.append(source.float32(low, high))
            first += count
        if not parts:
            return np.empty((0, *self.shape[1:]), dtype=np.float32)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def blocks(self, start: int, stop: int) -> Any | None:
        """None: the parts have blocks of their own."""
        _check_range(self, start, stop)
        return None

    @property
    def parts(self) -> tuple[WeightSource, ...]:
        return tuple(part for source in self.sources for part in source.parts)


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A float matrix [rows, columns] as rows of `dtype`, "Q8_0" or "Q4_0"; columns are a multiple of 32."""

    source: WeightSource
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def blocks(self, start: int, stop: int) -> Bytes:
        """Rows start..stop as new uint8 [stop - start, row bytes]."""
        _check_range(self, start, stop)
        columns = self.shape[1]
        out = np.empty((stop - start, FORMATS[self.dtype].row_bytes(columns)), np.uint8)
        step = max(1, _SLICE // columns)
        for first in range(start, stop, step):
            last = min(stop, first + step)
            out[first - start : last - start] = quantise(self.dtype, self.source.float32(first, last))
        return out

    def float32(self, start: int, stop: int) -> Float32:
        """What the narrowed rows are worth."""
        return dequantise(self.dtype, self.blocks(start, stop))

    @property
    def parts(self) -> tuple[WeightSource, ...]:
        return (self,)


def concat_rows(sources: Sequence[WeightSource]) -> WeightSource:
    """One source of the rows of `sources`, in order; their shapes must agree but for the rows (ValueError)."""
    if not sources or any(source.shape[1:] != sources[0].shape[1:] for source in sources):
        raise ValueError(f"concat_rows: shapes {[source.shape for source in sources]} do not share their columns")
    return ConcatenatedRows(tuple(sources))


def quantised_tensors(
    tensors: Mapping[str, WeightSource], kind: str, where: str
) -> tuple[dict[str, WeightSource], list[str]]:
    """(the matrices narrowed to `kind`, "Q8_0" or "Q4_0"; names of those kept as they are: rows are no whole blocks).

    Vectors stay as they are. OptionError, naming `where`, if a matrix is quantised already.
    """
    narrowed: dict[str, WeightSource] = dict(tensors)
    left: list[str] = []
    for name, source in tensors.items():
        if len(source.shape) == 1:
            continue
        if FORMATS[source.dtype].block > 1:
            raise OptionError(
                f"quantize: {name} of {where} is {source.dtype}, quantised already; only weights in F32, F16 or BF16 "
                "can be quantised"
            )
        if source.shape[1] % QUANT_BLOCK:
            left.append(name)
        else:
            narrowed[name] = QuantisedWeight(source, kind)
    return narrowed, left


def release(source: WeightSource) -> None:
    """Let go of the memory that reading a weight has taken: pages of its file, which are read again when needed."""
    if isinstance(source, StoredWeight):
        source.drop()
    elif isinstance(source, (UnpermutedHeads, QuantisedWeight)):
        release(source.source)
    elif isinstance(source, ConcatenatedRows):
        for part in source.sources:
            release(part)


def _check_range(source: WeightSource, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= source.shape[0]:
        raise IndexError(f"rows {start}..{stop} of a weight with {source.shape[0]} rows")
