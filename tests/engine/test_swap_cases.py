"""Memory pressure in the engine, case by case: long sequences, late and failing copies, aborts, groups that outgrow
everything. Cases that broke other systems are named after their ids."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA, smollm2_gguf, with_config
from engine_support import block_bytes, greedy, poison, prompt, scatter, tiny
from recording import Job, Run, alone, assert_same_bits, run
from test_swap import OPTIONS, any_way, assert_same_tokens, by_swap, mixed, nothing, over_a_link, pressed

from cupaged import LLM, SamplingParams
from cupaged.device import host_stream
from cupaged.engine import Engine


def small(blocks: int, host_blocks: int, folder: str | Path = "llama", **options: Any) -> LLM:
    """A tiny engine with so many blocks on the device and on the host, scattered and poisoned."""
    with tiny(folder, **options) as probe:
        size = block_bytes(probe)
    swap = {"swap_memory": host_blocks * size} if host_blocks else {}
    llm = tiny(folder, **options, kv_memory=blocks * size, **swap)
    scatter(llm.engine, seed=3)
    poison(llm.engine)
    return llm


def stepped(engine: Engine, seconds: float = 60) -> None:
    """Step until nothing is left; no token for so long is a failure."""
    last = time.monotonic()
    while engine.has_work:
        if any(piece.token_ids for piece in engine.step()):
            last = time.monotonic()
        assert time.monotonic() - last < seconds, "no progress"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[random.Random]:
    """Copies that take now no time, now as long as many steps."""
    rng = random.Random(1)
    copy = host_stream.copy_array

    def sleepy(source: Any, destination: Any) -> None:
        time.sleep(rng.choice([0, 0, 0.0005, 0.005]))
        copy(source, destination)

    monkeypatch.setattr(host_stream, "copy_array", sleepy)
    yield rng


# Longer than the device's pool


def test_a_sequence_longer_than_the_device_pool_has_the_same_bits() -> None:
    jobs = {"long": Job(prompt(150, 1), greedy(90)), "short": Job(prompt(9, 2), greedy(30), arrives=20)}
    with tiny() as llm:
        whole = alone(llm.engine, jobs)
    for options in ({"block_size": 8}, {"block_size": 8, "max_batch_tokens": 50, "threads": 2}, {"block_size": 16}):
        blocks = 40 // options["block_size"]  # of the 240 tokens
        with small(blocks, 300 // options["block_size"], **options) as llm:
            assert llm.engine.max_model_len == 256
            assert_same_bits(run(llm.engine, jobs), whole)
            stats = llm.engine.stats()
            assert stats.read_in_place > 90 * 10
            assert stats.peak_blocks == (blocks,)


def test_contexts_of_several_parts_are_read_in_place_too(tmp_path: Path) -> None:
    folder = with_config(DATA / "llama", tmp_path / "llama", max_position_embeddings=2048)
    jobs = {f"job{n}": Job(prompt(n, seed=n), greedy(6), arrives=i) for i, n in enumerate((1100, 515, 63))}
    with tiny(folder) as llm:
        whole = alone(llm.engine, jobs)
    with small(12, 128, folder, max_batch_tokens=100) as llm:
        assert_same_bits(run(llm.engine, jobs), whole)
        assert llm.engine.stats().read_in_place > 60


def test_a_request_too_long_for_both_pools_is_refused_with_both_numbers() -> None:
    with small(4, 5) as llm:
        assert llm.engine.max_model_len == 9 * 16
        with pytest.raises(Exception, match=r"need 145 positions \(10 blocks\); this engine has 144"):
            llm.generate([prompt(140)], greedy(5))
        assert llm.generate([prompt(140)], greedy(4))[0].finish_reason == "length"
        llm.engine.check_idle()


# Groups


@pytest.mark.parametrize("samples", [25, pytest.param(125, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [by_swap, over_a_link, nothing])
def test_A13_many_samples_of_a_long_prompt_make_progress_as_soon_as_the_host_pool_is_touched(
    way: Any, samples: int
) -> None:
    """n samples over 40 times the same words; the pool holds a part of them."""
    job = Job(prompt(5, 9) * 40, SamplingParams(n=samples, max_tokens=20, temperature=1.0, seed=5, ignore_eos=True))
    jobs = {"samples": job, "other": Job(prompt(30, 2), greedy(40), arrives=1)}
    options: dict[str, Any] = {"max_sequences": 256, "max_batch_tokens": 600}
    with tiny(**options, kv_memory="8MiB") as llm:
        whole = run(llm.engine, jobs)
        want = llm.engine.stats().peak_blocks[0]
    with small(want // 3, want, **options) as llm:
        way(llm.engine)
        for name, each in jobs.items():
            llm.engine.add_request(each.ids, each.params, name)
        stepped(llm.engine)
        for name in jobs:
            ours = [output.token_ids for output in llm.engine.request(name).output().outputs]
            assert ours == [output.token_ids for output in whole.outputs[name].outputs]
            llm.engine.forget(name)
        llm.engine.check_idle()
        assert llm.engine.stats().swapped_out > 0


def test_A14_a_host_pool_too_small_for_a_group_falls_back_to_recompute_and_all_finish() -> None:
    jobs = {
        "old": Job(prompt(40, 1), greedy(100)),
        "group": Job(prompt(40, 2), SamplingParams(n=3, max_tokens=60, temperature=1.0, seed=4, ignore_eos=True), 1),
        "young": Job(prompt(10, 3), greedy(20), arrives=2),
    }
    with tiny(kv_memory="8MiB") as llm:
        whole = run(llm.engine, jobs)
    with small(20, 2, block_size=8) as llm:
        by_swap(llm.engine)
        llm.engine.manager.in_place = False  # else the two blocks are read where they are
        assert_same_tokens(run(llm.engine, jobs), whole, jobs)
        stats = llm.engine.stats()
        assert stats.preemptions_by_recompute > 0
        assert stats.swapped_out == 0  # never a part


def test_beams_that_are_alone_and_outgrow_everything_end_with_length_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = SamplingParams(beam_width=4, n=4, max_tokens=90, temperature=0.0, ignore_eos=True)
    with small(12, 3, block_size=8) as llm:
        output = llm.generate([prompt(30, 8)], params)[0]
        assert {o.finish_reason for o in output.outputs} == {"length"}
        assert {o.stop_reason for o in output.outputs} == {"kv_memory"}
        assert 0 < output.usage.completion_tokens < 4 * 90
        said = "request request-0: its beams outgrew the KV memory; the search ended early"
        assert caplog.messages.count(said) == 1
        caplog.clear()
        llm.engine.check_idle()
    with small(50, 0, block_size=8) as llm:
        assert {o.stop_reason for o in llm.generate([prompt(30, 8)], params)[0].outputs} == {None}
    assert said not in caplog.messages


# Copies


def test_A19_late_copies_change_nothing(late: random.Random) -> None:
    """200 steps and more, the tables changing all the time, copies landing whenever they like."""
    jobs = mixed(11, count=40)
    with tiny(**OPTIONS, kv_memory="8MiB") as llm:
        whole = run(llm.engine, jobs)
        want = llm.engine.stats().peak_blocks[0]
    for way in ("by swap", "any way"):
        stats = pressed(way, 8, want, jobs, whole, lambda **options: tiny(**OPTIONS, **options))
        assert stats.steps > 100


def test_a_failing_copy_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {f"job{n}": Job(prompt(20 + n, n), greedy(60)) for n in range(6)}
    with tiny(kv_memory="8MiB") as llm:
        whole = run(llm.engine, jobs)
    copy = host_stream.copy_array
    number = 0

    def failing(source: Any, destination: Any) -> None:
        nonlocal number
        number += 1
        if number == 3:
            raise OSError("the link is down")
        copy(source, destination)

    monkeypatch.setattr(host_stream, "copy_array", failing)
    with small(24, 60, block_size=8) as llm:
        by_swap(llm.engine)
        result = run(llm.engine, jobs)
    failed = [name for name, output in result.outputs.items() if output.error]
    assert len(failed) == 1
    assert result.outputs[failed[0]].finish_reason == "error"
    assert "a KV block could not be copied (the link is down)" in str(result.outputs[failed[0]].error)
    for name in jobs.keys() - set(failed):
        assert result.outputs[name].token_ids == whole.outputs[name].token_ids


@pytest.mark.parametrize("seed", range(4))
def test_aborts_while_blocks_are_moving_leave_nothing_behind(seed: int, late: random.Random) -> None:
    rng = random.Random(seed)
    with small(24, 30, block_size=8, max_sequences=64) as llm:
        any_way(llm.engine)
        engine, live = llm.engine, []
        for step in range(120):
            if step < 60 and len(live) < 10:
                params = SamplingParams(max_tokens=40, ignore_eos=True, n=rng.choice([1, 1, 3]), seed=step)
                live.append(engine.add_request(prompt(rng.randint(1, 60), step), params))
            engine.step()
            if rng.random() < 0.25 and live:
                engine.forget(live.pop(rng.randrange(len(live))))
        for name in live:
            engine.forget(name)
        engine.check_idle()
        assert engine.stats().swapped_out > 0


@pytest.mark.parametrize("way", [by_swap, over_a_link, any_way, nothing])
def test_forks_under_pressure_give_what_their_tokens_give_alone(way: Any, late: random.Random) -> None:
    """Branches taken at any time, of requests that run, wait, or are moving; some parents are dropped at once."""
    rng = random.Random(3)
    with small(22, 60, block_size=8, max_sequences=64, max_batch_tokens=200) as llm:
        way(llm.engine)
        engine, live, done = llm.engine, [], {}
        for step in range(2000):
            if step < 50 and len(live) < 10:
                sampled = SamplingParams(max_tokens=30, ignore_eos=True, seed=step)
                live.append(engine.add_request(prompt(rng.randint(1, 50), step), rng.choice([greedy(30), sampled])))
            if step < 60 and live and rng.random() < 0.4:
                parent = rng.choice(live)
                live.append(engine.fork(parent, prompt(rng.randint(0, 3), step)))
                if rng.random() < 0.2:
                    engine.forget(parent)
                    live.remove(parent)
            engine.step()
            for name in [name for name in live if engine.request(name).state.terminal]:
                done[name] = engine.request(name).output(), engine.request(name).params
                live.remove(name)
                engine.forget(name)
            if step > 60 and not live:
                break
        engine.check_idle()
        assert engine.stats().swapped_out > 0
        assert engine.stats().forks > 5
    assert len(done) > 20
    with tiny(kv_memory="8MiB") as llm:
        for output, params in done.values():
            again = llm.generate([output.prompt_token_ids], params)[0]
            assert output.token_ids == again.token_ids


def test_closing_in_the_middle_of_copies_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = host_stream.copy_array
    monkeypatch.setattr(host_stream, "copy_array", lambda a, b: (time.sleep(0.01), copy(a, b)))
    threads = threading.active_count()
    with small(24, 60, block_size=8) as llm:
        by_swap(llm.engine)
        for number in range(6):
            llm.engine.add_request(prompt(20, number), greedy(60))
        while not llm.engine.swaps.busy:
            llm.engine.step()
    assert threading.active_count() <= threads


# The real model


@pytest.mark.slow
@pytest.mark.parametrize("share", [2, 4, 8])
@pytest.mark.parametrize("way", ["by swap", "by recompute", "in place"])
def test_the_real_model_gives_the_same_tokens_under_pressure(way: str, share: int) -> None:
    jobs, whole, want = real_run()
    options = {"device": "cpu", "kv_dtype": "float16", "max_sequences": 256}
    pressed(way, share, want, jobs, whole, lambda **more: LLM(smollm2_gguf(), **{**options, **more}))


_real: list[tuple[dict[str, Job], Run, int]] = []


def real_run() -> tuple[dict[str, Job], Run, int]:
    if not _real:
        jobs = mixed(21, count=64, longest=60, new=24, vocab=49152)
        options: dict[str, Any] = {"device": "cpu", "kv_dtype": "float16", "max_sequences": 256}
        with LLM(smollm2_gguf(), **options, kv_memory="400MiB") as llm:
            whole = run(llm.engine, jobs)
            stats = llm.engine.stats()
            assert stats.preemptions == 0
            _real.append((jobs, whole, stats.peak_blocks[0]))
    return _real[0]
