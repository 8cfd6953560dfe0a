"""A guarded reader of GGUF files, versions 2 and 3 (ggml's docs/gguf.md): metadata and tensor infos, no model in mind.

The file is memory-mapped and untrusted: every count, length, type and offset is checked against the bytes that are
left before it is used, so a hostile file costs no more than reading its own bytes. A part of a split model stands for
the whole (gguf_split.py). Deliberately not done: version 1 (32-bit lengths, long gone), big-endian files, and knowledge
of what the metadata mean.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from cupaged.errors import ModelFileError
from cupaged.model.config_values import countable, quote
from cupaged.model.gguf_split import check_tensors, joined_metadata, part_paths
from cupaged.model.regular_file import drop_pages, map_regular

# Tensor types by number: name, values a block, bytes a block (ggml.h, ggml-common.h). Numbers that ggml has retired
# (4, 5, 31-33, 36-38) are unknown here as there. Which of them can be used as weights is the affair of quants.py.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4  # arrays of arrays; real files use one level
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor as the file describes it.

    `shape` has rows first (the file's dimensions reversed); `dtype` is ggml's name; `offset` counts bytes from the
    start of its file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file; of a split model, all its parts, whichever of them `path` is.

    `metadata` maps keys to plain Python values (int, float, bool, str, lists of them); `tensors` maps names to infos;
    `version` is that of the file itself. Raises ModelFileError, naming the file and the reason, for anything that is
    not a sound file, and for parts that are missing or do not fit together.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        own = _Part(self.path)
        self.version = own.version
        paths = part_paths(self.path, own.metadata)
        parts = [own if path == self.path else _Part(path) for path in paths]
        metadata = own.metadata
        if len(parts) > 1:
            metadata = joined_metadata([(part.path, part.metadata) for part in parts])
            check_tensors(self.path, metadata, [name for part in parts for name in part.tensors])
        self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
        self.tensors: Mapping[str, GGUFTensor] = MappingProxyType(
            {name: tensor for part in parts for name, tensor in part.tensors.items()}
        )
        self._maps = {name: part.map for part in parts for name in part.tensors}

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor, a read-only uint8 view [rows, row bytes] of the mapped file."""
        tensor = self.tensors[name]
        data = np.frombuffer(self._maps[name], np.uint8, tensor.nbytes, tensor.offset)
        rows = math.prod(tensor.shape[:-1])
        return data.reshape(rows, tensor.nbytes // rows) if rows else data.reshape(0, 0)

    def drop(self, name: str) -> None:
        """Let go of the memory that looking at `raw(name)` has taken; what is looked at again is read again."""
        tensor = self.tensors[name]
        drop_pages(self._maps[name], tensor.offset, tensor.nbytes)


class _Part:
    """One file, mapped and read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.map = map_regular(path)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read ({error.strerror or error})") from None
        self.version, self.metadata, self.tensors = _Reader(self.map, path).read()


class _Reader:
    """One pass over the header. `pos` never moves past `size`."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data = data
        self.size = len(data)
        self.pos = 0
        self.path = path

    def fail(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: not a usable GGUF file: {reason}")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.pos:
            raise self.fail(f"{what} at byte {self.pos} needs {count} bytes, the file has {self.size - self.pos} left")

    def u32(self, what: str) -> int:
        self.need(4, what)
        value: int = _U32.unpack_from(self.data, self.pos)[0]
        self.pos += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        value: int = _U64.unpack_from(self.data, self.pos)[0]
        self.pos += 8
        return value

    def string(self, what: str) -> str:
        length = self.u64(f"length of {what}")
        self.need(length, what)
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings; the loop is kept tight because vocabularies have hundreds of thousands of them."""
        data, pos, size, unpack = self.data, self.pos, self.size, _U64.unpack_from
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                if pos > size:
                    raise self.fail(f"string {len(out)} of {what} runs past the end of the file")
                append(data[start:pos].decode())
        except struct.error:
            raise self.fail(f"{what} holds {count} strings, the file ends after {len(out)}") from None
        except UnicodeDecodeError:
            raise self.fail(f"string {len(out)} of {what} is not UTF-8") from None
        self.pos = pos
        return out

    def scalars(self, kind: int, count: int, what: str) -> list[Any]:
        code = _SCALARS[kind]
        width = struct.calcsize(f"<{code}")
        self.need(count * width, what)
        values = list(struct.unpack_from(f"<{count}{code}", self.data, self.pos))
        self.pos += count * width
        if kind == _BOOL:
            if any(value > 1 for value in values):
                raise self.fail(f"{what} is a bool that is neither 0 nor 1")
            return [bool(value) for value in values]
        return values

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalars(kind, 1, what)[0]
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise self.fail(f"{what} has value type {kind}; known: 0 to 12")
        if depth == _MAX_NESTING:
            raise self.fail(f"{what} nests arrays deeper than {_MAX_NESTING}")
        item, count = self.u32(f"item type of {what}"), self.u64(f"length of {what}")
        if item in _SCALARS:
            return self.scalars(item, count, what)
        if item == _STRING:
            self.need(8 * count, what)
            return self.strings(count, what)
        if item == _ARRAY:
            self.need(12 * count, what)
        return [self.value(item, what, depth + 1) for _ in range(count if item == _ARRAY else 1)]

    def read(self) -> tuple[int, dict[str, Any], dict[str, GGUFTensor]]:
        self.need(4, "the magic")
        magic = self.data[:4]
        if magic != b"GGUF":
            raise self.fail(f"it starts with {magic!r}, not b'GGUF'")
        self.pos = 4
        version = self.u32("the version")
        if version & 0xFFFF == 0:
            raise self.fail("it is big-endian; only little-endian files are supported")
        if version not in (2, 3):
            raise self.fail(f"version {version}; supported: 2 and 3")
        tensor_count, pair_count = self.u64("the tensor count"), self.u64("the metadata count")
        # The smallest pair is an empty key, its type and one byte; the smallest info an empty name and no dimension.
        self.need(13 * pair_count, f"metadata of {pair_count} pairs")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.fail(f"metadata key {quote(key)} occurs twice")
            metadata[key] = self.value(self.u32(f"type of {quote(key)}"), quote(key))
        self.need(24 * tensor_count, f"infos of {tensor_count} tensors")
        infos = [self.tensor_info() for _ in range(tensor_count)]
        return version, metadata, self.place(infos, self.alignment(metadata))

    def alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(value) is not int or value <= 0 or value & (value - 1):
            raise self.fail(f"general.alignment is {quote(value)}; it must be a power of two")
        return value

    def tensor_info(self) -> tuple[str, tuple[int, ...], str, int, int]:
        """(name, shape, dtype, offset in the data part, bytes)."""
        name = self.string("a tensor name")
        dimensions = self.u32(f"dimension count of {quote(name)}")
        if dimensions > _MAX_DIMENSIONS:
            raise self.fail(f"tensor {quote(name)} has {dimensions} dimensions; at most {_MAX_DIMENSIONS} are allowed")
        sizes = [self.u64(f"a dimension of {quote(name)}") for _ in range(dimensions)]
        kind = self.u32(f"type of {quote(name)}")
        offset = self.u64(f"offset of {quote(name)}")
        if kind not in TENSOR_TYPES:
            raise self.fail(f"tensor {quote(name)} has unknown type {kind}")
        dtype, block, block_bytes = TENSOR_TYPES[kind]
        columns = sizes[0] if sizes else 1
        if columns % block:
            raise self.fail(f"tensor {quote(name)} has rows of {columns} values, {dtype} needs a multiple of {block}")
        nbytes = columns // block * block_bytes * math.prod(sizes[1:])
        if nbytes > self.size:
            raise self.fail(f"tensor {quote(name)} needs {nbytes} bytes, the file has {self.size}")
        if not countable(sizes):
            raise self.fail(f"tensor {quote(name)} has sizes {quote(sizes)}, which no index can count")
        return name, tuple(reversed(sizes)), dtype, offset, nbytes

    def place(self, infos: list[tuple[str, tuple[int, ...], str, int, int]], alignment: int) -> dict[str, GGUFTensor]:
        """Check where the tensors lie: aligned, inside the file, no byte used twice. The data part starts at `pos`,
        rounded up to the alignment; a file without tensors may end before that."""
        start = -(-self.pos // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, dtype, offset, nbytes in infos:
            if name in tensors:
                raise self.fail(f"tensor {quote(name)} occurs twice")
            if offset % alignment:
                raise self.fail(f"tensor {quote(name)} has offset {offset}, which is not a multiple of {alignment}")
            if start + offset + nbytes > self.size:
                end = start + offset + nbytes
                raise self.fail(f"tensor {quote(name)} ends at byte {end}, the file has {self.size} (truncated?)")
            tensors[name] = GGUFTensor(name, shape, dtype, start + offset, nbytes)
        end, last = 0, ""
        for tensor in sorted(tensors.values(), key=lambda entry: (entry.offset, entry.nbytes)):
            if tensor.nbytes and tensor.offset < end:
                raise self.fail(f"tensors {quote(last)} and {quote(tensor.name)} overlap")
            end, last = max(end, tensor.offset + tensor.nbytes), tensor.name
        return tensors
