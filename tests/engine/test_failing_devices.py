"""A device that fails once, or for a while, whatever it is asked for: no block is lost, who is not told of it gets what
it would have got, and afterwards all is as before."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import DATA
from engine_support import Job, block_bytes, greedy, prompt, tiny
from recording import run

from cupaged import LLM, SamplingParams
from cupaged.async_engine import AsyncEngine
from cupaged.device.cpu import CpuDevice
from cupaged.engine import Engine
from cupaged.errors import DeviceError
from cupaged.outputs import RequestOutput
from cupaged.residency import Way

PLACES = ("copy_blocks", "sample", "broken_rows", "plan_attention", "upload", "upload_many", "download", "capture")
SWAPS = ("copy", "record", "wait")
ERRORS = (DeviceError("the cable"), KeyboardInterrupt("me"))


def jobs_of(rng: random.Random) -> dict[str, Job]:
    """Requests of every kind, which share the beginnings of their prompts."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "n": 3, "seed": 1},
        {"beam_width": 3, "n": 2},
        {"temperature": 1.0, "n": 2, "best_of": 3, "seed": 2},
        {"prompt_logprobs": 1, "logprobs": 1},
        {"repetition_penalty": 1.3},
    ]
    return {
        f"job{index}": Job(prompt(40)[: rng.randint(1, 40)] + prompt(2, index), greedy(rng.randint(4, 14), **kind))
        for index, kind in enumerate(kinds)
    }


def played(engine: Engine, jobs: dict[str, Job]) -> tuple[dict[str, RequestOutput], int]:
    """All jobs together, whatever comes up; then the engine holds nothing. Outputs, and interrupts that came."""
    interrupts = 0
    for name, job in jobs.items():
        engine.add_request(job.ids, job.params, name)
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        assert engine.num_steps < 2000 and interrupts < 20
        engine.manager.audit()
    outputs = {name: engine.request(name).output() for name in jobs}
    for name in jobs:
        engine.forget(name)
    engine.check_idle()
    return outputs, interrupts


def results(output: RequestOutput) -> Any:
    return [(each.token_ids, each.finish_reason, each.score) for each in output.outputs], output.prompt_logprobs


def failing(original: Callable[..., Any], first: int, times: int, error: BaseException, failed: list[int]) -> Any:
    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if first <= calls < first + times:
            failed.append(calls)
            raise error
        return original(*args, **options)

    return call


def check(llm: LLM, jobs: dict[str, Job], whole: dict[str, Any], place: str, call: Any, error: BaseException) -> int:
    """How often it failed."""
    engine, failed = llm.engine, list[int]()
    owner: Any = engine.device.ops if hasattr(engine.device.ops, place) else engine.device
    original = getattr(owner, place)
    setattr(owner, place, failing(original, *call, error, failed))
    outputs, interrupts = played(engine, jobs)
    setattr(owner, place, original)
    assert bool(interrupts) == (bool(failed) and isinstance(error, KeyboardInterrupt))  # a step may fail twice
    for name, output in outputs.items():
        if output.error is None:
            assert results(output) == whole[name], name
        else:
            assert str(error) in output.error
    again, _ = played(engine, jobs)
    assert {name: results(output) for name, output in again.items()} == whole
    return len(failed)


@pytest.mark.parametrize("place", PLACES + SWAPS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_S04_a_device_that_fails_once_or_more_loses_nothing(place: str, error: BaseException) -> None:
    rng = random.Random(place)
    jobs, hits = jobs_of(rng), 0
    with tiny(block_size=4) as llm:
        size = block_bytes(llm)
        whole = {name: results(output) for name, output in played(llm.engine, jobs)[0].items()}
    memory = {"kv_memory": 24 * size, "swap_memory": 80 * size} if place in SWAPS else {}
    for first in (1, rng.randint(2, 9)):
        with tiny(block_size=4, max_batch_tokens=24, **memory) as llm:
            if place in SWAPS:
                llm.engine.scheduler.look_ahead(False)
                llm.engine.scheduler.room.way_out = lambda *_: Way.SWAP
            hits += check(llm, jobs, whole, place, (first, rng.choice([1, 3])), error)
            assert place not in SWAPS or llm.engine.stats().swapped_out
    assert hits


@pytest.mark.parametrize("options", [{}, {"n": 3, "temperature": 1.0}, {"beam_width": 3}])
def test_a_processor_that_interrupts_the_main_thread_is_heard_and_nobody_hangs(options: dict[str, Any]) -> None:
    """A KeyboardInterrupt that a user's function raises on the main thread means the program, as Ctrl-C does."""

    def processor(tokens: list[int], _: Any) -> None:
        if len(tokens) > 9 and not heard:
            raise KeyboardInterrupt

    heard: list[int] = []
    job = {"plain": Job(prompt(20, 1), greedy(12))}
    with tiny() as llm:
        whole = run(llm.engine, job)
        engine = llm.engine
        engine.add_request(prompt(8), SamplingParams(max_tokens=9, logits_processor=processor, **options), "own")
        engine.add_request(job["plain"].ids, job["plain"].params, "plain")
        with pytest.raises(KeyboardInterrupt):
            while engine.has_work:
                engine.step()
        heard.append(1)
        while engine.has_work:
            engine.step()
            assert engine.num_steps < 100
        assert engine.request("own").state.terminal
        assert engine.request("plain").output().token_ids == whole.outputs["plain"].token_ids
        engine.forget("own")
        engine.forget("plain")
        engine.check_idle()


def test_a_device_that_fails_in_closing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: CpuDevice) -> None:
        close(device)
        raise DeviceError("the GPU is lost")

    close, unheard = CpuDevice.close, list[Any]()
    monkeypatch.setattr(CpuDevice, "close", broken)
    monkeypatch.setattr(threading, "excepthook", unheard.append)
    llm = tiny()
    with pytest.raises(DeviceError, match="the GPU is lost"):
        llm.close()
    llm.close()
    with pytest.raises(DeviceError, match="this LLM was closed"):
        llm.generate([[5, 7]], greedy(1))
    engine = AsyncEngine(DATA / "llama", device="cpu", dtype="float32", threads=1)
    assert engine.submit([5, 7], greedy(2)).result().finish_reason == "length"
    engine.shutdown()
    assert not unheard
