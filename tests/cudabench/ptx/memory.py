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
        self.buffers: list[np.ndarray] = []  # padded to whole 16 bytes
        self.lengths: list[int] = []
        self.names: list[str] = []
        self.shared = np.zeros((0, 0), np.uint8)
        self.local = np.zeros((0, 0), np.uint8)
        self.shared_bytes = self.local_bytes = 0  # of a block, of a thread; rows of the arrays are padded
        self.block_of = np.zeros(0, np.int64)  # thread -> row of `shared`

    def place(self, array: np.ndarray, name: str) -> int:
        """Address of a copy of an array's bytes (flat uint8), which `contents` gives back."""
        address = GLOBAL + len(self.buffers) * GAP
        padded = np.zeros(_whole(len(array)), np.uint8)
        padded[: len(array)] = array
        self.buffers.append(padded)
        self.lengths.append(len(array))
        self.names.append(name)
        self.starts = np.append(self.starts, address)
        return address

    def contents(self, address: int) -> np.ndarray:
        """The bytes of the array placed at an address, as they are now."""
        number = (address - GLOBAL) // GAP
        return self.buffers[number][: self.lengths[number]]

    def new_blocks(self, blocks: int, threads: int, shared_bytes: int, local_bytes: int) -> None:
        """Shared and local memory for blocks that begin: every bit set, so that a value read too early is NaN."""
        self.shared_bytes, self.local_bytes = shared_bytes, local_bytes
        self.shared = np.full((blocks, _whole(shared_bytes)), 0xFF, np.uint8)
        self.local = np.full((blocks * threads, _whole(local_bytes)), 0xFF, np.uint8)
        self.block_of = np.repeat(np.arange(blocks), threads)

    def load(self, space: str, address: np.ndarray, size: int, lanes: np.ndarray, what: str) -> np.ndarray:
        """`size` bytes for each lane: uint8 [lanes, size]. `lanes` are thread numbers."""
        found = self._find(space, address, size, lanes, what)
        if len(found) == 1:
            return _words(found[0][1], size)[found[0][2]].view(np.uint8)
        out = np.empty((len(lanes), size), np.uint8)
        for where, memory, index in found:
            out[where] = _words(memory, size)[index].view(np.uint8)
        return out

    def store(self, space: str, address: np.ndarray, values: np.ndarray, lanes: np.ndarray, what: str) -> None:
        """Bytes uint8 [lanes, size] written; of several lanes at one address the last wins."""
        size = values.shape[1]
        values = np.ascontiguousarray(values)
        for where, memory, index in self._find(space, address, size, lanes, what):
            _words(memory, size)[index] = _words(values[where].reshape(-1), size)

    def _find(
        self, space: str, address: np.ndarray, size: int, lanes: np.ndarray, what: str
    ) -> list[tuple[np.ndarray | slice, np.ndarray, np.ndarray]]:
        """(which of the lanes, flat memory, index in units of `size`) for each memory that is addressed; every lane is
        in one of them."""
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
            return [
                (
                    slice(None),
                    *self._rows(self.shared, self.shared_bytes, self.block_of[lanes], address, size, "shared", what),
                )
            ]
        if space == "local":
            return [(slice(None), *self._rows(self.local, self.local_bytes, lanes, address, size, "local", what))]
        number = np.searchsorted(self.starts, address, side="right") - 1
        parts = []
        one = bool((number == number[0]).all())
        for buffer in number[:1] if one else np.unique(number):
            chosen = slice(None) if one else np.nonzero(number == buffer)[0]
            index = address[chosen] - self.starts[buffer]
            if buffer < 0 or (index + size > self.lengths[buffer]).any():
                near = f" (offset {int(index.max())} of {self.names[buffer]})" if buffer >= 0 else ""
                raise KernelFault(f"{what}: global access of {size} bytes out of bounds{near}")
            parts.append((chosen, self.buffers[buffer], index // size))
        return parts

    @staticmethod
    def _rows(
        memory: np.ndarray, length: int, row: np.ndarray, address: np.ndarray, size: int, name: str, what: str
    ) -> tuple[np.ndarray, np.ndarray]:
        if (address < 0).any() or (address + size > length).any():
            raise KernelFault(f"{what}: {name} memory out of bounds, byte {int(address.max())} of {length}")
        return memory.reshape(-1), (row * memory.shape[1] + address) // size


def _whole(count: int) -> int:
    return -(-count // 16) * 16


def _words(memory: np.ndarray, size: int) -> np.ndarray:
    """Flat bytes as [units, words of a unit], a unit of `size` bytes."""
    return memory.view(f"u{min(size, 8)}").reshape(-1, -(-size // 8))
