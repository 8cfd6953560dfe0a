"""n and best_of: the prompt is computed and stored once, each sample is what it would be alone, nothing is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA, with_config
from engine_support import Job, block_bytes, greedy, ids_of, poison, prompt, tiny, with_tokenizer
from recording import run

from cupaged import LLM, SamplingParams
from cupaged.errors import OptionError
from cupaged.outputs import RequestOutput
from cupaged.step_logits import StepLogits
from cupaged.step_plan import Chunk


def sampled(n: int, new: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": new, "temperature": 1.0, "seed": 7, "ignore_eos": True, "n": n, **options})


def texts(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def small_pool(blocks: int, **options: Any) -> LLM:
    with tiny(**options) as probe:
        size = block_bytes(probe)
    return tiny(kv_memory=blocks * size, **options)


# -- each sample is itself


def test_Q06_n_samples_differ_are_repeatable_and_do_not_depend_on_n_or_company() -> None:
    with tiny() as llm:
        eight = texts(llm.generate([prompt(20)], sampled(8, 20))[0])
        assert len({tuple(ids) for ids in eight}) == 8
        for n in (1, 2, 5):
            assert texts(llm.generate([prompt(20)], sampled(n, 20))[0]) == eight[:n]
        others = [sampled(n, 20, seed=n) for n in range(1, 8)]
        outputs = llm.generate([prompt(n, n) for n in range(3, 10)] + [prompt(20)], [*others, sampled(8, 20)])
        assert texts(outputs[-1]) == eight
        assert texts(llm.generate([prompt(20)], sampled(2, 20, seed=8))[0]) != eight[:2]
        llm.engine.check_idle()


def test_a_sample_is_what_a_request_of_that_sample_number_would_be() -> None:
    """The engine is asked for one sequence, whose index is then set: sample 3 by itself, computed from scratch."""
    with tiny() as llm:
        engine = llm.engine
        four = texts(llm.generate([prompt(33)], sampled(4))[0])
        for index, expected in enumerate(four):
            name = engine.add_request(prompt(33), sampled(1))
            engine.request(name).sequences[0].index = index
            while engine.has_work:
                engine.step()
            assert engine.request(name).output().token_ids == expected


def test_greedy_samples_are_all_the_same() -> None:
    with tiny() as llm:
        (one,) = llm.generate([prompt(20)], greedy(9))
        (five,) = llm.generate([prompt(20)], greedy(9, n=5))
        assert texts(five) == [one.token_ids] * 5
        assert (five.usage.prompt_tokens, five.usage.completion_tokens) == (20, 45)


def test_the_prompt_is_computed_once() -> None:
    with tiny(max_batch_tokens=16) as llm:
        result = run(llm.engine, {"a": Job(prompt(50), sampled(6, 5))})
        assert result.chunks[:4] == [[("a", 0, 16)], [("a", 16, 16)], [("a", 32, 16)], [("a", 48, 2)]]
        assert result.chunks[4:] == [[("a", position, 1)] * 6 for position in range(50, 54)]


# -- memory, with the counts of cases/block_model_ref.py


@pytest.mark.parametrize(
    ("prompt_tokens", "n", "new", "after_fork", "copies", "used"),
    [(17, 4, 1, 2, 3, 5), (16, 4, 1, 1, 0, 5), (15, 4, 1, 1, 3, 4), (15, 4, 2, 1, 3, 8), (1, 2, 1, 1, 1, 2),
     (48, 8, 16, 3, 0, 11), (48, 8, 17, 3, 0, 19)],
)  # fmt: skip
def test_A08_forks_take_blocks_when_they_write_and_copy_a_shared_one_first(
    prompt_tokens: int, n: int, new: int, after_fork: int, copies: int, used: int
) -> None:
    """Blocks of 16. One step computes the prompt and forks; each later one writes a token of each sample.

    Every slot starts as NaN: a sample that read what was not copied would fail.
    """
    with tiny() as llm:
        engine = llm.engine
        poison(engine)
        name = engine.add_request(prompt(prompt_tokens), sampled(n, new + 5))
        engine.step()
        pool = engine.manager.pools[0]
        assert (pool.num_used, engine.stats().copies, engine.stats().forks) == (after_fork, 0, n - 1)
        assert engine.stats().groups[0].pool.shared == after_fork
        for _ in range(new):
            engine.step()
        assert (pool.num_used, engine.stats().copies) == (used, copies)
        engine.manager.audit()
        while engine.has_work:
            engine.step()
        output = engine.request(name).output()
        assert (output.metrics.forks, output.metrics.copies_on_write) == (n - 1, copies)
        assert texts(output) == texts(llm.generate([prompt(prompt_tokens)], sampled(n, new + 5))[0])
        engine.check_idle()


def test_A08_the_shared_block_is_left_as_it_is_and_its_last_user_writes_in_place() -> None:
    with tiny() as llm:
        engine = llm.engine
        name = engine.add_request(prompt(17), sampled(4))
        engine.step()
        (cache,), sequences = engine.caches, engine.request(name).sequences
        shared = sequences[0].tables.tables[0].refs[1]  # type: ignore[union-attr]
        before = cache.gather(0, [shared], 1)
        calls: list[tuple[list[int], list[int]]] = []
        copy_blocks = engine.device.ops.copy_blocks

        def noting(view: Any, sources: Sequence[int], destinations: Sequence[int]) -> None:
            calls.append((list(sources), list(destinations)))
            copy_blocks(view, sources, destinations)

        engine.device.ops.copy_blocks = noting  # type: ignore[method-assign]
        engine.step()
        last = [sequence.tables.tables[0].refs[1] for sequence in sequences]  # type: ignore[union-attr]
        ((sources, destinations),) = calls  # one call for the step
        assert sources == [shared] * 3
        assert last == [*destinations, shared]  # three copies, and the last user keeps the original
        for ref in last:
            assert all(np.array_equal(a, b) for a, b in zip(cache.gather(0, [ref], 1), before, strict=True))


def test_8_samples_over_1024_tokens_use_a_sixth_of_the_blocks_of_8_requests(tmp_path: Path) -> None:
    model, ids = with_config(DATA / "llama", tmp_path / "model", max_position_embeddings=2048), prompt(1024)
    with tiny(model, kv_memory="8MiB", prefix_cache=False) as llm:
        llm.generate([ids] * 8, [sampled(1, 16, seed=seed) for seed in range(8)])
        apart = llm.engine.stats().peak_blocks[0]
    with tiny(model, kv_memory="8MiB") as llm:
        llm.generate([ids], sampled(8, 16))
        together = llm.engine.stats().peak_blocks[0]
    assert apart > 8 * 64  # not all of them are in their last block at once
    assert together == 64 + 8 <= apart / 6


def test_A13_125_samples_in_a_pool_that_holds_few_of_them_all_finish() -> None:
    """40 blocks: some 35 samples at a time. The others wait and are computed anew; every step does something."""
    with tiny() as llm:
        whole = texts(llm.generate([prompt(40)], sampled(125, 25))[0])
    with small_pool(40) as llm:
        engine = llm.engine
        name = engine.add_request(prompt(40), sampled(125, 25))
        behind = engine.add_request(prompt(5), greedy(3))
        while engine.has_work:
            before = engine.num_steps
            assert engine.step() or engine.num_steps > before
            assert engine.num_steps < 2000
        output = engine.request(name).output()
        assert texts(output) == whole
        assert output.metrics.preemptions > 50
        assert len(engine.request(behind).output().token_ids) == 3
        engine.check_idle()


def test_preempted_groups_share_again_what_they_have_in_common() -> None:
    jobs = {f"g{n}": Job(prompt(30 + n, n), sampled(4, 40, seed=n)) for n in range(4)}
    with tiny() as llm:
        whole = {name: run(llm.engine, {name: job}).outputs[name] for name, job in jobs.items()}
    with small_pool(18) as llm:
        together = run(llm.engine, jobs)
        assert llm.engine.stats().preemptions > 0
        assert all(texts(together.outputs[name]) == texts(whole[name]) for name in jobs)
        assert llm.engine.stats().forks > 4 * 3


def test_no_sample_starves_where_a_step_takes_fewer() -> None:
    with tiny(max_sequences=3) as llm:
        narrow = texts(llm.generate([prompt(20)], sampled(8))[0])
        llm.engine.check_idle()
    with tiny() as llm:
        assert narrow == texts(llm.generate([prompt(20)], sampled(8))[0])


# -- best_of


def test_best_of_returns_the_best_by_mean_log_probability() -> None:
    with tiny() as llm:
        (every,) = llm.generate([prompt(20)], sampled(9, 30, ignore_eos=False, logprobs=0))
        (best,) = llm.generate([prompt(20)], sampled(3, 30, ignore_eos=False, best_of=9))
        means = [completion.cumulative_logprob / len(completion.token_ids) for completion in every.outputs]  # type: ignore[operator]
        order = sorted(range(9), key=lambda index: (-means[index], index))[:3]
        assert texts(best) == [every.outputs[index].token_ids for index in order]
        assert [completion.score for completion in best.outputs] == pytest.approx([means[index] for index in order])
        assert [completion.index for completion in best.outputs] == [0, 1, 2]
        assert best.outputs[0].cumulative_logprob is None  # not asked
        assert best.usage.completion_tokens == every.usage.completion_tokens  # what was generated
        llm.engine.check_idle()


def test_best_of_ties_go_to_the_first_sample() -> None:
    with tiny() as llm:
        name = llm.engine.add_request(prompt(20), greedy(5, n=2, best_of=6))
        while llm.engine.has_work:
            llm.engine.step()
        assert [sequence.index for sequence in llm.engine.request(name).reports] == [0, 1]


def test_best_of_streams_whole_outputs_at_the_end() -> None:
    with tiny() as llm:
        (output,) = llm.generate([prompt(9)], sampled(2, 6, best_of=5))
        pieces = list(llm.stream(prompt(9), sampled(2, 6, best_of=5)))
        assert [(piece.index, piece.token_ids, piece.finish_reason) for piece in pieces] == [
            (completion.index, completion.token_ids, "length") for completion in output.outputs
        ]
        assert [piece.usage is not None for piece in pieces] == [False, True]


# -- streams and ends


def test_pieces_of_samples_carry_their_index_and_one_end_each(tmp_path: Path) -> None:
    with tiny(with_tokenizer(tmp_path / "model")) as llm:
        pieces = list(llm.stream("abc", sampled(3, 9, logprobs=1)))
        (output,) = llm.generate("abc", sampled(3, 9, logprobs=1))
        assert {piece.index for piece in pieces} == {0, 1, 2}
        for completion in output.outputs:
            own = [piece for piece in pieces if piece.index == completion.index]
            assert [token for piece in own for token in piece.token_ids] == completion.token_ids
            assert "".join(piece.text for piece in own) == completion.text
            assert [entry for piece in own for entry in piece.logprobs or []] == completion.logprobs
            assert [piece.finish_reason for piece in own] == [None] * 8 + ["length"]
        assert [piece.usage is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_samples_end_one_by_one_and_give_their_blocks_back_at_once(tmp_path: Path) -> None:
    """Sample i writes 20 i tokens and then a stop string; the pool shrinks with each end."""
    with tiny(with_tokenizer(tmp_path / "model"), prefix_cache=False) as llm:  # which would find equal outputs equal
        engine = llm.engine
        by_index(engine, lambda index: [*ids_of("x" * (20 * index)), *ids_of("ok")])
        name = engine.add_request(prompt(16), sampled(3, 60, stop="ok"))
        held, ends = [], []
        while engine.has_work:
            ends += [piece for piece in engine.step() if piece.finish_reason is not None]
            held.append(engine.manager.pools[0].num_used)
        output = engine.request(name).output()
        assert [completion.text for completion in output.outputs] == ["", "x" * 20, "x" * 40]
        assert [(piece.index, piece.finish_reason, piece.stop_reason) for piece in ends] == [
            (0, "stop", "ok"), (1, "stop", "ok"), (2, "stop", "ok"),
        ]  # fmt: skip
        assert held[0] == 1 and held[10] == 1 + 2 and held[30] == 1 + 2 and held[-1] == 0
        assert held[19] == 1 + 2 * 2 and held[20] == 1 + 2
        engine.check_idle()


def by_index(engine: Any, tokens_of: Any) -> None:
    """Have each sample write its own tokens; all take the first from the prompt's last row, so that one is shared."""

    def scripted(logits: Any, rows: Any, checked: bool = False) -> list[int]:
        tokens = []
        for index, position in zip(rows.sample, rows.position, strict=True):
            own = tokens_of(index)
            done = position - 16
            tokens.append(own[done] if done < len(own) else 3)
        return tokens

    engine.device.ops.sample = scripted


@pytest.mark.parametrize("step", range(5))
def test_an_abort_ends_every_sample_and_leaves_no_block(step: int) -> None:
    with tiny(max_batch_tokens=16) as llm:
        engine = llm.engine
        name = engine.add_request(prompt(30), sampled(5, 40))
        for _ in range(step):
            engine.step()
        assert engine.abort(name) is True
        ends = [piece for piece in engine.step() if piece.finish_reason is not None]
        assert [(piece.index, piece.finish_reason) for piece in ends] == [(index, "abort") for index in range(5)]
        assert [piece.usage is not None for piece in ends] == [False] * 4 + [True]
        engine.check_idle()


@pytest.mark.parametrize("failing_at", [30, 31, 35])
def test_S04_an_error_in_one_sample_ends_its_request_and_no_other(failing_at: int) -> None:
    jobs = {"bad": Job(prompt(30), sampled(3, 20)), "good": Job(prompt(9, 1), sampled(3, 20))}
    with tiny() as llm:
        whole = run(llm.engine, {"good": jobs["good"]}).outputs["good"]
    with tiny() as llm:
        engine = llm.engine
        forward = engine._forward

        def failing(chunks: Sequence[Chunk]) -> Any:
            for chunk in chunks:
                sequence = chunk.sequence
                if (sequence.request.request_id, len(sequence.tokens)) == ("bad", failing_at):
                    raise ValueError("the cosmic ray")
            return forward(chunks)

        engine._forward = failing  # type: ignore[method-assign]
        outputs = run(engine, jobs).outputs
        assert [completion.finish_reason for completion in outputs["bad"].outputs] == ["error"] * 3
        assert texts(outputs["good"]) == texts(whole)


def test_M12_a_row_that_is_not_finite_ends_the_whole_group() -> None:
    with tiny() as llm:
        engine = llm.engine
        forward = engine._forward

        def poisoned(chunks: Sequence[Chunk]) -> Any:
            logits = np.array(forward(chunks).host)
            if len(chunks) == 3 and chunks[0].start == 33:
                logits[1, 5] = math.nan
            return StepLogits(engine.device, logits)

        engine._forward = poisoned  # type: ignore[method-assign]
        (output,) = llm.generate([prompt(30)], sampled(3))
        assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
        assert output.error is not None and "not finite" in output.error
        engine.check_idle()


def test_S06_no_tokens_at_all_gives_n_empty_outputs() -> None:
    with tiny() as llm:
        for best_of in (None, 5):
            (output,) = llm.generate([prompt(5)], sampled(3, 0, best_of=best_of))
            assert texts(output) == [[], [], []]
            pieces = list(llm.stream(prompt(5), sampled(3, 0, best_of=best_of)))
            assert [(piece.index, piece.finish_reason) for piece in pieces] == [(index, "length") for index in range(3)]
        llm.engine.check_idle()


def test_prompt_logprobs_and_adjusted_logits_work_for_all_samples() -> None:
    with tiny(max_batch_tokens=16) as llm:
        options = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "prompt_logprobs": 2, "logprobs": 1}
        (four,) = llm.generate([prompt(30)], sampled(4, **options))
        (one,) = llm.generate([prompt(30)], sampled(1, **options))
        assert four.prompt_logprobs == one.prompt_logprobs
        assert four.outputs[0] == one.outputs[0]
        assert len({tuple(ids) for ids in texts(four)}) == 4


REFUSED = [
    ({"n": 0}, r"n=0 is out of range: 1 \.\. 1024"),
    ({"n": 1025}, r"n=1025 .*1 \.\. 1024"),
    ({"n": True}, "n=True: an integer"),
    ({"n": 3, "best_of": 2}, r"best_of=2 is out of range: n \(3\) \.\. 1024"),
    ({"best_of": 0}, r"best_of=0 .*1 \.\. 1024"),
    ({"length_penalty": 2.0}, "length_penalty=2.0: this is for beam search; set beam_width"),
    ({"early_stopping": True}, "early_stopping=True: this is for beam search"),
    ({"early_stopping": "always"}, "early_stopping='always': True, False or \"never\""),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(o) for o, _ in REFUSED])
def test_Q09_bad_groups_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SamplingParams(**options)
