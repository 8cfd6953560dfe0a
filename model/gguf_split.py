"""Models in several GGUF files, as llama-gguf-split and the converters write them: which files, and do they fit.

Each part is a GGUF file of its own, with `split.no` (from 0), `split.count` and `split.tensors.count` (of all parts)
among its metadata, and the name `MODEL-00001-of-00003.gguf`. The first has the model's metadata. Only that name and the
part's own folder are looked at: nothing in a file can name another.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupaged.errors import ModelFileError
from cupaged.model.config_values import Values, quote

_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
_MAX_PARTS = 99_999  # five digits
_MAX_NAMED = 200
# What parts may say differently: which they are, and how their own tensors are aligned.
_OF_THE_PART = ("split.no", "general.alignment")


def part_paths(path: Path, metadata: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files of the model that `path` is a part of, in order, itself included; `path` alone if it is whole.

    ModelFileError if the file's name does not say what its metadata say, or if parts are missing, naming all of them.
    """
    count, number = _place(path, metadata)
    if count == 1:
        return (path,)
    found = _NAME.fullmatch(path.name)
    if found is None or (int(found[2]), int(found[3])) != (number + 1, count):
        raise ModelFileError(
            f"{path}: by its metadata it is part {number + 1} of {count}; its name must end in "
            f"-{number + 1:05d}-of-{count:05d}.gguf, or the other parts cannot be found"
        )
    names = [f"{found[1]}-{place:05d}-of-{count:05d}.gguf" for place in range(1, count + 1)]
    try:
        there = set(os.listdir(path.parent))
    except OSError as error:
        raise ModelFileError(f"{path.parent}: cannot be read ({error.strerror or error})") from None
    missing = [name for name in names if name not in there]
    if missing:
        named = ", ".join(missing[:_MAX_NAMED])
        rest = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise ModelFileError(f"{path}: {len(missing)} of {count} parts are missing in its folder: {named}{rest}")
    return tuple(path.with_name(name) for name in names)


def joined_metadata(parts: Sequence[tuple[Path, Mapping[str, Any]]]) -> dict[str, Any]:
    """The metadata of all parts, in order. ModelFileError if a file is not the part that its name says, or if two parts
    give one key two values."""
    joined = dict(parts[0][1])
    for place, (path, metadata) in enumerate(parts):
        count, number = _place(path, metadata)
        if (count, number) != (len(parts), place):
            raise ModelFileError(
                f"{path}: by its metadata it is part {number + 1} of {count}, not {place + 1} of {len(parts)}"
            )
        for key, value in metadata.items():
            first = joined.setdefault(key, value)
            # Compared as text, in which NaN equals itself and True is not 1.
            if key not in _OF_THE_PART and first is not value and repr(first) != repr(value):
                raise ModelFileError(
                    f"{path}: {quote(key)} is {quote(value)}, in {parts[0][0].name} it is {quote(first)}"
                )
    return joined


def check_tensors(path: Path, metadata: Mapping[str, Any], names: Sequence[str]) -> None:
    """ModelFileError if a tensor lies in two parts, or if they are not as many as `split.tensors.count` says."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ModelFileError(f"{path}: tensor {quote(name)} lies in two of the parts")
        seen.add(name)
    stated = Values(metadata, str(path)).optional_integer("split.tensors.count", low=0)
    if stated is not None and stated != len(names):
        raise ModelFileError(f"{path}: split.tensors.count is {stated}, the parts hold {len(names)}")


def _place(path: Path, metadata: Mapping[str, Any]) -> tuple[int, int]:
    """(how many parts, which one this is, from 0); (1, 0) for a file that is not split."""
    values = Values(metadata, str(path))
    count = values.integer("split.count", 1, low=0, high=_MAX_PARTS)
    return (count, values.integer("split.no", low=0, high=count - 1)) if count > 1 else (1, 0)
