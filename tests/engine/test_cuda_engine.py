"""The whole engine on the CUDA device over the stream double: whatever runs late, tokens are those of the CPU.

A seed draws the model, the requests, the pools, the ways out of them and back, graphs or none, and the order in which
everything queued runs. `-m slow` has seeds 32 to 199, and those with the emulated CUDA C behind the launches.
"""

from __future__ import annotations

import gc
from collections import Counter

import pytest
from checkpoints import DATA
from cuda_support import (
    MET,
    Pressed,
    Setting,
    assert_tokens_of_the_cpu,
    ended_amid_copies,
    on_the_cpu,
    pressed,
    speed_is_that_of_work_done,
)
from engine_support import greedy, prompt
from recording import Job, assert_same_bits, run
from streamdouble import StreamDouble
from streamdouble.engines import cuda_llm

SEEDS, DEFAULT, GROUP = 200, 32, 8


def nothing_is_held(runs: list[Pressed]) -> None:
    gc.collect()
    assert [each.gpu.live for each in runs] == [(0, 0)] * len(runs)


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[pytest.mark.slow] * (n >= DEFAULT)) for n in range(0, SEEDS, GROUP)],
)
def test_A19_tokens_are_those_of_the_cpu_under_memory_pressure(first: int) -> None:
    """Eight seeds; between them everything happens that the memory manager can do."""
    runs, met = [], Counter[str]()
    for seed in range(first, first + GROUP):
        setting = Setting.of(seed)
        ours = pressed(setting)
        assert_tokens_of_the_cpu(setting, ours.run)
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


def test_aborted_requests_leave_nothing_on_its_way() -> None:
    for seed in range(16):
        ended_amid_copies(seed)


def test_the_speed_of_prompts_is_that_of_work_done() -> None:
    for seed in range(8):
        speed_is_that_of_work_done(seed)
