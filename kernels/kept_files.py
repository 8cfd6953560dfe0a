"""Files of compiled kernels in a cache folder: which are in use, and the removal of those that no longer are.

A file's time of change is when it was last used, to the day: every new version of the kernels, of Numba or of a driver
writes files beside the old ones, which nobody would ever remove.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

DAY = 86400.0
UNUSED_DAYS = 30
# What we write, and what a process that was killed while it wrote has left.
_OURS = re.compile(r"cpu-[0-9a-f]+-[\w-]+\.bin|cuda-[\w-]+-[0-9a-f]+\.cubin|tmp\w{8}")


def without_waiting(path: str, flags: int) -> int:
    """An `opener` for `open`: a pipe of the name of one of our files must not hold us up."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def mark_used(path: Path) -> None:
    """Note that a file was used today. Writes once a day at most, and not at all where that is not allowed."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY:
            os.utime(path)


def remove_unused(folder: Path) -> list[Path]:
    """Remove files of compiled kernels that nobody has used for UNUSED_DAYS; returns them. Never raises.

    Other processes may do the same, or read what goes: who has opened a file keeps it, and who comes later compiles.
    """
    removed = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                unused = time.time() - path.lstat().st_mtime > UNUSED_DAYS * DAY
                if unused and _OURS.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    path.unlink()
                    removed.append(path)
    return removed
