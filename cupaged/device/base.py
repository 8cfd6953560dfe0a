"""What the runtime asks of a device. `cpu.py` implements it on NumPy and Numba, `cuda.py` on CuPy.

Work is issued on three streams, named by what they do: "compute", "to_host", "to_device". Work of one stream runs in
the order issued; between streams only events order it. On a device whose work is done when a call returns, events are
simply done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from cupaged.device.host_memory import host_memory
from cupaged.kernels.interface import Activation, Array, AttentionPlan, Operations, StorageType

StreamName = Literal["compute", "to_host", "to_device"]
CopyStream = Literal["to_host", "to_device"]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of the device's memory: all of it, and what a new allocation may take."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides between compiled kernels. group: query heads of a KV head."""

    head_dim: int
    group: int
    block_size: int
    activation: Activation


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool: ...
    def wait(self) -> None:
        """Block the calling thread until the point is reached."""
        ...


class Transfer(Event, Protocol):
    """A copy under way. `wait` and `done` never raise: what went wrong is in `error` once it is done."""

    @property
    def error(self) -> BaseException | None: ...
    @property
    def seconds(self) -> float | None:
        """How long the copy itself took, once it is done, where the device can tell."""
        ...


class Capture(Protocol):
    """Operations recorded on preallocated buffers. `replay` runs them on whatever those buffers hold now."""

    def replay(self, plans: Sequence[AttentionPlan] | None = None) -> None:
        """Run the operations. `plans`: attention plans of as many tokens in place of the capture's, in order."""
        ...


@runtime_checkable
class MovingCapture(Capture, Protocol):
    """One whose plans can be moved on by a token, which is less work than new ones."""

    def advance(self, changed: Sequence[bool]) -> bool:
        """The plans of the last replay, for the next step of decoding of the same sequences, each a token longer.

        changed: of each plan, whether entries of its tables have changed, in the arrays that it was made with. False:
        it needs new plans (a context enters another part, or who shares blocks may have changed); nothing was done.
        """
        ...


class Device(ABC):
    """Memory, streams, events and capture of one device, and its kernels (`ops`)."""

    kind: str  # "cpu" or "cuda"
    name: str  # for people: processor or card
    k_transposed: bool  # the order of K inside a block that this device's kernels like best
    unified: bool  # its memory is the host's: kernels read host blocks as fast as their own
    as_stored: bool  # weights asked for as float32 are kept as they are stored, see `interface.exact_type`

    @property
    @abstractmethod
    def ops(self) -> Operations: ...

    def prepare(  # noqa: B027  (not all have something to do)
        self, weights: Iterable[str], cache: StorageType, shape: ModelShape | None = None, exact: bool = False
    ) -> None:
        """Have the kernels at hand that a model needs, all at once, where they must be compiled.

        `weights`: what its matrices are kept as (see `interface.kept_type`); `cache`: the type of its K/V.
        exact: the weights were asked for as float32. Without `shape`, kernels that depend on it may be compiled at
        their first use.
        """

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised array in the device's memory, aligned to 64 bytes."""

    @abstractmethod
    def empty_host(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised host memory that kernels can read and that copies run from and to beside other work (pinned,
        on a GPU), aligned to 64 bytes."""

    @abstractmethod
    def copy(self, stream: CopyStream, pairs: Sequence[tuple[Array, Array]]) -> Transfer:
        """Copy (source, destination) pairs of flat arrays of equal type and size, between device memory and that of
        `empty_host`, behind all work issued on the stream. Returns at once."""

    @abstractmethod
    def upload(self, host: Array, out: Array | None = None) -> Array:
        """A NumPy array into device memory (`out`, if given), ordered on the compute stream."""

    def upload_many(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """(host, device) pairs uploaded in one go, ordered on the compute stream: a step's metadata."""
        for host, out in pairs:
            self.upload(host, out)

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

    def weight_bytes(self, kept: Mapping[str, int]) -> int:
        """Bytes that a model's matrices take here. kept: bytes by what they are kept as, as `interface.packed_bytes`
        counts them."""
        return sum(kept.values())

    def host_memory(self) -> MemoryInfo:
        """Bytes of the host's memory: what `empty_host` takes from."""
        return MemoryInfo(*host_memory())

    @abstractmethod
    def close(self) -> None:
        """Give back threads and memory. Using the device afterwards raises DeviceError."""


ProgressCallback = Callable[[int, int], None]
