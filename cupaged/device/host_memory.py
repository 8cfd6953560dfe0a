"""The memory of the machine, as far as this process may use it."""

from __future__ import annotations

from pathlib import Path


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of memory, a container's limit counted."""
    total = available = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, rest = line.partition(":")
            if key == "MemTotal":
                total = int(rest.split()[0]) * 1024
            elif key == "MemAvailable":
                available = int(rest.split()[0]) * 1024
    except (OSError, ValueError):
        total = available = 8 << 30  # not Linux: a guess that lets a small model run
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            total = min(total, int(limit))
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return total, available
