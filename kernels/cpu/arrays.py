"""Addresses of NumPy arrays, and checks of the forms that kernels take."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.interface import Array


def float_bits(x: float) -> int:
    """The bits of x as float32: how scalars travel in an operation record."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def aligned(count: int, dtype: Any) -> Array:
    """An uninitialised flat array aligned to 64 bytes."""
    item = np.dtype(dtype).itemsize
    raw = np.empty(count * item + 64, np.uint8)
    skip = -address(raw) % 64
    return raw[skip : skip + count * item].view(dtype)


class Arena:
    """Gives out 64-byte aligned pieces of large arrays, for which Linux uses pages of 2 MiB (NumPy asks it to).

    A layer's matrices are a few hundred KiB; in arrays of their own they would lie in pages of 4 KiB, and reading them
    would wait for address translation: 10-20 % of a small model's decode step.
    """

    CHUNK = 32 << 20

    def __init__(self) -> None:
        self._rest: Array = np.empty(0, np.uint8)

    def take(self, count: int, dtype: Any) -> Array:
        """As `aligned`."""
        size = count * np.dtype(dtype).itemsize
        if size > self.CHUNK // 4:
            return aligned(count, dtype)
        whole = -(-size // 64) * 64
        if whole > len(self._rest):
            self._rest = aligned(self.CHUNK, np.uint8)
        piece, self._rest = self._rest[:size], self._rest[whole:]
        return piece.view(dtype)


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def row_address(name: str, x: Array, dtype: type = np.float32) -> tuple[int, int]:
    """(address, row stride in bytes) of an array whose rows x[i] are contiguous."""
    if x.dtype != dtype:
        raise KernelError(f"{name}: dtype {x.dtype}, expected {np.dtype(dtype).name}")
    inner = x.itemsize
    for size, stride in zip(x.shape[:0:-1], x.strides[:0:-1], strict=True):
        if stride != inner and size > 1 and x.size:
            raise KernelError(f"{name}: the elements of a row are not contiguous (strides {x.strides})")
        inner *= size
    return address(x), (x.strides[0] if x.shape[0] > 1 and x.size else inner)


def contiguous(name: str, x: Array, dtype: type = np.float32) -> int:
    """The address of a contiguous array."""
    if x.dtype != dtype or not x.flags.c_contiguous:
        raise KernelError(f"{name}: expected a contiguous {np.dtype(dtype).name} array, got {x.dtype} {x.strides}")
    return address(x)
