"""Launching: what a backend gives, and arguments by name, each cast to the type that the kernel's signature has.

CuPy passes a Python float as 8 bytes and has no null pointer; a kernel that takes a float or an optional array would
read garbage. So every launch goes through `Launcher`, which reads the signature from the source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.cuda import sources
from cupaged.kernels.interface import Array

Kernel = Callable[..., None]
"""``kernel(grid, block, arguments, shared_bytes)``: queues one launch on the backend's stream. Arguments are arrays, or
NumPy scalars of exactly the parameter's type."""

Gemm = Callable[[Array, Array, Array, str], None]
"""``gemm(x, weight, out, dtype)``: queues out = x @ weight.T; see `runtime.Runtime.gemm`."""

NULL = np.uint64(0)


class Backend(Protocol):
    """A device as the launch layer sees it. Arrays are NumPy's or CuPy's; work runs in the order it is queued."""

    @property
    def architecture(self) -> int:
        """Compute capability as major * 10 + minor, 80 for sm_80."""
        ...

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that one block may have."""
        ...

    @property
    def multiprocessors(self) -> int: ...

    def kernel(self, source: str, name: str, defines: Mapping[str, int], shared_bytes: int) -> Kernel:
        """A kernel of a source compiled with these macros, able to use so much dynamic shared memory. Kept."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised array, aligned to 16 bytes at least."""
        ...

    @property
    def gemm(self) -> Gemm | None:
        """A library's matrix product; None where ours shall do."""
        ...

    def upload(self, host: Array, out: Array | None = None) -> Array:
        """A contiguous NumPy array on the device (in `out`, if given), before any work queued later."""
        ...

    def download(self, array: Array) -> Array:
        """A device array as NumPy, after all work queued so far."""
        ...

    def address(self, array: Array) -> int:
        """Where the array's first element lies."""
        ...


class Launcher:
    """Compiled kernels of a backend, called with arguments by name."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(
        self,
        source: str,
        name: str,
        grid: Sequence[int],
        threads: int,
        defines: Mapping[str, int],
        shared_bytes: int = 0,
        /,
        **arguments: Any,
    ) -> None:
        """Queue a launch. `arguments` are the kernel's parameters: arrays, None for an absent one, Python numbers.

        KernelError names an argument that is missing, unknown, or of another kind than the source says.
        """
        typed = typed_arguments(source, name, arguments)
        kernel = self.backend.kernel(source, name, defines, shared_bytes)
        kernel(tuple(int(n) for n in grid), (threads,), typed, shared_bytes)


def typed_arguments(source: str, name: str, arguments: Mapping[str, Any]) -> list[Any]:
    """The arguments in the order of the kernel's signature, scalars as NumPy scalars of its types."""
    parameters = sources.kernels(source)[name]
    names = [parameter.name for parameter in parameters]
    if set(names) != set(arguments):
        wrong = sorted(set(names) ^ set(arguments))
        raise KernelError(f"{name}: {', '.join(wrong)}: not both a parameter and an argument")
    return [_typed(parameter, arguments[parameter.name], name) for parameter in parameters]


def _typed(parameter: sources.Parameter, value: Any, kernel: str) -> Any:
    where = f"{kernel}: {parameter.name}"
    if parameter.kind == "pointer":
        if value is None:
            return NULL
        if not hasattr(value, "dtype") or not hasattr(value, "shape") or value.shape is None or np.isscalar(value):
            raise KernelError(f"{where}: expected an array, got {type(value).__name__}")
        if parameter.size and value.dtype.itemsize != parameter.size:
            raise KernelError(f"{where}: expected elements of {parameter.size} bytes, got {value.dtype}")
        return value
    if hasattr(value, "shape") and not np.isscalar(value):
        raise KernelError(f"{where}: expected a number, got an array")
    kind = np.dtype(parameter.kind)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        if not limits.min <= int(value) <= limits.max:
            raise KernelError(f"{where}: {value} does not fit {parameter.kind}")
        return kind.type(int(value))
    with np.errstate(over="ignore"):  # a scale beyond float32 is infinite there, as in the other kernels
        return kind.type(value)
