"""Swapping, recomputing and reading in place are invisible: the same tokens from a pool of a half, a quarter and an
eighth of what the requests want. And the cases of it that broke other systems, each named after its id."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from engine_support import VOCAB, block_bytes, poison, scatter, tiny, use_layout
from recording import Job, Run, run

from cupaged import LLM, SamplingParams
from cupaged.device import host_stream
from cupaged.engine import Engine
from cupaged.memory import BlockManager
from cupaged.residency import Parked, Speeds, Victim, Way, way_back, way_out
from cupaged.stats import EngineStats

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral-window": {"kv_dtype": "float16", "dtype": "auto"},
    "qwen3": {"dtype": "bfloat16"},
}


def by_swap(engine: Engine) -> None:
    """Blocks are moved wherever they can be; nothing is read on the host."""

    def out(victim: Victim, needed: int, host_free: int, speeds: Speeds, in_place: bool) -> Way:
        return Way.SWAP if host_free >= victim.blocks else Way.RECOMPUTE

    engine.scheduler.room.way_out = out
    engine.scheduler.room.way_back = lambda parked, speeds, in_place: Way.SWAP if parked.fits else Way.WAIT


def over_a_link(engine: Engine) -> None:
    """As on a GPU: the rules with measured speeds, and memory that is not one."""
    room = engine.scheduler.room
    speeds = Speeds(to_host=1e9, to_device=1e9, prefill=5e3)
    room.way_out = lambda victim, needed, free, _, in_place: way_out(victim, needed, free, speeds, in_place)
    room.way_back = lambda parked, _, in_place: way_back(parked, speeds, in_place)


def any_way(engine: Engine) -> None:
    """Now this way, now that."""
    rng = random.Random(7)

    def out(victim: Victim, needed: int, host_free: int, speeds: Speeds, in_place: bool) -> Way:
        possible = [Way.RECOMPUTE] + [Way.SWAP] * 3 * (host_free >= victim.blocks)
        moves = min(needed, victim.blocks)
        return rng.choice(possible + [Way.IN_PLACE] * 3 * (in_place and min(victim.old_blocks, host_free) >= moves))

    def back(parked: Parked, speeds: Speeds, in_place: bool) -> Way:
        possible = [Way.SWAP] * 4 * parked.fits + [Way.IN_PLACE] * 2 * (in_place and parked.fits_in_place)
        return rng.choice(possible) if possible else Way.WAIT

    engine.scheduler.room.way_out, engine.scheduler.room.way_back = out, back


def nothing(engine: Engine) -> None:
    """The rules as they are."""


# How, how much host memory beside the pool (as a multiple of what the requests want), and the counters that must show.
WAYS: dict[str, tuple[Callable[[Engine], None], float, tuple[str, ...]]] = {
    "by swap": (by_swap, 1, ("preemptions_by_swap", "swapped_out", "swapped_in")),
    "by recompute": (nothing, 0, ("preemptions_by_recompute",)),
    "in place": (nothing, 1, ("swapped_out", "read_in_place")),
    "over a link": (over_a_link, 0.25, ("swapped_out", "swapped_in")),
    "any way": (any_way, 0.5, ("preemptions_by_swap", "preemptions_by_recompute", "swapped_out")),
}


def mixed(seed: int, count: int = 64, longest: int = 70, new: int = 40, vocab: int = VOCAB) -> dict[str, Job]:
    """Requests of every kind: greedy and sampled, n, best_of, beams; some are aborted on their way."""
    rng = random.Random(seed)
    jobs = {}
    for index in range(count):
        sampled = {"temperature": 1.0, "seed": rng.randrange(99)}
        kind = rng.choice(
            [
                {"temperature": 0.0},
                sampled,
                {**sampled, "n": rng.randint(2, 4)},
                {**sampled, "n": 2, "best_of": 4},
                {"beam_width": rng.randint(2, 4), "temperature": 0.0},
            ]
        )
        params = SamplingParams(max_tokens=rng.randint(new // 2, new), ignore_eos=True, **kind)
        ids = [rng.randrange(3, vocab) for _ in range(rng.randint(1, longest))]
        arrives = rng.randint(0, 3)
        aborted = arrives + rng.randint(1, 30) if rng.random() < 0.15 else None
        jobs[f"job{index}"] = Job(ids, params, arrives, aborted)
    return jobs


def texts(result: Run) -> dict[str, list[list[int]]]:
    return {name: [o.token_ids for o in output.outputs] for name, output in result.outputs.items()}


def assert_same_tokens(some: Run, whole: Run, jobs: dict[str, Job]) -> None:
    for name, job in jobs.items():
        ours, theirs = some.outputs[name], whole.outputs[name]
        if any(each.finish_reason == "abort" for each in (*ours.outputs, *theirs.outputs)):  # others ended before
            assert job.aborted is not None
            if not job.params.picks:  # which of several is best so far depends on how far they are
                for a, b in zip(ours.outputs, theirs.outputs, strict=True):
                    shorter = min(len(a.token_ids), len(b.token_ids))
                    assert a.token_ids[:shorter] == b.token_ids[:shorter]
        else:
            assert [o.token_ids for o in ours.outputs] == [o.token_ids for o in theirs.outputs], name
            assert [o.finish_reason for o in ours.outputs] == [o.finish_reason for o in theirs.outputs]
            assert [o.score for o in ours.outputs] == [o.score for o in theirs.outputs]


OPTIONS: dict[str, Any] = {"max_sequences": 256, "block_size": 8, "max_batch_tokens": 300}


@lru_cache
def unpressured(folder: str, seed: int) -> tuple[dict[str, Job], Run, int]:
    """Jobs, what comes of them with blocks for all, and the blocks that they want at once."""
    jobs = mixed(seed)
    with tiny(folder, **MODELS[folder], **OPTIONS, kv_memory="8MiB") as llm:
        whole = run(llm.engine, jobs)
        stats = llm.engine.stats()
        assert stats.preemptions == stats.swapped_out == 0
        return jobs, whole, stats.peak_blocks[0]


def pressed(
    way: str,
    share: int,
    want: int,
    jobs: dict[str, Job],
    whole: Run,
    load: Callable[..., LLM],
    layout: str | None = None,
) -> EngineStats:
    """Run the jobs with a pool of `want / share` blocks; the stats then."""
    setup, host, counters = WAYS[way]
    with load() as probe:
        size = block_bytes(probe)
    options: dict[str, Any] = {"kv_memory": want // share * size}
    if host:
        options["swap_memory"] = int(want * host) * size
    with load(**options) as llm:
        if layout is not None:
            use_layout(llm.engine, layout)
        scatter(llm.engine, seed=share)
        poison(llm.engine)
        setup(llm.engine)
        result = run(llm.engine, jobs, 20_000)
        stats = llm.engine.stats()
    assert_same_tokens(result, whole, jobs)
    shown = {name: getattr(stats, name) for name in counters}
    assert all(shown.values()), shown
    requests = len(jobs)
    for output in result.outputs.values():
        assert output.metrics.preemptions <= 4 * requests  # samples that end count, and a sample may be suspended too
    return stats


@pytest.mark.parametrize(
    ("way", "share"), [("by swap", 8), ("by recompute", 4), ("in place", 8), ("over a link", 4), ("any way", 4)]
)
def test_a_smaller_pool_gives_the_same_tokens(way: str, share: int) -> None:
    jobs, whole, want = unpressured("llama", 1)
    pressed(way, share, want, jobs, whole, lambda **o: tiny("llama", **MODELS["llama"], **OPTIONS, **o))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("share", [2, 4, 8])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("folder", MODELS)
def test_every_way_and_share_on_every_model(folder: str, way: str, share: int, seed: int) -> None:
    jobs, whole, want = unpressured(folder, seed)
    pressed(way, share, want, jobs, whole, lambda **o: tiny(folder, **MODELS[folder], **OPTIONS, **o))


def test_a_layer_major_cache_swaps_too() -> None:
    jobs, whole, want = unpressured("llama", 1)
    some = dict(list(jobs.items())[:20])
    pressed("by swap", 16, want, some, whole, lambda **o: tiny("llama", **OPTIONS, **o), "layer_major")


def lost_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host_stream, "copy_array", lambda source, destination: None)


def tickets_reported_too_early(patch: pytest.MonkeyPatch) -> None:
    """Frames are handed out while their contents are still being copied, for longer than many steps take."""
    copy = host_stream.copy_array
    patch.setattr(host_stream, "copy_array", lambda source, target: (time.sleep(0.05), copy(source, target)))
    patch.setattr(host_stream.HostTransfer, "done", lambda self: True)


def chunks_of_unsettled_sequences(patch: pytest.MonkeyPatch) -> None:
    copy = host_stream.copy_array
    patch.setattr(host_stream, "copy_array", lambda source, target: (time.sleep(0.05), copy(source, target)))
    patch.setattr(BlockManager, "settled", lambda self, tables: True)


@pytest.mark.parametrize("fault", [lost_copies, tickets_reported_too_early, chunks_of_unsettled_sequences])
def test_planted_faults_are_seen(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, whole, want = unpressured("llama", 1)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        pressed("in place", 8, want, jobs, whole, lambda **o: tiny("llama", **OPTIONS, **o))
