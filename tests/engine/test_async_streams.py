"""AsyncEngine's streams: dropped, cancelled, under an id that was used before, read on a loop of another."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from checkpoints import DATA

from cupaged import SamplingParams
from cupaged.async_engine import AsyncEngine
from cupaged.errors import DeviceError, OptionError

PROMPT = [5, 7, 11]
SHORT = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=240, temperature=0.0, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    made = AsyncEngine(DATA / "llama", device="cpu", dtype="float32", threads=1)
    yield made
    made.shutdown()


def held(engine: AsyncEngine) -> Callable[[], None]:
    """Keep the worker between two steps until the returned function is called."""
    here, go = threading.Event(), threading.Event()
    engine._worker.call(lambda: (here.set(), go.wait(30)))
    here.wait(30)
    return go.set


@pytest.mark.parametrize("count", [1, 4])
def test_a_dropped_stream_is_collected_and_ends_its_request(engine: AsyncEngine, count: int) -> None:
    async def main() -> None:
        go = held(engine)
        streams = [engine.generate(PROMPT, LONG) for _ in range(count)]
        del streams
        gc.collect()
        go()
        for _ in range(100):  # far fewer steps than a whole answer takes
            if not engine.num_requests:
                break
            await asyncio.sleep(0.005)
        stats = await engine.stats()
        assert (engine.num_requests, stats.running, stats.waiting) == (0, 0, 0)
        assert stats.steps < 20

    asyncio.run(main())


def test_a_task_that_is_cancelled_while_it_does_something_else_ends_its_request(engine: AsyncEngine) -> None:
    async def main() -> None:
        async def reader() -> None:
            async for _ in engine.generate(PROMPT, LONG):
                await asyncio.sleep(60)

        task = asyncio.create_task(reader())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        for _ in range(100):
            if not engine.num_requests:
                break
            await asyncio.sleep(0.005)
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.steps < 200

    asyncio.run(main())


@pytest.mark.parametrize("what", ["stats", "abort"])
def test_who_asks_and_is_cancelled_does_not_stop_the_engine(engine: AsyncEngine, what: str) -> None:
    async def main() -> None:
        first, second = engine.generate(PROMPT, LONG, request_id="a"), engine.generate(PROMPT, SHORT)
        go = held(engine)
        asked: Any = asyncio.ensure_future(engine.stats() if what == "stats" else engine.abort("a"))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        go()
        assert (await second.result()).finish_reason == "length"
        assert (await first.result()).finish_reason == ("abort" if what == "abort" else "length")
        assert (await engine.stats()).running == 0

    asyncio.run(main())


def test_a_deadline_is_of_one_request_whoever_has_its_id_later(engine: AsyncEngine) -> None:
    async def main() -> None:
        await engine.generate(PROMPT, SHORT, request_id="a", deadline=0.05).result()
        go = held(engine)
        later = engine.generate(PROMPT, LONG, request_id="a")
        await asyncio.sleep(0.1)
        go()
        output = await later.result()
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("length", None)

    asyncio.run(main())


def test_an_abandoned_request_takes_nothing_from_the_next_of_its_id(engine: AsyncEngine) -> None:
    worker = engine._worker

    async def main() -> None:
        first = engine.generate(PROMPT, SHORT, request_id="a")
        await first.result()
        assert first.ticket is not None
        second = engine.generate(PROMPT, SHORT, request_id="a")
        worker.call(lambda: worker._drop("a", first.ticket))  # posted before the first ended, come to after it
        worker.abandon("a", first.ticket)
        assert (await asyncio.wait_for(second.result(), 20)).finish_reason == "length"

    asyncio.run(main())


def test_a_stream_is_read_by_the_loop_that_made_it(engine: AsyncEngine) -> None:
    async def make() -> Any:
        return engine.generate(PROMPT, SHORT, request_id="a")

    stream = asyncio.run(make())
    with pytest.raises(OptionError, match="request a: its stream belongs to the event loop that made it"):
        asyncio.run(stream.result())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit("out")])
def test_what_stopped_an_engine_is_named(
    engine: AsyncEngine, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(_: Any) -> Any:
        raise error

    monkeypatch.setattr(engine.llm.engine, "_forward", forward)
    failed = engine.submit(PROMPT, SHORT).result()
    assert failed.error is not None and f"the engine has stopped: {type(error).__name__}" in failed.error


@pytest.mark.parametrize("error", [KeyboardInterrupt("x"), SystemExit("x"), asyncio.CancelledError("x")])
@pytest.mark.parametrize("options", [{}, {"n": 3, "temperature": 1.0}, {"beam_width": 3}])
def test_whatever_a_processor_raises_ends_its_request_alone(
    engine: AsyncEngine, error: BaseException, options: dict[str, Any]
) -> None:
    def processor(tokens: Any, _: Any) -> None:
        if len(tokens) > len(PROMPT) + 1:
            raise error

    go = held(engine)
    neighbour = engine.submit(PROMPT, LONG)
    stream = engine.submit(PROMPT, SamplingParams(max_tokens=9, logits_processor=processor, ignore_eos=True, **options))
    go()
    failed = stream.result()
    assert failed.error is not None and f"the logits_processor raised {type(error).__name__}: x" in failed.error
    assert neighbour.result().finish_reason == "length"
    assert engine.submit(PROMPT, SHORT).result().finish_reason == "length"


def test_a_processor_that_waits_for_its_own_engine_is_told_so(engine: AsyncEngine) -> None:
    def processor(_: Any, __: Any) -> None:
        engine.submit(PROMPT, SHORT).result()

    stream = engine.submit(PROMPT, SamplingParams(max_tokens=3, logits_processor=processor))
    waiting = threading.Thread(target=stream.result, daemon=True)
    waiting.start()
    waiting.join(20)
    output = stream.output()
    assert output is not None and output.error is not None and "cannot wait for a result" in output.error
    assert engine.submit(PROMPT, SHORT).result().finish_reason == "length"


@pytest.mark.parametrize("what", ["generate", "stream", "close"])
def test_the_model_beneath_an_engine_is_left_to_it(engine: AsyncEngine, what: str) -> None:
    running = engine.submit(PROMPT, LONG)
    with pytest.raises(DeviceError, match="this LLM belongs to an AsyncEngine"):
        getattr(engine.llm, what)(*([] if what == "close" else [PROMPT]))
    assert running.result().finish_reason == "length"


def test_a_stream_read_in_a_forked_child_says_so(engine: AsyncEngine) -> None:
    go = held(engine)
    stream = engine.submit(PROMPT, LONG)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # instead of a wait for ever
        try:
            stream.result()
        except DeviceError:
            os._exit(7)
        os._exit(1)
    go()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert stream.result().finish_reason == "length"
