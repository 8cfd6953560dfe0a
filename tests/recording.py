"""Runs of requests on an engine, step by step, with the logits that every token was chosen from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from cupaged.engine import Engine
from cupaged.outputs import RequestOutput, StreamPiece
from cupaged.sampling import SamplingParams
from cupaged.step_plan import Chunk

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class Job:
    """A request of a run. `arrives`, `aborted`: steps before which it is submitted and aborted."""

    ids: Sequence[int]
    params: SamplingParams = GREEDY
    arrives: int = 0
    aborted: int | None = None


@dataclass
class Run:
    """What came of it. logits[name, position] is the row from which the token at that position was chosen; `name` is
    "job" for its first sequence, and "job/2" for its third. Beams have no names of their own and leave no logits."""

    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    logits: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    pieces: list[StreamPiece] = field(default_factory=list)
    chunks: list[list[tuple[str, int, int]]] = field(default_factory=list)  # per step: (name, start, count)

    def tokens(self) -> dict[str, list[int]]:
        return {name: output.token_ids for name, output in self.outputs.items()}


def run(engine: Engine, jobs: Mapping[str, Job], max_steps: int = 5000) -> Run:
    """All jobs together, until none is left; then the engine is idle, and it has told each end exactly once."""
    result = Run()
    stop = record(engine, result)
    waiting = dict(jobs)
    try:
        for step in range(max_steps):
            for name, job in list(waiting.items()):
                if job.arrives <= step:
                    engine.add_request(job.ids, job.params, name)
                    del waiting[name]
            for name, job in jobs.items():
                if job.aborted == step and name not in waiting:
                    engine.abort(name)
            if not waiting and not engine.has_work:
                break
            result.pieces += engine.step()
        else:
            raise AssertionError(f"not done after {max_steps} steps")
    finally:
        stop()
    for name in jobs:
        result.outputs[name] = engine.request(name).output()
        engine.forget(name)
    ends = sorted((piece.request_id, piece.index) for piece in result.pieces if piece.finish_reason is not None)
    assert ends == sorted((name, output.index) for name in jobs for output in result.outputs[name].outputs)
    engine.check_idle()
    return result


def record(engine: Engine, result: Run) -> Any:
    """Note the logits and chunks of every forward pass in `result`; returns what ends that."""
    forward = engine._forward

    def noting(chunks: Sequence[Chunk]) -> Any:
        logits = forward(chunks)
        result.chunks.append([(c.sequence.request.request_id, c.start, c.count) for c in chunks])
        ends = accumulate(chunk.rows for chunk in chunks)
        for chunk, end in zip(chunks, ends, strict=True):
            sequence = chunk.sequence
            if chunk.samples and sequence.request.params.beam_width is None:
                name, index = sequence.request.request_id, sequence.index
                key = f"{name}/{index}" if index else name, len(sequence.tokens)
                assert key not in result.logits
                result.logits[key] = logits.host[end - 1].copy()
        return logits

    engine._forward = noting  # type: ignore[method-assign]

    def stop() -> None:
        engine._forward = forward  # type: ignore[method-assign]

    return stop


def alone(engine: Engine, jobs: Mapping[str, Job]) -> Run:
    """Each job by itself, one after the other."""
    whole = Run()
    for name, job in jobs.items():
        one = run(engine, {name: Job(job.ids, job.params)})
        whole.outputs |= one.outputs
        whole.logits |= one.logits
    return whole


def assert_same_bits(some: Run, whole: Run) -> None:
    """Every row of logits in `some` is in `whole`, bit for bit (an aborted request leaves fewer)."""
    assert some.logits
    for (name, position), row in some.logits.items():
        assert np.array_equal(row, whole.logits[name, position]), (name, position)
    for name, output in some.outputs.items():
        if output.finish_reason == "abort":
            if output.outputs[0].score is None:  # which are picked in the end is not yet decided
                for part, entire in zip(output.outputs, whole.outputs[name].outputs, strict=True):
                    assert part.token_ids == entire.token_ids[: len(part.token_ids)]
        else:
            for part, entire in zip(output.outputs, whole.outputs[name].outputs, strict=True):
                assert (part.finish_reason, part.token_ids) == (entire.finish_reason, entire.token_ids)
