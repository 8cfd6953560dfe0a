"""PTX kernels that can be called, with the arguments of `cudabench.Kernel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cudabench.emulator import bytes_of, owner_of
from cudabench.errors import BenchError
from cudabench.nvrtc import compile_cuda
from cudabench.ptx.machine import Machine
from cudabench.ptx.memory import Memory
from cudabench.ptx.parse import Module, parse
from cudabench.ptx.schedule import Schedule

_THREADS_AT_ONCE = 16384  # threads whose instructions are one NumPy operation


class PtxKernel:
    """A kernel of a PTX module. `executed` counts the instructions of the last launch, one for all lanes together."""

    def __init__(self, module: Module, name: str) -> None:
        if name not in module.entries:
            raise BenchError(f"no kernel {name} in the PTX; it has {', '.join(module.entries)}")
        self.name, self.module, self.entry = name, module, module.entries[name]
        self.executed = 0

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        order: str = "forward",
    ) -> None:
        """Launch and wait: arrays are changed in place. Arguments are those of `cudabench.Kernel`."""
        schedule = Schedule(order)
        memory, params, back = Memory(), {}, []
        if len(args) != len(self.entry.params):
            raise BenchError(f"{self.name} takes {len(self.entry.params)} arguments, not {len(args)}")
        placed: dict[int, int] = {}
        for number, (arg, (name, kind, size)) in enumerate(zip(args, self.entry.params, strict=True)):
            if isinstance(arg, np.ndarray):
                owner = bytes_of(owner_of(arg))
                start = owner.ctypes.data
                if start not in placed:
                    # the owner, so that views of one array stay views of one array
                    placed[start] = memory.place(owner, f"array {number}")
                    back.append((owner, placed[start]))
                value = np.uint64(placed[start] + arg.ctypes.data - start).tobytes()
            elif isinstance(arg, np.generic):
                value = arg.tobytes()
            else:
                raise BenchError(f"{self.name}, argument {number}: {type(arg).__name__} is no array or NumPy scalar")
            if len(value) != size:
                raise BenchError(f"{self.name}, argument {number} (.{kind}): got {len(value)} bytes, not {size}")
            params[name] = value
        constants = {
            name: memory.place(np.ascontiguousarray(array).view(np.uint8).reshape(-1), name)
            for name, array in self.module.constants.items()
        }
        dims = [[*(int(n) for n in sizes), 1, 1][:3] for sizes in (grid, block)]
        together = max(1, _THREADS_AT_ONCE // int(np.prod(dims[1])))
        self.executed = 0
        with np.errstate(all="ignore"):
            for part in schedule.goes(int(np.prod(dims[0])), together):
                machine = Machine(self.entry, memory, params, constants, dims[0], dims[1], part, shared_mem, schedule)
                machine.run()
                self.executed += machine.executed
        for owner, address in back:
            flat = memory.contents(address)
            changed = owner != flat
            owner[changed] = flat[changed]


def interpret(
    source: str | Path,
    name: str | None = None,
    *,
    defines: Mapping[str, object] | None = None,
    include: Sequence[str | Path] = (),
    arch: int = 80,
    options: Sequence[str] = ("-std=c++17",),
) -> PtxKernel:
    """The kernel `name` of a .cu file, compiled by NVRTC and interpreted. Parameters as for `emulate` and NVRTC's own
    options. BenchError: the compiler's log. BenchMissing: no NVRTC."""
    module = _parsed(compile_cuda(source, arch=arch, defines=defines, include=include, options=options).ptx)
    if name is None and len(module.entries) > 1:
        raise BenchError(f"{source}: which kernel? It has {', '.join(module.entries)}")
    return PtxKernel(module, name or next(iter(module.entries)))


@lru_cache(maxsize=64)
def _parsed(text: str) -> Module:
    return parse(text)
