"""Blocks computed for one request serve the next: what is reused, and that nobody can tell from the tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA, with_config
from engine_support import tiny

from cupaged import LLM, SamplingParams
from cupaged.errors import OptionError

FOLDERS = ("llama", "mistral-window", "qwen3")


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


def greedy(tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **options)


def cold(ids: list[int], params: SamplingParams, folder: Any = "llama", **options: Any) -> Any:
    with tiny(folder, prefix_cache=False, **options) as llm:
        return llm.generate([ids], params)[0]


def same(a: Any, b: Any) -> None:
    assert [x.token_ids for x in a.outputs] == [x.token_ids for x in b.outputs]
    assert [x.logprobs for x in a.outputs] == [x.logprobs for x in b.outputs]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100])
def test_P01_a_prompt_again_gives_the_same_bits_and_leaves_a_token_to_compute(folder: str, length: int) -> None:
    ids, params = prompt(length), greedy(6, logprobs=3)
    with tiny(folder) as llm:
        first, again = llm.generate([ids], params)[0], llm.generate([ids], params)[0]
        same(first, cold(ids, params, folder))
        same(first, again)
        assert first.usage.cached_tokens == 0
        # blocks of 16: complete ones of prompt and answer are known, the last of them in part
        known = (length + 5) // 16 * 16
        assert again.usage.cached_tokens == min(known, length - 1) < length
        llm.engine.check_idle()


def test_P02_a_block_of_equal_sum_is_not_taken_for_another() -> None:
    a = prompt(33)
    b = list(a)
    b[4], b[5] = b[4] + 31 if b[4] < 280 else b[4] - 31, b[5] - 1
    with tiny() as llm:
        llm.generate([a], greedy())
        second = llm.generate([b], greedy(logprobs=2))[0]
    assert second.usage.cached_tokens == 4
    same(second, cold(b, greedy(logprobs=2)))


def test_P03_what_was_evicted_is_computed_again() -> None:
    a, b = prompt(60, 1), prompt(60, 2)
    with tiny() as probe:
        size = sum(cache.bytes_per_block for cache in probe.engine.caches)
    with tiny(kv_memory=5 * size, max_model_len=80) as llm:
        first = llm.generate([a], greedy())[0]
        llm.generate([b], greedy())
        assert llm.engine.stats().evicted > 0
        again = llm.generate([a], greedy())[0]
        assert again.usage.cached_tokens < 48 and again.token_ids == first.token_ids
        llm.engine.check_idle()


def test_P05_prompt_logprobs_are_computed_in_full() -> None:
    ids, params = prompt(33), greedy(2, prompt_logprobs=2)
    with tiny() as llm:
        first, again = llm.generate([ids], params)[0], llm.generate([ids], params)[0]
    assert first.prompt_logprobs == again.prompt_logprobs == cold(ids, params).prompt_logprobs
    assert len(first.prompt_logprobs) == 33 and first.prompt_logprobs[0] is None
    assert again.usage.cached_tokens == 0


def test_the_best_match_inside_a_block_is_reused_by_a_copy() -> None:
    a = prompt(40)
    b = [*a[:21], *prompt(20, 9)]
    with tiny() as llm:
        llm.generate([a], greedy())
        before = llm.engine.caches[0].gather(0, [1], 16)
        second = llm.generate([b], greedy(logprobs=2))[0]
        assert second.usage.cached_tokens == 21  # 16 shared, 5 copied
        after = llm.engine.caches[0].gather(0, [1], 16)
        assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
        third = llm.generate([a], greedy(logprobs=2))[0]
    same(second, cold(b, greedy(logprobs=2)))
    same(third, cold(a, greedy(logprobs=2)))


def test_requests_that_come_together_compute_a_common_prefix_once() -> None:
    """Chunks of 64: the later ones are let in when the first has computed what they share."""
    stem = prompt(160)
    ids = [[*stem, *prompt(5, seed)] for seed in range(1, 7)]
    with tiny(max_batch_tokens=64) as llm:
        outputs = llm.generate(ids, greedy(logprobs=1))
        reused = llm.engine.stats().reused_tokens
    assert reused >= 5 * 128
    for output, each in zip(outputs, ids, strict=True):
        same(output, cold(each, greedy(logprobs=1)))


def test_a_chat_of_ten_turns_computes_only_what_is_new() -> None:
    with tiny() as llm:
        computed: list[int] = []
        forward = llm.engine.decoder.forward
        replay_counts = llm.engine._run_chunks

        def counting(chunks: Any) -> None:
            computed.append(sum(chunk.count for chunk in chunks))
            replay_counts(chunks)

        llm.engine._run_chunks = counting  # type: ignore[method-assign]
        history = prompt(20)
        for turn in range(10):
            computed.clear()
            out = llm.generate([history], greedy(7))[0]
            new = len(history) - out.usage.cached_tokens
            assert sum(computed) == new + 6  # the last token's K/V are not needed
            if turn:
                # what the turn before left incomplete in its last block (its last token was never computed) and is new
                assert new <= 5 + 1 + 15
            history = [*history, *out.token_ids, *prompt(5, 100 + turn)]
        assert forward is not None
        final = llm.generate([history], greedy(7))[0]
    assert final.token_ids == cold(history, greedy(7)).token_ids


def test_salts_keep_requests_apart() -> None:
    ids = prompt(50)
    with tiny() as llm:
        llm.generate([ids], greedy(cache_salt="a"))
        assert llm.generate([ids], greedy(cache_salt="b"))[0].usage.cached_tokens == 0
        assert llm.generate([ids], greedy())[0].usage.cached_tokens == 0
        assert llm.generate([ids], greedy(cache_salt="a"))[0].usage.cached_tokens == 48
    with pytest.raises(OptionError, match="cache_salt"):
        greedy(cache_salt=7)


@pytest.mark.parametrize("options", [{"n": 3, "temperature": 1.0, "seed": 1}, {"beam_width": 3, "temperature": 0}])
def test_samples_and_beams_find_a_known_prompt(options: dict[str, Any]) -> None:
    ids = prompt(40)
    params = SamplingParams(max_tokens=20, ignore_eos=True, **options)
    with tiny() as llm:
        first, again = llm.generate([ids], params)[0], llm.generate([ids], params)[0]
        assert first.usage.cached_tokens == 0 and again.usage.cached_tokens == 39
        llm.engine.check_idle()
    same(first, again)
    same(first, cold(ids, params))


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    with tiny() as probe:
        size = sum(cache.bytes_per_block for cache in probe.engine.caches)
    ids = [prompt(40, seed) for seed in range(4)]
    with tiny(kv_memory=14 * size) as llm:
        outputs = llm.generate(ids, greedy(60))
        stats = llm.engine.stats()
        assert stats.preemptions > 0
        llm.engine.check_idle()
    for output, each in zip(outputs, ids, strict=True):
        assert output.token_ids == cold(each, greedy(60)).token_ids


def test_a_long_context_is_reused_across_parts(tmp_path: Any) -> None:
    model = with_config(DATA / "llama", tmp_path / "model", max_position_embeddings=2048)
    stem = prompt(1100)
    with tiny(model, kv_memory="16MiB") as llm:
        llm.generate([stem], greedy(1))
        out = llm.generate([[*stem, 5, 6, 7]], greedy(4, logprobs=2))[0]
        assert out.usage.cached_tokens == 1088
    same(out, cold([*stem, 5, 6, 7], greedy(4, logprobs=2), model, kv_memory="16MiB"))


def test_prefix_cache_is_checked_and_can_be_off() -> None:
    with pytest.raises(OptionError, match="prefix_cache"):
        LLM(DATA / "llama", prefix_cache=1)  # type: ignore[arg-type]
    with tiny(prefix_cache=False) as llm:
        ids = prompt(40)
        llm.generate([ids], greedy())
        assert llm.generate([ids], greedy())[0].usage.cached_tokens == 0
        pool = llm.engine.stats().groups[0].pool
        assert (pool.free, pool.cached) == (pool.total, 0)


def test_a_fork_may_have_another_salt() -> None:
    ids, more = prompt(70), prompt(9, seed=1)
    with tiny(kv_memory=16 * 12288) as llm:  # 16 blocks: both lines fill them, and what is kept has to go
        engine = llm.engine
        root = engine.add_request(ids, greedy(40, cache_salt="a"))
        for _ in range(12):
            engine.step()
        branch = engine.fork(root, more, greedy(40, cache_salt="b"))
        while engine.has_work:
            engine.step()
        forked = engine.request(branch).output()
        ids_of_branch = list(forked.prompt_token_ids)
        engine.forget(root), engine.forget(branch)
        engine.check_idle()
        again = llm.generate([prompt(200, seed=2)], greedy(20, cache_salt="b"))[0]
        engine.check_idle()
    same(forked, cold(ids_of_branch, greedy(40)))
    same(again, cold(prompt(200, seed=2), greedy(20)))
