"""AsyncEngine: many requests from asyncio and threads, each ending once, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import DATA
from engine_support import tiny

from cupaged import SamplingParams
from cupaged.async_engine import AsyncEngine, AsyncStream
from cupaged.errors import CapacityError, DeviceError, OptionError, QueueFullError, RequestError
from cupaged.outputs import StreamPiece

PROMPT = [5, 7, 11, 13, 17]
PARAMS = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


def make(**options: Any) -> AsyncEngine:
    return AsyncEngine(DATA / "llama", **{"device": "cpu", "dtype": "float32", "threads": 1, **options})


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    made = make()
    yield made
    made.shutdown()
    assert not made._worker._thread.is_alive()


def alone(prompt: list[int], params: SamplingParams) -> list[int]:
    with tiny() as llm:
        return llm.generate(prompt, params)[0].token_ids


def drained(engine: AsyncEngine) -> None:
    """Nothing is held once no request is left."""

    def check() -> None:
        assert not engine.llm.engine.has_work
        engine.llm.engine.check_idle()

    engine._worker.call(check).result(10)


async def collect(stream: AsyncStream) -> list[StreamPiece]:
    return [piece async for piece in stream]


def test_pieces_of_many_requests_are_those_of_each_alone(engine: AsyncEngine) -> None:
    prompts = [[5 + i, 7, 11 + i] for i in range(8)]
    expected = [alone(prompt, PARAMS) for prompt in prompts]

    async def main() -> list[list[StreamPiece]]:
        return await asyncio.gather(*(collect(engine.generate(prompt, PARAMS)) for prompt in prompts))

    for pieces, tokens in zip(asyncio.run(main()), expected, strict=True):
        assert [token for piece in pieces for token in piece.token_ids] == tokens
        assert [piece.usage is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert pieces[-1].finish_reason == "length"
    drained(engine)


def test_threads_and_an_event_loop_share_one_engine(engine: AsyncEngine) -> None:
    expected = alone(PROMPT, PARAMS)
    got: list[list[int]] = []
    threads = [threading.Thread(target=lambda: got.append(engine.submit(PROMPT, PARAMS).result().token_ids))
               for _ in range(4)]  # fmt: skip
    for thread in threads:
        thread.start()

    async def main() -> list[int]:
        return (await engine.generate(PROMPT, PARAMS).result()).token_ids

    assert asyncio.run(main()) == expected
    for thread in threads:
        thread.join(30)
    assert got == [expected] * 4
    drained(engine)


def test_errors_come_at_once_and_disturb_nobody(engine: AsyncEngine) -> None:
    async def main() -> None:
        running = engine.generate(PROMPT, LONG, request_id="a")
        with pytest.raises(RequestError, match="request id 'a' is in use"):
            engine.generate(PROMPT, PARAMS, request_id="a")
        with pytest.raises(RequestError):
            engine.generate([], PARAMS)
        with pytest.raises(RequestError, match="320"):
            engine.generate([320], PARAMS)
        with pytest.raises(CapacityError):
            engine.generate([1] * 5000, PARAMS)
        for bad in ({"priority": 1.5}, {"deadline": -1}, {"deadline": float("nan")}, {"request_id": ""}):
            with pytest.raises(OptionError, match=next(iter(bad))):
                engine.generate(PROMPT, PARAMS, **bad)  # type: ignore[arg-type]
        assert len((await running.result()).token_ids) == 200

    asyncio.run(main())
    drained(engine)


def test_S09_abort_of_any_request_is_true_once_and_never_an_error(engine: AsyncEngine) -> None:
    async def main() -> None:
        stream = engine.generate(PROMPT, LONG, request_id="a")
        await anext(stream)
        assert await engine.abort("a") is True
        pieces = await collect(stream)
        assert pieces[-1].finish_reason == "abort" and sum(piece.usage is not None for piece in pieces) == 1
        assert await engine.abort("a") is False
        assert await engine.abort("never") is False
        short = engine.generate(PROMPT, SamplingParams(max_tokens=1), request_id="b")
        assert (await short.result()).finish_reason == "length"
        assert await engine.abort("b") is False

    asyncio.run(main())
    drained(engine)


def test_leaving_a_stream_early_ends_its_request(engine: AsyncEngine) -> None:
    async def main() -> None:
        async with engine.generate(PROMPT, LONG) as stream:
            async for _ in stream:
                break
        dropped = engine.generate(PROMPT, LONG)
        await anext(dropped)
        del dropped
        gc.collect()
        cancelled = asyncio.create_task(engine.generate(PROMPT, LONG).result())
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        for _ in range(200):
            if not engine.num_requests:
                break
            await asyncio.sleep(0.01)
        assert engine.num_requests == 0

    asyncio.run(main())
    drained(engine)


def test_queue_limit(engine: AsyncEngine) -> None:
    engine.shutdown()
    small = make(max_requests=2)
    streams = [small.submit(PROMPT, LONG) for _ in range(2)]
    with pytest.raises(QueueFullError, match="max_requests=2"):
        small.submit(PROMPT, LONG)
    streams[0].close()
    streams[1].result()
    for _ in range(200):
        if small.num_requests < 2:
            break
        time.sleep(0.01)
    assert small.submit(PROMPT, PARAMS).result().finish_reason == "length"
    small.shutdown()


def test_a_deadline_ends_a_request_and_says_so(engine: AsyncEngine) -> None:
    late = engine.submit(PROMPT, LONG, deadline=0)
    whole = engine.submit(PROMPT, LONG, deadline=600)
    output = late.result()
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("abort", "deadline")
    assert whole.result().finish_reason == "length"
    drained(engine)


def test_smaller_priorities_go_first(engine: AsyncEngine) -> None:
    """One place in a step: who runs first is who finishes first."""
    engine.shutdown()
    narrow = make(max_sequences=1)
    ended: list[str] = []

    async def read(name: str, priority: int) -> None:
        await narrow.generate(PROMPT, PARAMS, request_id=name, priority=priority).result()
        ended.append(name)

    async def main() -> None:
        first = narrow.generate(PROMPT, LONG)
        await anext(first)  # it has the place; the others queue
        tasks = [asyncio.create_task(read(name, p)) for name, p in (("low", 5), ("mid", 0), ("high", -1), ("mid2", 0))]
        await asyncio.sleep(0)
        await first.aclose()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert ended == ["high", "mid", "mid2", "low"]
    narrow.shutdown()


def test_S04_a_failing_request_ends_alone(engine: AsyncEngine) -> None:
    def raises(tokens: list[int], logits: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    bad = engine.submit(PROMPT, SamplingParams(max_tokens=5, logits_processor=raises))
    good = [engine.submit(PROMPT, PARAMS) for _ in range(7)]
    output = bad.result()
    assert output.finish_reason == "error" and "on purpose" in (output.error or "")
    assert [stream.result().finish_reason for stream in good] == ["length"] * 7
    drained(engine)


def test_S11_every_request_gets_one_terminal_piece_when_the_engine_breaks(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [engine.submit(PROMPT, LONG) for _ in range(3)]
    next(streams[0])

    def broken() -> Any:
        raise MemoryError("no memory left")

    monkeypatch.setattr(engine.llm.engine, "step", broken)
    for stream in streams:
        pieces = list(stream)
        assert [piece.finish_reason for piece in pieces if piece.usage is not None] == ["error"]
        output = stream.output()
        assert output is not None and "no memory left" in (output.error or "")
    with pytest.raises(DeviceError, match="no memory left"):
        engine.submit(PROMPT, PARAMS)


@pytest.mark.parametrize("drain", [True, False])
def test_close_drains_or_aborts(drain: bool) -> None:
    async def main() -> list[str | None]:
        engine = make()
        streams = [engine.generate(PROMPT, LONG) for _ in range(3)]
        await anext(streams[0])
        await engine.close(drain=drain)
        with pytest.raises(DeviceError, match="closed"):
            engine.generate(PROMPT, PARAMS)
        assert await engine.abort(streams[0].request_id) is False
        await engine.close()
        return [(await stream.result()).finish_reason for stream in streams]

    assert asyncio.run(main()) == ["length" if drain else "abort"] * 3


def test_two_engines_in_one_process() -> None:
    async def main() -> None:
        async with make() as one, make(block_size=8) as two:
            a, b = await asyncio.gather(one.generate(PROMPT, PARAMS).result(), two.generate(PROMPT, PARAMS).result())
            assert a.token_ids == b.token_ids

    asyncio.run(main())


def test_a_forgotten_engine_stops_its_thread() -> None:
    engine = make()
    engine.submit(PROMPT, LONG)
    thread = engine._worker._thread
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_K22_a_forked_child_is_told(engine: AsyncEngine) -> None:
    engine.submit(PROMPT, PARAMS).result()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine.submit(PROMPT, PARAMS)
        except DeviceError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        assert "forked" in pipe.read()
    assert engine.submit(PROMPT, PARAMS).result().finish_reason == "length"


def _generate_in_child(queue: Any) -> None:
    engine = make()
    queue.put(engine.submit(PROMPT, PARAMS).result().token_ids)
    engine.shutdown()


@pytest.mark.slow
def test_a_spawned_child_works(engine: AsyncEngine) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_generate_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == engine.submit(PROMPT, PARAMS).result().token_ids
    child.join(60)
    assert child.exitcode == 0


def test_stats_and_chat(engine: AsyncEngine) -> None:
    async def main() -> None:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        assert (await engine.stats()).running == 1
        await stream.aclose()
        with pytest.raises(Exception, match="chat template"):
            engine.chat([{"role": "user", "content": "hi"}])

    asyncio.run(main())


def test_max_requests_is_checked() -> None:
    for bad in (0, -1, 1.5, True, "8"):
        with pytest.raises(OptionError, match="max_requests"):
            AsyncEngine(DATA / "llama", max_requests=bad)  # type: ignore[arg-type]
