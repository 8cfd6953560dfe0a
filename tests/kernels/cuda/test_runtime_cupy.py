"""`CupyRuntime` on a CuPy that these tests make up, and every name that it uses in the CuPy that is installed.

No GPU has run it: what is shown is what it asks of CuPy.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cupy import FakeCupy

from cupaged.errors import DeviceError, DeviceMemoryError, NoDeviceError
from cupaged.kernels.cuda import compile, cupy_runtime
from cupaged.kernels.cuda.backend import STAGING_BYTES, RuntimeBackend
from cupaged.kernels.cuda.cupy_runtime import CupyRuntime
from cupaged.kernels.cuda.launch import NULL
from cupaged.kernels.cuda.variants import Build


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(compile, "cubin", lambda source, architecture, defines: f"{source} {architecture}".encode())
    monkeypatch.setattr(compile, "check", lambda architecture: None)
    monkeypatch.setattr(cupy_runtime.cublas, "found", lambda major: None)
    return fake


def test_facts_of_the_card(cupy: FakeCupy) -> None:
    runtime = CupyRuntime()
    assert (runtime.name, runtime.architecture, runtime.shared_limit) == ("Card B", 90, 232448)
    assert runtime.multiprocessors == 132 and runtime.memory() == (1000, 705)  # what the pool has spare is free


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({"capability": 61}, 0, "Card B: compute capability 6.1 is below 7.0"),
        ({}, 3, "device 3 cannot be had (cudaErrorSomething: status 101)"),
    ],
)
def test_a_card_that_will_not_do_is_one_line(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int], device: int, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(**options))
    with pytest.raises(NoDeviceError, match=re.escape(message)) as caught:
        CupyRuntime(device)
    assert "\n" not in str(caught.value)


def test_a_card_without_a_compiler_is_one_line(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def old(architecture: int) -> None:
        raise DeviceError(f"NVRTC 11.0 compiles ... not for {architecture / 10}")

    monkeypatch.setattr(compile, "check", old)
    with pytest.raises(NoDeviceError, match=r"device 'cuda': NVRTC 11\.0 compiles \.\.\. not for 9\.0"):
        CupyRuntime()


def test_without_cupy_the_command_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NoDeviceError, match=r"CuPy cannot be imported .*; pip install 'cupaged\[gpu\]'"):
        CupyRuntime()


def test_arrays_go_up_and_come_back_through_pinned_memory(cupy: FakeCupy) -> None:
    backend = RuntimeBackend(CupyRuntime())
    host = np.random.default_rng(0).integers(0, 256, (STAGING_BYTES // 4 + 3, 9), np.uint8)
    sent = backend.upload(host)
    assert np.array_equal(backend.download(sent), host)
    copies = [call for call in cupy.calls if call[0] == "copy"]
    assert {kind for _, _, kind, _ in copies} == {4} and {stream for *_, stream in copies} == {backend.stream.ptr}
    assert sorted(size for _, size, _, _ in copies) == sorted(
        2 * [STAGING_BYTES, STAGING_BYTES, host.nbytes - 2 * STAGING_BYTES]
    )


def test_pinned_memory_lives_as_long_as_a_view_of_it(cupy: FakeCupy) -> None:
    runtime = CupyRuntime()
    array = runtime.empty_host((3, 5), np.float16)
    assert array.shape == (3, 5) and array.dtype == np.float16 and array.flags.writeable
    array[...] = 2
    assert ("hostAlloc", 30, 1) in cupy.calls
    view = array[1:]
    del array
    gc.collect()
    assert not cupy.pinned_freed and (view == 2).all()
    assert runtime.address(view) == view.ctypes.data
    del view
    gc.collect()
    assert cupy.pinned_freed == [30]
    assert runtime.empty_host((0, 4), np.float32).shape == (0, 4)


def test_K14_K15_a_launch_passes_addresses_and_typed_numbers(cupy: FakeCupy) -> None:
    runtime = CupyRuntime()
    stream = runtime.stream("compute")
    function = runtime.function("norms.cu", "rms_norm", {"A": 1}, 0)
    device, pinned = runtime.empty((4,), np.float32), runtime.empty_host((4,), np.float32)
    runtime.launch(function, (2, 1, 1), (256, 1, 1), [device, pinned, NULL, np.int32(4), np.float32(1)], 0, stream)
    name, grid, block, arguments, shared, on = cupy.calls[-1][1:]
    assert (name, grid, block, shared, on) == ("rms_norm", (2, 1, 1), (256, 1, 1), 0, stream.ptr)
    assert [type(value) for value in arguments] == [np.uint64, np.uint64, np.uint64, np.int32, np.float32]
    assert [int(value) for value in arguments[:3]] == [device.data.ptr, pinned.ctypes.data, 0]


def test_a_kernel_is_loaded_once_for_a_variant_and_given_its_shared_memory(cupy: FakeCupy) -> None:
    runtime = CupyRuntime()
    functions = [
        runtime.function("norms.cu", name, {"A": a}, shared)
        for name, a, shared in (("rms_norm", 1, 0), ("rms_norm", 1, 9), ("head_norm", 1, 0), ("rms_norm", 2, 100 << 10))
    ]
    assert functions[0] is functions[1]
    assert [call[1] for call in cupy.calls if call[0] == "load"] == [b"norms.cu 90"] * 2
    assert [call for call in cupy.calls if call[0] == "funcSetAttribute"] == [
        ("funcSetAttribute", 0x7000, 8, 100 << 10)
    ]


def test_events_order_streams_and_tell_time(cupy: FakeCupy) -> None:
    runtime = CupyRuntime()
    first, second = runtime.stream("compute"), runtime.stream("to_host")
    event, timed = runtime.record(first), runtime.record(first, timed=True)
    assert not event.timed and timed.timed
    runtime.wait(second, event)
    assert cupy.calls[-1] == ("wait", second.ptr, event.ptr)
    assert runtime.done(event)
    cupy.fail["eventQuery"] = 600
    assert not runtime.done(event)
    cupy.fail["eventQuery"] = 700  # an illegal address: CuPy's own `done` would say "not yet" for ever
    with pytest.raises(DeviceError, match="CUDA: cudaErrorSomething: status 700"):
        runtime.done(event)
    runtime.synchronize(event)
    runtime.synchronize()
    assert cupy.names()[-2:] == ["synchronize", "deviceSynchronize"]
    assert runtime.seconds(timed, timed) == 0.0025


def test_a_graph_is_captured_from_a_stream_and_launched_on_one(cupy: FakeCupy) -> None:
    runtime = CupyRuntime()
    stream = runtime.stream("compute")
    runtime.begin_capture(stream)
    graph = runtime.end_capture(stream)
    runtime.launch_graph(graph, stream)
    assert cupy.calls[-3:] == [(name, stream.ptr) for name in ("begin_capture", "end_capture", "launch_graph")]


def test_memory_that_is_used_up_is_said_to_be(cupy: FakeCupy) -> None:
    runtime = CupyRuntime()
    with pytest.raises(DeviceMemoryError, match="used up: Out of memory allocating 2,147,483,648 bytes"):
        runtime.empty((1 << 29,), np.float32)
    cupy.fail["hostAlloc"] = 2
    with pytest.raises(DeviceMemoryError, match="used up"):
        runtime.empty_host((4,), np.float32)
    assert isinstance(DeviceMemoryError(""), MemoryError)  # a cache names the option that asked for too much


def test_the_library_face_runs_on_cupys_current_stream(cupy: FakeCupy) -> None:
    runtime = CupyRuntime()
    backend = RuntimeBackend(runtime, stream=runtime.current_stream())
    backend.upload(np.ones(4, np.float32))
    assert [call[-1] for call in cupy.calls if call[0] == "copy"] == [0x42]


def test_kernels_are_compiled_side_by_side_and_counted(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(compile, "cubin", lambda source, *_: compiled.append(source) or b"code")
    monkeypatch.setattr(compile, "is_kept", lambda source, *_: source == "rope.cu")
    builds = [Build(f"{name}.cu", kernel, "", {}, 256) for name in ("a", "b", "rope") for kernel in ("x", "y")]
    seen: list[tuple[int, int]] = []
    CupyRuntime().prepare(builds, lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)] and sorted(compiled) == ["a.cu", "a.cu", "b.cu", "b.cu", "rope.cu"]
    monkeypatch.setattr(compile, "is_kept", lambda *_: True)
    CupyRuntime().prepare(builds, lambda done, total: pytest.fail("nothing was to compile"))


def test_cublas_that_does_not_start_is_done_without(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str, workspace: tuple[int, int]) -> Any:
        raise DeviceError("cuBLAS cannot be loaded")

    assert not CupyRuntime().has_gemm
    monkeypatch.setattr(cupy_runtime.cublas, "found", lambda major: "libcublas.so.12" if major == 12 else None)
    monkeypatch.setattr(cupy_runtime.cublas, "Cublas", broken)
    runtime = CupyRuntime()
    with pytest.warns(RuntimeWarning, match=r"libcublas.so.12: cuBLAS cannot be loaded; .*without it"):
        assert not runtime.has_gemm
    assert not runtime.has_gemm and RuntimeBackend(runtime).gemm is None  # asked once
    with pytest.raises(DeviceError, match="there is no cuBLAS"):
        runtime.gemm(None, None, None, "float16", None)


def test_a_product_names_addresses_and_the_stride_of_its_result(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Blas:
        def __init__(self, path: str, workspace: tuple[int, int]) -> None:
            asked.append(workspace[1])

        def gemm(self, *arguments: Any) -> None:
            asked.append(arguments)

        def close(self) -> None:
            asked.append("closed")

    monkeypatch.setattr(cupy_runtime.cublas, "found", lambda major: "libcublas.so.12")
    monkeypatch.setattr(cupy_runtime.cublas, "Cublas", Blas)
    backend = RuntimeBackend(CupyRuntime())
    x, weight = backend.empty((9, 64), np.float16), backend.empty((5, 64), np.float16)
    out = backend.empty((9, 12), np.float32)[:, 3:8]
    assert backend.gemm is not None
    backend.gemm(x, weight, out, "float16")
    assert asked[1] == (
        x.data.ptr, weight.data.ptr, out.data.ptr, 9, 5, 64, 12, "float16", backend.stream.ptr
    )  # fmt: skip
    assert RuntimeBackend(backend.runtime, deterministic=True).gemm is None
    backend.runtime.close()
    assert asked[2:] == ["closed"]


def test_everything_is_given_back_after_all_work(cupy: FakeCupy) -> None:
    runtime = CupyRuntime()
    runtime.close()
    assert cupy.names()[-2:] == ["deviceSynchronize", "free_all_blocks"]


def test_every_name_of_cupy_that_is_used_is_there() -> None:
    """In the installed CuPy, whichever it is; importing it needs no driver. Names are read from the source."""
    real = pytest.importorskip("cupy")
    tree = ast.parse(Path(cupy_runtime.__file__).read_text())
    roots = {"self._cupy": real, "cupy": real, "self._cuda": real.cuda.runtime, "pinned": real.cuda.pinned_memory}
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node).partition("(")[0]
            used |= {(root, text.removeprefix(root + ".")) for root in roots if text.startswith(root + ".")}
    assert len(used) > 20
    for root, path in used:
        place: Any = roots[root]
        for name in path.split("."):
            assert hasattr(place, name), f"{root}.{path}"
            place = getattr(place, name)
    methods = {
        real.cuda.Stream: ("wait_event", "begin_capture", "end_capture"),
        real.cuda.Event: ("record", "synchronize"),
        real.cuda.Graph: ("launch",),
        real.cuda.MemoryPool: ("malloc", "free_bytes", "free_all_blocks"),
        real.cuda.Device: ("attributes", "__enter__", "__exit__"),
        real.cuda.function.Module: ("load", "get_function"),
    }
    for kind, names in methods.items():
        assert [name for name in names if not hasattr(kind, name)] == []
    assert "memcpyAsync(intptr_t dst, intptr_t src, size_t size, int kind, intptr_t stream)" in str(
        real.cuda.runtime.memcpyAsync.__doc__
    )
    assert "(intptr_t f, int attribute, int value)" in str(real.cuda.driver.funcSetAttribute.__doc__)
    assert real.cuda.runtime.runtimeGetVersion() >= 12000
