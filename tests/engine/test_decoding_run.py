"""Steps of decoding that continue the one before: the same bits as with batches made anew, and not where something else
has happened in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA, with_config
from engine_support import block_bytes, greedy, mix, prompt, tiny
from recording import Job, assert_same_bits, run

from cupaged.decoding import DecodingRun

SHARED = prompt(70, 9)


@pytest.fixture
def went_on(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every step that could continue the one before, whether it did."""
    seen: list[bool] = []
    advance = DecodingRun.advance

    def noted(self: DecodingRun) -> bool:
        seen.append(advance(self))
        return seen[-1]

    monkeypatch.setattr(DecodingRun, "advance", noted)
    return seen


def without_it(engine: Any, jobs: Any) -> Any:
    """The same jobs, every batch made anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodingRun, "follows", lambda self, chunks: False)
        return run(engine, jobs)


def jobs_of(seed: int) -> dict[str, Job]:
    """Random ones, some that begin alike (their blocks are found, or become one later), and some that grow long."""
    alike = {f"alike{n}": Job(SHARED[: 60 + 3 * n], greedy(40 - 9 * n), arrives=n // 2) for n in range(4)}
    growing = {f"growing{n}": Job(prompt(5 + n, n), greedy(60), arrives=n) for n in range(4)}
    return alike | growing | mix(seed, count=5)


@pytest.mark.parametrize("blocks", [None, 24])
@pytest.mark.parametrize("folder", ["llama", "mistral-window", "qwen3"])
def test_steps_that_go_on_have_the_bits_of_steps_made_anew(
    folder: str, blocks: int | None, went_on: list[bool]
) -> None:
    options: dict[str, Any] = {"block_size": 8, "swap_memory": "1MiB" if blocks else None}
    if blocks is not None:  # too few: some are stopped, and their blocks move
        with tiny(folder, block_size=8) as probe:
            options["kv_memory"] = blocks * block_bytes(probe)
    jobs = jobs_of(3)
    with tiny(folder, **options) as llm:
        assert_same_bits(run(llm.engine, jobs), without_it(llm.engine, jobs))
        if blocks is not None and folder == "llama":
            assert llm.engine.scheduler.preemptions > 0
    assert sum(went_on) > 20


@pytest.mark.parametrize("window", [None, 300])
def test_new_plans_are_made_at_the_borders_of_parts_alone(
    window: int | None, went_on: list[bool], tmp_path: Path
) -> None:
    """And where the first rotary table (1024) ends: of 619 steps that follow one of decoding, all others go on."""
    folder = "llama" if window is None else "mistral-window"
    changes = {"max_position_embeddings": 4096} | ({} if window is None else {"sliding_window": window})
    model = with_config(DATA / folder, tmp_path / folder, **changes)
    jobs = {"long": Job(prompt(460), greedy(621))}
    with tiny(model) as llm:
        whole = run(llm.engine, jobs)
        followed = len(went_on)
        assert followed >= 618
        borders = [512, 1024] + (
            [] if window is None else [512 + window - 1]
        )  # positions, and where a window leaves one
        grown = (621 + 460) // 16 - 460 // 16  # tables have room for four blocks more
        assert went_on.count(False) <= len(borders) + grown // 4 + 1
        assert_same_bits(whole, without_it(llm.engine, jobs))
