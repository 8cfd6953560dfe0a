"""Reading files of strangers: regular ones only, and never more of them than was asked for.

A model folder may hold anything under a model's names: a pipe, on which a reader would wait for ever, or a link to a
device without an end. Links are followed, for the Hub's cache is made of them; what they lead to must be a regular
file. All readers of model files open through here. What cannot be read is an OSError with `strerror` set, for the
reader to word as its own kind of error.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO, Protocol

_CHUNK = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


def open_regular(path: str | Path) -> BinaryIO:
    """Open for reading. OSError if it is not there, or not a regular file."""
    # Before opening, because opening a device can already do something (rewind a tape); and of the open file, because
    # the path may lead elsewhere by then.
    _check(os.stat(path), path)
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115  (handed to the caller)
    try:
        _check(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: str | Path, limit: int) -> bytes:
    """The whole of a file of at most `limit` bytes. OSError if it is larger, not there, or not a regular file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise _too_large(path, limit)
        return read_bounded(file, limit, path)


def read_bounded(file: _Readable, limit: int, name: str | Path) -> bytes:
    """All that comes from an open binary `file`, whatever it is; OSError once it has given more than `limit` bytes.

    In chunks: one read of a limit's size would take that much memory for a file of three lines.
    """
    data = bytearray()
    while len(data) <= limit:
        chunk = file.read(min(_CHUNK, limit + 1 - len(data)))
        if not chunk:
            return bytes(data)
        data += chunk
    raise _too_large(name, limit)


def map_regular(path: str | Path) -> mmap.mmap | bytes:
    """A file's bytes as a read-only memory map; b"" for an empty file, which cannot be mapped. OSError as above."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def drop_pages(data: mmap.mmap | bytes, start: int, count: int) -> None:
    """Let go of the memory behind `count` bytes of a map; they are read from the file again when they are looked at.

    Without effect where the system does not take such advice.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    if advice is not None and count and isinstance(data, mmap.mmap):
        data.madvise(advice, first, start + count - first)


def _without_waiting(path: str, flags: int) -> int:
    # A pipe that took the file's place after the first look would otherwise wait for a writer.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def _too_large(name: str | Path, limit: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than {limit} bytes", os.fspath(name))
