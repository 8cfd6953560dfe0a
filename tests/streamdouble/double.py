"""`StreamDouble`: `kernels.cuda.runtime.Runtime` on a CPU, with everything queued run late and in a random order."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cupaged.errors import DeviceError, KernelError
from cupaged.kernels import bfloat16
from cupaged.kernels.cuda import sources
from streamdouble import launches
from streamdouble.heap import POISON, Arena, Pointer
from streamdouble.work import Call, Copy, Event, GraphLaunch, Poison, Record, Scheduler, Stream, Wait, Work

Array = np.ndarray
DEFAULT_SHARED = 48 << 10
POLLS = 1000


@dataclass(frozen=True)
class Function:
    """A kernel of a variant, able to use so much dynamic shared memory."""

    source: str
    name: str
    defines: Mapping[str, int]
    shared_bytes: int
    bind: launches.Bind


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Work, ...]


class StreamDouble:
    """One pretended GPU.

    seed: of the order in which queued work runs. bias: see `work.BIASES`; None changes it as it goes. kernels:
    "reference" puts NumPy behind the launches, "emulated" the CUDA C, compiled by `cudabench`. gemm: whether there is a
    cuBLAS. `launched`: launches so far by kernel name; `graphs_launched`, `multiplied`: graphs and gemms.
    """

    def __init__(
        self, seed: int = 0, bias: str | None = None, kernels: str = "reference", gemm: bool = False,
        architecture: int = 80, memory: int = 128 << 20,
    ) -> None:  # fmt: skip
        self.name = "stream double"
        self.architecture = architecture
        self.shared_limit = 163 << 10
        self.multiprocessors = 4
        self.has_gemm = gemm
        self.launched: dict[str, int] = {}
        self.graphs_launched = 0
        self.multiplied = 0
        self._kernels = launches.KERNELS[kernels]
        self._functions: dict[Any, Function] = {}
        self._scheduler = Scheduler(seed, bias)
        self._dropped: list[tuple[Arena, int, int]] = []
        self._device = Arena("device", memory, self._drop)
        self._pinned = Arena("pinned", memory, self._drop)
        self._compute: Stream | None = None
        self._capturing: Stream | None = None
        self._capture_fault: str | None = None
        self._closed = False
        self._polls = 0  # times that the host asked in vain since something last ran
        self._polled_at = 0

    # -- what tests look at

    @property
    def pending(self) -> int:
        """Things queued that have not run."""
        self._collect()
        return sum(len(stream.queue) for stream in self._scheduler.streams)

    @property
    def computing(self) -> int:
        """Launches and graphs that have not been done."""
        queues = [stream.queue for stream in self._scheduler.streams]
        return sum(isinstance(work, Call | GraphLaunch) for queue in queues for work in queue)

    @property
    def copying(self) -> int:
        """Bytes of copies that have not been done, on other streams than compute."""
        streams = [stream for stream in self._scheduler.streams if stream is not self._compute]
        return sum(work.size for stream in streams for work in stream.queue if isinstance(work, Copy))

    @property
    def live(self) -> tuple[int, int]:
        """Arrays of device and of pinned memory that somebody holds."""
        self._collect()
        return len(self._device.live), len(self._pinned.live)

    # -- memory

    def memory(self) -> tuple[int, int]:
        self._enter()
        return self._device.capacity, self._device.capacity - self._device.used

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self._enter("allocating device memory")
        return self._device.new(tuple(shape), dtype)

    def empty_host(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self._enter("allocating pinned memory")
        return self._pinned.new(tuple(shape), dtype)

    def address(self, array: Array) -> int:
        return Pointer(array).address

    def _drop(self, arena: Arena, start: int, size: int) -> None:
        """Called by the garbage collector, at any time: what follows is done at the next call."""
        self._dropped.append((arena, start, size))

    def _collect(self) -> None:
        dropped, self._dropped = self._dropped, []
        for arena, start, size in dropped:
            if arena.kind == "device" and self._compute is not None:
                self._compute.queue.append(Poison(start, size))
            else:
                ctypes.memset(start, POISON, size)
            if arena.kind == "pinned" and self._capturing is not None:
                self._capture_fault = "pinned memory was freed, which waits for the device"
            arena.give_back(start, size)

    # -- streams and events

    def stream(self, name: str) -> Stream:
        self._enter("making a stream")
        stream = Stream(name)
        self._scheduler.streams.append(stream)
        if name == "compute":
            self._compute = stream
        return stream

    def copy(self, destination: Array, source: Array, stream: Stream) -> None:
        self._enter()
        for array in (destination, source):
            if not array.flags.c_contiguous:
                raise DeviceError(f"copy: an array of strides {array.strides} is not contiguous")
        if destination.nbytes != source.nbytes:
            raise DeviceError(f"copy: {source.nbytes} bytes to {destination.nbytes}")
        if source.nbytes:
            self._queue(stream, Copy(Pointer(destination).address, Pointer(source).address, source.nbytes))

    def record(self, stream: Stream, timed: bool = False) -> Event:
        self._enter("recording an event")
        event = Event(stream, timed)
        self._queue(stream, Record(event))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._enter("waiting for an event")
        self._queue(stream, Wait(event))

    def done(self, event: Event) -> bool:
        self._enter("asking for an event")
        if self._scheduler.ran != self._polled_at:
            self._polled_at, self._polls = self._scheduler.ran, 0
        self._polls += not event.done
        if self._polls > POLLS:
            raise AssertionError("the host asks for events over and over instead of waiting for one")
        self._tell()
        return event.done

    def synchronize(self, event: Event | None = None) -> None:
        self._enter("synchronising")
        if event is None:
            self._scheduler.all()
        else:
            self._scheduler.until(event)
        self._tell()

    def fail(self, error: Exception) -> None:
        """As if a kernel had failed: told from now on whenever the host waits or asks."""
        self._scheduler.error = error

    def _tell(self) -> None:
        if self._scheduler.error is not None:
            raise DeviceError(f"a kernel failed: {self._scheduler.error}") from self._scheduler.error

    def seconds(self, first: Event, last: Event) -> float:
        self._enter()
        for event in (first, last):
            if not event.timed or not event.done:
                raise DeviceError("seconds: an event that is not timed, or not done")
        return last.at - first.at

    # -- work

    def function(self, source: str, name: str, defines: Mapping[str, int], shared_bytes: int) -> Function:
        key = (source, name, tuple(sorted(defines.items())), shared_bytes)
        if key not in self._functions:
            if not 0 <= shared_bytes <= self.shared_limit:
                raise DeviceError(f"{name}: {shared_bytes} bytes of shared memory, of {self.shared_limit}")
            if name not in sources.kernels(source):
                raise DeviceError(f"{source} has no kernel {name}")
            bind = self._kernels(source, name, dict(defines), self.architecture)
            self._functions[key] = Function(source, name, dict(defines), shared_bytes, bind)
        return self._functions[key]

    def prepare(self, builds: Sequence[Any], progress: Callable[[int, int], None] | None = None) -> None:
        for done, build in enumerate(builds, 1):
            self.function(build.source, build.kernel, build.defines, build.shared_bytes)
            if progress is not None:
                progress(done, len(builds))

    def launch(
        self, function: Function, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: Sequence[Any],
        shared_bytes: int, stream: Stream,
    ) -> None:  # fmt: skip
        self._enter()
        if len(grid) != 3 or len(block) != 3 or min(*grid, *block) < 1:
            raise DeviceError(f"{function.name}: grid {grid}, block {block}")
        if math.prod(block) > 1024 or max(grid[1:]) > 65535 or grid[0] >= 1 << 31:
            raise DeviceError(f"{function.name}: grid {grid}, block {block} is more than CUDA takes")
        if shared_bytes > max(DEFAULT_SHARED, function.shared_bytes):
            raise DeviceError(f"{function.name}: {shared_bytes} bytes of shared memory were not asked for")
        passed = [_passed(p, v, function) for p, v in zip(_parameters(function), arguments, strict=True)]
        self.launched[function.name] = self.launched.get(function.name, 0) + 1
        self._queue(stream, Call(function.bind(grid, block, passed, shared_bytes)))

    def gemm(self, x: Array, weight: Array, out: Array, dtype: str, stream: Stream) -> None:
        self._enter()
        if not self.has_gemm:
            raise DeviceError("gemm: there is no cuBLAS")
        (rows, inner), outputs = x.shape, weight.shape[0]
        kind = np.dtype({"bfloat16": "uint16"}.get(dtype, dtype))
        fits = weight.shape[1] == inner and out.shape == (rows, outputs) and x.dtype == weight.dtype == kind
        fits = fits and x.flags.c_contiguous and weight.flags.c_contiguous and out.dtype == np.float32
        if not fits or (outputs > 1 and rows and out.strides[1] != 4):
            raise DeviceError(f"gemm: {x.shape} by {weight.shape} of {x.dtype}, {weight.dtype} into {out.shape}")
        self.multiplied += 1
        self._queue(stream, Call(partial(_multiply, Pointer(x), Pointer(weight), Pointer(out), dtype)))

    # -- graphs

    def begin_capture(self, stream: Stream) -> None:
        self._enter("capturing")
        stream.recorded = []
        self._capturing, self._capture_fault = stream, None

    def end_capture(self, stream: Stream) -> Graph:
        self._enter()
        if self._capturing is not stream or stream.recorded is None:
            raise DeviceError("end_capture: the stream is not being captured")
        nodes, stream.recorded, self._capturing = tuple(stream.recorded), None, None
        if self._capture_fault is not None:
            raise DeviceError(f"while a stream was captured {self._capture_fault}")
        return Graph(nodes)

    def launch_graph(self, graph: Graph, stream: Stream) -> None:
        self._enter("launching a graph")
        self.graphs_launched += 1
        self._queue(stream, GraphLaunch(graph.nodes))

    def close(self) -> None:
        if not self._closed:
            self._capturing = None
            self._scheduler.all()
            self._closed = True

    def _enter(self, forbidden: str | None = None) -> None:
        """Every call of the host comes through here; in between anything may have run. `forbidden`: what the call is
        called where a capture does not allow it."""
        if self._closed:
            raise DeviceError("the device was closed")
        self._collect()
        if forbidden is not None and self._capturing is not None:
            raise DeviceError(f"{forbidden} while a stream is captured")
        self._scheduler.some()

    def _queue(self, stream: Stream, work: Work) -> None:
        if stream.recorded is not None:
            stream.recorded.append(work)
        else:
            stream.queue.append(work)


def _parameters(function: Function) -> tuple[sources.Parameter, ...]:
    return sources.kernels(function.source)[function.name]


def _passed(parameter: sources.Parameter, value: Any, function: Function) -> Any:
    """An argument as it travels: a Pointer, None for a null one, or the scalar. KernelError unless it has exactly the
    parameter's type, since a GPU would read other bytes."""
    if isinstance(value, np.ndarray):
        if parameter.kind != "pointer" or (parameter.size and parameter.size != value.itemsize):
            raise KernelError(f"{function.name}: {parameter.name}: got an array of {value.dtype}")
        return Pointer(value)
    expected = "uint64" if parameter.kind == "pointer" else parameter.kind
    if not isinstance(value, np.generic) or value.dtype != expected or (parameter.kind == "pointer" and value != 0):
        raise KernelError(f"{function.name}: {parameter.name}: expected {parameter.kind}, got {value!r:.60}")
    return None if parameter.kind == "pointer" else value


def _multiply(x: Pointer, weight: Pointer, out: Pointer, dtype: str) -> None:
    left, right = (_wide(pointer.again(), dtype) for pointer in (x, weight))
    with np.errstate(all="ignore"):
        out.again()[...] = left @ right.T


def _wide(array: Array, dtype: str) -> Array:
    return bfloat16.to_float32(array) if dtype == "bfloat16" else array.astype(np.float32)
