"""The front door: streams side by side, streams given up, threads, interrupts, closing, arguments of the wrong kind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA, with_config
from engine_support import greedy, prompt, tiny, with_tokenizer

from cupaged import LLM, SamplingParams
from cupaged.errors import CapacityError, DeviceError, ModelFileError, OptionError, RequestError
from cupaged.step_plan import Chunk


def tokens(stream: Any) -> list[int]:
    return [token for piece in stream for token in piece.token_ids]


# -- streams


def test_two_streams_taken_in_turns_give_what_each_gives_alone() -> None:
    with tiny() as llm:
        alone = [llm.generate([prompt(n, n)], greedy(12))[0].token_ids for n in (4, 30)]
        one, two = llm.stream(prompt(4, 4), greedy(12)), llm.stream(prompt(30, 30), greedy(12))
        got: list[list[int]] = [[], []]
        for first, second in zip(one, two, strict=True):
            got[0] += first.token_ids
            got[1] += second.token_ids
        assert got == alone
        assert llm.engine.num_steps <= 2 * 12 + 12  # shared steps, not one for each
        llm.engine.check_idle()


def test_the_last_piece_of_a_stream_has_the_usage_and_no_other() -> None:
    with tiny() as llm:
        pieces = list(llm.stream(prompt(5), greedy(4)))
        assert [piece.usage is not None for piece in pieces] == [False, False, False, True]
        assert pieces[-1].usage is not None
        assert (pieces[-1].usage.prompt_tokens, pieces[-1].usage.completion_tokens) == (5, 4)


def test_metrics_are_in_the_order_of_events() -> None:
    with tiny(max_sequences=1) as llm:
        first, second = (output.metrics for output in llm.generate([prompt(5), prompt(9)], greedy(4)))
    for metrics in (first, second):
        assert metrics.first_scheduled_time is not None
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        assert metrics.arrival_time <= metrics.first_scheduled_time
        assert metrics.first_scheduled_time < metrics.first_token_time < metrics.finished_time
    assert first.finished_time < second.first_scheduled_time  # one at a time


def give_up_by_close(llm: LLM) -> None:
    stream = llm.stream(prompt(40), greedy(50))
    next(stream)
    stream.close()
    assert list(stream) == []  # closed is ended
    stream.close()


def give_up_by_with(llm: LLM) -> None:
    with llm.stream(prompt(40), greedy(50)) as stream:
        next(stream)


def give_up_by_dropping(llm: LLM) -> None:
    stream = llm.stream(prompt(40), greedy(50))
    next(stream)
    next(stream)
    del stream
    gc.collect()


def give_up_unstarted(llm: LLM) -> None:
    llm.stream(prompt(40), greedy(50))
    gc.collect()


def give_up_in_a_loop(llm: LLM) -> None:
    for piece in llm.stream(prompt(40), greedy(50)):
        if piece.token_ids:
            break
    gc.collect()


@pytest.mark.parametrize(
    "give_up",
    [give_up_by_close, give_up_by_with, give_up_by_dropping, give_up_unstarted, give_up_in_a_loop],
)
def test_a_stream_given_up_frees_its_blocks_at_once(give_up: Callable[[LLM], None]) -> None:
    with tiny() as llm:
        give_up(llm)
        assert not llm.engine.has_work
        llm.engine.check_idle()


def test_a_stream_dropped_inside_a_step_ends_after_it() -> None:
    """The interpreter may collect a dropped stream at any moment, be it in the middle of this thread's own step."""
    with tiny() as llm:
        expected = llm.generate([prompt(6)], greedy(8))[0].token_ids
        victims = [llm.stream(prompt(9), greedy(50))]
        left: list[int] = []
        forward = llm.engine._forward

        def dropping(chunks: Sequence[Chunk]) -> Any:
            if victims and len(chunks) == 2:
                del victims[:]
                gc.collect()
                left.append(len(llm.engine.scheduler.running))
            return forward(chunks)

        llm.engine._forward = dropping  # type: ignore[method-assign]
        stream = llm.stream(prompt(6), greedy(8))
        assert tokens(stream) == expected
        assert left == [2]  # inside the step everything was still as planned
        assert not llm.engine.has_work
        llm.engine.check_idle()


def test_errors_of_a_stream_come_with_the_call() -> None:
    with tiny() as llm:
        with pytest.raises(RequestError, match="empty"):
            llm.stream([])
        with pytest.raises(CapacityError):
            llm.stream(prompt(257))
        assert not llm.engine.has_work


def test_abort_ends_a_stream_and_its_neighbour_goes_on() -> None:
    with tiny() as llm:
        expected = llm.generate([prompt(8)], greedy(10))[0].token_ids
        one, two = llm.stream(prompt(4), greedy(100)), llm.stream(prompt(8), greedy(10))
        next(one)
        assert llm.abort(one.request_id) is True
        rest = list(one)
        assert (rest[-1].finish_reason, llm.abort(one.request_id)) == ("abort", False)
        assert tokens(two) == expected
        llm.engine.check_idle()


# -- interrupts


@pytest.mark.parametrize("where", ["forward", "sample", "copies"])
def test_an_interrupt_inside_a_step_leaves_the_engine_usable(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny() as llm:
        engine = llm.engine
        expected = llm.generate([prompt(n, n) for n in (20, 3)], greedy(10))
        neighbour = llm.stream(prompt(3, 3), greedy(10))
        got = next(neighbour).token_ids
        owner, name = {
            "forward": (engine.decoder, "forward"),
            "sample": (engine.device.ops, "sample"),
            "copies": (engine, "_run_items"),
        }[where]
        original = getattr(owner, name)

        def interrupted(*args: Any, **options: Any) -> Any:
            monkeypatch.setattr(owner, name, original)
            raise KeyboardInterrupt

        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt(20, 20)], greedy(10))
        got += tokens(neighbour)  # it was in the interrupted step too
        assert got == expected[1].token_ids
        assert llm.generate([prompt(20, 20)], greedy(10))[0].token_ids == expected[0].token_ids
        assert not engine.has_work
        engine.check_idle()


# -- threads


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls made at once, each in a thread; an exception is a result too."""
    results: list[Any] = [None] * len(calls)

    def one(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return results


def many(llm: LLM, seed: int) -> list[list[int]]:
    return [llm.generate([prompt(5 + seed + n, n)], greedy(15))[0].token_ids for n in range(6)]


def test_K22_threads_share_one_llm() -> None:
    with tiny(threads=2) as llm:
        alone = [many(llm, seed) for seed in range(4)]
        assert in_threads(*[lambda seed=seed: many(llm, seed) for seed in range(4)]) == alone  # type: ignore[misc]
        llm.engine.check_idle()


def test_K22_threads_use_an_llm_each() -> None:
    with tiny(threads=2) as one, tiny("qwen3", threads=3) as two:
        alone = [many(one, 1), many(two, 1)]
        assert in_threads(lambda: many(one, 1), lambda: many(two, 1)) == alone


def test_K22_a_waiting_thread_gets_its_turn() -> None:
    """With a plain lock the thread that generates takes it again before a waiting one wakes, for hundreds of steps.

    Counted from when a thread is the next one: before that it may wait for Python's own lock, or for a processor.
    """
    with tiny() as llm:
        waits: list[int] = []
        since = threading.local()
        gate, acquired = llm._lock._gate, llm._lock._acquired

        class Gate:
            """The lock's, which the next one holds."""

            def acquire(self, timeout: float) -> bool:
                got = gate.acquire(timeout=timeout)
                since.step = llm.engine.num_steps
                return got

            locked, release = gate.locked, gate.release

        def counting() -> bool:
            got = acquired()
            if hasattr(since, "waits"):
                waits.append(llm.engine.num_steps - since.step)
            return got

        llm._lock._gate = Gate()  # type: ignore[assignment]
        llm._lock._acquired = counting  # type: ignore[method-assign]

        def long() -> None:
            llm.generate([prompt(5, n) for n in range(8)], greedy(240))

        def short() -> None:
            since.waits = True
            for _ in range(10):
                assert len(tokens(llm.stream(prompt(5), greedy(2)))) == 2

        assert in_threads(long, short) == [None, None]
        assert len(waits) >= 20 and max(waits) <= 10, waits


def test_closing_ends_the_requests_of_other_threads_with_an_error() -> None:
    llm = tiny()
    started = threading.Event()

    def reading() -> None:
        for _ in llm.stream(prompt(5), greedy(240)):
            started.set()

    def closing() -> None:
        started.wait(10)
        llm.close()

    first, second = in_threads(reading, closing)
    assert isinstance(first, DeviceError)
    assert second is None


# -- closing


def test_closing_twice_is_fine_and_use_afterwards_is_an_error() -> None:
    before = threading.active_count()
    llm = tiny(threads=3)
    stream = llm.stream(prompt(5), greedy(20))
    next(stream)
    assert threading.active_count() == before + 2
    llm.close()
    llm.close()
    assert threading.active_count() == before
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([prompt(3)]),
        lambda: llm.stream(prompt(3)),
        lambda: next(stream),
        lambda: llm.engine,
        llm.info,
        lambda: llm.abort("x"),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="this LLM was closed"):
            call()
    stream.close()


def test_an_llm_that_is_dropped_stops_its_threads() -> None:
    """Its helper threads watch memory of the team; they must neither outlive that memory nor stay for ever."""
    before = threading.active_count()
    for _ in range(5):
        llm = tiny(threads=4)
        llm.generate([prompt(3)], greedy(2))
        del llm
        gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("cupaged-"):
            thread.join(timeout=10)
    assert threading.active_count() == before


def test_a_with_block_closes() -> None:
    with tiny() as llm:
        pass
    with pytest.raises(DeviceError):
        llm.generate([prompt(3)])


# -- arguments


def test_no_prompts_give_no_outputs() -> None:
    with tiny() as llm:
        assert llm.generate([]) == []
        assert llm.generate([], [SamplingParams()] * 0) == []


@pytest.mark.parametrize(
    "prompts", [None, 5, b"hello", bytearray(b"x"), {"prompt": "x"}, [b"ab"], [None], [[1], 5], 1.5]
)
def test_prompts_of_the_wrong_kind_are_refused(prompts: Any) -> None:
    with tiny() as llm:
        with pytest.raises(RequestError, match=r"needed, not (NoneType|int|bytes|bytearray|dict|float)"):
            llm.generate(prompts)
        assert not llm.engine.has_work


def test_params_must_be_one_or_as_many_as_prompts() -> None:
    with tiny() as llm:
        with pytest.raises(OptionError, match="params: 3 for 2 prompts"):
            llm.generate([[1], [2]], [SamplingParams()] * 3)
        with pytest.raises(OptionError, match="params: item 1 is dict, not SamplingParams"):
            llm.generate([[1], [2]], [SamplingParams(), {"max_tokens": 3}])  # type: ignore[list-item]
        with pytest.raises(OptionError, match="params: SamplingParams or a list of them is needed, not int"):
            llm.generate([[1]], 5)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="not SamplingParams"):
            llm.stream([1], {"max_tokens": 3})  # type: ignore[arg-type]
        assert not llm.engine.has_work


def test_one_bad_prompt_of_many_is_named_and_nothing_starts(tmp_path: Path) -> None:
    with tiny(with_tokenizer(tmp_path / "model")) as llm:
        with pytest.raises(CapacityError, match=r"^prompt 2 of 3: prompt of 300 tokens"):
            llm.generate(["a", [4, 5], prompt(300)], greedy(5))
        assert not llm.engine.has_work
        assert llm.engine._requests == {}


def test_K12_heads_that_are_no_multiple_of_kv_heads_are_refused_at_load(tmp_path: Path) -> None:
    for heads, kv_heads in ((8, 3), (2, 4)):
        folder = with_config(
            DATA / "llama", tmp_path / f"{heads}", num_attention_heads=heads, num_key_value_heads=kv_heads
        )
        with pytest.raises(ModelFileError, match=rf"{heads}.*{kv_heads}|{kv_heads}.*{heads}"):
            LLM(folder, device="cpu")
