"""Several KV groups: no family here has them yet, but tables, caches, plans and scheduler carry them from the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from engine_support import Job, block_bytes, greedy, mix, prompt, scatter, tiny
from recording import alone, assert_same_bits, run

from cupaged.model import checkpoint as checkpoint_module
from cupaged.model.checkpoint import Checkpoint
from cupaged.model.config import KVGroup

Split = Callable[[int | None, int | None], None]


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Split:
    """Have checkpoints of three layers opened with two KV groups: layers 0 and 2, and layer 1; with given windows."""
    original = checkpoint_module.open_checkpoint

    def apply(first: int | None, second: int | None) -> None:
        def opened(path: Any) -> Checkpoint:
            checkpoint = original(path)
            (group,) = checkpoint.config.kv_groups
            groups = (KVGroup((0, 2), first, group.rope), KVGroup((1,), second, group.rope))
            return dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, kv_groups=groups))

        monkeypatch.setattr(checkpoint_module, "open_checkpoint", opened)

    return apply


@pytest.mark.parametrize(("folder", "window"), [("llama", None), ("mistral-window", 16)])
def test_layers_in_two_groups_compute_what_they_do_in_one(folder: str, window: int | None, split: Split) -> None:
    jobs = mix(seed=7, count=6)
    with tiny(folder) as llm:
        whole = alone(llm.engine, jobs)
    split(window, window)
    with tiny(folder, max_batch_tokens=40) as llm:
        assert [len(cache.view.pools) and cache.num_layers for cache in llm.engine.caches] == [2, 1]
        scatter(llm.engine, seed=3)
        assert_same_bits(run(llm.engine, jobs), whole)


def test_groups_of_different_windows_keep_their_bits_in_company_and_preempted(split: Split) -> None:
    split(None, 16)
    jobs = {f"growing{n}": Job(prompt(5 + n, n), greedy(70)) for n in range(5)} | mix(seed=8, count=4, longest=90)
    with tiny() as llm:
        whole = alone(llm.engine, jobs)
        size = block_bytes(llm)
    with tiny(kv_memory=8 * size, max_batch_tokens=33, threads=2) as llm:
        assert [pool.num_blocks for pool in llm.engine.manager.pools] == [8, 8]
        assert_same_bits(run(llm.engine, jobs), whole)
        assert llm.engine.scheduler.preemptions > 0
