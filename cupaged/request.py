"""A request and its sequences: tokens, block tables, text so far, and the states they pass through.

    WAITING --schedule--> RUNNING --stop, length--> FINISHED
       ^                    |  |
       +----preempted-------+  +--abort--> ABORTED, a failing step--> ERROR

FINISHED, ABORTED and ERROR are terminal; a request enters exactly one of them, once. What is refused never becomes a
request: the caller gets an exception.

A request of several sequences (n, best_of, beams) computes what they have in common once: the **stem**. Its first
sequence does, the others have no blocks meanwhile, and share the first one's when it is done (`Scheduler.spread`). The
stem of a new request is its prompt; of one that lost its blocks it is the tokens that all its sequences begin with.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from cupaged.beam_search import BeamSearch
from cupaged.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, StreamPiece, Usage
from cupaged.sampling import SamplingParams
from cupaged.stopping import StopMatcher

if TYPE_CHECKING:
    from cupaged.memory import SequenceTables
    from cupaged.model.detokenizer import Detokenizer


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    ERROR = "error"

    @property
    def terminal(self) -> bool:
        return self not in (RequestState.WAITING, RequestState.RUNNING)


class TextStream:
    """From token ids to the text that may be shown: detokenising, stop strings, nothing shown too early.

    Where nobody looks for stop strings or reads along, `put` only notes a token, and its text is made when somebody
    asks: all at once, which takes a third of the time of one between two forward passes, with cold caches.
    """

    def __init__(self, detokenizer: Detokenizer | None, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(params.stop_strings, params.include_stop_str_in_output)
        self._unsearched = params.min_tokens  # tokens whose text is not searched for stop strings
        self._text = ""
        self._noted: list[int] = []  # tokens whose text is yet to be made

    @property
    def text(self) -> str:
        """What may be shown so far."""
        self._catch_up()
        return self._text

    def fork(self) -> TextStream:
        """Another stream that goes on from here by itself."""
        self._catch_up()
        twin = copy.copy(self)
        twin._detokenizer = None if self._detokenizer is None else self._detokenizer.fork()
        twin._noted = []
        twin._matcher = copy.copy(self._matcher)  # its automaton is shared, its place in it is not
        return twin

    def put(self, token_id: int) -> str | None:
        """A token whose text nobody waits for; the stop string completed by it."""
        if not self._matcher.idle:
            return self.push(token_id)[1]
        self._noted.append(token_id)
        return None

    def _catch_up(self) -> None:
        noted, self._noted = self._noted, []
        for token_id in noted:
            self.push(token_id)

    def push(self, token_id: int) -> tuple[str, str | None]:
        """(new text to show, stop string completed by this token)."""
        if self._detokenizer is None:
            return "", None
        if self._noted:
            self._catch_up()
        text = self._detokenizer.push(token_id)
        if self._matcher.idle:
            return self._show(text, None)
        if self._unsearched:
            self._unsearched -= 1
            return self._show(text, None)
        return self._show(*self._matcher.push(text))

    def finish(self) -> tuple[str, str | None]:
        """The tokens end here: what was held back. A stop string may still be completed by an unfinished character."""
        self._catch_up()
        if self._detokenizer is None or self._matcher.matched is not None:
            return "", None
        shown, matched = self._matcher.push(self._detokenizer.finish())
        return self._show(shown + self._matcher.flush(), matched)

    def _show(self, shown: str, matched: str | None) -> tuple[str, str | None]:
        self._text += shown
        return shown, matched


@dataclass(eq=False, slots=True)
class Sequence:
    """One line of tokens of a request. `tables.num_tokens` of its tokens have their K/V stored.

    `index` is the sample's number: with seed and position it keys the random stream.
    """

    request: Request
    index: int
    tokens: list[int]
    stream: TextStream
    tables: SequenceTables | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    score: float | None = None
    total: float = 0.0  # of a beam: the sum that its score is made of
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_computed(self) -> int:
        return 0 if self.tables is None else self.tables.num_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens whose K/V are not stored yet: 1 while decoding, more while the prompt is computed."""
        return len(self.tokens) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]


@dataclass(eq=False, slots=True)
class Request:
    """One request. `max_total` is the length at which it ends with "length"; `stop_ids` end it with "stop"."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    max_total: int
    stop_ids: frozenset[int]
    rank: tuple[int, int]  # (priority, order of arrival), the scheduler's queue key: smaller ones go first
    seed: int
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of which the last must not follow the others
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=list)  # as far as they are known
    state: RequestState = RequestState.WAITING
    sequences: list[Sequence] = field(default_factory=list)
    error: str | None = None
    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0
    forks: int = 0
    copies: int = 0
    cached_tokens: int = 0  # of the prompt, found in blocks that were computed for others
    search: BeamSearch[Sequence] | None = None
    stopped_at: int = -1  # how many had ended when it was stopped last (see preemption.py)
    watched: bool = True  # somebody reads its tokens as they come: prompts beside it keep its pace (budget.py)
    plain: bool = field(init=False)  # each sequence chooses its next token by itself, from the logits as they are
    followed: bool = True  # pieces are made of its tokens as they come; else only the last of each output
    stem: int | None = None  # tokens that the first live sequence computes for all; None: each has blocks of its own

    def __post_init__(self) -> None:
        self.plain = self.params.beam_width is None and not self.params.adjusts

    @property
    def live_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def places(self) -> int:
        """Sequences that may take part in one step, now or later."""
        return self.params.beam_width or len(self.live_sequences)

    @property
    def reports(self) -> list[Sequence]:
        """The sequences that are this request's outputs, in order: all, or the best `n` of its candidates.

        best_of: by mean log-probability; among equals, the lower index. (One without tokens has mean 0.) Of beams those
        that are finished and those that are still here, by score.
        """
        if not self.params.picks:
            return self.sequences
        candidates = list(self.sequences)
        if self.search is not None:
            for sequence in candidates:
                sequence.score = self.search.score(sequence.total, max(1, len(sequence.output_ids)))
            for score, sequence in self.search.finished:
                if sequence not in candidates:
                    sequence.score = score
                    candidates.append(sequence)
        else:
            for sequence in candidates:
                sequence.score = sequence.cumulative_logprob / max(1, len(sequence.output_ids))
        candidates.sort(key=lambda sequence: -(sequence.score or 0.0))
        return candidates[: self.params.n]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the logits of further prompt tokens are needed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids)

    def usage(self) -> Usage:
        generated = sum(len(sequence.output_ids) for sequence in self.sequences)
        return Usage(len(self.prompt_ids), generated, self.cached_tokens)

    def pieces(self) -> list[StreamPiece]:
        """The outputs of an ended request as a stream brings them where they had to be picked first: each whole."""
        usage, reports = self.usage(), self.reports
        return [
            StreamPiece(
                self.request_id, index, sequence.stream.text, list(sequence.output_ids),
                None if self.params.logprobs is None else list(sequence.logprobs),
                sequence.finish_reason, sequence.stop_reason, usage if sequence is reports[-1] else None,
            )
            for index, sequence in enumerate(reports)
        ]  # fmt: skip

    def output(self) -> RequestOutput:
        """The result as it stands."""
        asked = self.params.logprobs is not None
        outputs = [
            CompletionOutput(
                index=index,
                text=sequence.stream.text,
                token_ids=list(sequence.output_ids),
                cumulative_logprob=sequence.cumulative_logprob if asked else None,
                logprobs=list(sequence.logprobs) if asked else None,
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
                score=sequence.score,
            )
            for index, sequence in enumerate(self.reports)
        ]
        metrics = RequestMetrics(
            self.arrival_time, self.first_scheduled_time, self.first_token_time, self.finished_time, self.preemptions,
            self.forks, self.copies,
        )  # fmt: skip
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_ids),
            outputs=outputs,
            usage=self.usage(),
            metrics=metrics,
            finished=self.state.terminal,
            error=self.error,
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
        )


def make_request(
    request_id: str,
    prompt: str | None,
    prompt_ids: list[int],
    params: SamplingParams,
    max_total: int,
    eos_ids: frozenset[int],
    rank: tuple[int, int],
    make_detokenizer: Callable[[bool], Detokenizer] | None,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Request:
    """A waiting request with its sequences. Without a seed it gets a fresh one of 63 bits."""
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
    seed = int.from_bytes(os.urandom(8)) >> 1 if params.seed is None else params.seed
    request = Request(request_id, prompt, prompt_ids, params, max_total, stop_ids, rank, seed, bad_words)
    if params.prompt_logprobs is not None:
        request.prompt_logprobs.append(None)  # nothing comes before the first token
    if params.beam_width is not None:
        new = max_total - len(prompt_ids)
        request.search = BeamSearch(params.beam_width, params.length_penalty, params.early_stopping, new, len(stop_ids))
    for index in range(1 if params.beam_width else params.num_sequences):  # beams branch when the first step is done
        detokenizer = None if make_detokenizer is None else make_detokenizer(params.skip_special_tokens)
        request.sequences.append(Sequence(request, index, list(prompt_ids), TextStream(detokenizer, params)))
    return request


def common_stem(sequences: list[Sequence]) -> int:
    """Tokens that sequences without blocks can have in common: their longest common prefix.

    Where they differ the prefix ends before the last token of the shortest: each sequence must have a token left to
    compute, whose logits choose its next one. Where they are all the same, those logits are the same too.
    """
    first = sequences[0].tokens
    if all(sequence.tokens == first for sequence in sequences):
        return len(first)
    shortest = min(len(sequence.tokens) for sequence in sequences)
    for position in range(shortest - 1):
        token = first[position]
        if any(sequence.tokens[position] != token for sequence in sequences):
            return position
    return shortest - 1
