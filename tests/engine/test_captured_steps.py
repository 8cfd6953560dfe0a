"""Steps are captured once for a number of tokens and rows and replayed: the same bits as recording each anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import DATA, with_config
from engine_support import greedy, prompt, tiny
from recording import Job, assert_same_bits, run

from cupaged import forward
from cupaged.engine import Engine
from cupaged.errors import KernelError


def count_captures(engine: Engine) -> list[int]:
    """The numbers of tokens of the forward passes that are recorded from now on."""
    recorded: list[int] = []
    forward = engine.decoder.forward

    def counted(batch: object, caches: object) -> object:
        recorded.append(len(batch.token_ids))  # type: ignore[attr-defined]
        return forward(batch, caches)  # type: ignore[arg-type]

    engine.decoder.forward = counted  # type: ignore[method-assign,assignment]
    return recorded


def test_a_step_is_recorded_once_for_each_number_of_tokens_and_rows() -> None:
    with tiny(prefix_cache=False) as llm:
        recorded = count_captures(llm.engine)
        llm.generate([prompt(5), prompt(9)], [greedy(10), greedy(20)])
        assert recorded == [14, 2, 1]  # both prompts, then decoding by two, then alone
        llm.generate([prompt(7)], greedy(30))
        assert recorded == [14, 2, 1, 7]
        llm.generate([prompt(8, 1), prompt(6, 1)], greedy(30))  # 14 tokens, cut elsewhere
        assert recorded == [14, 2, 1, 7]


def test_the_steps_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "MOST_CAPTURED", 3)
    with tiny(prefix_cache=False) as llm:
        recorded = count_captures(llm.engine)
        for length in (5, 6, 5, 7, 5, 6):
            llm.generate([prompt(length)], greedy(2))
            assert len(llm.engine.passes.captured) <= 3
        assert recorded == [5, 1, 6, 7, 6]


@pytest.mark.parametrize("folder", ["llama", "mistral-window", "qwen3"])
def test_replayed_chunks_beside_decodes_have_the_bits_of_recorded_ones(folder: str) -> None:
    jobs = {f"job{n}": Job(prompt(20 + 9 * n, n), greedy(20), arrives=3 * n) for n in range(8)}
    with tiny(folder, max_batch_tokens=12) as llm:
        recorded = count_captures(llm.engine)
        replayed = run(llm.engine, jobs)
        assert len(recorded) < len(replayed.chunks) / 2
    with tiny(folder, max_batch_tokens=12) as llm:
        llm.engine.passes.captured = Forgetful()
        assert_same_bits(replayed, run(llm.engine, jobs))


@pytest.mark.parametrize("folder", ["llama", "mistral-window", "qwen3"])
def test_replayed_steps_have_the_bits_of_recorded_ones(folder: str, tmp_path: Path) -> None:
    """Over a context that crosses parts of attention (512) and outgrows the first rotary table (1024)."""
    model = with_config(DATA / folder, tmp_path / folder, max_position_embeddings=4096)
    jobs = {"long": Job(prompt(460), greedy(620)), "short": Job(prompt(30), greedy(100), arrives=40)}
    with tiny(model) as llm:
        replayed = run(llm.engine, jobs)
        assert len(replayed.outputs["long"].token_ids) == 620
    with tiny(model) as llm:
        llm.engine.passes.captured = Forgetful()
        assert_same_bits(replayed, run(llm.engine, jobs))


class Forgetful(dict):  # type: ignore[type-arg]
    """A cache of captured steps that keeps none."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


def test_plans_of_another_number_of_tokens_are_refused() -> None:
    with tiny() as llm:
        llm.generate([prompt(5)], greedy(3))
        engine = llm.engine
        cache = engine.caches[0].view
        table = np.zeros((1, 1), np.int32)
        plan = engine.device.ops.plan_attention(cache, table, [0, 2], [5], engine.config.num_heads)
        with pytest.raises(KernelError, match="plans: not made for the number of tokens"):
            engine.passes.captured[1, 1].step.replay([plan])
