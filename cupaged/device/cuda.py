"""A GPU as a device: memory, three streams, events, uploads, captured steps. On any `kernels.cuda.runtime.Runtime`.

**No GPU has run this file yet.** The whole engine runs on it in the tests, over a runtime that defers all work and runs
it in random orders that streams and events allow.

Who waits for what: work of one stream runs in its order, and device memory comes from a pool ordered by the compute
stream, so nothing on that stream needs a wait or has to be kept alive. The copy streams do: `wait` orders them behind
compute, and `copy` holds both ends of its copies until they are done. The host waits for staging buffers (backend.py).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cupaged.device import driver
from cupaged.device.base import CopyStream, Device, Event, MemoryInfo, ModelShape, ProgressCallback, StreamName
from cupaged.device.cuda_capture import CudaCapture, GraphUse, RecordingOperations
from cupaged.errors import DeviceError, NoDeviceError
from cupaged.kernels.cuda.backend import RuntimeBackend
from cupaged.kernels.cuda.operations import CudaOperations
from cupaged.kernels.cuda.packing import unpacked_bytes
from cupaged.kernels.cuda.variants import builds_for
from cupaged.kernels.interface import Array, AttentionPlan, Operations, StorageType

if TYPE_CHECKING:
    from cupaged.kernels.cuda.runtime import Event as RuntimeEvent
    from cupaged.kernels.cuda.runtime import Runtime

# Left alone when K/V pools are sized: machine code, the library's workspace, work lists, partial results of attention,
# products' scratch, sampling's weights, captured graphs. At most an eighth of a small card.
RESERVED_BYTES = 768 << 20
_RESERVED_SHARE = 8


class CudaEvent:
    """A point in a stream. DeviceError if the work before it failed."""

    def __init__(self, runtime: Runtime, event: RuntimeEvent) -> None:
        self._runtime = runtime
        self.event = event

    def done(self) -> bool:
        return self._runtime.done(self.event)

    def wait(self) -> None:
        self._runtime.synchronize(self.event)


class CudaTransfer:
    """Copies between two timed events. `wait` and `done` never raise: `error` says what went wrong."""

    def __init__(
        self, runtime: Runtime, first: RuntimeEvent | None, last: RuntimeEvent | None, error: BaseException | None
    ) -> None:
        self._runtime = runtime
        self._first = first
        self.event = last  # None: nothing was queued
        self._error = error
        self._finished = last is None

    def done(self) -> bool:
        if not self._finished:
            try:
                self._finished = self._runtime.done(self.event)
            except DeviceError as error:
                self._fail(error)
        return self._finished

    def wait(self) -> None:
        if not self._finished:
            try:
                self._runtime.synchronize(self.event)
                self._finished = True
            except DeviceError as error:
                self._fail(error)

    def _fail(self, error: DeviceError) -> None:
        self._error = self._error or error
        self._finished = True

    @property
    def error(self) -> BaseException | None:
        return self._error if self._finished else None

    @property
    def seconds(self) -> float | None:
        if not self._finished or self._error is not None:
            return None
        return self._runtime.seconds(self._first, self.event)


class CudaDevice(Device):
    """A GPU. `runtime`: None is the first GPU that CuPy sees, NoDeviceError if there is none.

    deterministic: products of all sizes by our kernel, which sums each output in one order for any number of rows, so
    that neither batch nor chunk changes a bit; by default products of many rows are the library's. graphs: captured
    steps run as CUDA graphs from their second replay on; the same bits either way. progress(done, total) while kernels
    are compiled.
    """

    kind = "cuda"
    unified = False
    as_stored = False
    k_transposed = False

    def __init__(
        self,
        runtime: Runtime | None = None,
        deterministic: bool = False,
        graphs: bool = True,
        progress: ProgressCallback | None = None,
    ) -> None:
        if runtime is None:
            if (reason := driver.why_no_gpu()) is not None:
                raise NoDeviceError(f"device 'cuda': {reason}")
            from cupaged.kernels.cuda.cupy_runtime import CupyRuntime

            runtime = CupyRuntime()
        self.runtime = runtime
        self.name = runtime.name
        self.graphs = GraphUse(graphs)
        self._progress = progress
        self._process = os.getpid()
        self._closed = False
        self.backend = RuntimeBackend(runtime, deterministic)
        self.recorder = RecordingOperations(CudaOperations(self.backend))
        self._streams: dict[str, Any] = {name: runtime.stream(name) for name in _COPY_STREAMS}
        self._streams["compute"] = self.backend.stream
        self._kept: dict[str, deque[tuple[RuntimeEvent, Any]]] = {name: deque() for name in _COPY_STREAMS}

    @property
    def ops(self) -> Operations:
        return self.recorder.front

    def prepare(
        self, weights: Iterable[str], cache: StorageType, shape: ModelShape | None = None, exact: bool = False
    ) -> None:
        self._check()
        builds = builds_for(self.runtime.architecture, self.runtime.shared_limit, weights, cache, shape)
        self.runtime.prepare(list(builds), self._progress)

    # -- memory

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self._check()
        return self.backend.empty(shape, dtype)

    def empty_host(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self._check()
        return self.runtime.empty_host(shape, dtype)

    def upload(self, host: Array, out: Array | None = None) -> Array:
        self._check()
        return self.backend.upload(host, out)

    def upload_many(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        self._check()
        self.backend.upload_many(pairs)

    def download(self, array: Array) -> Array:
        self._check()
        return self.backend.download(array)

    def memory(self) -> MemoryInfo:
        self._check()
        total, free = self.runtime.memory()
        return MemoryInfo(total, max(0, free - min(RESERVED_BYTES, total // _RESERVED_SHARE)))

    def weight_bytes(self, kept: Mapping[str, int]) -> int:
        return sum(unpacked_bytes(kind, size) for kind, size in kept.items())

    # -- streams

    def copy(self, stream: CopyStream, pairs: Sequence[tuple[Array, Array]]) -> CudaTransfer:
        self._check()
        queue = self._streams[stream]
        first = last = error = None
        try:
            first = self.runtime.record(queue, timed=True)
            try:
                for source, destination in pairs:
                    self.runtime.copy(destination, source, queue)
            finally:
                last = self.runtime.record(queue, timed=True)
                self._keep(stream, last, pairs)
        except DeviceError as caught:
            error = caught
        return CudaTransfer(self.runtime, first, last, error)

    def _keep(self, stream: CopyStream, event: RuntimeEvent, held: Any) -> None:
        """Hold what work on a copy stream uses until the event behind it; let go of what earlier work used."""
        kept = self._kept[stream]
        while kept and self.runtime.done(kept[0][0]):
            kept.popleft()
        kept.append((event, held))

    def record(self, stream: StreamName = "compute") -> CudaEvent:
        self._check()
        return CudaEvent(self.runtime, self.runtime.record(self._streams[stream]))

    def wait(self, stream: StreamName, event: Event) -> None:
        self._check()
        if not isinstance(event, CudaEvent | CudaTransfer):
            event.wait()  # another device's
        elif event.event is not None:
            self.runtime.wait(self._streams[stream], event.event)

    def synchronize(self) -> None:
        self._check()
        self.runtime.synchronize()
        for kept in self._kept.values():
            kept.clear()

    # -- captured steps

    @contextlib.contextmanager
    def capture(self, plans: Sequence[AttentionPlan] = ()) -> Iterator[CudaCapture]:
        self._check()
        captured = CudaCapture(self, plans)
        self.recorder.begin()
        try:
            yield captured
        finally:
            captured.take(self.recorder.end())

    # -- the end

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._process == os.getpid():
                self.runtime.close()
        finally:  # a broken GPU says so here, too
            for kept in self._kept.values():
                kept.clear()

    def _check(self) -> None:
        """DeviceError where the device was closed, or is a forked child's copy of its parent's."""
        if self._closed:
            raise DeviceError("the device was closed")
        if self._process != os.getpid():
            raise DeviceError(f"device 'cuda': {driver.FORKED}")


_COPY_STREAMS: tuple[CopyStream, ...] = ("to_host", "to_device")
