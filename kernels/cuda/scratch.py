"""Device memory that an operation needs while it runs, and nobody after: kept, so that none is allocated in a step."""

from __future__ import annotations

from typing import Any

from cupaged.kernels.cuda.launch import Backend
from cupaged.kernels.interface import Array


class Scratch:
    """Arrays by name, each as large as any call has needed so far.

    One that has become too small is replaced; a captured graph that uses the old one keeps it. Both may be in use: work
    of the compute stream runs in order, and nothing in scratch is needed from one operation to the next.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._arrays: dict[str, Array] = {}

    def get(self, name: str, count: int, dtype: Any) -> Array:
        """count elements; always of the same type for a name."""
        known = self._arrays.get(name)
        if known is None or known.shape[0] < count:
            known = self._arrays[name] = self._backend.empty((count,), dtype)
        return known[:count]
