"""What the CUDA device asks of a CUDA runtime: memory, streams, events, launches, graphs, products.

`cupy_runtime.CupyRuntime` is that on a GPU, through CuPy. The tests' stream double is that on a CPU, with all work
deferred and run in a random order that streams and events allow. Everything between the two, that is the device, the
launch layer and the engine, is the same code.

The rules of CUDA hold: work of one stream runs in the order issued; between streams only events order it; nothing that
pending work touches may be freed, overwritten by the host or reused, and nothing here keeps it alive: the caller does.
Device memory comes from a pool ordered by the compute stream: an array that is dropped may at once be handed out again
to work issued on the compute stream later. Of the other streams the pool knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cupaged.kernels.interface import Array

if TYPE_CHECKING:
    from cupaged.kernels.cuda.variants import Build

Stream = Any  # opaque to callers
Event = Any
Function = Any
Graph = Any


class Runtime(Protocol):
    """One GPU. DeviceError for whatever CUDA refuses, with its own words; OutOfMemory is a DeviceError, too."""

    name: str  # of the card
    architecture: int  # compute capability, 80 for 8.0
    shared_limit: int  # bytes of shared memory that one block may ask for
    multiprocessors: int

    def memory(self) -> tuple[int, int]:
        """(total, free) bytes of the device's memory, what the pool has spare counted as free."""
        ...

    # -- memory

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised device memory from the pool, aligned to 256 bytes."""
        ...

    def empty_host(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised pinned memory as a NumPy array, readable by kernels where it lies. Freed when it is dropped."""
        ...

    def address(self, array: Array) -> int:
        """Where kernels find the first element of a device array or of pinned memory (the same in both: UVA)."""
        ...

    # -- streams and events

    def stream(self, name: str) -> Stream:
        """A new stream that does not wait for the default one; `name` is for people."""
        ...

    def copy(self, destination: Array, source: Array, stream: Stream) -> None:
        """Queue a copy of a contiguous array to one of as many bytes, either end on the device or pinned."""
        ...

    def record(self, stream: Stream, timed: bool = False) -> Event:
        """An event behind all work issued on the stream so far."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Work issued on the stream from now on runs after the event."""
        ...

    def done(self, event: Event) -> bool: ...
    def synchronize(self, event: Event | None = None) -> None:
        """Block the host until the event, or all work of the device, is done. DeviceError if some of it failed."""
        ...

    def seconds(self, first: Event, last: Event) -> float:
        """Time between two timed events that are done."""
        ...

    # -- work

    def function(self, source: str, name: str, defines: Mapping[str, int], shared_bytes: int) -> Function:
        """A kernel of a source of this folder compiled with these macros (from the cache of cubins, or by NVRTC), able
        to use so much dynamic shared memory. Kept."""
        ...

    def prepare(self, builds: Sequence[Build], progress: Callable[[int, int], None] | None) -> None:
        """Compile those of these kernels that the cache of cubins does not have, several at a time, so that `function`
        has them at once. progress(done, total) counts those that were compiled."""
        ...

    def launch(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        shared_bytes: int,
        stream: Stream,
    ) -> None:
        """Queue a kernel. arguments: arrays for pointers (device or pinned), NumPy scalars of the signature's types."""
        ...

    @property
    def has_gemm(self) -> bool:
        """Whether cuBLAS was found. Without it products are those of our own kernels."""
        ...

    def gemm(self, x: Array, weight: Array, out: Array, dtype: str, stream: Stream) -> None:
        """Queue out = x @ weight.T by cuBLAS on our own handle and workspace, one fixed algorithm for a shape.

        x [M, K], weight [N, K] contiguous, of `dtype` (float16; bfloat16 as uint16; float32), sums in float32; out
        [M, N] float32, its rows possibly strided.
        """
        ...

    # -- graphs

    def begin_capture(self, stream: Stream) -> None:
        """From now on work issued on the stream is recorded, not run. Allocating or synchronising is an error."""
        ...

    def end_capture(self, stream: Stream) -> Graph:
        """A graph of the recorded work, ready to be launched; it holds addresses, not arrays."""
        ...

    def launch_graph(self, graph: Graph, stream: Stream) -> None:
        """Queue the graph. It may be dropped before it has run: CUDA then frees it behind its last launch."""
        ...

    def close(self) -> None:
        """Wait for all work, and give back pools, handles and streams."""
        ...
