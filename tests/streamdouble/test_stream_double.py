"""The double itself: scripts over three streams pass under every seed; with a fault planted, some seed fails."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged.errors import DeviceError, KernelError
from cupaged.kernels.cuda.launch import NULL, typed_arguments
from streamdouble import BIASES, StreamDouble

SEEDS = 60
STEPS = 12
SIZE = 700


class Script:
    """Sums of batches that go up on one stream, are added to a total on another and come down on a third."""

    def __init__(self, seed: int, fault: str = "") -> None:
        self.fault = fault
        self.gpu = StreamDouble(seed)
        self.compute, self.up, self.down = (self.gpu.stream(name) for name in ("compute", "to_device", "to_host"))
        self.add_kernel = self.gpu.function("elementwise.cu", "add", {}, 0)
        self.staging = [self.gpu.empty_host((SIZE,), np.float32) for _ in range(2)]
        self.reused = [None, None]
        self.total = self.gpu.empty((SIZE,), np.float32)
        self.results: list[Any] = []

    def add(self, x: Any, y: Any) -> None:
        typed = typed_arguments("elementwise.cu", "add", {"x": x, "y": y, "count": SIZE})
        self.gpu.launch(self.add_kernel, (3, 1, 1), (256, 1, 1), typed, 0, self.compute)

    def wait(self, name: str, stream: Any, event: Any) -> None:
        if self.fault != name:
            self.gpu.wait(stream, event)

    def run(self) -> list[np.ndarray]:
        zeros = self.gpu.empty_host((SIZE,), np.float32)
        zeros[:] = 0
        self.gpu.copy(self.total, zeros, self.compute)
        self.gpu.synchronize(self.gpu.record(self.compute))
        for step in range(STEPS):
            self.step(step)
        self.gpu.synchronize()
        return self.results

    def step(self, step: int) -> None:
        staging = self.staging[step % 2]
        event = self.reused[step % 2]
        if event is not None and self.fault != "staging overwritten while it is copied":
            self.gpu.synchronize(event)
        staging[:] = step + 1
        batch = self.gpu.empty((SIZE,), np.float32)
        if self.fault != "memory of the pool used on another stream at once":
            self.gpu.wait(self.up, self.gpu.record(self.compute))
        self.gpu.copy(batch, staging, self.up)
        self.reused[step % 2] = copied = self.gpu.record(self.up)
        self.wait("compute does not wait for the copy up", self.compute, copied)
        self.add(self.total, batch)
        result = self.gpu.empty_host((SIZE,), np.float32)
        self.wait("the copy down does not wait for compute", self.down, self.gpu.record(self.compute))
        self.gpu.copy(result, self.total, self.down)
        self.wait("compute overwrites what is copied down", self.compute, self.gpu.record(self.down))
        self.results.append(result)


RIGHT = [np.full(SIZE, (step + 1) * (step + 2) / 2, np.float32) for step in range(STEPS)]
FAULTS = (
    "staging overwritten while it is copied",
    "memory of the pool used on another stream at once",
    "compute does not wait for the copy up",
    "the copy down does not wait for compute",
    "compute overwrites what is copied down",
)


def is_right(results: list[np.ndarray]) -> bool:
    return all(np.array_equal(ours, right) for ours, right in zip(results, RIGHT, strict=True))


def test_a_right_script_passes_under_every_seed_and_bias() -> None:
    for seed in range(SEEDS):
        script = Script(seed)
        assert is_right(script.run()), seed
        assert script.gpu.pending == 0
    for bias in BIASES:
        gpu = StreamDouble(1, bias)
        assert gpu.pending == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_some_seed(fault: str) -> None:
    assert any(not is_right(Script(seed, fault).run()) for seed in range(SEEDS))


def on_two_streams(gpu: StreamDouble) -> tuple[Any, Any]:
    return gpu.stream("compute"), gpu.stream("to_device")


def filled(gpu: StreamDouble, value: float, size: int = SIZE) -> np.ndarray:
    host = gpu.empty_host((size,), np.float32)
    host[:] = value
    return host


def dropped_device_array(gpu: StreamDouble) -> np.ndarray:
    """A copy on another stream reads an array that is gone when it gets there."""
    compute, other = on_two_streams(gpu)
    array, out = gpu.empty((SIZE,), np.float32), filled(gpu, 0)
    gpu.copy(array, filled(gpu, 1), compute)
    gpu.synchronize()
    gpu.copy(out, array, other)
    del array
    again = gpu.empty((SIZE,), np.float32)
    gpu.copy(again, filled(gpu, 5), compute)
    gpu.synchronize()
    return out


def dropped_pinned_array(gpu: StreamDouble) -> np.ndarray:
    compute, _ = on_two_streams(gpu)
    array, out, staging = gpu.empty((SIZE,), np.float32), filled(gpu, 0), filled(gpu, 1)
    gpu.copy(array, staging, compute)
    del staging
    gpu.copy(out, array, compute)
    gpu.synchronize()
    return out


def dropped_capture_buffer(gpu: StreamDouble) -> np.ndarray:
    """A graph holds addresses: what it works on must be kept with it."""
    compute, _ = on_two_streams(gpu)
    array, out, ones = gpu.empty((SIZE,), np.float32), filled(gpu, 0), filled(gpu, 1)
    gpu.copy(array, ones, compute)
    gpu.begin_capture(compute)
    gpu.copy(out, array, compute)
    graph = gpu.end_capture(compute)
    gpu.launch_graph(graph, compute)
    gpu.synchronize()
    assert (out == 1).all()
    del array
    gpu.launch_graph(graph, compute)
    gpu.synchronize()
    return out


def read_before_it_is_there(gpu: StreamDouble) -> np.ndarray:
    compute, _ = on_two_streams(gpu)
    array, out = gpu.empty((SIZE,), np.float32), filled(gpu, 0)
    gpu.copy(array, filled(gpu, 1), compute)
    gpu.copy(out, array, compute)
    result = out.copy()
    gpu.synchronize()
    return result


@pytest.mark.parametrize(
    "script", [dropped_device_array, dropped_pinned_array, dropped_capture_buffer, read_before_it_is_there]
)
def test_use_after_a_drop_or_before_the_end_fails_some_seed(script: Callable[[StreamDouble], np.ndarray]) -> None:
    assert any(not (script(StreamDouble(seed)) == 1).all() for seed in range(SEEDS))


def test_dropped_device_memory_serves_compute_as_long_as_work_was_queued_before() -> None:
    """The pool is ordered by the compute stream: this is no fault."""
    for seed in range(SEEDS):
        gpu = StreamDouble(seed)
        compute, _ = on_two_streams(gpu)
        out, ones, fives = filled(gpu, 0), filled(gpu, 1), filled(gpu, 5)
        array = gpu.empty((SIZE,), np.float32)
        gpu.copy(array, ones, compute)
        gpu.copy(out, array, compute)
        address = gpu.address(array)
        del array
        again = gpu.empty((SIZE,), np.float32)
        assert gpu.address(again) == address
        gpu.copy(again, fives, compute)
        gpu.synchronize()
        assert (out == 1).all() and (again == 5).all()


def test_views_keep_their_memory_and_new_memory_is_nan() -> None:
    gpu = StreamDouble()
    gpu.stream("compute")
    array = gpu.empty((4, 8), np.float32)
    assert np.isnan(array).all() and gpu.address(array) % 256 == 0
    view = array[1:].reshape(-1)[3:].view(np.int32)
    del array
    gc.collect()
    assert gpu.live == (1, 0)
    del view
    assert gpu.live == (0, 0)
    assert gpu.memory() == (128 << 20, 128 << 20)


def test_the_host_writes_to_device_memory_by_copies_alone() -> None:
    gpu = StreamDouble()
    with pytest.raises(ValueError, match="read-only"):
        gpu.empty((4,), np.float32)[0] = 1
    gpu.empty_host((4,), np.float32)[0] = 1


def test_a_capture_records_and_a_graph_runs_on_what_buffers_hold_then() -> None:
    script = Script(3)
    gpu, compute = script.gpu, script.compute
    x, y, ones = gpu.empty((SIZE,), np.float32), gpu.empty((SIZE,), np.float32), filled(gpu, 1)
    gpu.copy(x, ones, compute)
    gpu.copy(y, ones, compute)
    gpu.synchronize()
    gpu.begin_capture(compute)
    script.add(x, y)
    script.add(y, x)
    graph = gpu.end_capture(compute)
    gpu.synchronize()
    assert (x == 1).all()
    for _ in range(2):
        gpu.launch_graph(graph, compute)
    gpu.synchronize()
    assert (x == 5).all() and (y == 8).all() and gpu.graphs_launched == 2


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda gpu, event: gpu.empty((1,), np.float32), "allocating device memory"),
        (lambda gpu, event: gpu.empty_host((1,), np.float32), "allocating pinned memory"),
        (lambda gpu, event: gpu.synchronize(), "synchronising"),
        (lambda gpu, event: gpu.synchronize(event), "synchronising"),
        (lambda gpu, event: gpu.done(event), "asking for an event"),
        (lambda gpu, event: gpu.wait(event.stream, event), "waiting for an event"),
    ],
)
def test_what_a_capture_does_not_allow_is_an_error(call: Callable[[StreamDouble, Any], Any], what: str) -> None:
    gpu = StreamDouble()
    compute = gpu.stream("compute")
    event = gpu.record(compute)
    gpu.begin_capture(compute)
    with pytest.raises(DeviceError, match=f"{what} while a stream is captured"):
        call(gpu, event)
    gpu.end_capture(compute)
    assert gpu.done(event) in (True, False)


def test_pinned_memory_freed_during_a_capture_fails_it() -> None:
    gpu = StreamDouble()
    compute = gpu.stream("compute")
    pinned = gpu.empty_host((1,), np.float32)
    gpu.begin_capture(compute)
    del pinned
    with pytest.raises(DeviceError, match="while a stream was captured pinned memory was freed"):
        gpu.end_capture(compute)


def test_a_kernel_that_fails_is_told_at_the_next_synchronisation_and_ever_after() -> None:
    gpu = StreamDouble(0, "late")
    compute = gpu.stream("compute")
    x, rows, out = gpu.empty((2, 4), np.float32), gpu.empty((1,), np.int32), gpu.empty((1, 4), np.float32)
    wrong = gpu.empty_host((1,), np.int32)
    wrong[:] = 99
    gpu.copy(rows, wrong, compute)
    take = gpu.function("elementwise.cu", "take_rows", {}, 0)
    typed = typed_arguments("elementwise.cu", "take_rows", {"x": x, "rows": rows, "out": out, "cols": 4})
    gpu.launch(take, (1, 1, 1), (256, 1, 1), typed, 0, compute)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"a kernel failed: bytes 0\.\.1600 of 256 touched"):
            gpu.synchronize(gpu.record(compute))


def test_timed_events_tell_how_long_copies_took() -> None:
    gpu = StreamDouble(2)
    up = gpu.stream("to_device")
    target, source = gpu.empty((1 << 20,), np.float32), filled(gpu, 1, 1 << 20)
    first = gpu.record(up, timed=True)
    gpu.copy(target, source, up)
    last, plain = gpu.record(up, timed=True), gpu.record(up)
    gpu.synchronize()
    assert 2e-4 < gpu.seconds(first, last) < 3e-4
    with pytest.raises(DeviceError, match="not timed"):
        gpu.seconds(first, plain)


def add_arguments(gpu: StreamDouble, **changes: Any) -> list[Any]:
    array = gpu.empty((SIZE,), np.float32)
    return list(({"x": array, "y": array, "count": np.int64(SIZE)} | changes).values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": SIZE}, "count: expected int64, got 700"),
        ({"count": np.int32(SIZE)}, "count: expected int64"),
        ({"count": np.float64(SIZE)}, "count: expected int64"),
        ({"x": None}, "x: expected pointer, got None"),
        ({"x": 0}, "x: expected pointer, got 0"),
        ({"x": np.uint64(8)}, "x: expected pointer"),
    ],
)
def test_K14_K15_arguments_are_exactly_of_the_signatures_types(changes: dict[str, Any], message: str) -> None:
    gpu = StreamDouble()
    compute = gpu.stream("compute")
    function = gpu.function("elementwise.cu", "add", {}, 0)
    with pytest.raises(KernelError, match=f"add: {message}"):
        gpu.launch(function, (1, 1, 1), (256, 1, 1), add_arguments(gpu, **changes), 0, compute)
    gpu.launch(function, (1, 1, 1), (256, 1, 1), add_arguments(gpu, x=NULL), 0, compute)


def test_arrays_of_other_memory_and_of_other_types_are_refused() -> None:
    gpu = StreamDouble()
    compute = gpu.stream("compute")
    function = gpu.function("elementwise.cu", "add", {}, 0)
    foreign = np.zeros(SIZE, np.float32)
    with pytest.raises(DeviceError, match="neither device memory nor pinned"):
        gpu.launch(function, (1, 1, 1), (256, 1, 1), add_arguments(gpu, x=foreign), 0, compute)
    with pytest.raises(KernelError, match="x: got an array of float16"):
        half = gpu.empty((SIZE,), np.float16)
        gpu.launch(function, (1, 1, 1), (256, 1, 1), add_arguments(gpu, x=half), 0, compute)
    with pytest.raises(DeviceError, match="2800 bytes to 1400"):
        gpu.copy(half, add_arguments(gpu)[0], compute)
    with pytest.raises(DeviceError, match="not contiguous"):
        gpu.copy(half[::2], half[::2], compute)
    with pytest.raises(DeviceError, match="grid"):
        gpu.launch(function, (1, 70000, 1), (256, 1, 1), add_arguments(gpu), 0, compute)
    with pytest.raises(DeviceError, match="out of device memory: 268,435,456 bytes of 134,217,728"):
        gpu.empty((1 << 26,), np.float32)
