"""The whole engine on the CUDA device over the stream double: whatever runs late, tokens are those of the CPU.

A seed draws the model, the requests, the pools, the ways out of them and back, graphs or none, and the order in which
everything queued runs. `-m slow` has seeds 24 to 199, and those with the emulated CUDA C behind the launches.
"""

from __future__ import annotations

import gc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import DATA
from cuda_support import (
    MET,
    MIXES,
    Pressed,
    Setting,
    assert_tokens_of_the_cpu,
    ended_amid_copies,
    on_the_cpu,
    on_the_double,
    pressed,
    speed_is_that_of_work_done,
)
from engine_support import greedy, prompt, tiny
from recording import Job, assert_same_bits, run
from streamdouble import StreamDouble
from streamdouble.engines import cuda_llm

from cupaged.errors import DeviceError
from cupaged.request import RequestState

SEEDS, DEFAULT, GROUP = 200, 24, 8


def nothing_is_held(runs: list[Pressed]) -> None:
    gc.collect()
    assert [each.gpu.live for each in runs] == [(0, 0)] * len(runs)


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[pytest.mark.slow] * (n >= DEFAULT)) for n in range(0, SEEDS, GROUP)],
)
def test_A19_tokens_are_those_of_the_cpu_under_memory_pressure(first: int) -> None:
    """Eight seeds; between them everything happens that the memory manager can do. A third of them is deterministic,
    and has the logits, to the bit, of a run with blocks for all."""
    runs, met = [], Counter[str]()
    for seed in range(first, first + GROUP):
        setting = Setting.of(seed)
        ours = pressed(setting)
        assert_tokens_of_the_cpu(setting, ours.run)
        if setting.options["deterministic"]:
            assert_same_bits(ours.run, on_the_double(setting.folder, setting.mix))
        assert bool(ours.met["graphs"]) == setting.options["graphs"]
        runs.append(ours)
        met += ours.met
    assert not {*MET, "graphs", "gemm"} - set(met), met
    nothing_is_held(runs)


@pytest.mark.parametrize("seed", [7, 31, 57])
@pytest.mark.slow
def test_tokens_are_those_of_the_cpu_with_the_cuda_c_behind_the_launches(seed: int) -> None:
    setting = Setting.of(seed, kernels="emulated")
    ours = pressed(setting)
    assert_tokens_of_the_cpu(setting, ours.run)
    assert ours.met["swapped_out"] and ours.met["copies"]
    nothing_is_held([ours])


@pytest.mark.slow
def test_deterministic_logits_are_the_same_bits_alone_and_under_pressure() -> None:
    """With the CUDA C behind the launches, in another batch, other chunks and another place each time."""
    setting = Setting.of(0, kernels="emulated")
    setting.options |= {"deterministic": True, "block_size": 4, "max_batch_tokens": 30}
    jobs = dict(list(on_the_cpu(setting.folder, setting.mix)[0].items())[:4])
    options = {**setting.options, "block_size": 16, "max_batch_tokens": 200}
    with cuda_llm(DATA / setting.folder, StreamDouble(1, kernels="emulated"), **options) as llm:
        whole = run(llm.engine, {name: Job(job.ids, job.params) for name, job in jobs.items()})
    setting.share = 4
    some = pressed(setting, jobs)
    assert some.met["swapped_out"]
    assert_same_bits(some.run, whole)


@pytest.mark.parametrize(
    ("seed", "kept"),
    [(5, {"dtype": "bfloat16"}), (26, {"dtype": "float16"}), (36, {"dtype": "auto", "quantize": "q8_0"})],
)
def test_16_bit_pools_and_stored_weights_have_the_same_bits_under_pressure(seed: int, kept: dict[str, str]) -> None:
    setting = Setting.of(seed)
    setting.options |= {"deterministic": True, **kept}
    ours = pressed(setting)
    assert ours.met["swapped_out"]
    assert_same_bits(ours.run, on_the_double(setting.folder, setting.mix, **kept))


@pytest.mark.parametrize("gemm", [False, True])
def test_graphs_and_eager_steps_give_the_same_bits(gemm: bool) -> None:
    jobs = {f"job{n}": Job(prompt(3 * n + 1, n), greedy(12), arrives=n % 3) for n in range(12)}
    runs = []
    for graphs in (False, True):
        gpu = StreamDouble(5, gemm=gemm)
        with cuda_llm(DATA / "qwen3", gpu, graphs=graphs, max_batch_tokens=40) as llm:
            runs.append(run(llm.engine, jobs))
        assert bool(gpu.graphs_launched) == graphs
    assert_same_bits(runs[1], runs[0])


def test_threads_that_generate_at_once_share_the_device() -> None:
    prompts = [prompt(10 + number, number) for number in range(6)]
    with tiny("llama") as llm:
        expected = [output.token_ids for output in llm.generate(prompts, greedy(8))]
    with cuda_llm(DATA / "llama", StreamDouble(4)) as llm, ThreadPoolExecutor(3) as pool:
        halves = pool.map(lambda some: llm.generate(some, greedy(8)), (prompts[:2], prompts[2:4], prompts[4:]))
        assert [output.token_ids for outputs in halves for output in outputs] == expected


def test_aborted_requests_leave_nothing_on_its_way() -> None:
    for seed in range(8):
        ended_amid_copies(seed)


def test_the_speed_of_prompts_is_that_of_work_done() -> None:
    for seed in range(8):
        speed_is_that_of_work_done(seed)


@pytest.mark.parametrize("sampled", [False, True])
def test_M12_logits_that_are_not_finite_end_their_request_alone(sampled: bool) -> None:
    """A block of one request becomes NaN; the host learns of it from a flag, and the others' tokens are the CPU's."""
    jobs, whole, _ = on_the_cpu("llama", 0)
    alone = {name: job for name, job in jobs.items() if not job.params.picks and job.aborted is None}
    victim = next(name for name, job in alone.items() if (job.params.temperature > 0) == sampled)
    with cuda_llm(DATA / "llama", StreamDouble(3)) as llm:
        engine = llm.engine
        for name, job in alone.items():
            engine.add_request(job.ids, job.params, name)
        for _ in range(3):
            engine.step()
        tables = engine.request(victim).sequences[0].tables
        assert tables is not None
        for piece in engine.caches[0].pieces(tables.tables[0].refs[0]):
            engine.device.upload(np.full(piece.shape, np.nan, piece.dtype), piece)
        while engine.has_work:
            engine.step()
        for name in alone:
            output = engine.request(name).output()
            if name == victim:
                assert output.finish_reason == "error"
                assert output.error is not None and "the model's logits are not finite (step 3" in output.error
            else:
                assert [o.token_ids for o in output.outputs] == [o.token_ids for o in whole.outputs[name].outputs]
            engine.forget(name)
        engine.check_idle()


@pytest.mark.parametrize("seed", range(6))
def test_S04_a_device_that_fails_is_told_in_its_words_and_nothing_hangs(seed: int) -> None:
    """Requests end with the error, or the step raises it where it is no single request's; all can be forgotten then."""
    jobs, _, _ = on_the_cpu("llama", seed % MIXES)
    gpu = StreamDouble(seed, Setting.of(seed).gpu["bias"])
    llm = cuda_llm(DATA / "llama", gpu, block_size=8, kv_memory="64KiB", swap_memory="64KiB")
    engine = llm.engine
    for name, job in jobs.items():
        engine.add_request(job.ids, job.params, name)
    for _ in range(5 + seed):
        engine.step()
    gpu.fail(RuntimeError("an illegal address"))
    told = []
    for _ in range(200):
        if not engine.has_work:
            break
        try:
            engine.step()
        except DeviceError as error:
            told.append(str(error))
            break
    told += [str(engine.request(name).error) for name in jobs if engine.request(name).state is RequestState.ERROR]
    assert told and all("a kernel failed: an illegal address" in line for line in told)
    for name in jobs:
        engine.forget(name)
    engine.check_idle()
    llm.close()
