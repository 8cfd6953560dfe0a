"""Typed, checked access to configuration read from a model file: JSON of a Hub folder, or GGUF metadata.

Both are untrusted and hand-edited in the wild, so every value is checked where it is taken, and every message names
the file, the key, what stands there and what is allowed. Keys that nobody asked for are known afterwards
(`untouched`), so that none is dropped silently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupaged.errors import ModelFileError
from cupaged.model.regular_file import read_regular

_MAX_INTEGER = 2**31 - 1
_MAX_JSON_BYTES = 64 << 20  # config files are kilobytes; a tokenizer's own file is not read through here


# Bounds of numbers that arithmetic in float32 depends on. Those with a meaning are far beyond any model's, and so near
# that a value within them can neither vanish nor overflow on its way through the kernels.
Range = tuple[float, float]
FLOAT32: Range = (2.0**-126, (2 - 2.0**-23) * 2.0**127)  # what float32 holds in full precision, above 0
NORM_EPS: Range = (1e-30, 1.0)
ROPE_THETA: Range = (1.0, 1e18)
ROPE_FACTOR: Range = (1e-6, 1e6)  # what frequencies are divided by, and llama3's bounds between them

NOT_THERE = "no such file or folder"


def quote(value: object, limit: int = 80) -> str:
    """`repr` of a value from a file, cut to `limit` characters, so that a message stays one short line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def countable(shape: Sequence[int]) -> bool:
    """Whether NumPy can hold a view of that shape, elements of up to eight bytes. It counts bytes in int64, and leaves
    out sizes of 0, which would make any product small: [2**62, 2**62, 0] has no element, and no view."""
    return math.prod(size for size in shape if size) < 2**60


def absence(path: Path) -> str | None:
    """Why a file or folder cannot be had, or None if it is there. Links are followed; a dangling one is told."""
    try:
        if path.exists():
            return None
        if path.is_symlink():
            return f"file missing (broken link to {path.readlink()})"
    except OSError as error:
        return f"cannot be looked at ({error.strerror or error})"
    return NOT_THERE


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. ModelFileError, naming the file, if it cannot be read or is not an object."""
    try:
        data = json.loads(read_regular(path, _MAX_JSON_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not JSON in UTF-8 ({error})") from None
    if not isinstance(data, dict):
        raise ModelFileError(f"{path}: holds {type(data).__name__}, not a JSON object")
    return data


class Values:
    """Checked reading of a mapping. `where` (file, or file and section) begins every message.

    A null is the same as an absent key, unless a method says otherwise; the default stands in for both.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where
        self._touched: set[str] = set()

    def get(self, key: str) -> Any:
        """The raw value, None if absent; counts as touched."""
        self._touched.add(key)
        return self.data.get(key)

    def present(self, key: str) -> bool:
        """Whether the key stands in the file at all, null included."""
        return key in self.data

    def untouched(self) -> list[str]:
        """Keys with a value other than null that no call has asked for."""
        return sorted(key for key, value in self.data.items() if value is not None and key not in self._touched)

    def wrong(self, key: str, allowed: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {key} is {quote(self.data.get(key))}; it must be {allowed}")

    def missing(self, key: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {key} is missing")

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = _MAX_INTEGER) -> int:
        """An int (never a bool) in low..high; without a default the key is required."""
        value = self.optional_integer(key, low, high)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        return value

    def optional_integer(self, key: str, low: int = 1, high: int = _MAX_INTEGER) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        # Writers in JavaScript and some converters write 4096.0; a float with a fraction is a mistake.
        if type(value) is float and math.isfinite(value) and value == int(value):
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, within: Range = FLOAT32) -> float:
        """A number in the range, bounds included; without a default the key is required."""
        value = self.optional_number(key, within)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        return value

    def optional_number(self, key: str, within: Range = FLOAT32) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not within[0] <= value <= within[1]:
            raise self.wrong(key, f"a number from {within[0]:g} to {within[1]:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not str:
            raise self.wrong(key, "a string")
        return value

    def table(self, key: str) -> dict[str, Any] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids written as one int, a list of ints, or null."""
        value = self.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if any(type(item) is not int or not 0 <= item <= _MAX_INTEGER for item in ids):
            raise self.wrong(key, "a token id, a list of token ids, or null")
        return tuple(ids)
