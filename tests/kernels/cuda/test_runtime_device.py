"""The CUDA device on the stream double: memory, copies, captures, and what is refused. Whole engines: tests/engine."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
from kernel_support import ArraySource
from quant_support import blocks_of
from streamdouble.double import StreamDouble

from cupaged.cache import PagedKVCache
from cupaged.device.base import ModelShape
from cupaged.device.cuda import RESERVED_BYTES, CudaDevice
from cupaged.device.cuda_capture import RECORDED
from cupaged.errors import DeviceError, DeviceMemoryError, KernelError, OptionError
from cupaged.kernels.cuda.backend import STAGING_BYTES
from cupaged.kernels.interface import PACKED_BLOCK_BYTES, UNIT_FORMATS, Operations, packed_bytes

SEEDS = range(4)


def device_on(seed: int = 0, **options: Any) -> CudaDevice:
    given = {name: options.pop(name) for name in ("deterministic", "graphs") if name in options}
    return CudaDevice(StreamDouble(seed, **options), **given)


def test_every_operation_of_a_pass_is_recorded_while_a_step_is_captured() -> None:
    """One that is not would run before those that were recorded before it."""
    at_once = {"matrix", "vector", "plan_attention", "copy_blocks", "sample", "broken_rows"}
    named = {name for name in vars(Operations) if not name.startswith("_")}
    assert named - set(RECORDED) == at_once


@pytest.mark.parametrize("seed", SEEDS)
def test_A19_arrays_arrive_as_they_were_when_sent(seed: int) -> None:
    """The host's arrays are overwritten at once; staging buffers are used again by the next upload but one."""
    device = device_on(seed)
    host, arrays = np.empty(3000, np.int32), []
    for number in range(20):
        size = 1 + number * 149
        host[:size] = np.arange(size) + 1000 * number
        arrays.append(device.upload(host[:size]))
        host[:] = -1
    for number, array in enumerate(arrays):
        assert np.array_equal(device.download(array), np.arange(len(array)) + 1000 * number)
    out = device.empty((20,), np.int32)
    device.upload_many([(np.arange(8, dtype=np.int32) + i, out[8 * i : 8 * i + 8]) for i in range(2)])
    assert device.download(out)[:16].tolist() == [*range(8), *range(1, 9)]
    device.close()


def test_what_is_larger_than_a_staging_buffer_travels_in_pieces() -> None:
    device = device_on(1, memory=8 * STAGING_BYTES)
    host = np.random.default_rng(0).integers(0, 1 << 30, (2, STAGING_BYTES // 4 + 5), np.int32)
    sent = device.upload(host)
    small = np.arange(7, dtype=np.int16)
    device.upload_many([(host[0, 9:], sent[1, 9:]), (small, landed := device.empty((7,), np.int16))])
    back = device.download(sent)
    assert np.array_equal(back[0], host[0]) and np.array_equal(back[1, 9:], host[0, 9:])
    assert np.array_equal(back[1, :9], host[1, :9]) and np.array_equal(device.download(landed), small)


@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.uint8])
def test_shapes_and_types_come_back(dtype: Any) -> None:
    device = device_on()
    for shape in ((), (0,), (3, 0, 2), (2, 3, 4)):
        host = np.ones(shape, dtype)
        back = device.download(device.upload(host))
        assert back.dtype == dtype and back.size == host.size and (back == 1).all()
    strided = np.arange(24, dtype=dtype).reshape(4, 6)[:, ::2]
    assert np.array_equal(device.download(device.upload(strided)), strided)


def test_what_does_not_fit_is_refused_by_name() -> None:
    device = device_on()
    array = device.empty((4, 6), np.float32)
    for host, out in ((np.ones(3, np.float32), array), (np.ones((4, 6)), array)):
        with pytest.raises(KernelError, match=r"upload: float.* does not fit float32"):
            device.upload(host, out)
    with pytest.raises(KernelError, match="contiguous"):
        device.download(array[:, :3])
    with pytest.raises(KernelError, match="contiguous"):
        device.upload(np.ones((4, 3), np.float32), array[:, :3])


@pytest.mark.parametrize("seed", range(12))
def test_copies_keep_both_ends_and_tell_how_long_they_took(seed: int) -> None:
    """The arrays are dropped while the copies wait; those made next would get their place."""
    device = device_on(seed)
    source = device.upload(np.arange(500, dtype=np.int32))
    host = device.empty_host((500,), np.int32)
    device.wait("to_host", device.record())
    away = device.copy("to_host", [(source[:200], host[:200]), (source[200:], host[200:])])
    del source
    others = [device.upload(np.full(500, -1, np.int32)) for _ in range(3)]
    device.wait("to_device", away)
    landed = device.empty((500,), np.int32)
    device.wait("to_device", device.record())  # whoever had its place before is done
    back = device.copy("to_device", [(host, landed)])
    del host
    pinned = [device.empty_host((500,), np.int32) for _ in range(3)]
    for array in pinned:
        array[:] = -2
    device.wait("compute", back)
    assert np.array_equal(device.download(landed), np.arange(500))
    back.wait()
    assert back.done() and back.error is None and back.seconds is not None and back.seconds >= 0
    assert away.done() and (device.download(others[0]) == -1).all()


def test_a_transfer_tells_what_went_wrong_and_never_raises() -> None:
    class Broken(StreamDouble):
        def copy(self, *arguments: Any) -> None:
            raise DeviceError("CUDA: an illegal address")

    device = CudaDevice(Broken())
    transfer = device.copy("to_host", [(device.empty((3,), np.int8), device.empty_host((3,), np.int8))])
    transfer.wait()
    assert transfer.done() and transfer.seconds is None and str(transfer.error) == "CUDA: an illegal address"

    class Late(StreamDouble):
        def synchronize(self, event: Any = None) -> None:
            raise DeviceError("CUDA: unspecified launch failure")

        def done(self, event: Any) -> bool:
            raise DeviceError("CUDA: unspecified launch failure")

    device = CudaDevice(Late())
    for ask in ("wait", "done"):
        transfer = device.copy("to_host", [])
        assert transfer.error is None
        getattr(transfer, ask)()
        assert transfer.done() and "launch failure" in str(transfer.error)
    with pytest.raises(DeviceError, match="launch failure"):
        device.record().wait()


def test_memory_leaves_room_for_what_a_step_needs() -> None:
    total = 128 << 20
    device = device_on(memory=total)
    info = device.memory()
    assert info.total == total and 0 < info.available <= total - total // 8
    device.runtime.memory = lambda: (80 << 30, 70 << 30)  # type: ignore[method-assign]
    assert device.memory().available == (70 << 30) - RESERVED_BYTES
    device.runtime.memory = lambda: (8 << 30, 10 << 20)  # type: ignore[method-assign]
    assert device.memory().available == 0


@pytest.mark.parametrize("kind", [*PACKED_BLOCK_BYTES, "float32", "bfloat16"])
def test_what_weights_take_is_known_before_they_are_read(kind: str) -> None:
    """Formats without a CUDA kernel are kept as float16, others as they are in the file. A CPU's units count a bit."""
    device = device_on()
    quantised = kind in PACKED_BLOCK_BYTES
    source = blocks_of(kind, 64, 512) if quantised else ArraySource(np.ones((64, 512)))
    matrix = device.ops.matrix(source, "quantised" if quantised else kind)
    most = 1.0125 if kind in UNIT_FORMATS else 1
    assert matrix.nbytes <= device.weight_bytes({kind: packed_bytes(kind, 64, 512)}) <= most * matrix.nbytes


def test_a_cache_that_does_not_fit_names_its_option() -> None:
    device = device_on(memory=1 << 20)

    def full(shape: Any, dtype: Any) -> Any:
        raise DeviceMemoryError("the GPU's or pinned memory is used up")

    device.runtime.empty = full  # type: ignore[method-assign]
    with pytest.raises(OptionError, match="num_blocks: 131,072 bytes of KV cache cannot be allocated"):
        PagedKVCache(16, 16, 1, 64, device=device)


# -- captured steps


class Step:
    """A captured step on a device: out = norm(x + y)."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.x, self.y, self.out = (device.empty((3, 64), np.float32) for _ in range(3))
        self.weight = device.ops.vector(ArraySource(np.ones(64)))
        with device.capture() as self.step:
            device.ops.add(self.x, self.y)
            device.ops.rms_norm(self.x, self.weight, 1e-5, self.out)

    def run(self, value: float) -> np.ndarray:
        for array, factor in ((self.x, 1.0), (self.y, 2.0)):
            self.device.upload(np.linspace(value, factor, 192, dtype=np.float32).reshape(3, 64), array)
        self.step.replay()
        result: np.ndarray = self.device.download(self.out)
        return result


@pytest.mark.parametrize("graphs", [True, False])
def test_a_captured_step_runs_on_what_its_buffers_hold_now(graphs: bool) -> None:
    device = device_on(3, graphs=graphs)
    step = Step(device)
    assert "add" not in device.runtime.launched  # recorded, not run
    results = [step.run(value) for value in (1.0, 2.0, 1.0, 2.0)]
    assert np.array_equal(results[0], results[2]) and np.array_equal(results[1], results[3])
    assert not np.array_equal(results[0], results[1])
    use = device.graphs
    assert (use.made, use.launched, use.failure) == ((1, 3, None) if graphs else (0, 0, None))
    plain = device_on(3)
    expected = np.linspace(1, 1, 192) + np.linspace(1, 2, 192)
    rows = expected.reshape(3, 64)
    np.testing.assert_allclose(results[0], rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-5), rtol=1e-5)
    plain.close()


def test_a_graph_that_cannot_be_captured_is_said_once_and_done_without() -> None:
    class Without(StreamDouble):
        def end_capture(self, stream: Any) -> Any:
            super().end_capture(stream)
            raise DeviceError("CUDA: operation not permitted when stream is capturing")

    device = CudaDevice(Without())
    step = Step(device)
    first = step.run(1.0)
    with pytest.warns(RuntimeWarning, match="CUDA graphs are not used: CUDA: operation not permitted"):
        second = step.run(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third, other = step.run(1.0), Step(device)
        other.run(1.0)
        assert np.array_equal(other.run(1.0), first)
    assert np.array_equal(first, second) and np.array_equal(first, third)
    assert device.graphs.made == 0 and "not permitted" in str(device.graphs.failure)


def test_an_error_in_a_captured_call_leaves_the_stream_usable() -> None:
    device = device_on()
    with device.capture() as step:
        device.ops.add(device.empty((3,), np.float32), device.empty((4,), np.float32))
    for _ in range(2):
        with pytest.raises(KernelError, match="y: expected shape"):
            step.replay()
    assert np.array_equal(device.download(device.upload(np.ones(5))), np.ones(5))
    with pytest.raises(RuntimeError, match="mine"), device.capture():
        raise RuntimeError("mine")
    step = Step(device)
    with pytest.raises(DeviceError, match="a capture is already running"), device.capture(), device.capture():
        pass
    assert np.isfinite(step.run(1.0)).all()


def test_scratch_that_a_graph_uses_lives_as_long_as_the_graph() -> None:
    """A larger product takes new scratch; the graph that knows the old one goes on writing there, and nowhere else."""
    device = device_on(5, gemm=True)
    weight = device.ops.matrix(ArraySource(np.eye(64)), "float16")
    x, out = device.empty((9, 64), np.float32), device.empty((9, 64), np.float32)
    with device.capture() as step:
        device.ops.matmul(x, weight, out)
    rng = np.random.default_rng(0)
    held: list[Any] = []
    for round_ in range(6):
        rows = rng.standard_normal((9, 64), np.float32).astype(np.float16).astype(np.float32)
        device.upload(rows, x)
        step.replay()
        assert np.array_equal(device.download(out), rows)
        if round_ == 2:
            many, product = device.upload(np.ones((50, 64), np.float32)), device.empty((50, 64), np.float32)
            device.ops.matmul(many, weight, product)
        held.append(device.upload(np.full(256, round_, np.float16)))
        for number, array in enumerate(held):
            assert (device.download(array) == number).all()
    assert device.graphs.launched == 5


def test_plans_that_are_not_the_captures_are_refused() -> None:
    device = device_on()
    cache = PagedKVCache(8, 16, 1, 64, device=device)

    def plan(count: int) -> Any:
        tables = np.arange(count, dtype=np.int32).reshape(count, 1)
        return device.ops.plan_attention(cache.view, tables, list(range(count + 1)), [5] * count, 2)

    query, out = device.empty((2, 2, 64), np.float32), device.empty((2, 2, 64), np.float32)
    with device.capture([mine := plan(2)]) as step:
        device.ops.paged_attention(query, cache.view, 0, mine, out, 0.125)
    with pytest.raises(KernelError, match="plans: expected 1 as the capture has, got 2"):
        step.replay([plan(2), plan(2)])
    with pytest.raises(KernelError, match="plans: one of 3 tokens in place of one of 2"):
        step.replay([plan(3)])
    with pytest.raises(KernelError, match="plan: a object was made by another set of kernels"):
        step.replay([object()])  # type: ignore[list-item]
    assert mine.placed is None  # the capture has a copy of its own


def test_steps_of_two_kinds_in_turn_end_up_in_one_graph() -> None:
    """One needs wider tables, the other more partial results: there is room for both after each came once."""
    device = device_on(2)
    cache = PagedKVCache(300, 16, 1, 64, device=device)
    tables = np.arange(4 * 70, dtype=np.int32).reshape(4, 70)

    def plan(contexts: list[int]) -> Any:
        width = -(-max(contexts) // 16)
        return device.ops.plan_attention(cache.view, tables[:, :width], list(range(5)), contexts, 2)

    query, out = device.upload(np.ones((4, 2, 64), np.float32)), device.empty((4, 2, 64), np.float32)
    slots = np.arange(4 * 70 * 16, dtype=np.int64)
    rows = device.upload(np.random.default_rng(0).standard_normal((len(slots), 1, 64), np.float32))
    device.ops.write_kv(rows, rows, cache.view, 0, device.upload(slots))
    one, other = [1100, 5, 5, 5], [513, 513, 513, 513]
    with device.capture([first := plan(one)]) as step:
        device.ops.paged_attention(query, cache.view, 0, first, out, 0.125)
    made = []
    for contexts in (one, other, one, other, one, other):
        step.replay([fresh := plan(contexts)])
        result = device.download(out)
        device.ops.paged_attention(query, cache.view, 0, fresh, out, 0.125)
        assert np.array_equal(result, device.download(out))
        made.append(device.graphs.made)
    assert made == [0, 0, 1, 1, 1, 1] and device.graphs.launched == 4


# -- prepared, closed, forked


def test_what_is_prepared_is_what_a_model_launches() -> None:
    from checkpoints import DATA
    from streamdouble.engines import cuda_llm

    from cupaged import SamplingParams

    class Strict(StreamDouble):
        """Counts kernels that are asked for after they were to be ready."""

        late: list[tuple[Any, ...]] | None = None

        def function(self, source: str, name: str, defines: Any, shared_bytes: int) -> Any:
            if (
                self.late is not None
                and (source, name, tuple(sorted(defines.items())), shared_bytes) not in self._functions
            ):
                self.late.append((source, name, dict(defines)))
            return super().function(source, name, defines, shared_bytes)

    for folder, dtype in (("llama", "float16"), ("qwen3", "bfloat16"), ("llama-tied-mqa", "float32")):
        gpu = Strict(gemm=True)
        llm = cuda_llm(DATA / folder, gpu, dtype=dtype, block_size=16)
        config = llm._model.checkpoint.config
        shape = ModelShape(config.head_dim, config.num_heads // config.num_kv_heads, 16, config.activation)
        llm.engine.device.prepare([dtype], dtype, shape)
        gpu.late = []
        params = [SamplingParams(max_tokens=4, temperature=t, n=n) for t, n in ((0, 1), (1, 3))]
        llm.generate([[3] * 20, [5, 6]], params)
        assert gpu.late == []
        llm.close()


def test_K18_importing_the_device_brings_neither_cupy_nor_a_context(checkout_env: dict[str, str]) -> None:
    code = """
import sys, cupaged.device.cuda, cupaged.kernels.cuda.cupy_runtime
print([m for m in sys.modules if m.startswith(("cupy", "numba"))], "libcuda" in open("/proc/self/maps").read())
"""
    assert subprocess.check_output([sys.executable, "-c", code], env=checkout_env, text=True) == "[] False\n"


def test_a_closed_device_says_so() -> None:
    device = device_on()
    array = device.upload(np.ones(3))
    device.close()
    device.close()
    for use in (
        lambda: device.empty((3,), np.int8),
        lambda: device.empty_host((3,), np.int8),
        lambda: device.upload(np.ones(3)),
        lambda: device.download(array),
        lambda: device.copy("to_host", []),
        lambda: device.record(),
        lambda: device.synchronize(),
        lambda: device.memory(),
        lambda: device.prepare([], "float16"),
        lambda: device.capture().__enter__(),
    ):
        with pytest.raises(DeviceError, match="the device was closed"):
            use()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_K18_a_forked_child_is_told_to_be_spawned() -> None:
    device = device_on()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            device.upload(np.ones(3))
        except DeviceError as error:
            os.write(write, str(error).encode())
        device.close()  # touches nothing of the parent's
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as file:
        assert "start it by multiprocessing.get_context('spawn')" in file.read()
    assert np.array_equal(device.download(device.upload(np.ones(3))), np.ones(3))
