"""The CPU as a device: capture and replay, its thread team, the attention plan, the cache of compiled kernels."""

from __future__ import annotations

import ast
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA, Bare, expected
from engine_support import greedy, prompt, tiny

from cupaged.cache import PagedKVCache
from cupaged.device import get_device, make_device
from cupaged.device.cpu import CpuDevice, host_memory, usable_processors
from cupaged.errors import DeviceError, KernelError, OptionError
from cupaged.kernels.cpu import library
from cupaged.kernels.cpu.executor import Pace

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = CpuDevice(threads=2)
    yield made
    made.close()


def array(device: CpuDevice, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.asarray(device.upload(np.random.default_rng(seed).standard_normal(shape, np.float32)))


# -- capture and replay


def test_a_captured_forward_pass_replays_to_the_eager_bits() -> None:
    model = Bare(DATA / "qwen3", get_device("cpu"))
    ids = expected("qwen3")[2][0]
    eager = model.logits(ids)
    model.cache.array[:] = np.nan
    inner = model.decoder.forward

    def captured(batch: Any, caches: Any) -> Any:
        with model.device.capture() as step:
            logits = inner(batch, caches)
        before = logits.copy()
        logits[:] = np.nan  # nothing ran yet, so nothing is overwritten by this
        assert before.shape == logits.shape
        step.replay()
        return logits

    model.decoder.forward = captured  # type: ignore[method-assign]
    for chunk in (None, 7):
        assert np.array_equal(model.logits(ids, chunk), eager)


def test_capturing_runs_nothing_and_replaying_uses_what_the_buffers_hold_then(device: CpuDevice) -> None:
    x, y, weight = array(device, (5, 96), 1), array(device, (5, 96), 2), array(device, (96,), 3)
    out = device.empty((5, 96), np.float32)
    out[:] = 7
    with device.capture() as step:
        device.ops.add(x, y)
        device.ops.rms_norm(x, weight, 1e-5, out)
    assert (out == 7).all()
    for seed in (10, 11, 12):
        x[:], y[:] = array(device, (5, 96), seed), array(device, (5, 96), seed + 50)
        total = x + y
        step.replay()
        assert np.array_equal(x, total)
        replayed = out.copy()
        device.ops.rms_norm(total, weight, 1e-5, out)
        assert np.array_equal(replayed, out)


def test_scratch_that_a_capture_outgrows_stays_alive(device: CpuDevice) -> None:
    """Two attention calls in one capture, the second with more partial results: the first's must not be freed."""
    heads, dim = 4, 32
    cache = PagedKVCache(300, 16, heads, dim, 1, "float32", device)
    cache.array[:] = np.random.default_rng(0).standard_normal(cache.array.size, np.float32)
    table = np.arange(300, dtype=np.int32)[None]
    jobs = []
    for count, context in ((1, 40), (200, 4800)):
        query, out = array(device, (count, heads, dim), count), device.empty((count, heads, dim), np.float32)
        jobs.append((query, out, device.ops.plan_attention(cache.view, table, [0, count], [context], heads)))
    with device.capture() as step:
        for query, out, plan in jobs:
            device.ops.paged_attention(query, cache.view, 0, plan, out, 0.1)
    gc.collect()
    filler = [np.full(1 << n, np.nan, np.float32) for n in range(6, 20)]  # what is free gets overwritten
    step.replay()
    captured = [out.copy() for _, out, _ in jobs]
    for (query, out, plan), replayed in zip(jobs, captured, strict=True):
        device.ops.paged_attention(query, cache.view, 0, plan, out, 0.1)
        assert np.array_equal(out, replayed)
    assert len(filler) == 14


def test_a_capture_that_fails_ends_and_captures_do_not_nest(device: CpuDevice) -> None:
    x = array(device, (4, 8), 1)
    with pytest.raises(KernelError):
        with device.capture():
            device.ops.add(x, x.astype(np.float64))
    with device.capture():
        with pytest.raises(DeviceError, match="capture is already running"):
            with device.capture():
                pass
    double = 2 * x
    device.ops.add(x, x.copy())  # and eager work runs again
    assert np.array_equal(x, double)


# -- the team


def test_threads_are_started_at_first_use_and_closed_with_the_device() -> None:
    before = threading.active_count()
    device = CpuDevice(threads=4)
    assert threading.active_count() == before
    x = array(device, (3, 8), 1)
    device.ops.add(x, x.copy())
    assert threading.active_count() == before + 3
    device.close()
    device.close()
    assert threading.active_count() == before
    with pytest.raises(DeviceError, match="closed"):
        device.ops.add(x, x.copy())


@pytest.mark.parametrize("threads", [0, -1, 257, True, 1.5, "2"])
def test_impossible_thread_counts_are_refused(threads: Any) -> None:
    with pytest.raises(OptionError, match=r"threads: .* 1\.\.256"):
        CpuDevice(threads=threads)


def test_devices_by_name() -> None:
    with pytest.raises(OptionError, match="device: 'tpu' is not one of auto, cpu, cuda"):
        make_device("tpu")
    with pytest.raises(DeviceError, match="cuda"):
        make_device("cuda")
    assert get_device("cpu") is get_device("cpu")


def test_memory_and_processors_are_those_of_this_process() -> None:
    total, available = host_memory()
    assert 0 < available <= total
    assert 1 <= usable_processors() <= len(os.sched_getaffinity(0))


def test_a_quota_of_processors_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Path, *_: Any) -> str:
        return {"cpu.max": "150000 100000"}[self.name]

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(Path, "read_text", read)
    assert usable_processors() == 1


def test_a_list_may_be_changed_as_soon_as_it_has_run() -> None:
    """Operations of one chunk behind the last one of several: no thread looks at the list once it is done."""
    device = CpuDevice(threads=3)
    try:
        x, weight = array(device, (20, 64), 1), np.ones(64, np.float32)
        outs = [device.empty((count, 64), np.float32) for count in (1, 20, 1, 7, 1, 1)]
        expected = [np.empty_like(out) for out in outs]
        for out in expected:
            device.ops.rms_norm(x[: len(out)], weight, 1e-5, out)
        with device.capture() as step:
            for out in outs:
                device.ops.rms_norm(x[: len(out)], weight, 1e-5, out)
        step.records.pace.alone = lambda: False  # type: ignore[method-assign]
        for _ in range(30):
            for out in outs:
                out[:] = np.nan
            step.replay()
            chunks = step.records.array[: len(outs), 1]
            step.records.array[:, 1] = 1000
            assert all(np.array_equal(out, wanted) for out, wanted in zip(outs, expected, strict=True))
            chunks[:] = [len(out) for out in outs]
    finally:
        device.close()


# -- compiled kernels, kept

OBJECTS = [("add", "symbol_of_add", b"\x7fELF" + bytes(100)), ("sub", "ünïcode", b""), ("mul", "m", b"x" * 5000)]


def test_kernels_are_kept_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kernels" / "cpu.bin"
    assert library._write(path, OBJECTS)
    assert library._read(path) == OBJECTS
    assert path.parent.stat().st_mode & 0o077 == 0
    assert [entry.name for entry in path.parent.iterdir()] == ["cpu.bin"]  # no temporary file is left
    assert library._write(path, OBJECTS[:1])
    assert library._read(path) == OBJECTS[:1]


def test_a_damaged_cache_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "cpu.bin"
    assert library._read(path) is None
    library._write(path, OBJECTS)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (b"", whole[:31], whole[:32], whole[:-1], whole + b"x", bytes(flipped), b"\0" + whole[1:]):
        path.write_bytes(damaged)
        path.chmod(0o600)
        assert library._read(path) is None
    path.unlink()
    path.mkdir()
    assert library._read(path) is None


def test_a_cache_file_that_others_could_write_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpu.bin"
    library._write(path, OBJECTS)
    for mode, good in ((0o600, True), (0o644, True), (0o664, False), (0o646, False), (0o620, False), (0o400, True)):
        path.chmod(mode)
        assert (library._read(path) is not None) is good, oct(mode)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid != 0:  # root may write anything anyway
        assert library._read(path) is None


def test_a_pipe_in_the_place_of_the_cache_file_does_not_hold_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cpu.bin", 0o600)
    assert library._read(tmp_path / "cpu.bin") is None


def test_K23_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert library._write(tmp_path / "file" / "kernels" / "cpu.bin", OBJECTS) is False


def test_K23_cache_folders_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUPAGED_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    first, second = library.cache_folders()
    assert first == Path("/nonexistent/.cache/cupaged/kernels")
    assert str(os.getuid()) in str(second)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.cache_folders()[0] == tmp_path / "cupaged" / "kernels"
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "own"))
    assert library.cache_folders() == [tmp_path / "own" / "kernels"]


# -- constants that are written down twice, because importing one side would import Numba


def constants(path: str) -> dict[str, Any]:
    """Module-level names of numbers and of products of numbers and earlier ones, without importing the module."""
    found: dict[str, Any] = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                code = compile(ast.Expression(node.value), path, "eval")
                found[node.targets[0].id] = eval(code, {"__builtins__": {}}, dict(found))
            except Exception:  # not a constant
                continue
    return found


def test_constants_written_down_twice_agree() -> None:
    operations, gemm = constants("kernels/cpu/operations.py"), constants("kernels/cpu/gemm.py")
    sampling, reference = constants("kernels/cpu/sampling.py"), constants("kernels/reference/sampling.py")
    team = constants("kernels/cpu/team.py")
    executor = constants("kernels/cpu/executor.py")
    interface, blockref = constants("kernels/interface.py"), constants("cupaged/memory/blockref.py")
    pairs = [
        (constants("kernels/cpu/matrices.py")["PANEL"], gemm["PANEL"]),
        (operations["_MATMUL_SCRATCH"], gemm["SCRATCH"]),
        (operations["_ROWS_A_CHUNK"], gemm["MB"]),
        (operations["_SAMPLE_BUCKETS"], sampling["BUCKETS"]),
        (operations["_SAMPLE_GROUP"], constants("kernels/cpu/sampling_math.py")["GROUP"]),
        (sampling["GREEDY_BELOW"], reference["GREEDY_BELOW"]),
        (operations["GREEDY_BELOW"], reference["GREEDY_BELOW"]),
        (sampling["TOP_P_SLACK"], reference["TOP_P_SLACK"]),
        (reference["GREEDY_BELOW"], constants("cupaged/sampling.py")["GREEDY_TEMPERATURE"]),
        (executor["RECORD_WORDS"] * 8, team["RECORD"]),
        (executor["_LINE_WORDS"] * 8, team["LINE"]),
        (constants("cupaged/loading.py")["MAX_BLOCK_SIZE"], constants("cupaged/cache.py")["MAX_BLOCK_SIZE"]),
        *((interface[name], blockref[name]) for name in ("FRAME_BITS", "FRAME_MASK", "POOL_SHIFT", "POOL_MASK")),
        *((interface[name], blockref[name]) for name in ("FORMAT_SHIFT", "NO_BLOCK")),
    ]
    assert all(one == other for one, other in pairs), pairs


# -- how many threads a repeated list is run on


def paces(team: float, alone: float, runs: int, pace: Pace | None = None) -> tuple[Pace, list[bool]]:
    """So many runs that take so long each way: which were alone."""
    pace = pace or Pace()
    chosen = []
    for _ in range(runs):
        way = pace.alone()
        chosen.append(way)
        pace.note(way, alone if way else team)
    return pace, chosen


def test_the_faster_way_is_taken_and_the_other_tried_now_and_then() -> None:
    pace, quiet = paces(team=1.0, alone=1.8, runs=320)
    assert quiet[:3] == [False, False, True] and sum(quiet) <= 5
    _, busy = paces(team=3.0, alone=1.8, runs=320, pace=pace)  # the machine got busy
    assert sum(busy[64:]) >= 240
    _, again = paces(team=1.0, alone=1.8, runs=640, pace=pace)  # and quiet again
    assert sum(again[-160:]) <= 10


def test_trying_the_slower_way_becomes_rare_and_a_slow_run_is_a_reason_to_try() -> None:
    pace, _ = paces(team=1.0, alone=1.8, runs=3000)
    _, later = paces(team=1.0, alone=1.8, runs=2000, pace=pace)
    assert 1 <= sum(later) <= 2
    _, busy = paces(team=4.0, alone=2.0, runs=8, pace=pace)
    assert busy[2:5] == [True] * 3 and sum(busy[2:]) == 5  # the team is tried again after four
    _, other = paces(team=0.5, alone=1.9, runs=80, pace=pace)
    assert sum(other[40:]) <= 1


def test_slow_runs_now_and_then_do_not_have_the_slower_way_taken() -> None:
    """Where both ways differ by a fifth and one run in eight of the team takes three times as long."""
    pace, chosen = Pace(), []
    for index in range(800):
        way = pace.alone()
        chosen.append(way)
        pace.note(way, 1.2 if way else 3.0 if index % 8 == 5 else 1.0 + index % 3 * 0.05)
    assert sum(chosen) <= 10


def test_lists_of_about_as_many_tokens_share_what_is_known_of_them() -> None:
    with tiny(threads=2) as llm:
        llm.generate([prompt(5 + n) for n in range(7)], greedy(4))
        records = [known.step.records for known in llm.engine.passes.captured.values()]
        assert {each.work for each in records} >= {7, 5 * 7 + 21}
        by_size: dict[int, set[int]] = {}
        for each in records:
            by_size.setdefault(each.work.bit_length(), set()).add(id(each.pace))
        assert all(len(paces) == 1 for paces in by_size.values()) and len(by_size) >= 2


def test_a_list_run_alone_gives_the_same_bits() -> None:
    with tiny(threads=3) as llm:
        ids = prompt(70)
        expected = llm.generate([ids], greedy(40, logprobs=5))[0]
        team = llm.engine.device.team
        submit = team._submit
        team._submit = lambda records, alone=False: submit(records, True)
        got = llm.generate([ids], greedy(40, logprobs=5))[0]
        assert got.outputs[0].logprobs == expected.outputs[0].logprobs and got.token_ids == expected.token_ids
