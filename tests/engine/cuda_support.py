"""What the tests of the engine on the stream double share: jobs of every kind, the CPU's tokens for them, and runs
under memory pressure of which everything but the tokens is drawn by a seed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from checkpoints import DATA, FOLDERS
from engine_support import VOCAB, block_bytes, prompt, scatter, tiny, use_layout
from recording import Job, Run, run
from streamdouble import BIASES, StreamDouble
from streamdouble.engines import cuda_llm

from cupaged import SamplingParams
from cupaged.device.cuda import CudaDevice
from cupaged.engine import Engine
from cupaged.residency import Parked, Speeds, Victim, Way

MIXES = 4  # sets of jobs a model


def jobs_of(seed: int, count: int = 8, longest: int = 28, new: int = 26) -> dict[str, Job]:
    """Greedy, sampled, n, best_of and beams; some prompts begin alike, some requests are aborted."""
    rng = random.Random(seed)
    front = [rng.randrange(3, VOCAB) for _ in range(17)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1, "top_k": 40, "top_p": 0.95},
        {"temperature": 1.0, "seed": 2, "n": 3},
        {"temperature": 1.0, "seed": 3, "n": 2, "best_of": 3},
        {"temperature": 0.0, "beam_width": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ]
    jobs = {}
    for index in range(count):
        kind = kinds[index % len(kinds)]
        ids = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))]
        if rng.random() < 0.4:
            ids = front + ids[: longest - len(front)]
        params = SamplingParams(max_tokens=rng.randint(new // 2, new), ignore_eos=True, **kind)
        arrives = rng.randint(0, 3)
        aborted = arrives + rng.randint(1, 20) if rng.random() < 0.15 else None
        jobs[f"job{index}"] = Job(ids, params, arrives, aborted)
    return jobs


@lru_cache
def on_the_cpu(folder: str, mix: int) -> tuple[dict[str, Job], Run, int]:
    """Jobs, what comes of them on the CPU with blocks for all, and the blocks of 8 that they want at once."""
    jobs = jobs_of(mix)
    with tiny(folder, block_size=8, kv_memory="8MiB") as llm:
        whole = run(llm.engine, jobs)
        return jobs, whole, llm.engine.stats().peak_blocks[0]


def ways(engine: Engine, seed: int) -> None:
    """Ways out of the pool and back into it, drawn anew each time: now more copies, now more reading in place."""
    rng = random.Random(seed)
    copies, in_place_, again = rng.choice([(3, 3, 1), (6, 0, 1), (1, 8, 0), (4, 2, 0)])

    def out(victim: Victim, needed: int, host_free: int, speeds: Speeds, in_place: bool) -> Way:
        moves = min(needed, victim.blocks)
        possible = [Way.RECOMPUTE] * again + [Way.SWAP] * copies * (host_free >= victim.blocks)
        possible += [Way.IN_PLACE] * in_place_ * (in_place and min(victim.old_blocks, host_free) >= moves)
        return rng.choice(possible or [Way.RECOMPUTE])

    def back(parked: Parked, speeds: Speeds, in_place: bool) -> Way:
        possible = [Way.SWAP] * copies * parked.fits
        possible += [Way.IN_PLACE] * in_place_ * (in_place and parked.fits_in_place)
        return rng.choice(possible or [Way.SWAP if parked.fits else Way.WAIT])

    engine.scheduler.room.way_out, engine.scheduler.room.way_back = out, back


@dataclass
class Setting:
    """What a seed draws. `share`: the pool has want / share blocks."""

    seed: int
    folder: str
    mix: int
    gpu: dict[str, Any]
    options: dict[str, Any]
    share: float
    host: float
    limit: int
    layout: str

    @classmethod
    def of(cls, seed: int, **gpu: Any) -> Setting:
        rng = random.Random(10_000 + seed)
        block_size = rng.choice([4, 8, 16])
        return cls(
            seed=seed,
            folder=FOLDERS[seed % len(FOLDERS)],
            mix=rng.randrange(MIXES),
            gpu={"bias": [None, *BIASES][seed % (1 + len(BIASES))], "gemm": seed % 2 == 0} | gpu,
            options={
                "block_size": block_size,
                "max_batch_tokens": rng.choice([16, 30, 200]),
                "graphs": rng.random() < 0.7,
                "deterministic": seed % 3 == 0,
            },
            share=rng.choice([2, 3, 4, 6]),
            host=rng.choice([0.3, 1, 1.5]),
            limit=rng.choice([1, 3, 1000]),
            layout="layer_major" if seed % 8 == 6 else "block_major",
        )


@lru_cache
def _block_bytes(folder: str, block_size: int, **kept: str) -> int:
    with tiny(folder, block_size=block_size, **kept) as llm:
        return block_bytes(llm)


@dataclass
class Pressed:
    """What came of a run, what happened on the way (counters of `EngineStats` and others), and where it ran."""

    run: Run
    met: Counter[str]
    gpu: StreamDouble


def pressed(setting: Setting, jobs: dict[str, Job] | None = None) -> Pressed:
    """Run a setting's jobs, or others, in its pools. Then nothing is pending, and every block is free or cached."""
    own, _, want = on_the_cpu(setting.folder, setting.mix)
    jobs = own if jobs is None else jobs
    kept = {name: setting.options[name] for name in ("dtype", "quantize") if name in setting.options}
    size = _block_bytes(setting.folder, setting.options["block_size"], **kept)
    wanted = want * 8 // setting.options["block_size"]
    # A group that cannot read on the host needs room for all of its sequences, or it ends for want of memory.
    longest = 48 if setting.layout == "block_major" else 3 * 56
    pool = max(int(wanted / setting.share), -(-longest // setting.options["block_size"]))
    gpu = StreamDouble(setting.seed, **setting.gpu)
    memory = {"kv_memory": pool * size, "swap_memory": int(wanted * setting.host) * size}
    with cuda_llm(DATA / setting.folder, gpu, **setting.options, **memory) as llm:
        engine, device = llm.engine, llm.engine.device
        assert isinstance(device, CudaDevice)
        if setting.layout != "block_major":
            use_layout(engine, setting.layout)
        scatter(engine, setting.seed)
        ways(engine, setting.seed)
        engine.swaps.limit = setting.limit * size
        result = run(engine, jobs, 5000)
        device.synchronize()
        assert gpu.pending == 0
        assert device.graphs.failure is None
        stats = engine.stats()
        met = Counter({name: getattr(stats, name) for name in MET})
    met["graphs"], met["steps"], met["gemm"] = gpu.graphs_launched, len(result.chunks), gpu.multiplied
    return Pressed(result, met, gpu)


@lru_cache
def on_the_double(folder: str, mix: int, **kept: str) -> Run:
    """The same jobs, none aborted, with blocks for all: deterministic, everything at once."""
    jobs = {name: Job(job.ids, job.params, job.arrives) for name, job in on_the_cpu(folder, mix)[0].items()}
    with cuda_llm(DATA / folder, StreamDouble(0, "at once"), deterministic=True, kv_memory="8MiB", **kept) as llm:
        return run(llm.engine, jobs)


# Counters of `EngineStats` that are of interest.
MET = (
    "forks", "copies", "reused_tokens", "preemptions", "preemptions_by_swap", "preemptions_by_recompute", "swapped_out",
    "swapped_in", "read_in_place",
)  # fmt: skip


def assert_tokens_of_the_cpu(setting: Setting, ours: Run) -> None:
    """The same tokens and ends for every request; of one that was aborted, so far as both got."""
    jobs, whole, _ = on_the_cpu(setting.folder, setting.mix)
    for name, job in jobs.items():
        mine, theirs = ours.outputs[name], whole.outputs[name]
        where = (setting, name)
        if "abort" in (mine.finish_reason, theirs.finish_reason):
            assert job.aborted is not None, where
            for a, b in zip(mine.outputs, theirs.outputs, strict=True) if not job.params.picks else ():
                shorter = min(len(a.token_ids), len(b.token_ids))
                assert a.token_ids[:shorter] == b.token_ids[:shorter], where
            continue
        assert [o.token_ids for o in mine.outputs] == [o.token_ids for o in theirs.outputs], where
        assert [o.finish_reason for o in mine.outputs] == [o.finish_reason for o in theirs.outputs], where


def speed_is_that_of_work_done(seed: int) -> None:
    """What recomputing costs is measured when a step of a long prompt has been computed, not when it is queued."""
    gpu = StreamDouble(seed, [None, *BIASES][seed % (1 + len(BIASES))])
    with cuda_llm(DATA / "llama", gpu) as llm:
        engine = llm.engine
        forward, left = engine.passes.run, []
        engine.passes.run = lambda *given: [forward(*given), left.append(gpu.computing)][0]  # type: ignore[method-assign]
        engine.add_request(prompt(100), SamplingParams(max_tokens=1))
        while engine.has_work:
            engine.step()
        assert left == [0] and engine.passes.prefill_speed


def ended_amid_copies(seed: int) -> None:
    """Everything is aborted while blocks are on their way: the copies end, and every block is free again."""
    folder, options = "llama", {"block_size": 4, "max_batch_tokens": 30}
    jobs, _, want = on_the_cpu(folder, 0)
    size = _block_bytes(folder, 4)
    gpu = StreamDouble(seed, [None, *BIASES][seed % (1 + len(BIASES))])
    with cuda_llm(DATA / folder, gpu, **options, kv_memory=want // 2 * size, swap_memory=want * 2 * size) as llm:
        engine = llm.engine
        engine.scheduler.room.way_out = lambda *_: Way.SWAP
        for name, job in jobs.items():
            engine.add_request(job.ids, job.params, name)
        for _ in range(60):
            if engine.swaps.busy:
                break
            engine.step()
        for name in jobs:
            engine.forget(name)
        engine.check_idle()
        assert engine.manager.stats().swapped_out > 0
