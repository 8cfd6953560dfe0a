"""What a benchmark ran on, for the record."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from typing import Any

_TELLING = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimddp",
    "sve",
)


def describe_machine() -> dict[str, Any]:
    """Date, processor, cores that this process may use, memory in GiB, system, Python; what is unknown is None."""
    model, flags = _processor()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": model,
        "instructions": [name for name in _TELLING if name in flags],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
    }


def machine_line(machine: dict[str, Any]) -> str:
    """`describe_machine` on one line."""
    memory = "" if machine["memory_gib"] is None else f", {machine['memory_gib']} GiB"
    processor = " ".join([machine["processor"] or "unknown processor", *machine["instructions"]])
    return f"{machine['date']}, {machine['cores']} cores of {processor}{memory}, Python {machine['python']}"


def _processor() -> tuple[str | None, set[str]]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return platform.processor() or None, set()
    values = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    return values.get("model name"), set((values.get("flags") or values.get("Features") or "").split())


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, OSError, ValueError):
        return None
