"""A program that branches by itself: forks equal plain requests with the same tokens, whatever they share."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_support import block_bytes, greedy, prompt, tiny, with_tokenizer

from cupaged import LLM, SamplingParams
from cupaged.engine import Engine
from cupaged.errors import CapacityError, RequestError
from cupaged.outputs import RequestOutput


def finish(engine: Engine, *names: str) -> list[RequestOutput]:
    """Step until these have ended; their outputs."""
    limit = engine.num_steps + 3000
    while any(not engine.request(name).state.terminal for name in names):
        engine.step()
        assert engine.num_steps < limit, "nothing gets on"
    return [engine.request(name).output() for name in names]


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def plain(llm: LLM, ids: list[int], params: SamplingParams) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate([ids], params)[0].outputs]


def small_pool(blocks: int) -> LLM:
    with tiny() as probe:
        size = block_bytes(probe)
    return tiny(kv_memory=blocks * size)


@pytest.mark.parametrize("after", [0, 1, 2, 7, 30])
@pytest.mark.parametrize("more", [[], [40, 41, 42], list(range(10, 60))], ids=len)
def test_a_fork_equals_a_request_with_its_tokens_and_computes_only_what_is_new(after: int, more: list[int]) -> None:
    with tiny(max_batch_tokens=32, prefix_cache=False) as llm:
        engine = llm.engine
        parent = engine.add_request(prompt(37), greedy(40))
        steps(engine, after)
        sofar = list(engine.request(parent).sequences[0].tokens)
        computed = engine.request(parent).sequences[0].num_computed
        child = engine.fork(parent, more, greedy(9))
        whole, branch = finish(engine, parent, child)
        assert branch.prompt_token_ids == sofar + more
        assert branch.usage.cached_tokens == computed
        assert branch.metrics.forks == (computed > 0)
        assert [branch.token_ids] == plain(llm, sofar + more, greedy(9))
        assert [whole.token_ids] == plain(llm, prompt(37), greedy(40))
        engine.check_idle()


def test_branches_share_blocks_until_they_write() -> None:
    with tiny(prefix_cache=False) as llm:
        engine = llm.engine
        parent = engine.add_request(prompt(40), greedy(60))
        steps(engine, 1)
        pool = engine.manager.pools[0]
        assert pool.num_used == 3
        children = [engine.fork(parent, [50 + n], greedy(20)) for n in range(4)]
        assert (pool.num_used, engine.stats().groups[0].pool.shared, engine.stats().forks) == (3, 3, 4)
        steps(engine, 1)
        assert (pool.num_used, engine.stats().copies) == (3 + 4, 4)
        assert engine.abort(parent)
        grandchild = engine.fork(children[0], [9], greedy(5))
        outputs = finish(engine, *children, grandchild)
        for n, output in enumerate(outputs[:4]):
            assert [output.token_ids] == plain(llm, output.prompt_token_ids, greedy(20))
            assert output.prompt_token_ids[-1] == 50 + n
        assert [outputs[4].token_ids] == plain(llm, outputs[4].prompt_token_ids, greedy(5))
        engine.check_idle()


def test_parent_and_child_end_each_by_itself() -> None:
    with tiny(prefix_cache=False) as llm:
        engine = llm.engine
        parent = engine.add_request(prompt(20), greedy(50))
        steps(engine, 5)
        child = engine.fork(parent, [7], greedy(30))
        other = engine.fork(parent, [8], greedy(30))
        assert engine.abort(parent) and engine.abort(other)
        engine.forget(parent)
        (output,) = finish(engine, child)
        assert len(output.token_ids) == 30 and output.finish_reason == "length"
        engine.check_idle()


def test_a_fork_may_have_samples_or_beams_of_its_own() -> None:
    many = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    beams = SamplingParams(n=3, beam_width=3, max_tokens=8, ignore_eos=True)
    with tiny(prefix_cache=False) as llm:
        engine = llm.engine
        parent = engine.add_request(prompt(20), greedy(30))
        steps(engine, 4)
        tokens = list(engine.request(parent).sequences[0].tokens)
        forks = [engine.fork(parent, [60, 61], params) for params in (many, beams)]
        outputs = finish(engine, parent, *forks)
        for params, output in zip((many, beams), outputs[1:], strict=True):
            assert output.usage.cached_tokens == 23
            assert [each.token_ids for each in output.outputs] == plain(llm, [*tokens, 60, 61], params)
        engine.check_idle()


def test_a_fork_of_a_sample_follows_that_sample() -> None:
    many = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    with tiny(prefix_cache=False) as llm:
        engine = llm.engine
        parent = engine.add_request(prompt(20), many)
        steps(engine, 6)
        child = engine.fork(parent, index=2)
        tokens = list(engine.request(parent).sequences[2].tokens)
        whole, branch = finish(engine, parent, child)
        assert len(branch.outputs) == 1 and branch.prompt_token_ids == tokens
        assert branch.usage.cached_tokens == 25
        assert branch.token_ids[:1] != [] and whole.outputs[2].token_ids[:6] == tokens[20:]
        ended = engine.fork(parent, params=greedy(3), index=2)
        (late,) = finish(engine, ended)
        assert late.prompt_token_ids == prompt(20) + whole.outputs[2].token_ids
        assert late.usage.cached_tokens == 0  # the parent's blocks were gone
        engine.check_idle()


def test_a_fork_at_an_earlier_place_or_with_prompt_logprobs_is_computed_afresh() -> None:
    with tiny(prefix_cache=False) as llm:
        engine = llm.engine
        parent = engine.add_request(prompt(20), greedy(30))
        steps(engine, 9)
        early = engine.fork(parent, [5], greedy(6), length=11)
        scored = engine.fork(parent, [5], greedy(6, prompt_logprobs=1))
        first, second = finish(engine, early, scored)
        assert (first.prompt_token_ids, first.usage.cached_tokens) == ([*prompt(20)[:11], 5], 0)
        assert [first.token_ids] == plain(llm, first.prompt_token_ids, greedy(6))
        assert second.prompt_logprobs is not None
        assert len(second.prompt_logprobs) == len(second.prompt_token_ids)
        engine.abort(parent)
        engine.check_idle()


# -- trees


def test_a_tree_computes_each_node_once() -> None:
    """Nodes that have ended, branches of branches: what is known is found by its tokens, the last one is computed."""
    with tiny() as llm:
        engine = llm.engine
        root = engine.add_request(prompt(48), greedy(1))
        finish(engine, root)
        children = [engine.fork(root, [60 + n], greedy(10), length=48) for n in range(3)]
        outputs = finish(engine, *children)
        assert [output.usage.cached_tokens for output in outputs] == [48] * 3
        leaves = [engine.fork(child, [5], greedy(4)) for child in children for _ in range(2)]
        for output in finish(engine, *leaves):
            assert output.usage.cached_tokens >= 48
            assert [output.token_ids] == plain(llm, output.prompt_token_ids, greedy(4))
        for name in (root, *children, *leaves):
            engine.forget(name)
        engine.check_idle()


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_equal_plain_requests_in_any_pool(seed: int) -> None:
    rng = random.Random(seed)
    with tiny(prefix_cache=False) as reference, small_pool(rng.choice([12, 20, 64])) as llm:
        engine, known, asked = llm.engine, [], {}
        for _ in range(60):
            if not known or rng.random() < 0.15:
                ids = prompt(rng.randint(1, 60), rng.randrange(99))
                name = engine.add_request(ids, params(rng))
            else:
                try:
                    more = [rng.randrange(3, 300) for _ in range(rng.choice([0, 1, 5]))]
                    name = engine.fork(rng.choice(known), more, params(rng))
                except CapacityError:
                    continue
            known.append(name)
            asked[name] = (list(engine.request(name).prompt_ids), engine.request(name).params)
            steps(engine, rng.randint(0, 6))
            if rng.random() < 0.2:
                engine.abort(known[rng.randrange(len(known))])
            if rng.random() < 0.1:
                gone = known.pop(rng.randrange(len(known)))
                if engine.request(gone).state.terminal:
                    check(reference, engine.request(gone).output(), *asked.pop(gone))
                    engine.forget(gone)
                else:
                    known.append(gone)
        finish(engine, *known)
        for name in known:
            check(reference, engine.request(name).output(), *asked[name])
            engine.forget(name)
        assert engine.stats().forks > 10
        engine.check_idle()


def params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([0, 1, 10, 30]), seed=rng.randrange(9), temperature=rng.choice([0.0, 1.0]),
        ignore_eos=True, n=rng.choice([1, 1, 1, 3]),
    )  # fmt: skip


def check(reference: LLM, output: RequestOutput, ids: list[int], options: SamplingParams) -> None:
    whole = plain(reference, ids, options)
    for each, tokens in zip(output.outputs, whole, strict=True):
        assert each.token_ids == tokens[: len(each.token_ids)]
        assert each.token_ids == tokens or each.finish_reason == "abort"


# -- refusals, and the front door


def test_what_cannot_be_forked_is_refused_by_name() -> None:
    with tiny() as llm:
        engine = llm.engine
        parent = engine.add_request(prompt(20), greedy(30))
        steps(engine, 3)
        for wrong, message in (
            (lambda: engine.fork("nobody"), "fork: there is no request 'nobody'"),
            (lambda: engine.fork(parent, index=1), r"fork: output 1 of request-0 is not in 0\.\.0"),
            (lambda: engine.fork(parent, length=24), r"fork: length 24 is not in 0\.\.23"),
            (lambda: engine.fork(parent, None), "token_ids: a list of token ids is needed, got None"),  # type: ignore[arg-type]
            (lambda: engine.fork(parent, [320]), r"prompt: token id 320 at index 23 is not in 0\.\.319"),
            (lambda: engine.fork(parent, [1] * 300), "323 tokens and 30 to generate need 353 positions"),
            (lambda: engine.fork(parent, new_id=parent), "request id 'request-0' is in use"),
        ):
            with pytest.raises(RequestError, match=message):
                wrong()  # type: ignore[no-untyped-call]
        assert engine.stats().forks == 0
        engine.abort(parent)
        engine.check_idle()


def test_a_stream_branches_where_it_was_read(tmp_path: Path) -> None:
    with tiny(with_tokenizer(tmp_path / "model")) as llm:
        stream = llm.stream("abc", greedy(20))
        read = [token for _ in range(5) for token in next(stream).token_ids]
        branch = stream.fork("ok", greedy(6))
        elsewhere = stream.fork([70, 71])  # the same options
        text = "".join(piece.text for piece in branch)
        ids = llm.tokenizer.encode("abc") + read  # type: ignore[union-attr]
        expected = llm.generate([ids + llm.tokenizer.encode("ok", add_special_tokens=False)], greedy(6))[0]  # type: ignore[union-attr]
        assert text == expected.text
        rest = [token for piece in stream for token in piece.token_ids]
        assert read + rest == llm.generate("abc", greedy(20))[0].token_ids
        other = [token for piece in elsewhere for token in piece.token_ids]
        assert other == llm.generate([[*ids, 70, 71]], greedy(20))[0].token_ids
        late = stream.fork([5], greedy(3))  # it has ended, and its K/V are gone: computed anew
        assert [token for piece in late for token in piece.token_ids] == (
            llm.generate([[*ids, *rest, 5]], greedy(3))[0].token_ids
        )
        llm.engine.check_idle()


def test_a_stream_without_a_tokenizer_branches_by_ids() -> None:
    with tiny() as llm:
        stream = llm.stream(prompt(5), greedy(9))
        next(stream)
        with pytest.raises(RequestError, match="continuation: this model folder has no tokenizer"):
            stream.fork("x")
        with pytest.raises(RequestError, match="fork: output 3"):
            stream.fork([5], index=3)
        stream.close()
        llm.engine.check_idle()
