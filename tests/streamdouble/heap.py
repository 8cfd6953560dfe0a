"""Memory of the double: two arenas that stay mapped, so that work which comes too late meets other data, not a crash.

An array is a NumPy view of a `Region`. When the last view is gone the region is dropped: whoever has only its address
will find NaN there, and soon what somebody else has put there.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from cupaged.errors import DeviceError, DeviceMemoryError

ALIGNMENT = 256
POISON = 0xFF  # as bytes of a float: NaN; as an id or a slot: -1


class Region:
    """One allocation. NumPy arrays made of it lead to it by their bases, however many views lie in between; those of a
    device's memory are read-only: the host writes there by copies alone."""

    __slots__ = ("__array_interface__", "__weakref__", "arena", "size", "start")

    def __init__(self, arena: Arena, start: int, size: int) -> None:
        self.arena = arena
        self.start = start
        self.size = size
        self.__array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (start, arena.kind == "device"), "version": 3,
        }  # fmt: skip


class Arena:
    """Memory of one kind, "device" or "pinned". What was given back last is handed out first."""

    def __init__(self, kind: str, capacity: int, dropped: Callable[[Arena, int, int], None]) -> None:
        self.kind = kind
        self.capacity = capacity
        self.buffer = mmap.mmap(-1, capacity)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.live: dict[int, int] = {}  # start -> bytes of regions that have not been given back
        self._dropped = dropped
        self._free: list[tuple[int, int]] = []
        self._fresh = self.base

    @property
    def used(self) -> int:
        return sum(self.live.values())

    def new(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array on a region of its own; `dropped(arena, start, size)` is called when the last view of it is gone."""
        kind = np.dtype(dtype)
        count = math.prod(shape)
        size = max(1, -(-count * kind.itemsize // ALIGNMENT)) * ALIGNMENT
        start = self._take(size)
        self.live[start] = size
        region = Region(self, start, size)
        weakref.finalize(region, self._dropped, self, start, size).atexit = False
        return np.asarray(region)[: count * kind.itemsize].view(kind).reshape(shape)

    def give_back(self, start: int, size: int) -> None:
        del self.live[start]
        self._free.append((start, size))

    def _take(self, size: int) -> int:
        for index in range(len(self._free) - 1, -1, -1):
            start, length = self._free[index]
            if length >= size:
                if length > size:
                    self._free[index] = (start + size, length - size)
                else:
                    del self._free[index]
                return start
        if self._fresh + size > self.base + self.capacity:
            if self._merged():
                return self._take(size)
            raise DeviceMemoryError(f"out of {self.kind} memory: {size:,} bytes of {self.capacity:,} are not free")
        start = self._fresh
        self._fresh += size
        ctypes.memset(start, POISON, size)
        return start

    def _merged(self) -> bool:
        """Join free neighbours; whether there were any."""
        joined: list[tuple[int, int]] = []
        for start, size in sorted(self._free):
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        merged = len(joined) < len(self._free)
        self._free = joined
        return merged


class Pointer:
    """What queued work keeps of an array: where it lay, and how far its allocation reached. Nothing is kept alive."""

    __slots__ = ("_base", "_buffer", "address", "dtype", "high", "low", "shape", "strides")

    def __init__(self, array: np.ndarray) -> None:
        """DeviceError for an array that is neither the double's device memory nor its pinned memory."""
        region: Any = array
        while not isinstance(region, Region | None):  # as_strided puts an object of another kind in between
            region = getattr(region, "base", None)
        if region is None:
            raise DeviceError(f"an array {array.shape} of {array.dtype} is neither device memory nor pinned memory")
        self._buffer, self._base = region.arena.buffer, region.arena.base
        self.low, self.high = region.start, region.start + region.size
        self.address = array.__array_interface__["data"][0]
        self.shape, self.strides, self.dtype = array.shape, array.strides, array.dtype

    def again(self) -> np.ndarray:
        """The array as it was passed, on whatever lies there now."""
        return np.ndarray(self.shape, self.dtype, self._buffer, self.address - self._base, self.strides)

    def view(
        self, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None, offset: int = 0
    ) -> np.ndarray:
        """An array that starts `offset` elements behind the pointer; strides in elements. DeviceError where it leaves
        the allocation, as a kernel would be stopped by Compute Sanitizer."""
        kind = np.dtype(dtype)
        item = kind.itemsize
        start = self.address + offset * item
        if strides is None:
            reach = math.prod(shape) * item
            steps = None
        else:
            steps = tuple(step * item for step in strides)
            reach = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + item
        if 0 not in shape and not (self.low <= start and start + reach <= self.high):
            raise DeviceError(f"bytes {start - self.low}..{start + reach - self.low} of {self.high - self.low} touched")
        return np.ndarray(shape, kind, self._buffer, start - self._base, steps)

    def rest(self, dtype: Any) -> np.ndarray:
        """All whole elements from the pointer to the end of the allocation."""
        return self.view(((self.high - self.address) // np.dtype(dtype).itemsize,), dtype)
