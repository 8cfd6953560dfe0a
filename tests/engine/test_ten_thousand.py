"""10,000 requests through a small pool: each ends once, with the bits that it gets alone, and nothing is left behind.

300 distinct ones, drawn again and again: lengths distributed as ShareGPT's (scaled to the tiny model), prompts that
begin as others do, samples and beams, priorities, aborts at any moment.
"""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from checkpoints import DATA
from engine_support import block_bytes, prompt, tiny

from cupaged import SamplingParams
from cupaged.async_engine import AsyncEngine
from cupaged.bench.memory.traces import DISTRIBUTIONS, draw
from cupaged.engine import Engine
from cupaged.outputs import RequestOutput

DISTINCT = 300
SCALE = 8  # ShareGPT-like lengths go to 2,048 tokens, the golden model to 256


@dataclass(frozen=True)
class Wish:
    ids: tuple[int, ...]
    params: SamplingParams


def wishes(seed: int) -> list[Wish]:
    rng = random.Random(seed)
    stems = [prompt(rng.randint(10, 60), seed=1000 + i) for i in range(8)]
    drawn = []
    for index, lengths in enumerate(draw(DISTRIBUTIONS["sharegpt-like"], DISTINCT, 2048, seed)):
        own = max(1, lengths.prompt // SCALE)
        stem = rng.choice(stems)[: rng.randint(1, 60)] if rng.random() < 0.6 else []
        ids = (*stem, *prompt(own, seed=index))[:200]
        drawn.append(Wish(ids, options(rng, max(1, min(lengths.output // SCALE, 48)))))
    return drawn


def options(rng: random.Random, new: int) -> SamplingParams:
    base: dict[str, Any] = {"max_tokens": new, "seed": rng.randrange(1 << 30), "ignore_eos": rng.random() < 0.6}
    kind = rng.choices(["greedy", "sampled", "many", "best", "beams", "scored", "salted"], [30, 40, 8, 4, 6, 4, 8])[0]
    if kind == "beams":
        width = rng.randint(2, 4)
        return SamplingParams(
            **(base | {"max_tokens": min(new, 16)}), beam_width=width, n=rng.randint(1, width),
            length_penalty=rng.choice([0.5, 1.0]), early_stopping=rng.choice([True, False, "never"]),
        )  # fmt: skip
    if kind == "greedy":
        return SamplingParams(**base, temperature=0.0, logprobs=rng.choice([None, 0, 2]))
    base |= {"temperature": rng.choice([0.7, 1.0]), "top_p": rng.choice([1.0, 0.9]), "top_k": rng.choice([0, 30])}
    base |= {"stop_token_ids": rng.sample(range(320), rng.choice([0, 3])), "logprobs": rng.choice([None, 1])}
    if kind == "many":
        return SamplingParams(**base, n=rng.randint(2, 4))
    if kind == "best":
        return SamplingParams(**base, n=2, best_of=rng.randint(2, 4))
    if kind == "scored":
        return SamplingParams(**base, prompt_logprobs=1)
    return SamplingParams(**base, cache_salt="apart" if kind == "salted" else None)


def solo(each: list[Wish]) -> list[RequestOutput]:
    with tiny(prefix_cache=False) as llm:
        return [llm.generate([list(wish.ids)], wish.params)[0] for wish in each]


def assert_is(output: RequestOutput, alone: RequestOutput) -> None:
    """All of it, or of an aborted one what there is so far. (Some of its outputs may have ended before.)"""
    if any(part.finish_reason == "abort" for part in output.outputs):
        if output.outputs[0].score is None:
            for part, whole in zip(output.outputs, alone.outputs, strict=True):
                assert part.token_ids == whole.token_ids[: len(part.token_ids)]
        return
    assert output.error is None
    for part, whole in zip(output.outputs, alone.outputs, strict=True):
        assert (part.token_ids, part.finish_reason, part.stop_reason) == (
            whole.token_ids, whole.finish_reason, whole.stop_reason,
        )  # fmt: skip
        assert (part.logprobs, part.score) == (whole.logprobs, whole.score)
    assert output.prompt_logprobs == alone.prompt_logprobs
    assert 0 <= output.usage.cached_tokens < max(1, output.usage.prompt_tokens)


def play(engine: Engine, each: list[Wish], alone: list[RequestOutput], count: int, seed: int) -> dict[str, int]:
    """Submit `count` of them, some 30 waiting at a time; check each as it ends. Counts of what happened."""
    rng = random.Random(seed)
    open_: dict[str, int] = {}
    seen = {"aborted waiting": 0, "aborted running": 0, "ended": 0}
    submitted = 0
    forward = engine._forward
    scheduler = engine.scheduler

    def bounded(chunks: Any) -> Any:
        assert sum(chunk.count for chunk in chunks) <= scheduler.max_tokens and len(chunks) <= scheduler.max_sequences
        return forward(chunks)

    engine._forward = bounded  # type: ignore[method-assign]
    while submitted < count or open_:
        while submitted < count and len(open_) < 30:
            which = rng.randrange(DISTINCT)
            name = engine.add_request(each[which].ids, each[which].params, priority=rng.choice([0, 0, 0, 1, -1]))
            open_[name] = which
            submitted += 1
        if rng.random() < 0.05:
            name = rng.choice(list(open_))
            state = engine.request(name).state.value
            assert engine.abort(name)
            assert not engine.abort(name)
            seen[f"aborted {state}"] += 1
        for piece in engine.step():
            if piece.usage is not None:
                assert_is(engine.request(piece.request_id).output(), alone[open_.pop(piece.request_id)])  # once
                engine.forget(piece.request_id)
                seen["ended"] += 1
        if engine.num_steps % 500 == 0:
            engine.manager.audit()
    engine.check_idle()
    stats = engine.stats()
    for name in ("reused_tokens", "evicted", "copies", "preemptions_by_recompute", "swapped_out", "read_in_place"):
        seen[name] = getattr(stats, name)
    return seen


SETTINGS: list[dict[str, Any]] = [
    {"max_batch_tokens": 64, "max_sequences": 16},
    {"max_batch_tokens": 96, "max_sequences": 24, "block_size": 8},
    {"max_batch_tokens": 128, "max_sequences": 32, "threads": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_10000_requests_get_what_each_gets_alone(seed: int) -> None:
    each = wishes(seed)
    alone = solo(each)
    settings = SETTINGS[seed]
    with tiny(**settings) as llm:
        size = block_bytes(llm)
    tokens = 900  # of all sequences together; a request wants up to 4 x 250
    memory = tokens // settings.get("block_size", 16) * size
    swap = memory // 2 if seed == 1 else None
    with tiny(kv_memory=memory, swap_memory=swap, **settings) as llm:
        seen = play(llm.engine, each, alone, 10_000, seed)
    assert seen["ended"] == 10_000
    assert seen["aborted waiting"] > 20 and seen["aborted running"] > 20
    assert seen["reused_tokens"] > 50_000 and seen["evicted"] > 1000 and seen["copies"] > 1000
    if swap:
        assert seen["swapped_out"] > 100
    else:
        assert seen["preemptions_by_recompute"] > 100


def test_300_requests_get_what_each_gets_alone() -> None:
    each = wishes(7)
    alone = solo(each)
    with tiny() as llm:
        size = block_bytes(llm)
    with tiny(kv_memory=60 * size, max_batch_tokens=64, max_sequences=16) as llm:
        seen = play(llm.engine, each, alone, 300, 7)
    assert seen["ended"] == 300 and seen["reused_tokens"] > 1000 and seen["evicted"] > 50


def test_threads_and_tasks_at_once_get_what_each_gets_alone() -> None:
    """4 threads and 40 tasks of an event loop on one engine, with aborts from all sides."""
    each = wishes(8)[:60]
    alone = solo(each)
    with tiny() as llm:
        size = block_bytes(llm)
    engine = AsyncEngine(
        DATA / "llama", device="cpu", dtype="float32", threads=1, kv_memory=80 * size, max_batch_tokens=64,
        max_sequences=16,
    )  # fmt: skip
    failures: list[BaseException] = []

    def thread(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(15):
                which = rng.randrange(len(each))
                stream = engine.submit(list(each[which].ids), each[which].params, priority=rng.choice([0, 1]))
                pieces = 0
                for piece in stream:
                    pieces += piece.usage is not None
                    if rng.random() < 0.02:
                        engine._worker.abort(stream.request_id)
                output = stream.output()
                assert pieces == 1 and output is not None
                assert_is(output, alone[which])
        except BaseException as error:  # told to the test, which runs on another thread
            failures.append(error)

    async def task(number: int) -> None:
        rng = random.Random(100 + number)
        for _ in range(2):
            which = rng.randrange(len(each))
            stream = engine.generate(list(each[which].ids), each[which].params)
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.02)
                await engine.abort(stream.request_id)
            assert_is(await stream.result(), alone[which])

    async def tasks() -> None:
        await asyncio.gather(*(task(number) for number in range(40)))

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(4)]
    for each_thread in threads:
        each_thread.start()
    asyncio.run(tasks())
    for each_thread in threads:
        each_thread.join()
    assert not failures, failures[0]

    def check() -> None:
        engine.llm.engine.check_idle()
        assert not engine.llm.engine._requests

    engine._worker.call(check).result(30)
    engine.shutdown()
