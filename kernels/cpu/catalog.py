"""All kernels by name and home. Only compile.py builds them: to import a home compiles what it holds, with Numba."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from cupaged.kernels.interface import STORAGE_BYTES

# Kernels that exist once, and those that are built for each storage type, by the module of this package they are in.
ONCE = {
    "elementwise": ("rms_norm", "head_norm", "rope", "gated_activation", "take_rows", "add", "copy_blocks"),
    "attention": ("attention_merge",),
    "sampling": ("sample",),
    "team": ("team_worker", "team_submit", "run_alone"),
}
PER_TYPE = {"gemm": ("matmul", "pack", "embed"), "elementwise": ("write_kv",), "attention": ("attention_parts",)}


def kernels(progress: Callable[[int, int], None] | None = None) -> list[tuple[str, Any]]:
    """(name, dispatcher) of every kernel; each has one explicit signature of int64 arguments.

    `progress(done, total)` is called before each is built.
    """
    wanted: list[tuple[str, str, str | None]] = [(home, name, None) for home, names in ONCE.items() for name in names]
    wanted += [(home, name, kind) for kind in STORAGE_BYTES for home, names in PER_TYPE.items() for name in names]
    table = []
    for done, (home, name, kind) in enumerate(wanted):
        if progress is not None:
            progress(done, len(wanted))
        found = getattr(import_module(f"cupaged.kernels.cpu.{home}"), name)
        table.append((name, found) if kind is None else (f"{name}_{kind}", found(kind)))
    if progress is not None:
        progress(len(wanted), len(wanted))
    return table
