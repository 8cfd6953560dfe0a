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

Split = Callable[..., None]
TWO_GROUPS = ((0, 2), (1,)), ((0, 1), (2,))  # layers; the last one in either group


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Split:
    """Have checkpoints of three layers opened with two KV groups, of given windows."""
    original = checkpoint_module.open_checkpoint

    def apply(first: int | None, second: int | None, layers: tuple[tuple[int, ...], ...] = TWO_GROUPS[0]) -> None:
        def opened(path: Any) -> Checkpoint:
            checkpoint = original(path)
            (group,) = checkpoint.config.kv_groups
            groups = (KVGroup(layers[0], first, group.rope), KVGroup(layers[1], second, group.rope))
            return dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, kv_groups=groups))

        monkeypatch.setattr(checkpoint_module, "open_checkpoint", opened)

    return apply


@pytest.mark.parametrize("layers", TWO_GROUPS)
@pytest.mark.parametrize(("folder", "window"), [("llama", None), ("mistral-window", 16)])
def test_layers_in_two_groups_compute_what_they_do_in_one(
    folder: str, window: int | None, layers: tuple[tuple[int, ...], ...], split: Split
) -> None:
    jobs = mix(seed=7, count=6)
    with tiny(folder) as llm:
        whole = alone(llm.engine, jobs)
    split(window, window, layers)
    with tiny(folder, max_batch_tokens=40) as llm:
        assert [len(cache.view.pools) and cache.num_layers for cache in llm.engine.caches] == [2, 1]
        scatter(llm.engine, seed=3)
        assert_same_bits(run(llm.engine, jobs), whole)


@pytest.mark.parametrize("layers", TWO_GROUPS)
def test_groups_of_different_windows_keep_their_bits_in_company_and_preempted(
    layers: tuple[tuple[int, ...], ...], split: Split
) -> None:
    split(None, 16, layers)
    jobs = {f"growing{n}": Job(prompt(5 + n, n), greedy(70)) for n in range(5)} | mix(seed=8, count=4, longest=90)
    with tiny() as llm:
        whole = alone(llm.engine, jobs)
        size = block_bytes(llm)
    with tiny(kv_memory=8 * size, max_batch_tokens=33, threads=2) as llm:
        assert [pool.num_blocks for pool in llm.engine.manager.pools] == [8, 8]
        assert_same_bits(run(llm.engine, jobs), whole)
        assert llm.engine.scheduler.preemptions > 0


def test_a_window_keeps_its_last_blocks_alone(split: Split) -> None:
    """Positions that no later token sees take no blocks; what is computed is the same."""
    job = {"long": Job(prompt(50), greedy(150))}
    split(None, None)
    with tiny("mistral-window", prefix_cache=False) as llm:
        used = most_used(llm, job)
        assert used[0] == used[1] >= 12
    split(16, None)
    with tiny("mistral-window", prefix_cache=False, max_batch_tokens=20) as llm:
        windowed = most_used(llm, job)
        assert windowed[0] <= 4 and windowed[1] == used[1]
        llm.engine.check_idle()


def most_used(llm: Any, jobs: dict[str, Job]) -> list[int]:
    """Per KV group, the most blocks that were in use between two steps."""
    engine = llm.engine
    for name, job in jobs.items():
        engine.add_request(job.ids, job.params, name)
    most = [0] * len(engine.manager.pools)
    while engine.has_work:
        engine.step()
        engine.manager.audit()
        most = [max(known, pool.num_used) for known, pool in zip(most, engine.manager.pools, strict=True)]
    return most


@pytest.mark.parametrize("windows", [(16, 16), (None, 16), (16, 40)])
def test_a_prefix_is_found_though_its_windows_have_passed(split: Split, windows: tuple[int, int]) -> None:
    """The next turn of a chat needs the last window's blocks only, and so do many that share a prompt."""
    jobs = {"first": Job(prompt(90), greedy(30))} | {
        f"turn{n}": Job(prompt(90) + prompt(9, n), greedy(9)) for n in (1, 2)
    }
    split(*windows)
    with tiny(prefix_cache=False) as llm:
        whole = alone(llm.engine, jobs)
    with tiny() as llm:
        first = run(llm.engine, {"first": jobs["first"]})
        answer = first.outputs["first"].token_ids
        later = run(llm.engine, {name: job for name, job in jobs.items() if name != "first"})
        assert all(output.usage.cached_tokens >= 80 for output in later.outputs.values())
        for some in (first, later):
            assert_same_bits(some, whole)
        chat = prompt(90) + answer
        turn = run(llm.engine, {"chat": Job([*chat, 5, 6, 7], greedy(5))}).outputs["chat"]
        assert turn.usage.cached_tokens == len(chat) // 16 * 16
    with tiny(prefix_cache=False) as llm:
        assert run(llm.engine, {"chat": Job([*chat, 5, 6, 7], greedy(5))}).outputs["chat"].token_ids == turn.token_ids


@pytest.mark.parametrize("seed", range(3))
def test_windows_slide_under_pressure_with_swaps_forks_and_shared_prompts(split: Split, seed: int) -> None:
    split(None, 16)
    params = [greedy(50, n=1 + n % 3, temperature=0.8, seed=n) for n in range(4)]
    jobs = {f"shared{n}": Job(prompt(40) + prompt(3 + n, n), params[n]) for n in range(4)}
    jobs |= mix(seed=seed, count=6, longest=90)
    with tiny(prefix_cache=False) as llm:
        whole = alone(llm.engine, jobs)
        size = block_bytes(llm)
    with tiny(kv_memory=12 * size, swap_memory=8 * size, max_batch_tokens=33, threads=2) as llm:
        assert_same_bits(run(llm.engine, jobs), whole)
        assert llm.engine.scheduler.preemptions > 0 or llm.engine.manager.stats().swapped_out > 0
        llm.engine.check_idle()
        llm.engine.manager.audit()


@pytest.mark.parametrize("windows", [(None, None), (None, 16), (16, None), (16, 16)])
def test_what_recomputing_costs_counts_what_a_window_has_passed(split: Split, windows: Any) -> None:
    split(*windows)
    with tiny(prefix_cache=False) as llm:
        engine = llm.engine
        engine.add_request(prompt(80), greedy(5, n=2), "two")
        engine.add_request(prompt(50), greedy(5), "one")
        for _ in range(3):
            engine.step()
        tokens = [engine.scheduler.room._tokens(engine.request(name)) for name in ("one", "two")]
        (one,) = engine.request("one").sequences
        assert tokens[0] == one.num_computed > 50
        assert 80 <= tokens[1] <= 80 + 2 * 16  # the prompt once
