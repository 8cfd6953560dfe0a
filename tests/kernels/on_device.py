"""The kernels of a CUDA device as an implementation for the conformance suite, whose arrays are NumPy's.

Every call takes its arrays to the device and back. What travels is the memory that an array is a view of, all of it: so
strides and overlaps are those of the test, and what a kernel writes beside its output comes back and is found.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from cupaged.device.cuda import CudaDevice
from cupaged.kernels.interface import KVView

# Their arrays stay on the host: tables, and the weights of a file.
ON_THE_HOST = ("plan_attention", "matrix", "vector")


class OnDevice:
    """Operations of a `CudaDevice` on NumPy arrays."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._made: dict[int, Any] = {}  # arrays of the device that an operation gave, by id

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self.device.ops, name)
        if name in ON_THE_HOST:

            def make(*arguments: Any, **named: Any) -> Any:
                made = function(*arguments, **named)
                if isinstance(made, np.ndarray):  # of a pretended device; a real one's arrays are not NumPy's
                    self._made[id(made)] = made
                return made

            return make

        def call(*arguments: Any, **named: Any) -> Any:
            trip = Trip(self.device, self._made)
            whole = name != "copy_blocks"  # whose lists of blocks are the host's
            there = [trip.there(argument, whole) for argument in arguments]
            try:
                return function(*there, **{key: trip.there(value, whole) for key, value in named.items()})
            finally:
                trip.back()

        return call


class Trip:
    """The memory of one call's arrays on the device."""

    def __init__(self, device: CudaDevice, made: dict[int, Any]) -> None:
        self._device = device
        self._made = made
        self._roots: dict[int, tuple[np.ndarray, Any]] = {}  # by id: flat bytes on the host, and on the device

    def there(self, value: Any, arrays: bool = True) -> Any:
        if isinstance(value, KVView):
            return dataclasses.replace(value, pools=tuple(self.there(pool) for pool in value.pools))
        if not arrays or not isinstance(value, np.ndarray) or id(value) in self._made:
            return value
        root = value
        while isinstance(root.base, np.ndarray):
            root = root.base
        if id(root) not in self._roots:
            bytes_ = root.reshape(-1, order="A").view(np.uint8)
            assert bytes_.size == 0 or np.shares_memory(bytes_, root)
            self._roots[id(root)] = bytes_, self._device.upload(np.array(bytes_))
        _, there = self._roots[id(root)]
        start = value.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        flat = there[start : start + (there.size - start) // value.itemsize * value.itemsize].view(value.dtype)
        tricks = np if isinstance(flat, np.ndarray) else sys.modules["cupy"]
        return tricks.lib.stride_tricks.as_strided(flat, value.shape, value.strides)

    def back(self) -> None:
        for here, there in self._roots.values():
            if here.flags.writeable:
                here[...] = self._device.download(there)
