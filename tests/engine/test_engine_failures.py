"""Steps that fail end the request at fault and no other; what sampling promises holds in any company."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine_support import Job, greedy, prompt, tiny
from recording import alone, run

from cupaged import LLM, SamplingParams
from cupaged.errors import DeviceError, RequestError
from cupaged.step_logits import StepLogits
from cupaged.step_plan import Chunk


def test_S04_an_exception_in_one_request_s_fifth_step_ends_that_one_alone() -> None:
    jobs = {f"r{n}": Job(prompt(5 + 3 * n, n), greedy(12, seed=n)) for n in range(8)}
    with tiny() as llm:
        whole = alone(llm.engine, jobs)
    with tiny() as llm:
        engine = llm.engine
        forward = engine._forward

        def failing(chunks: Sequence[Chunk]) -> Any:
            for chunk in chunks:
                if chunk.sequence.request.request_id == "r3" and len(chunk.sequence.output_ids) == 4:
                    raise ValueError("the cosmic ray")
            return forward(chunks)

        engine._forward = failing  # type: ignore[method-assign]
        outputs = run(engine, jobs).outputs
    broken = outputs.pop("r3")
    assert (broken.finish_reason, broken.finished) == ("error", True)
    assert broken.error == "request r3: ValueError: the cosmic ray"
    assert broken.token_ids == whole.outputs["r3"].token_ids[:4]
    assert {name: output.token_ids for name, output in outputs.items()} == {
        name: tokens for name, tokens in whole.tokens().items() if name != "r3"
    }


def test_S04_a_sampler_that_fails_for_one_row_ends_that_request_alone() -> None:
    jobs = {f"r{n}": Job(prompt(5, n), greedy(6)) for n in range(4)}
    with tiny() as llm:
        whole = alone(llm.engine, jobs)
        sample = llm.engine.device.ops.sample

        def failing(logits: Any, rows: Any, checked: bool = False) -> Any:
            if 8 in rows.position and any(np.array_equal(row, whole.logits["r1", 8]) for row in logits):
                raise RuntimeError("no token")
            return sample(logits, rows, checked)

        llm.engine.device.ops.sample = failing  # type: ignore[method-assign]
        outputs = run_tolerant(llm, jobs)
    assert [name for name, output in outputs.items() if output.finish_reason == "error"] == ["r1"]
    assert all(outputs[name].token_ids == whole.outputs[name].token_ids for name in ("r0", "r2", "r3"))


def run_tolerant(llm: LLM, jobs: dict[str, Job]) -> dict[str, Any]:
    """As `run`, where a step may be repeated request by request."""
    for name, job in jobs.items():
        llm.engine.add_request(job.ids, job.params, name)
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.check_idle()
    return {name: llm.engine.request(name).output() for name in jobs}


def test_S04_a_step_in_which_everything_fails_ends_everything() -> None:
    with tiny() as llm:

        def failing(chunks: Sequence[Chunk]) -> Any:
            raise MemoryError("no more")

        llm.engine._forward = failing  # type: ignore[method-assign]
        outputs = llm.generate([prompt(3), prompt(4)], greedy(5))
        assert [output.finish_reason for output in outputs] == ["error", "error"]
        assert "MemoryError: no more" in str(outputs[0].error)
        llm.engine.check_idle()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_M12_logits_that_are_not_finite_end_their_request_and_name_the_step(value: float) -> None:
    jobs = {f"r{n}": Job(prompt(5, n), greedy(10, logprobs=3)) for n in range(4)}
    with tiny() as llm:
        whole = alone(llm.engine, jobs)
    with tiny() as llm:
        forward = llm.engine._forward

        def poisoned(chunks: Sequence[Chunk]) -> Any:
            logits = np.array(forward(chunks).host)
            for row, chunk in zip(logits, chunks, strict=True):
                if chunk.sequence.request.request_id == "r2" and len(chunk.sequence.tokens) == 8:
                    row[17] = value
            return StepLogits(llm.engine.device, logits)

        llm.engine._forward = poisoned  # type: ignore[method-assign]
        outputs = run(llm.engine, jobs).outputs
    broken = outputs["r2"]
    assert broken.finish_reason == "error"
    assert broken.error == "request r2: the model's logits are not finite (step 3, position 8)"
    assert broken.token_ids == whole.outputs["r2"].token_ids[:3]
    for name in ("r0", "r1", "r3"):
        assert outputs[name].token_ids == whole.outputs[name].token_ids
    text = json.dumps([output.outputs[0].logprobs for output in outputs.values()], allow_nan=False)
    assert "NaN" not in text


@pytest.mark.parametrize("temperature", [1e-5, 9e-6, 1e-8, 1e-12, 5e-324])
def test_Q03_tiny_temperatures_equal_greedy(temperature: float) -> None:
    with tiny() as llm:
        prompts = [prompt(n, n) for n in (1, 8, 40)]
        cold = llm.generate(prompts, SamplingParams(max_tokens=20, temperature=temperature, seed=3, ignore_eos=True))
        exact = llm.generate(prompts, greedy(20))
        assert [output.token_ids for output in cold] == [output.token_ids for output in exact]


def test_Q06_a_seed_gives_the_same_text_alone_and_among_others() -> None:
    def sampled(seed: int | None) -> SamplingParams:
        return SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)

    with tiny() as llm:
        first = llm.generate([prompt(6)], sampled(11))[0].token_ids
        assert llm.generate([prompt(6)], sampled(11))[0].token_ids == first
        others = [sampled(seed) for seed in (1, 2, 3, None, 4, 5, 6)]
        outputs = llm.generate([prompt(n, n) for n in range(3, 10)] + [prompt(6)], [*others, sampled(11)])
        assert outputs[-1].token_ids == first
        texts = {tuple(llm.generate([prompt(6)], sampled(seed))[0].token_ids) for seed in range(8)}
        assert len(texts) == 8
        fresh = {tuple(llm.generate([prompt(6)], sampled(None))[0].token_ids) for _ in range(4)}
        assert len(fresh) == 4  # without a seed each request gets one of its own


ONE = SamplingParams(max_tokens=1, temperature=0)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((None, ONE), {}, "prompt: None is not a list of token ids"),
        ((5, ONE), {}, "prompt: 5 is not a list of token ids"),
        (([5], None), {}, "params: None is not SamplingParams"),
        (([5], {"n": 2}), {}, "params: {'n': 2} is not SamplingParams"),
        (([5], ONE, 5), {}, "request id 5: a string that is not empty is needed"),
        (([5], ONE, ""), {}, "request id '': a string that is not empty is needed"),
        (([5], ONE, "a"), {"priority": "high"}, "priority: 'high' is not a whole number"),
    ],
)
def test_what_is_no_request_is_refused_and_leaves_nothing(args: Any, options: Any, message: str) -> None:
    with tiny() as llm:
        with pytest.raises(RequestError, match=re.escape(message)):
            llm.engine.add_request(*args, **options)
        assert not llm.engine.has_work
        llm.engine.forget(llm.engine.add_request([5], ONE, "a"))  # the id is not in use


def test_what_a_processor_raised_is_said_to_be_its() -> None:
    def processor(_: Any, __: Any) -> None:
        raise StopIteration

    with tiny() as llm:
        (output,) = llm.generate([[5, 7]], SamplingParams(max_tokens=2, logits_processor=processor))
    assert output.error is not None and output.error.endswith("the logits_processor raised StopIteration")


def test_a_copy_on_write_that_fails_ends_those_who_need_it_and_loses_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device refuses once is not written, so whoever would read it ends; the others go on, and all can begin
    again."""
    jobs = {
        "plain": Job(prompt(20, 1), greedy(30)),
        "many": Job(prompt(21, 2), greedy(30, n=3, temperature=0.9, seed=5)),
    }
    with tiny() as llm:
        whole = run(llm.engine, jobs)
    with tiny() as llm:
        engine = llm.engine
        copy_blocks, failed = engine.device.ops.copy_blocks, []

        def failing(*arguments: Any) -> None:
            if not failed:
                failed.append(arguments)
                raise DeviceError("the GPU's memory is used up")
            copy_blocks(*arguments)

        monkeypatch.setattr(engine.device.ops, "copy_blocks", failing)
        outputs = run(engine, jobs).outputs
        assert failed and outputs["plain"].token_ids == whole.outputs["plain"].token_ids
        assert "a KV block could not be copied (the GPU's memory is used up)" in str(outputs["many"].error)
        assert {each.finish_reason for each in outputs["many"].outputs} == {"error"}
        engine.check_idle()
        again = run(engine, {"again": jobs["many"]}).outputs["again"]
        assert [each.token_ids for each in again.outputs] == [
            each.token_ids for each in whole.outputs["many"].outputs
        ]  # fmt: skip
        engine.check_idle()
