"""`launch.Backend` on one stream of a `runtime.Runtime`: launches, and arrays to the device and back through pinned
memory of its own.

Whatever the host waits for is waited for here, in `Staging`; the device's waits are `cupaged.device.cuda`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cupaged.errors import DeviceError, KernelError
from cupaged.kernels.cuda.launch import Gemm, Kernel
from cupaged.kernels.cuda.runtime import Event, Runtime, Stream
from cupaged.kernels.interface import Array

STAGING_BYTES = 16 << 20  # of a staging buffer at most: what is larger travels in pieces
_LEAST_STAGING = 64 << 10
_SLOTS = 2  # while the copy from one runs, the host fills the other
_ALIGNED = 64


class Slot:
    """A staging buffer, and the event behind the copies that last ran from it."""

    def __init__(self, buffer: Array) -> None:
        self.buffer = buffer
        self.copied: Event | None = None


class Staging:
    """Pinned memory between NumPy arrays and the device's, whose copies run on one stream."""

    def __init__(self, runtime: Runtime, stream: Stream) -> None:
        self._runtime = runtime
        self._stream = stream
        self._slots = [Slot(runtime.empty_host((_LEAST_STAGING,), np.uint8)) for _ in range(_SLOTS)]
        self._landing = runtime.empty_host((_LEAST_STAGING,), np.uint8)
        self._turn = 0

    def send(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Queue copies of (host, device) arrays of equal sizes; the host ones may be changed at once."""
        batch: list[tuple[Array, Array]] = []
        used = 0
        for host, device in pairs:
            for start in range(0, host.size, STAGING_BYTES):
                piece = host[start : start + STAGING_BYTES]
                if batch and used + piece.size > STAGING_BYTES:
                    self._send(batch, used)
                    batch, used = [], 0
                batch.append((piece, device[start : start + STAGING_BYTES]))
                used += -(-piece.size // _ALIGNED) * _ALIGNED
        if batch:
            self._send(batch, used)

    def _send(self, batch: Sequence[tuple[Array, Array]], size: int) -> None:
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _SLOTS
        if slot.copied is not None:
            self._runtime.synchronize(slot.copied)
        if slot.buffer.size < size:
            slot.buffer = self._runtime.empty_host((_rounded(size),), np.uint8)
        try:
            start = 0
            for host, device in batch:
                space = slot.buffer[start : start + host.size]
                space[...] = host
                self._runtime.copy(device, space, self._stream)
                start += -(-host.size // _ALIGNED) * _ALIGNED
        finally:
            slot.copied = self._runtime.record(self._stream)

    def fetch(self, device: Array, host: Array) -> None:
        """Copy a device array to a host one of as many bytes, after all work queued so far; done on return."""
        for start in range(0, host.size, STAGING_BYTES):
            piece = host[start : start + STAGING_BYTES]
            if self._landing.size < piece.size:
                self._landing = self._runtime.empty_host((_rounded(piece.size),), np.uint8)
            space = self._landing[: piece.size]
            self._runtime.copy(space, device[start : start + STAGING_BYTES], self._stream)
            self._runtime.synchronize(self._runtime.record(self._stream))
            piece[...] = space


def _rounded(size: int) -> int:
    return min(STAGING_BYTES + _ALIGNED, max(_LEAST_STAGING, 1 << (size - 1).bit_length()))


class RuntimeBackend:
    """`launch.Backend`, and what the device asks of it besides. `deterministic`: no library's products. `stream`: by
    default one of its own."""

    def __init__(self, runtime: Runtime, deterministic: bool = False, stream: Stream | None = None) -> None:
        self.runtime = runtime
        self.stream = runtime.stream("compute") if stream is None else stream
        self.architecture = runtime.architecture
        self.shared_limit = runtime.shared_limit
        self.multiprocessors = runtime.multiprocessors
        self._deterministic = deterministic
        self._staging = Staging(runtime, self.stream)
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._used: list[Array] | None = None  # by launches that are captured

    def kernel(self, source: str, name: str, defines: Mapping[str, int], shared_bytes: int) -> Kernel:
        key = (source, name, shared_bytes, tuple(sorted(defines.items())))
        if key not in self._kernels:
            self._kernels[key] = self._bound(self.runtime.function(source, name, defines, shared_bytes))
        return self._kernels[key]

    def _bound(self, function: Any) -> Kernel:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[Any], shared: int) -> None:
            if self._used is not None:
                self._used += [argument for argument in arguments if not np.isscalar(argument)]
            self.runtime.launch(function, _three(grid), _three(block), arguments, shared, self.stream)

        return launch

    @property
    def gemm(self) -> Gemm | None:
        return None if self._deterministic or not self.runtime.has_gemm else self._gemm

    def _gemm(self, x: Array, weight: Array, out: Array, dtype: str) -> None:
        # Its arrays are held by the launches that fill them (`capturing`) and by the recorded call.
        self.runtime.gemm(x, weight, out, dtype, self.stream)

    @contextmanager
    def capturing(self) -> Iterator[list[Array]]:
        """While launches are captured: the arrays that they use, which the graph needs but does not keep."""
        used: list[Array] = []
        self._used = used
        try:
            yield used
        finally:
            self._used = None

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self._refuse_while_capturing()
        return self.runtime.empty(shape, dtype)

    def upload(self, host: Array, out: Array | None = None) -> Array:
        if out is None:
            out = self.empty(host.shape, host.dtype)
        self.upload_many([(host, out)])
        return out

    def upload_many(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Several uploads in one go: (host, device) pairs of equal types and sizes, the device ones contiguous."""
        self._refuse_while_capturing()
        for host, out in pairs:
            if host.size != out.size or host.dtype != out.dtype:
                raise KernelError(
                    f"upload: {host.dtype} {tuple(host.shape)} does not fit {out.dtype} {tuple(out.shape)}"
                )
        self._staging.send([(_bytes(np.ascontiguousarray(host)), _bytes(out)) for host, out in pairs if host.size])

    def download(self, array: Array) -> Array:
        self._refuse_while_capturing()
        host = np.empty(array.shape, array.dtype)
        if host.size:
            self._staging.fetch(_bytes(array), _bytes(host))
        return host

    def address(self, array: Array) -> int:
        return self.runtime.address(array)

    def _refuse_while_capturing(self) -> None:
        if self._used is not None:
            raise DeviceError("memory was asked for, or moved, while a graph was captured")


def _three(size: tuple[int, ...]) -> tuple[int, int, int]:
    """A grid or a block with all its dimensions."""
    x, y, z = (*size, 1, 1)[:3]
    return x, y, z


def _bytes(array: Array) -> Array:
    """A contiguous array, NumPy's or the device's, as bytes."""
    if not array.flags.c_contiguous:
        raise KernelError(f"array {tuple(array.shape)}: expected a contiguous one")
    return array.reshape(-1).view(np.uint8)
