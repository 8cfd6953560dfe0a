"""Launching: what a backend gives, and arguments by name, each cast to the type that the kernel's signature has.

CuPy passes a Python float as 8 bytes and has no null pointer; a kernel that takes a float or an optional array would
read garbage. So every launch goes through `Launcher`, which reads the signature from the source.
"""

from __future__ import annotations

import functools
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
NO_DEFINES: Mapping[str, int] = {}
DEFAULT_STORAGE = 1  # common.cuh's
_SAFE = 1e38  # of float32


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
        typed = typed_arguments(source, name, arguments, defines)
        kernel = self.backend.kernel(source, name, defines, shared_bytes)
        kernel(tuple(int(n) for n in grid), (threads,), typed, shared_bytes)


def typed_arguments(
    source: str, name: str, arguments: Mapping[str, Any], defines: Mapping[str, int] = NO_DEFINES
) -> list[Any]:
    """The arguments in the order of the kernel's signature, scalars as NumPy scalars of its types.

    defines: of the variant; STORAGE decides what `stored_t` is.
    """
    converters = _converters(source, name, defines.get("STORAGE", DEFAULT_STORAGE))
    if len(converters) != len(arguments) or not converters.keys() <= arguments.keys():
        wrong = sorted(set(converters) ^ set(arguments))
        raise KernelError(f"{name}: {', '.join(wrong)}: not both a parameter and an argument")
    return [convert(arguments[parameter]) for parameter, convert in converters.items()]


@functools.cache
def _converters(source: str, name: str, storage: int) -> dict[str, Callable[[Any], Any]]:
    """What makes an argument of each parameter, in order: a step has hundreds of launches with ten arguments or so."""
    found: dict[str, Callable[[Any], Any]] = {}
    for parameter in sources.kernels(source)[name]:
        where = f"{name}: {parameter.name}"
        if parameter.kind == "pointer":
            element = sources.STORED[storage] if parameter.element == "stored" else parameter.element
            found[parameter.name] = functools.partial(_pointer, where, np.dtype(element) if element else None)
        elif np.dtype(parameter.kind).kind in "iu":
            limits = np.iinfo(parameter.kind)
            found[parameter.name] = functools.partial(
                _whole, where, np.dtype(parameter.kind).type, int(limits.min), int(limits.max)
            )
        else:
            found[parameter.name] = functools.partial(_real, where, np.dtype(parameter.kind).type)
    return found


def _pointer(where: str, element: Any, value: Any) -> Any:
    if value is None:
        return NULL
    if isinstance(value, np.generic) or not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise KernelError(f"{where}: expected an array, got {value!r:.40}")
    if element is not None and value.dtype != element:
        raise KernelError(f"{where}: expected an array of {element}, got {value.dtype}")
    return value


def _whole(where: str, kind: Any, low: int, high: int, value: Any) -> Any:
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise KernelError(f"{where}: expected a whole number, got {_shown(value)}")
        value = int(value)
    if not low <= value <= high:
        raise KernelError(f"{where}: {value} does not fit {kind.__name__}")
    return kind(value)


def _real(where: str, kind: Any, value: Any) -> Any:
    if type(value) is float and -_SAFE < value < _SAFE:
        return kind(value)
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise KernelError(f"{where}: expected a number, got {_shown(value)}")
    with np.errstate(over="ignore"):  # a scale beyond float32 is infinite there, as in the other kernels
        return kind(value)


def _shown(value: Any) -> str:
    return "an array" if hasattr(value, "shape") and not isinstance(value, np.generic) else f"{value!r:.40}"
