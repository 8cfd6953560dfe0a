"""The memories of the interpreted machine, with the bounds and alignment of every access checked.

Addresses are 64-bit numbers. Arrays passed to a kernel lie from 2^40 on, far apart, so that a pointer cut to 32 bits or
an offset that wrapped hits nothing. Generic addresses of shared memory lie from 2^52, of local memory from 2^53.
"""

from __future__ import annotations

import numpy as np

from cudabench.errors import KernelFault

GLOBAL, GAP = 1 << 40, 1 << 34
SHARED, LOCAL = 1 << 52, 1 << 53


class Memory:
    """Global memory of a launch, and the shared and local memory of the blocks that run at present."""

    def __init__(self) -> None:
        self.starts = np.zeros(0, np.int64)
        self.buffers: list[np.ndarray] = []
        self.names: list[str] = []
        self.shared = np.zeros((0, 0), np.uint8)
        self.local = np.zeros((0, 0), np.uint8)
        self.block_of = np.zeros(0, np.int64)  # thread -> row of `shared`

    def place(self, array: np.ndarray, name: str) -> int:
        """Address of an array's bytes (flat uint8)."""
        address = GLOBAL + len(self.buffers) * GAP
        self.buffers.append(array)
        self.names.append(name)
        self.starts = np.append(self.starts, address)
        return address

    def new_blocks(self, blocks: int, threads: int, shared_bytes: int, local_bytes: int) -> None:
        """Shared and local memory for blocks that begin: every bit set, so that a value read too early is NaN."""
        self.shared = np.full((blocks, shared_bytes), 0xFF, np.uint8)
        self.local = np.full((blocks * threads, local_bytes), 0xFF, np.uint8)
        self.block_of = np.repeat(np.arange(blocks), threads)

    def load(self, space: str, address: np.ndarray, size: int, lanes: np.ndarray, what: str) -> np.ndarray:
        """`size` bytes for each lane: uint8 [lanes, size]. `lanes` are thread numbers."""
        out = np.empty((len(lanes), size), np.uint8)
        for where, memory, index in self._find(space, address, size, lanes, what):
            out[where] = memory[index[:, None] + np.arange(size)]
        return out

    def store(self, space: str, address: np.ndarray, values: np.ndarray, lanes: np.ndarray, what: str) -> None:
        """Bytes uint8 [lanes, size] written; of several lanes at one address the last wins."""
        size = values.shape[1]
        for where, memory, index in self._find(space, address, size, lanes, what):
            memory[index[:, None] + np.arange(size)] = values[where]

    def _find(
        self, space: str, address: np.ndarray, size: int, lanes: np.ndarray, what: str
    ) -> list[tuple[np.ndarray | slice, np.ndarray, np.ndarray]]:
        """(which of the lanes, flat memory, index of the first byte) for each memory that is addressed."""
        if (address & (size - 1)).any():
            raise KernelFault(f"{what}: misaligned access of {size} bytes")
        if space == "generic":
            parts = []
            kinds = np.where(address >= LOCAL, 2, np.where(address >= SHARED, 1, 0))
            for kind, name, base in ((0, "global", 0), (1, "shared", SHARED), (2, "local", LOCAL)):
                chosen = np.nonzero(kinds == kind)[0]
                if chosen.size:
                    found = self._find(name, address[chosen] - base, size, lanes[chosen], what)
                    parts += [(chosen[where], memory, index) for where, memory, index in found]
            return parts
        if space == "shared":
            return [(slice(None), *self._rows(self.shared, self.block_of[lanes], address, size, "shared", what))]
        if space == "local":
            return [(slice(None), *self._rows(self.local, lanes, address, size, "local", what))]
        number = np.searchsorted(self.starts, address, side="right") - 1
        parts = []
        for buffer in np.unique(number):
            chosen = np.nonzero(number == buffer)[0]
            index = address[chosen] - self.starts[buffer]
            if buffer < 0 or (index + size > len(self.buffers[buffer])).any():
                near = f" (offset {int(index.max())} of {self.names[buffer]})" if buffer >= 0 else ""
                raise KernelFault(f"{what}: global access of {size} bytes out of bounds{near}")
            parts.append((chosen, self.buffers[buffer], index))
        return parts

    @staticmethod
    def _rows(
        memory: np.ndarray, row: np.ndarray, address: np.ndarray, size: int, name: str, what: str
    ) -> tuple[np.ndarray, np.ndarray]:
        if (address < 0).any() or (address + size > memory.shape[1]).any():
            raise KernelFault(f"{what}: {name} memory out of bounds, byte {int(address.max())} of {memory.shape[1]}")
        return memory.reshape(-1), row * memory.shape[1] + address
