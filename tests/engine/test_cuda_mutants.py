"""Every wait and every keep-alive of the CUDA device is needed, and the stream double notices when it is not there.

Each place where the device, its staging, the swap engine or the engine waits for an event, asks for one, or holds
arrays for work that is under way is taken out in turn: then some seed fails. Unchanged, all of these seeds pass
(test_cuda_device.py, test_cuda_engine.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_scripts import SCRIPTS
from cuda_support import Setting, assert_tokens_of_the_cpu, ended_amid_copies, pressed, speed_is_that_of_work_done
from streamdouble.mutation import Mutant, applied, mutants

import cupaged.device.cuda
import cupaged.device.cuda_capture
import cupaged.engine
import cupaged.forward
import cupaged.kernels.cuda.backend
import cupaged.swap
from cupaged.memory import BlockManager

FILES = (
    cupaged.device.cuda, cupaged.device.cuda_capture, cupaged.kernels.cuda.backend, cupaged.swap, cupaged.engine,
    cupaged.forward,
)  # fmt: skip
# What waits for threads, for the CPU's copies, or is the CUDA runtime itself.
OTHERS = ("async_engine.py", "worker.py", "cpu.py", "host_stream.py", "base.py", "cupy_runtime.py")
MUTANTS = [mutant for module in FILES for mutant in mutants(str(module.__file__))]
SEEDS = 60
LATE_FIRST = sorted(range(SEEDS), key=lambda seed: seed % 8 != 2)  # where what waits for nothing waits for ever


def fails(seed: int) -> bool:
    """Whether anything goes wrong: wrong numbers, or an error that says so."""
    setting = Setting.of(seed)
    try:
        assert_tokens_of_the_cpu(setting, pressed(setting).run)
    except Exception:
        return True
    return False


def notices() -> str | None:
    """What fails first: a script of the device, the end of a run, a run of the engine."""
    for script in (*SCRIPTS, speed_is_that_of_work_done, ended_amid_copies):
        for seed in range(24 if script in SCRIPTS else 12):
            try:
                script(seed)
            except Exception:
                return f"{script.__name__}({seed})"
    return next((f"seed {seed}" for seed in LATE_FIRST if fails(seed)), None)


def test_the_places_are_found() -> None:
    kinds = {(mutant.path.rsplit("/", 1)[1], mutant.kind) for mutant in MUTANTS}
    assert {("cuda.py", "no wait"), ("cuda.py", "not kept"), ("cuda.py", "done too early")} <= kinds
    assert {("backend.py", "no wait"), ("swap.py", "no wait"), ("engine.py", "no wait")} <= kinds
    assert {("backend.py", "not noted"), ("swap.py", "not noted"), ("cuda_capture.py", "not kept")} <= kinds
    assert len(MUTANTS) >= 25


def test_no_other_file_waits_for_events() -> None:
    places = [Path(str(cupaged.swap.__file__)).parent, Path(str(cupaged.kernels.cuda.backend.__file__)).parent]
    files = [path for place in places for path in (*place.glob("*.py"), *place.glob("device/*.py"))]
    waiting = {path.name for path in files if re.search(r"\.(wait|synchronize|done)\(", path.read_text())}
    assert waiting - set(OTHERS) <= {Path(str(module.__file__)).name for module in FILES}


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_without_a_wait_or_a_keep_alive_some_seed_fails(mutant: Mutant) -> None:
    with applied(mutant):
        assert notices() is not None


def blocks_on_their_way_are_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "settled", lambda self, tables: True)


def frames_are_free_before_their_copy_is_done(patch: pytest.MonkeyPatch) -> None:
    start = cupaged.swap.SwapEngine.start

    def reported(self: Any, items: Any) -> None:
        start(self, items)
        for item, transfer in self._under_way:
            self._under_way[self._under_way.index((item, transfer))] = (item, Done(transfer))

    patch.setattr(cupaged.swap.SwapEngine, "start", reported)


class Done:
    """A transfer that says it is done."""

    error = seconds = None

    def __init__(self, transfer: Any) -> None:
        self.event = transfer.event

    def done(self) -> bool:
        return True


@pytest.mark.parametrize("fault", [blocks_on_their_way_are_read, frames_are_free_before_their_copy_is_done])
def test_what_the_engine_does_instead_of_waiting_is_needed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert any(fails(seed) for seed in range(SEEDS))


def test_what_a_mutant_changes_is_there_again() -> None:
    (mutant, *_) = [each for each in MUTANTS if each.kind == "no wait" and each.path.endswith("swap.py")]
    code = cupaged.swap.SwapEngine.wait.__code__
    with applied(mutant):
        assert cupaged.swap.SwapEngine.wait.__code__ is not code
    assert cupaged.swap.SwapEngine.wait.__code__ is code
