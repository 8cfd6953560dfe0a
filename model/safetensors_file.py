"""A guarded reader of safetensors files, one or sharded with an index (the format: huggingface/safetensors README).

Files are untrusted and memory-mapped. The header is checked whole before a byte of data is used: its length, JSON,
types, shapes, and that the tensors fill the data part without overlap, hole or rest. Pickles (`pytorch_model.bin`, or a
pickle under another name) are refused unread: unpickling runs code. Names in an index are confined to plain file names
in the folder; symbolic links that the user has there (as the Hub's cache does) are followed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from cupaged.errors import ModelFileError, UnsupportedModelError
from cupaged.model.config_values import NOT_THERE, absence, countable, quote, read_json
from cupaged.model.regular_file import drop_pages, map_regular

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

# Bits an element. Which of them can be used as weights is the affair of quants.py.
_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
_ARRAYS: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor as a header describes it; `offset` counts bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class SafetensorsFile:
    """One open file: `tensors` by name, `metadata` (strings). ModelFileError, naming file and reason, if not sound."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._map = map_regular(self.path)
        except OSError as error:
            raise ModelFileError(f"{self.path}: cannot be read ({error.strerror or error})") from None
        header, start = self._header()
        self.metadata = self._metadata(header.pop("__metadata__", None))
        self.tensors: Mapping[str, SafeTensor] = MappingProxyType(self._tensors(header, start))

    def raw(self, name: str) -> np.ndarray:
        """Stored bytes, a read-only uint8 view [rows, row bytes] of the mapped file; a vector or scalar is one row."""
        tensor = self.tensors[name]
        data = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        rows = math.prod(tensor.shape[:-1])
        return data.reshape(rows, tensor.nbytes // rows) if rows else data.reshape(0, 0)

    def drop(self, name: str) -> None:
        """Let go of the memory that looking at `raw(name)` has taken; what is looked at again is read again."""
        tensor = self.tensors[name]
        drop_pages(self._map, tensor.offset, tensor.nbytes)

    def array(self, name: str) -> np.ndarray:
        """A read-only view in the file's own precision and shape: F32 as float32, F16 as float16, and BF16 as uint16,
        the bits themselves (NumPy has no bfloat16). ModelFileError for other types."""
        tensor = self.tensors[name]
        if tensor.dtype not in _ARRAYS:
            raise ModelFileError(f"{self.path}: {quote(name)} is {tensor.dtype}; expected {', '.join(_ARRAYS)}")
        flat = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset).view(_ARRAYS[tensor.dtype])
        return flat.reshape(tensor.shape)

    def _fail(self, reason: str) -> ModelFileError:
        # Only after the header has proved unusable: a sound header length may begin with the same bytes.
        start = self._map[:2]
        if start == b"PK" or (len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5):
            reason = "it is a pickle (PyTorch) file; pickles are never loaded, because loading one can run code"
        return ModelFileError(f"{self.path}: not a usable safetensors file: {reason}")

    def _header(self) -> tuple[dict[str, Any], int]:
        size = len(self._map)
        if size < 8:
            raise self._fail(f"{size} bytes are too few for a header")
        length = int.from_bytes(self._map[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise self._fail(f"header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
        if length > size - 8:
            raise self._fail(f"header of {length} bytes, the file has {size - 8} left (truncated?)")
        try:
            header = json.loads(self._map[8 : 8 + length].decode(), object_pairs_hook=self._object)
        except UnicodeDecodeError:
            raise self._fail("the header is not UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise self._fail(f"the header is not JSON ({error})") from None
        if not isinstance(header, dict):
            raise self._fail(f"the header holds {type(header).__name__}, not a JSON object")
        return header, 8 + length

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise self._fail(f"{quote(name)} occurs twice")
            found[name] = value
        return found

    def _metadata(self, value: Any) -> dict[str, str]:
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise self._fail("__metadata__ must map strings to strings")
        return value

    def _tensors(self, header: dict[str, Any], start: int) -> dict[str, SafeTensor]:
        tensors = {name: self._tensor(name, entry, start) for name, entry in header.items()}
        end, last = start, "the header"
        for tensor in sorted(tensors.values(), key=lambda entry: (entry.offset, entry.nbytes)):
            if tensor.offset != end:
                kind = "overlaps" if tensor.offset < end else "leaves a hole after"
                raise self._fail(f"tensor {quote(tensor.name)} {kind} {last}")
            end, last = tensor.offset + tensor.nbytes, quote(tensor.name)
        if end != len(self._map):
            kind = "the file is truncated" if end > len(self._map) else "there are bytes after the last tensor"
            raise self._fail(f"{kind}: the header describes {end} bytes, the file has {len(self._map)}")
        return tensors

    def _tensor(self, name: str, entry: Any, start: int) -> SafeTensor:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._fail(f"entry of {quote(name)} must have dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise self._fail(f"tensor {quote(name)} has unknown dtype {quote(dtype)}")
        if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
            raise self._fail(f"tensor {quote(name)} has shape {quote(shape)} and data_offsets {quote(offsets)}")
        begin, end = offsets
        if begin > end:
            raise self._fail(f"tensor {quote(name)} begins at {begin}, after its end {end}")
        bits = _BITS[dtype] * math.prod(shape)
        if bits % 8 or bits // 8 != end - begin:
            raise self._fail(f"tensor {quote(name)} of {dtype} {quote(shape)} does not take {end - begin} bytes")
        if not countable(shape):
            raise self._fail(f"tensor {quote(name)} has shape {quote(shape)}, whose size no index can count")
        # A row is what is read and widened at a time. The format itself asks for whole bytes of the tensor only.
        if shape and _BITS[dtype] * shape[-1] % 8:
            raise UnsupportedModelError(
                f"{self.path}: tensor {quote(name)} of {dtype} {quote(shape)} has rows that end within a byte"
            )
        return SafeTensor(name, tuple(shape), dtype, start + begin, end - begin)


def _counts(value: Any) -> bool:
    """A list of non-negative 64-bit integers, no longer than NumPy 1 allows shapes to be."""
    return isinstance(value, list) and len(value) <= 32 and all(type(v) is int and 0 <= v < 1 << 64 for v in value)


def open_folder(folder: Path) -> dict[str, SafetensorsFile]:
    """The safetensors of a Hub folder: each tensor's name to the open file that holds it.

    `model.safetensors` is preferred, as in Transformers, to `model.safetensors.index.json` with shards. All missing
    shards are named before any is opened; a tensor in two shards, or promised by the index and absent, is refused.
    """
    single, index = folder / _SINGLE, folder / _INDEX
    reasons = {path: absence(path) for path in (single, index)}
    if reasons[single] is None:
        file = SafetensorsFile(single)
        return dict.fromkeys(file.tensors, file)
    if reasons[index] is None:
        return _open_shards(folder, index)
    for path, reason in reasons.items():
        if reason != NOT_THERE:
            raise ModelFileError(f"{path}: {reason}")
    raise _no_weights(folder)


def _open_shards(folder: Path, index: Path) -> dict[str, SafetensorsFile]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: weight_map must be an object of tensor names to file names")
    for name in weight_map.values():
        if not _plain(name):
            raise ModelFileError(
                f"{index}: {quote(name)} is not allowed as a shard; only plain *.safetensors names in the same folder"
            )
    shards = sorted(set(weight_map.values()))
    missing = []
    for name in shards:
        reason = absence(folder / name)
        if reason:
            missing.append(name if reason == NOT_THERE else f"{name}: {reason}")
    if missing:
        raise ModelFileError(f"{folder}: {len(missing)} of {len(shards)} shards missing: {', '.join(missing)}")
    found: dict[str, SafetensorsFile] = {}
    for name in shards:
        file = SafetensorsFile(folder / name)
        for tensor in file.tensors:
            if tensor in found:
                raise ModelFileError(f"{folder}: tensor {quote(tensor)} is in {found[tensor].path.name} and in {name}")
            found[tensor] = file
    astray = [tensor for tensor, shard in weight_map.items() if tensor not in found or found[tensor].path.name != shard]
    if astray:
        raise ModelFileError(
            f"{index}: not in the shard that the index names: {', '.join(quote(tensor) for tensor in astray)}"
        )
    return found


def _plain(name: Any) -> bool:
    """A file name without any path in it. Checked on the text, so that nothing outside the folder is even looked at."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and not any(char in name for char in "/\\:\0")
    )


def _no_weights(folder: Path) -> ModelFileError:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return ModelFileError(f"{folder}: cannot be listed ({error.strerror or error})")
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".bin.index.json"))]
    if pickles:
        return ModelFileError(
            f"{folder}: no safetensors, only {pickles[0]}; pickles are never loaded, because loading one can run code"
        )
    ggufs = [name for name in names if name.endswith(".gguf")]
    hint = f"; give the path of {quote(ggufs[0])} itself" if ggufs else ""
    return ModelFileError(f"{folder}: neither {_SINGLE} nor {_INDEX} is there{hint}")
