"""Checks of device arrays, NumPy's and CuPy's alike: shape, type, and rows that a kernel can step through."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.interface import Array

_DTYPES = {name: np.dtype(name) for name in ("float32", "float16", "uint16", "int32", "int64", "uint8")}


def row_stride(name: str, array: Array, shape: Sequence[int], dtype: str = "float32") -> int:
    """Elements from one row to the next of an array [T, ...] whose rows are contiguous. KernelError if it is not so."""
    if tuple(array.shape) != tuple(shape):
        raise KernelError(f"{name}: expected shape {tuple(shape)}, got {tuple(array.shape)}")
    if array.dtype != _DTYPES[dtype]:
        raise KernelError(f"{name}: expected {dtype}, got {array.dtype}")
    item = array.dtype.itemsize
    if not array.size:
        return 0
    inner = item
    for size, stride in zip(reversed(array.shape[1:]), reversed(array.strides[1:]), strict=True):
        if size > 1 and stride != inner:
            raise KernelError(f"{name}: rows are not contiguous")
        inner *= size
    if array.shape[0] <= 1:
        return inner // item
    if array.strides[0] % item or array.strides[0] < 0:
        raise KernelError(f"{name}: a stride of {array.strides[0]} bytes between rows")
    return int(array.strides[0]) // item


def contiguous(name: str, array: Array, shape: Sequence[int], dtype: str = "float32") -> None:
    """KernelError unless the array has this shape and type and no gaps."""
    stride = row_stride(name, array, shape, dtype)
    size = 1
    for extent in shape[1:]:
        size *= extent
    if array.size and shape[0] > 1 and stride != size:
        raise KernelError(f"{name}: rows are not adjacent")
