"""The last layer computes only those tokens whose logits are wanted: the same bits as if it computed all of them."""

from __future__ import annotations

import pytest
from engine_support import greedy, mix, prompt, tiny
from recording import Job, assert_same_bits, run

from cupaged import batch
from cupaged.engine import Engine


def count_rows(engine: Engine) -> list[tuple[int, int, int]]:
    """(tokens, wanted ones, rows of attention in the last layer) of the forward passes from now on."""
    recorded: list[tuple[int, int, int]] = []
    forward, attend = engine.decoder.forward, engine.device.ops.paged_attention

    def counted(inputs: object, caches: object) -> object:
        recorded.append((len(inputs.token_ids), len(inputs.logit_rows), 0))  # type: ignore[attr-defined]
        return forward(inputs, caches)  # type: ignore[arg-type]

    def attended(query: object, cache: object, layer: int, *arguments: object) -> None:
        if layer == engine.config.num_layers - 1:
            recorded[-1] = (*recorded[-1][:2], len(query))  # type: ignore[arg-type]
        attend(query, cache, layer, *arguments)  # type: ignore[arg-type]

    engine.decoder.forward = counted  # type: ignore[method-assign,assignment]
    engine.device.ops.paged_attention = attended  # type: ignore[method-assign,assignment]
    return recorded


def test_it_computes_what_is_wanted_and_no_more() -> None:
    with tiny(prefix_cache=False, max_batch_tokens=20) as llm:
        recorded = count_rows(llm.engine)
        llm.generate([prompt(50)], greedy(2))
        assert recorded == [(20, 0, 0), (10, 1, 1), (1, 1, 1)]  # the second of 20 is replayed


@pytest.mark.parametrize("folder", ["llama", "mistral-window", "qwen3"])
@pytest.mark.parametrize("size", [12, 64])
def test_the_bits_are_those_of_all_tokens(folder: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = mix(5) | {"scored": Job(prompt(70), greedy(9, prompt_logprobs=2, logprobs=3), arrives=2)}
    with tiny(folder, max_batch_tokens=size) as llm:
        narrow = run(llm.engine, jobs)
    monkeypatch.setattr(batch, "_last_plan", lambda *_: None)
    with tiny(folder, max_batch_tokens=size) as llm:
        recorded = count_rows(llm.engine)
        whole = run(llm.engine, jobs)
        assert all(attended == tokens for tokens, wanted, attended in recorded if wanted)
        assert any(tokens > wanted > 0 for tokens, wanted, _ in recorded)
    assert_same_bits(narrow, whole)
