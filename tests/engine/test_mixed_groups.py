"""64 requests of all kinds at once (samples, best-of, beams, forks, aborts): each gets what it would get alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_support import block_bytes, prompt, tiny

from cupaged import SamplingParams
from cupaged.engine import Engine
from cupaged.outputs import RequestOutput, StreamPiece

COUNT = 64


def options(rng: random.Random) -> SamplingParams:
    base: dict[str, Any] = {"max_tokens": rng.randint(1, 30), "seed": rng.randrange(99)}
    base["ignore_eos"] = rng.random() < 0.6
    kind = rng.choice(["one", "one", "many", "best", "beams", "beams"])
    if kind == "beams":
        width = rng.randint(1, 6)
        return SamplingParams(
            **base, beam_width=width, n=rng.randint(1, width), length_penalty=rng.choice([0.5, 1.0, 2.0]),
            early_stopping=rng.choice([True, False, "never"]), stop_token_ids=rng.sample(range(320), 8),
        )  # fmt: skip
    base["temperature"] = rng.choice([0.0, 0.8, 1.2])
    base["top_p"], base["top_k"] = rng.choice([1.0, 0.9]), rng.choice([0, 20])
    n = 1 if kind == "one" else rng.randint(2, 5)
    best_of = n + rng.randint(0, 3) if kind == "best" else None
    return SamplingParams(**base, n=n, best_of=best_of, repetition_penalty=rng.choice([1.0, 1.0, 1.3]), logprobs=1)


def play(engine: Engine, seed: int) -> tuple[dict[str, RequestOutput], dict[str, tuple[list[int], SamplingParams]]]:
    """All requests, a few more each step; a third are forks of others, some are aborted. What came, what was asked."""
    rng = random.Random(seed)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    pieces: list[StreamPiece] = []
    while engine.has_work or len(asked) < COUNT:
        for _ in range(rng.choice([0, 1, 2])):
            if len(asked) == COUNT:
                break
            params = options(rng)
            running = [name for name in asked if not engine.request(name).state.terminal]
            if running and rng.random() < 0.35:
                parent = rng.choice(running)
                index = rng.randrange(len(engine.request(parent).sequences))
                more = [rng.randrange(3, 320) for _ in range(rng.randint(0, 3))]
                name = engine.fork(parent, more, params, index=index)
            else:
                name = engine.add_request(prompt(rng.choice([1, 5, 16, 33, 60]), rng.randrange(9)), params)
            asked[name] = (list(engine.request(name).prompt_ids), params)
        if asked and rng.random() < 0.04:
            engine.abort(rng.choice(list(asked)))
        pieces += engine.step()
        assert engine.num_steps < 5000
    outputs = {name: engine.request(name).output() for name in asked}
    ends = sorted((piece.request_id, piece.index) for piece in pieces if piece.finish_reason is not None)
    assert ends == sorted((name, each.index) for name, output in outputs.items() for each in output.outputs)
    for name in asked:
        engine.forget(name)
    return outputs, asked


@pytest.mark.parametrize(
    ("seed", "blocks", "settings"),
    [
        (1, None, {"max_batch_tokens": 64, "max_sequences": 24}),
        (2, 60, {"max_batch_tokens": 100}),
        pytest.param(3, 30, {"block_size": 8, "threads": 2}, marks=pytest.mark.slow),
        pytest.param(4, 24, {"max_batch_tokens": 32, "prefix_cache": False}, marks=pytest.mark.slow),
        pytest.param(5, None, {"max_sequences": 7}, marks=pytest.mark.slow),
    ],
)
def test_64_mixed_requests_get_what_each_gets_alone(seed: int, blocks: int | None, settings: dict[str, Any]) -> None:
    with tiny(**settings) as llm:
        memory = None if blocks is None else blocks * block_bytes(llm)
    with tiny(kv_memory=memory, **settings) as llm:
        outputs, asked = play(llm.engine, seed)
        llm.engine.check_idle()
        stats = llm.engine.stats()
    assert stats.forks > 40 and stats.copies > 20
    assert blocks is None or stats.preemptions > 0
    reasons = [each.finish_reason for output in outputs.values() for each in output.outputs]
    assert {"stop", "length", "abort"} <= set(reasons)
    with tiny(prefix_cache=False) as llm:
        for name, output in outputs.items():
            ids, params = asked[name]
            (whole,) = llm.generate([ids], params)
            aborted = any(each.finish_reason == "abort" for each in output.outputs)
            if not aborted:
                same = [(each.token_ids, each.finish_reason, each.score, each.logprobs) for each in output.outputs]
                assert same == [(e.token_ids, e.finish_reason, e.score, e.logprobs) for e in whole.outputs], name
            elif not params.picks:
                for part, entire in zip(output.outputs, whole.outputs, strict=True):
                    assert part.token_ids == entire.token_ids[: len(part.token_ids)]
