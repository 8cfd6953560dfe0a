"""A CuPy that tests make up: as much of it as `CupyRuntime` calls, on memory of the host, everything done at once.

It is strict where CuPy is silent: wrong argument types, use without the device being current.
"""

from __future__ import annotations

import ctypes
import types
from typing import Any

import numpy as np


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaErrorSomething:\n status {status}")
        self.status = status


class CUDADriverError(CUDARuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class FakeArray:
    """`cupy.ndarray` over a NumPy array."""

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, _of: np.ndarray | None = None) -> None:
        if _of is None:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            _of = memptr.memory[:size].view(dtype).reshape(shape)
        self.of = _of
        self.data = types.SimpleNamespace(ptr=_of.ctypes.data)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "strides", "nbytes", "size", "flags", "ndim"):
            return getattr(self.of, name)
        raise AttributeError(name)

    def __getitem__(self, key: Any) -> FakeArray:
        return FakeArray(None, _of=self.of[key])

    def reshape(self, *shape: Any) -> FakeArray:
        return FakeArray(None, _of=self.of.reshape(*shape))

    def view(self, dtype: Any) -> FakeArray:
        return FakeArray(None, _of=self.of.view(dtype))

    def __len__(self) -> int:
        return len(self.of)


class FakeCupy(types.ModuleType):
    """`calls`: what was asked of the driver, in order. `fail`: status of the next call of that name."""

    def __init__(self, capability: int = 90, devices: int = 1, memory: int = 1 << 30) -> None:
        super().__init__("cupy")
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, int] = {}
        self.pinned_freed: list[int] = []
        self.depth = 0
        self.ndarray = FakeArray
        fake = self

        def note(name: str, *arguments: Any) -> None:
            assert fake.depth > 0, f"{name} without the device being current"
            fake.calls.append((name, *arguments))
            if name in fake.fail:
                raise CUDARuntimeError(fake.fail.pop(name))

        class Device:
            def __init__(self, number: int) -> None:
                self.number = number

            def __enter__(self) -> None:
                fake.depth += 1

            def __exit__(self, *_: Any) -> None:
                fake.depth -= 1

            @property
            def attributes(self) -> dict[str, int]:
                if self.number >= devices:
                    raise CUDARuntimeError(101)
                return {
                    "ComputeCapabilityMajor": capability // 10,
                    "ComputeCapabilityMinor": capability % 10,
                    "MaxSharedMemoryPerBlockOptin": 232448,
                    "MultiProcessorCount": 132,
                }

        class MemoryPool:
            def __init__(self) -> None:
                self.left = memory

            def malloc(self, size: int) -> Any:
                note("malloc", size)
                assert isinstance(size, int) and size > 0
                if size > self.left:
                    raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes")
                return types.SimpleNamespace(memory=np.full(size, 0xFF, np.uint8))

            def free_bytes(self) -> int:
                return 5

            def free_all_blocks(self) -> None:
                note("free_all_blocks")

        class PinnedMemory:
            def __init__(self, size: int, flags: int = 0) -> None:
                self.size = size
                note("hostAlloc", size, flags)
                self.memory = (ctypes.c_char * size)()
                self.ptr = ctypes.addressof(self.memory)

            def __del__(self) -> None:
                fake.pinned_freed.append(self.size)

        class PinnedMemoryPointer:
            """Gives its buffer as CuPy's does; holds the memory."""

            def __new__(cls, memory: PinnedMemory, offset: int) -> Any:
                assert offset == 0
                buffer = (ctypes.c_byte * memory.size).from_address(memory.ptr)
                buffer.memory = memory
                return buffer

        class Stream:
            number = 0x5000

            def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
                assert non_blocking and not null
                note("stream")
                Stream.number += 1
                self.ptr = Stream.number

            def wait_event(self, event: Event) -> None:
                note("wait", self.ptr, event.ptr)

            def begin_capture(self, mode: Any = None) -> None:
                assert mode is None
                note("begin_capture", self.ptr)

            def end_capture(self) -> Graph:
                note("end_capture", self.ptr)
                return Graph()

        class Graph:
            def launch(self, stream: Any = None) -> None:
                note("launch_graph", stream.ptr)

        class Event:
            number = 0x6000

            def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
                Event.number += 1
                self.ptr, self.timed = Event.number, not disable_timing

            def record(self, stream: Any = None) -> None:
                note("record", stream.ptr, self.ptr)

            def synchronize(self) -> None:
                note("synchronize", self.ptr)

        class Function:
            def __init__(self, module: Module, name: str) -> None:
                self.module, self.name, self.ptr = module, name, 0x7000

            def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int = 0, stream: Any = None) -> None:
                assert isinstance(grid, tuple) and isinstance(block, tuple) and len(grid) == len(block) == 3
                assert isinstance(arguments, tuple) and all(isinstance(a, np.generic) for a in arguments)
                note("launch", self.name, grid, block, arguments, shared_mem, stream.ptr)

        class Module:
            def load(self, code: bytes) -> None:
                assert isinstance(code, bytes)
                note("load", code)

            def get_function(self, name: str) -> Function:
                return Function(self, name)

        def memcpy_async(destination: int, source: int, size: int, kind: int, stream: int) -> None:
            note("copy", size, kind, stream)
            ctypes.memmove(destination, source, size)

        def elapsed(first: Event, last: Event) -> float:
            assert first.timed and last.timed
            note("elapsed")
            return 2.5  # milliseconds

        def check_status(status: int) -> None:
            if status:
                raise CUDARuntimeError(status)

        def event_query(event: int) -> int:
            assert fake.depth > 0
            return fake.fail.pop("eventQuery", 0)

        runtime = types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceProperties=lambda number: {"name": b"Card B"},
            memGetInfo=lambda: note("memGetInfo") or (700, 1000),
            memcpyAsync=memcpy_async, memcpyDefault=4, hostAllocPortable=1, eventQuery=event_query,
            check_status=check_status, deviceSynchronize=lambda: note("deviceSynchronize"),
            runtimeGetVersion=lambda: 12090,
        )  # fmt: skip
        driver = types.SimpleNamespace(
            CUDADriverError=CUDADriverError, funcSetAttribute=lambda *numbers: note("funcSetAttribute", *numbers)
        )
        self.cuda = types.SimpleNamespace(
            Device=Device, MemoryPool=MemoryPool, Stream=Stream, Event=Event, runtime=runtime, driver=driver,
            get_elapsed_time=elapsed, get_current_stream=lambda: types.SimpleNamespace(ptr=0x42),
            memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            pinned_memory=types.SimpleNamespace(PinnedMemory=PinnedMemory, PinnedMemoryPointer=PinnedMemoryPointer),
            function=types.SimpleNamespace(Module=Module),
        )  # fmt: skip

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]
