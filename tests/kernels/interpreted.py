"""The launch layer over interpreted PTX: what `emulated.EmulatedBackend` is for the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudabench.ptx import interpret
from emulated import EmulatedBackend, emulated_operations

from cupaged.kernels.cuda import sources


class InterpretedBackend(EmulatedBackend):
    """Launches NVRTC's PTX, interpreted. `order` is that of `cudabench.ptx.Schedule`; there is no `check`."""

    def __init__(self, architecture: int = 80, shared_limit: int = 163 << 10) -> None:
        super().__init__(architecture, shared_limit)
        self.multiprocessors = 16  # blocks that run side by side cost little more than one

    def kernel(self, source: str, name: str, defines: Mapping[str, int], shared_bytes: int) -> Any:
        assert shared_bytes <= self.shared_limit
        key = (source, name, tuple(sorted(defines.items())))
        if key not in self._kernels:
            self._kernels[key] = interpret(
                sources.FOLDER / source, name, defines=defines, arch=self.architecture, options=sources.NVRTC_OPTIONS
            )
        kernel = self._kernels[key]

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: Any, shared: int) -> None:
            self.launches.append((name, grid))
            assert self.check is None
            kernel(grid, block, arguments, shared_mem=shared, order=self.order)

        return launch


def interpreted_operations(architecture: int = 80, **options: Any) -> Any:
    """`CudaOperations` on the interpreter; `.backend` has the switches."""
    limit = {"shared_limit": options.pop("shared_limit")} if "shared_limit" in options else {}
    return emulated_operations(backend=InterpretedBackend(architecture, **limit), **options)
