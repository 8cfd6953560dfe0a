"""Writes weights as safetensors, a few rows at a time, so that a model of any size takes a few megabytes of memory.

The format is that of huggingface/safetensors: eight bytes of header length, a JSON header, the tensors without a gap.
Above a size, several files and model.safetensors.index.json, as Transformers writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from cupaged.errors import ModelFileError
from cupaged.kernels.interface import STORAGE_BYTES, StorageType, WeightSource

MAX_SHARD_BYTES = 5_000_000_000  # the Hub's recommendation
_NAMES: dict[StorageType, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CHUNK_ELEMENTS = 1 << 20

Float32 = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]


def weight_bytes(tensors: Mapping[str, WeightSource], dtype: StorageType) -> int:
    """Bytes of all tensors when stored as `dtype`, headers left out."""
    return sum(_size(source, dtype) for source in tensors.values())


def write_weights(
    folder: Path,
    tensors: Mapping[str, WeightSource],
    dtype: StorageType,
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write `tensors` (by the file's names, in that order) into `folder`, each value rounded to nearest, ties to even.

    Returns the names of the files written. progress(done, total) counts bytes. ModelFileError for a value that is
    finite and would become infinite; OSError as the system gives it.
    """
    total = weight_bytes(tensors, dtype)
    shards = _shards(tensors, dtype, max_shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    count(0)
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("xb") as out:
            out.write(_header({key: tensors[key] for key in shard}, dtype))
            for key in shard:
                _write_tensor(out, key, tensors[key], dtype, count)
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        names.append("model.safetensors.index.json")
        (folder / names[-1]).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return names


def to_bfloat16(values: Float32) -> np.ndarray:
    """The nearest bfloat16, ties to even, as uint16; a NaN stays one. values: float32, none finite above 3.39e38.

    A bfloat16 is the upper half of a float32: half of the last kept bit is added, less one unless that bit is set,
    and the carry does the rounding.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    kept = bits >> np.uint32(16)
    rounded = (bits + (np.uint32(0x7FFF) + (kept & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), kept | np.uint32(0x40), rounded).astype(np.uint16)


def _size(source: WeightSource, dtype: StorageType) -> int:
    return math.prod(source.shape) * STORAGE_BYTES[dtype]


def _shards(tensors: Mapping[str, WeightSource], dtype: StorageType, limit: int) -> list[list[str]]:
    """Names in order, cut where a file would pass `limit` bytes; a tensor that is larger has a file of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, source in tensors.items():
        size = _size(source, dtype)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _header(tensors: Mapping[str, WeightSource], dtype: StorageType) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Transformers loads nothing without it
    end = 0
    for name, source in tensors.items():
        begin, end = end, end + _size(source, dtype)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(source.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of eight
    return len(encoded).to_bytes(8, "little") + encoded


def _write_tensor(
    out: BinaryIO, name: str, source: WeightSource, dtype: StorageType, count: Callable[[int], None]
) -> None:
    columns = math.prod(source.shape[1:])
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, source.shape[0], step):
        values = source.float32(start, min(start + step, source.shape[0]))
        stored = _narrowed(values, dtype, name)
        out.write(stored.astype(stored.dtype.newbyteorder("<"), copy=False).tobytes())
        count(stored.nbytes)


def _narrowed(values: Float32, dtype: StorageType, name: str) -> np.ndarray:
    if dtype == "float32":
        return values
    limit = np.float32(65520.0 if dtype == "float16" else 3.3961775e38)  # from here on rounding gives infinity
    magnitude = np.abs(values)
    if bool((magnitude >= limit).any()):
        large = magnitude[(magnitude >= limit) & np.isfinite(magnitude)]
        if large.size:
            hint = "; bfloat16 and float32 can" if dtype == "float16" else "; float32 can"
            raise ModelFileError(f"{name} holds {large.max():g}, which {dtype} cannot hold{hint}")
    return values.astype(np.float16) if dtype == "float16" else to_bfloat16(values)
