"""A beam request's step: from the logits of its beams to the next beams, their blocks forked, the dead ones' freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cupaged.beam_search import Candidate
from cupaged.errors import StepError
from cupaged.kernels.interface import Array
from cupaged.logits import adjust
from cupaged.logprobs import best_logprobs, log_softmax
from cupaged.request import Request, TextStream
from cupaged.request import Sequence as TokenSequence

if TYPE_CHECKING:
    from cupaged.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Growth:
    """A candidate with its text, and what ends it: ("stop", id or string), ("length", None), or None."""

    candidate: Candidate
    stream: TextStream
    end: tuple[str, int | str | None] | None


def advance(request: Request, rows: Sequence[Array], scheduler: Scheduler) -> None:
    """Replace a request's beams by the next ones. rows: for each beam the logits [V] behind its last token.

    Its K/V must be committed. Afterwards `request.sequences` are the beams that go on; none if the search is over.
    """
    search, beams = request.search, request.sequences
    assert search is not None
    candidates = search.candidates(log_probabilities(rows, beams), [beam.total for beam in beams])
    if not candidates:
        raise StepError("no token is left to choose from: bias, min_tokens, bad_words and processor exclude all")
    running: list[TokenSequence] = []
    parents: list[int] = []
    for rank, candidate in enumerate(candidates):
        if rank >= search.width and len(running) == search.width:
            break
        parent = beams[candidate.beam]
        growth = grow(request, parent, candidate)
        if growth.end is None and len(running) < search.width:
            running.append(child_of(parent, growth, rows[candidate.beam], len(running)))
            parents.append(candidate.beam)
        elif growth.end is not None and rank < search.width:
            child = child_of(parent, growth, rows[candidate.beam], 0)
            end(child, *growth.end)
            search.finish(child, child.total, len(child.output_ids))
    if running and search.over(running[0].total, len(running[0].output_ids)):
        running, parents = [], []
    hand_over(beams, running, parents, scheduler)
    request.sequences = running


def log_probabilities(rows: Sequence[Array], beams: Sequence[TokenSequence]) -> Array:
    """float64 [B, V]: the model's, with penalties, bias and the rest applied to them (as Hugging Face applies its
    processors: to log-probabilities, not normalised again)."""
    scores = log_softmax(np.stack(rows))
    if beams[0].request.params.adjusts:
        for index, beam in enumerate(beams):
            scores[index] = adjust(scores[index].astype(np.float32), beam)
    return scores


def grow(request: Request, parent: TokenSequence, candidate: Candidate) -> Growth:
    """What a beam becomes with one more token. The parent is left as it is: it may have several children."""
    stream, token, params = parent.stream.fork(), candidate.token, request.params
    if token in request.stop_ids:
        if params.include_stop_str_in_output:
            stream.push(token)
        return Growth(candidate, stream, ("stop", token))
    _, stop = stream.push(token)
    if stop is not None:
        return Growth(candidate, stream, ("stop", stop))
    full = len(parent.tokens) + 1 >= request.max_total
    return Growth(candidate, stream, ("length", None) if full else None)


def child_of(parent: TokenSequence, growth: Growth, logits: Array, rank: int) -> TokenSequence:
    token, params = growth.candidate.token, parent.request.params
    child = TokenSequence(parent.request, rank, [*parent.tokens, token], growth.stream, total=growth.candidate.total)
    if params.logprobs is not None:
        logprobs = best_logprobs(logits, token, params.logprobs)
        child.logprobs = [*parent.logprobs, logprobs]
        child.cumulative_logprob = parent.cumulative_logprob + logprobs[token]
    return child


def end(sequence: TokenSequence, reason: str, stop: int | str | None) -> None:
    _, matched = sequence.stream.finish()
    if matched is not None and reason == "length":
        reason, stop = "stop", matched
    sequence.finish_reason, sequence.stop_reason = reason, stop


def hand_over(
    beams: Sequence[TokenSequence], children: Sequence[TokenSequence], parents: Sequence[int], scheduler: Scheduler
) -> None:
    """Give the children their parents' blocks: all forks first, then what nobody took over is freed.

    In this order no block is free, be it for a moment, that a child uses. The last child of a beam takes its place.
    """
    heirs = {parent: child for child, parent in zip(children, parents, strict=True)}
    for child, parent in zip(children, parents, strict=True):
        if heirs[parent] is not child:
            scheduler.fork(beams[parent], child)
    for parent, beam in enumerate(beams):
        if parent in heirs:
            heirs[parent].tables, beam.tables = beam.tables, None
        else:
            scheduler.release_sequence(beam)
