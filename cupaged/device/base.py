"""What the runtime asks of a device. `cpu.py` implements it on NumPy and Numba; the CUDA device will on CuPy.

Work is issued on three streams, named by what they do: "compute", "to_host", "to_device". Work of one stream runs in
the order issued; between streams only events order it. On a device whose work is done when a call returns, events are
simply done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cupaged.kernels.interface import Array, AttentionPlan, Operations

StreamName = Literal["compute", "to_host", "to_device"]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of the device's memory: all of it, and what a new allocation may take."""

    total: int
    available: int


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool: ...
    def wait(self) -> None:
        """Block the calling thread until the point is reached."""
        ...


class Capture(Protocol):
    """Operations recorded on preallocated buffers. `replay` runs them on whatever those buffers hold now."""

    def replay(self, plans: Sequence[AttentionPlan] | None = None) -> None:
        """Run the operations. `plans`: attention plans of as many tokens in place of the capture's, in order."""
        ...


class Device(ABC):
    """Memory, streams, events and capture of one device, and its kernels (`ops`)."""

    kind: str  # "cpu" or "cuda"
    name: str  # for people: processor or card
    k_transposed: bool  # the order of K inside a block that this device's kernels like best

    @property
    @abstractmethod
    def ops(self) -> Operations: ...

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised array in the device's memory, aligned to 64 bytes."""

    @abstractmethod
    def upload(self, host: Array, out: Array | None = None) -> Array:
        """A NumPy array into device memory (`out`, if given), ordered on the compute stream."""

    @abstractmethod
    def download(self, array: Array) -> Array:
        """A device array as NumPy, after all compute work issued so far."""

    @abstractmethod
    def record(self, stream: StreamName = "compute") -> Event:
        """An event after all work issued on the stream so far."""

    @abstractmethod
    def wait(self, stream: StreamName, event: Event) -> None:
        """Work issued on the stream from now on runs after the event."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all streams are idle."""

    @abstractmethod
    def capture(self, plans: Sequence[AttentionPlan] = ()) -> AbstractContextManager[Capture]:
        """``with device.capture() as step: ops...`` records the operations instead of running them.

        `plans`: the attention plans that the operations will use, if later replays shall use others.
        """

    @abstractmethod
    def memory(self) -> MemoryInfo: ...

    @abstractmethod
    def close(self) -> None:
        """Give back threads and memory. Using the device afterwards raises DeviceError."""


ProgressCallback = Callable[[int, int], None]
