"""The launch layer over interpreted PTX: what `emulated.EmulatedBackend` is for the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudabench.ptx import interpret
from emulated import EmulatedBackend, emulated_operations

from cupaged.kernels.cuda import sources


class InterpretedBackend(EmulatedBackend):
    """Launches NVRTC's PTX, interpreted."""

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
            kernel(grid, block, arguments, shared_mem=shared)

        return launch


def interpreted_operations(architecture: int = 80, **options: Any) -> Any:
    """`CudaOperations` on the interpreter; `.backend` has the switches."""
    return emulated_operations(backend=InterpretedBackend(architecture), **options)
