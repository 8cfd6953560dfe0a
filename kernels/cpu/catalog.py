"""All kernels by name, each built (which compiles it, with Numba) when it is reached. Only compile.py uses this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KINDS = ("float32", "float16", "bfloat16")


def kernels(progress: Callable[[int, int], None] | None = None) -> list[tuple[str, Any]]:
    """(name, dispatcher) of every kernel; each has one explicit signature of int64 arguments."""
    from cupaged.kernels.cpu import attention, elementwise, gemm, sampling, team

    plain = [
        (name, lambda module=module, name=name: getattr(module, name))
        for module, names in (
            (elementwise, ("rms_norm", "head_norm", "rope", "gated_activation", "take_rows", "add", "copy_blocks")),
            (attention, ("attention_merge",)),
            (sampling, ("sample",)),
            (team, ("team_worker", "team_submit", "run_alone")),
        )
        for name in names
    ]
    typed = [
        (f"{name}_{kind}", lambda build=build, kind=kind: build(kind))
        for kind in KINDS
        for name, build in (
            ("matmul", gemm.matmul),
            ("pack", gemm.pack),
            ("embed", gemm.embed),
            ("write_kv", elementwise.write_kv),
            ("attention_parts", attention.attention_parts),
        )
    ]
    table = []
    for done, (name, build) in enumerate(plain + typed):
        if progress is not None:
            progress(done, len(plain) + len(typed))
        table.append((name, build()))
    return table
