"""`runtime.Runtime` on a GPU, through CuPy.

**No GPU has run this file yet.** Every call was looked up in CuPy's sources and documentation (13 and 14); the tests
run it on a CuPy that they make up. What it relies on:

* CuPy's pool hands out again what was dropped to whoever allocates next on the same current stream, and we allocate
  for the compute stream alone;
* `PinnedMemory` is cudaHostAlloc, which gives the same address to host and device (CuPy's pinned pool, which rounds up
  to powers of two, is not used);
* stream capture in its relaxed mode, CuPy's own choice, lets other threads allocate meanwhile.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from cupaged.errors import DeviceError, DeviceMemoryError, NoDeviceError
from cupaged.kernels.cuda import compile, cublas
from cupaged.kernels.cuda.runtime import Event, Function, Graph, Stream
from cupaged.kernels.interface import Array

if TYPE_CHECKING:
    from cupaged.kernels.cuda.runtime import Runtime
    from cupaged.kernels.cuda.variants import Build

LEAST_CAPABILITY = 70
_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NO_MEMORY, _NOT_READY = 2, 600  # cudaErrorMemoryAllocation (CUDA_ERROR_OUT_OF_MEMORY), cudaErrorNotReady
_DEFAULT_SHARED = 48 << 10  # what a block may have without asking
_COMPILERS = 8  # kernels compiled at a time, at most


class CupyRuntime:
    """One GPU. `device`: its number."""

    def __init__(self, device: int = 0) -> None:
        """NoDeviceError: no CuPy, no driver, no such device, one older than sm_70, or no compiler for it."""
        try:
            import cupy
        except Exception as error:  # an ImportError, or whatever a library does that does not fit the system
            raise NoDeviceError(
                f"device 'cuda': CuPy cannot be imported ({_line(error)}); pip install 'cupaged[gpu]'"
            ) from error
        self._cupy: Any = cupy
        self._cuda: Any = cupy.cuda.runtime
        errors = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)
        try:
            self._device = cupy.cuda.Device(device)
            attributes = self._device.attributes
            properties = self._cuda.getDeviceProperties(device)
        except errors as error:
            raise NoDeviceError(f"device 'cuda': device {device} cannot be had ({_line(error)})") from error
        self._here = _OnDevice(self._device, errors, cupy.cuda.memory.OutOfMemoryError)
        self.name: str = properties["name"].decode(errors="replace")
        self.architecture: int = 10 * attributes["ComputeCapabilityMajor"] + attributes["ComputeCapabilityMinor"]
        self.shared_limit: int = attributes["MaxSharedMemoryPerBlockOptin"]
        self.multiprocessors: int = attributes["MultiProcessorCount"]
        if self.architecture < LEAST_CAPABILITY:
            raise NoDeviceError(
                f"device 'cuda': {self.name}: compute capability {self.architecture / 10} is below 7.0; "
                "use --device cpu"
            )
        try:
            compile.check(self.architecture)
        except DeviceError as error:
            raise NoDeviceError(f"device 'cuda': {error}") from error
        self._pool = cupy.cuda.MemoryPool()
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._functions: dict[tuple[Any, ...], Function] = {}
        self._blas: cublas.Cublas | None = None
        self._blas_sought = False
        self._workspace: Array = None
        self._lock = threading.Lock()

    def memory(self) -> tuple[int, int]:
        with self._here:
            free, total = self._cuda.memGetInfo()
            return int(total), int(free) + int(self._pool.free_bytes())

    # -- memory

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        kind = np.dtype(dtype)
        with self._here:
            pointer = self._pool.malloc(max(1, math.prod(shape) * kind.itemsize))
            return self._cupy.ndarray(shape, kind, pointer)

    def empty_host(self, shape: tuple[int, ...], dtype: Any) -> Array:
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if not size:
            return np.empty(shape, kind)
        pinned = self._cupy.cuda.pinned_memory
        with self._here:
            memory = pinned.PinnedMemory(size, self._cuda.hostAllocPortable)
        whole = np.frombuffer(pinned.PinnedMemoryPointer(memory, 0), np.uint8, size)  # holds the memory
        return whole.view(kind).reshape(shape)

    def address(self, array: Array) -> int:
        if isinstance(array, np.ndarray):
            return int(array.__array_interface__["data"][0])
        return int(array.data.ptr)

    # -- streams and events

    def stream(self, name: str) -> Stream:
        with self._here:
            return self._cupy.cuda.Stream(non_blocking=True)

    def current_stream(self) -> Stream:
        """Whichever stream is CuPy's current one when work is queued."""
        return _CurrentStream(self._cupy)

    def copy(self, destination: Array, source: Array, stream: Stream) -> None:
        if destination.nbytes != source.nbytes:
            raise DeviceError(f"copy: {source.nbytes} bytes to {destination.nbytes}")
        with self._here:
            self._cuda.memcpyAsync(
                self.address(destination), self.address(source), source.nbytes, self._cuda.memcpyDefault, stream.ptr
            )

    def record(self, stream: Stream, timed: bool = False) -> Event:
        with self._here:
            event = self._cupy.cuda.Event(disable_timing=not timed)
            event.record(stream)
            return event

    def wait(self, stream: Stream, event: Event) -> None:
        with self._here:
            stream.wait_event(event)

    def done(self, event: Event) -> bool:
        with self._here:
            status = int(self._cuda.eventQuery(event.ptr))  # `Event.done` of CuPy takes an error for "not yet"
            if status not in (0, _NOT_READY):
                self._cuda.check_status(status)
            return status == 0

    def synchronize(self, event: Event | None = None) -> None:
        with self._here:
            if event is None:
                self._cuda.deviceSynchronize()
            else:
                event.synchronize()

    def seconds(self, first: Event, last: Event) -> float:
        with self._here:
            return float(self._cupy.cuda.get_elapsed_time(first, last)) / 1000

    # -- work

    def function(self, source: str, name: str, defines: Mapping[str, int], shared_bytes: int) -> Function:
        variant = (source, tuple(sorted(defines.items())))
        wanted = shared_bytes if shared_bytes > _DEFAULT_SHARED else 0
        key = (*variant, name, wanted)
        with self._lock:
            if key in self._functions:
                return self._functions[key]
            with self._here:
                if variant not in self._modules:
                    module = self._cupy.cuda.function.Module()
                    module.load(compile.cubin(source, self.architecture, defines))
                    self._modules[variant] = module
                function = self._modules[variant].get_function(name)
                if wanted:
                    self._cupy.cuda.driver.funcSetAttribute(function.ptr, _DYNAMIC_SHARED_SIZE, wanted)
            self._functions[key] = function
            return function

    def prepare(self, builds: Sequence[Build], progress: Callable[[int, int], None] | None) -> None:
        variants = {(build.source, tuple(sorted(build.defines.items()))) for build in builds}
        missing = [key for key in sorted(variants) if not compile.is_kept(key[0], self.architecture, dict(key[1]))]
        if missing:
            compile.announce(len(missing), progress is not None)
            workers = min(len(missing), _COMPILERS, os.cpu_count() or 1)
            with ThreadPoolExecutor(workers) as pool:  # NVRTC compiles without the GIL
                report = progress or (lambda done, total: None)
                report(0, len(missing))
                for done, _ in enumerate(pool.map(self._compile, missing), 1):
                    report(done, len(missing))
        for build in builds:
            self.function(build.source, build.kernel, build.defines, build.shared_bytes)

    def _compile(self, variant: tuple[str, tuple[tuple[str, int], ...]]) -> None:
        compile.cubin(variant[0], self.architecture, dict(variant[1]))

    def launch(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        shared_bytes: int,
        stream: Stream,
    ) -> None:
        # Addresses and not arrays: CuPy takes a NumPy array, pinned or not, for something else.
        passed = tuple(a if np.isscalar(a) else np.uint64(self.address(a)) for a in arguments)
        with self._here:
            function(grid, block, passed, shared_bytes, stream)

    @property
    def has_gemm(self) -> bool:
        if not self._blas_sought:
            self._blas_sought = True
            self._blas = self._find_blas()
        return self._blas is not None

    def _find_blas(self) -> cublas.Cublas | None:
        path = cublas.found(int(self._cuda.runtimeGetVersion()) // 1000)
        if path is None:
            return None
        try:
            with self._here:
                self._workspace = self.empty((cublas.WORKSPACE_BYTES,), np.uint8)
                return cublas.Cublas(path, (self.address(self._workspace), cublas.WORKSPACE_BYTES))
        except DeviceError as error:
            warnings.warn(f"{path}: {error}; long prompts are computed without it, slower", RuntimeWarning, 2)
            return None

    def gemm(self, x: Array, weight: Array, out: Array, dtype: str, stream: Stream) -> None:
        if not self.has_gemm or self._blas is None:
            raise DeviceError("there is no cuBLAS; pip install nvidia-cublas-cu12")
        rows, inner = x.shape
        outputs = int(weight.shape[0])
        stride = int(out.strides[0]) // 4 if rows > 1 else outputs
        addresses = self.address(x), self.address(weight), self.address(out)
        with self._here:
            self._blas.gemm(*addresses, int(rows), outputs, int(inner), stride, dtype, int(stream.ptr))

    # -- graphs

    def begin_capture(self, stream: Stream) -> None:
        with self._here:
            stream.begin_capture()

    def end_capture(self, stream: Stream) -> Graph:
        with self._here:
            return stream.end_capture()

    def launch_graph(self, graph: Graph, stream: Stream) -> None:
        with self._here:
            graph.launch(stream)

    def close(self) -> None:
        with self._here:
            self._cuda.deviceSynchronize()
            if self._blas is not None:
                self._blas.close()
                self._blas = None
            self._workspace = None
            self._functions.clear()
            self._modules.clear()
            self._pool.free_all_blocks()


class _CurrentStream:
    """What of a stream CuPy asks for: its handle."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    @property
    def ptr(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)


class _OnDevice:
    """Makes the device the thread's current one, and CUDA's errors ours."""

    def __init__(self, device: Any, errors: tuple[Any, ...], of_pool: Any) -> None:
        self._device = device
        self._errors = errors
        self._of_pool = of_pool  # what CuPy's pool raises

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._device.__exit__(kind, error, trace)
        if error is None:
            return
        ours = isinstance(error, self._errors)
        if isinstance(error, self._of_pool) or (ours and getattr(error, "status", None) == _NO_MEMORY):
            raise DeviceMemoryError(f"the GPU's or pinned memory is used up: {_line(error)}") from error
        if ours:
            raise DeviceError(f"CUDA: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """The words of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__


if TYPE_CHECKING:

    def _(runtime: CupyRuntime) -> Runtime:
        return runtime  # mypy compares every signature with the interface
