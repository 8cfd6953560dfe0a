"""Ctrl-C at any moment, by real signals, in a program that goes on afterwards: nothing is lost, left or locked."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_support import block_bytes, tiny

from cupaged import SamplingParams
from cupaged.interrupts import shield
from cupaged.turns import TurnLock

PARAMS = SamplingParams(max_tokens=6, seed=3, temperature=0.8, ignore_eos=True)


def by_sigint(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def by_alarm(*_: Any) -> None:
    raise KeyboardInterrupt  # as a program's own timeout does


@pytest.fixture
def alarm() -> Iterator[Callable[[Any], None]]:
    """Set what a timer does; afterwards all is as it was."""
    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda handler: signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt_for(seconds: float, seed: int) -> int:
    """Interrupt two requests at random moments, over and over; after each, the LLM is as good as new."""
    with tiny() as llm:
        memory = 25 * block_bytes(llm)
    rng, hits = random.Random(seed), 0
    with tiny(kv_memory=memory) as llm:
        expected = llm.generate([[1, 2, 3]], PARAMS)[0].token_ids
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            inside = True
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(5e-5, 6e-3))
                llm.generate([[1, 2, 3]] * 2, PARAMS)
                inside = False
                time.sleep(1)  # the timer goes off once, here at the latest: never in what follows
            except KeyboardInterrupt:
                hits += inside
            (out,) = llm.generate([[1, 2, 3]], PARAMS)
            assert out.error is None and out.token_ids == expected
            assert not llm._queues and not llm.engine.has_work
            llm.engine.check_idle()
    return hits


@pytest.mark.parametrize("how", [by_sigint, by_alarm])
def test_interrupts_at_any_moment_leave_the_llm_as_it_was(alarm: Callable[[Any], None], how: Any) -> None:
    alarm(how)
    assert interrupt_for(1.5, seed=1) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_interrupts_leave_the_llm_as_it_was(alarm: Callable[[Any], None], seed: int) -> None:
    alarm(by_sigint)
    assert interrupt_for(15, seed) > 200


def test_an_interrupt_in_the_shield_comes_at_its_end(alarm: Callable[[Any], None]) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), shield, shield:
        signal.raise_signal(signal.SIGINT)
        done.append("body")
        assert shield.pending
    assert done == ["body"] and not shield.pending
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_waiting_for_a_turn_can_be_interrupted(alarm: Callable[[Any], None]) -> None:
    lock, held, release = TurnLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    alarm(by_sigint)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), lock:
        raise AssertionError("the lock was had")
    assert time.monotonic() - began < 2
    release.set()
    thread.join()
    with lock:
        assert lock.mine


def test_an_interrupt_at_the_door_of_the_clean_up_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first instruction has run: what `generate` had queued is given up when its frame goes."""
    with tiny() as llm:
        forget = llm._forget
        calls = 0

        def interrupted(ids: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise KeyboardInterrupt
            forget(ids)

        monkeypatch.setattr(llm, "_forget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3]] * 2, PARAMS)
        gc.collect()
        (out,) = llm.generate([[1, 2, 3]], PARAMS)
        assert out.error is None and calls >= 3
        assert not llm._queues and not llm.engine.has_work
        llm.engine.check_idle()
