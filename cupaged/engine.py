"""The engine: requests in, pieces of their results out. One step = schedule -> copies -> forward -> sample -> commit.

Not thread-safe: one thread at a time owns an engine (`LLM` holds a lock around it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import numpy as np

from cupaged.batch import StepInputs, build_batch
from cupaged.cache import PagedKVCache
from cupaged.device.base import Capture, Device
from cupaged.errors import BlockError, CapacityError, RequestError, StepError, shown
from cupaged.interrupts import uninterrupted
from cupaged.kernels.interface import Array, KVView, SampleRows
from cupaged.logits import adjust
from cupaged.memory import BlockManager, MemoryStats, PlanItem, blocks_for, frame_of
from cupaged.model.config import ModelConfig
from cupaged.model.decoder import Decoder
from cupaged.model.detokenizer import Detokenizer
from cupaged.outputs import FinishReason, StreamPiece
from cupaged.request import Request, RequestState, make_request
from cupaged.request import Sequence as TokenSequence
from cupaged.sampling import SamplingParams
from cupaged.scheduler import PROMPT_ROWS, Chunk, Scheduler

MakeDetokenizer = Callable[[bool], Detokenizer]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A decode step ready to be replayed, where it leaves its logits, and the K/V arrays that it works on."""

    step: Capture
    logits: Array
    views: list[KVView]


class Engine:
    """Serves requests on one decoder with one cache per KV group.

    `max_model_len`: positions of the longest sequence, at most what the pool holds. `eos_ids` end a text.
    `make_detokenizer(skip_special_tokens)`: None for a model without a tokenizer; texts are then empty.
    """

    def __init__(
        self, config: ModelConfig, decoder: Decoder, caches: Sequence[PagedKVCache], manager: BlockManager,
        device: Device, *, max_model_len: int, max_tokens: int, max_sequences: int, eos_ids: frozenset[int],
        make_detokenizer: MakeDetokenizer | None = None, encode: Callable[[str], list[int]] | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.decoder = decoder
        self.caches = list(caches)
        self.manager = manager
        self.device = device
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(manager, max_tokens, max_sequences)
        self.eos_ids = eos_ids
        self.num_steps = 0
        self._make_detokenizer = make_detokenizer
        self._encode = encode
        self._inputs = StepInputs(device, len(self.caches), max_tokens, max_sequences + PROMPT_ROWS)
        self._captured: dict[int, CapturedStep] = {}  # by number of sequences: max_sequences at most
        self._requests: dict[str, Request] = {}
        self._pending: list[StreamPiece] = []
        self._arrivals = count()
        self._names: Iterator[str] = (f"request-{number}" for number in count())

    # -- requests

    @uninterrupted
    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
    ) -> str:
        """Queue a request; returns its id. RequestError (CapacityError for lengths), and nothing queued, if it cannot
        be served: empty, an id outside the vocabulary, too long, an id that is in use."""
        ids = self.check_request(prompt_ids, params)
        if request_id is None:
            request_id = next(name for name in self._names if name not in self._requests)
        elif request_id in self._requests:
            raise RequestError(f"request id {shown(request_id)} is in use")
        arrival = next(self._arrivals)
        room = self.max_model_len if params.max_tokens is None else len(ids) + params.max_tokens
        request = make_request(
            request_id,
            prompt,
            ids,
            params,
            room,
            self.eos_ids,
            arrival,
            self._make_detokenizer,
            self._bad_words(params),
        )
        self._requests[request_id] = request
        if params.max_tokens == 0:
            self._finish(request.sequences[0], "length", None, [])
        else:
            self.scheduler.add(request)
        return request_id

    def check_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as plain ints, if this engine can serve it; RequestError otherwise, naming value and limit."""
        vocab = self.config.vocab_size
        ids = []
        for index, token in enumerate(prompt_ids):
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise RequestError(f"prompt: item {index} is {shown(token)}, not a token id")
            if not 0 <= token < vocab:
                raise RequestError(f"prompt: token id {shown(token)} at index {index} is not in 0..{vocab - 1}")
            ids.append(int(token))
        if not ids:
            raise RequestError("prompt: it is empty (no token at all)")
        for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            for token in tokens:
                if token >= vocab:
                    raise RequestError(f"{name}: token id {token} is not in 0..{vocab - 1}")
        self._bad_words(params)
        if params.stop_strings and self._make_detokenizer is None:
            raise RequestError("stop: this model has no tokenizer, so stop strings cannot be found; use stop_token_ids")
        new = 1 if params.max_tokens is None else params.max_tokens
        if len(ids) + new > self.max_model_len:
            size = self.manager.groups[0].block_size
            raise CapacityError(
                f"prompt of {len(ids)} tokens and {new} to generate need {len(ids) + new} positions "
                f"({blocks_for(len(ids) + new, size)} blocks); this engine has {self.max_model_len} for a sequence "
                f"({blocks_for(self.max_model_len, size)} blocks, {self.manager.pools[0].num_blocks} in all)"
            )
        return ids

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """bad_words as token ids, each as it is at the start of a word and inside one."""
        if not params.bad_words:
            return ()
        if self._encode is None:
            raise RequestError("bad_words: this model has no tokenizer to find their tokens with; use logit_bias")
        forms = [self._encode(form) for word in params.bad_words for form in (word, f" {word.lstrip()}")]
        return tuple(dict.fromkeys(tuple(ids) for ids in forms if ids))

    @uninterrupted
    def abort(self, request_id: str) -> bool:
        """End a request at once; its blocks are free again. False if there is no such request or it has ended."""
        request = self._requests.get(request_id)
        if request is None or request.state.terminal:
            return False
        for sequence in list(request.live_sequences):
            self._finish(sequence, "abort", None, [], state=RequestState.ABORTED)
        return True

    def request(self, request_id: str) -> Request:
        """A request that has not been forgotten. KeyError otherwise."""
        return self._requests[request_id]

    @uninterrupted
    def forget(self, request_id: str) -> None:
        """Drop the record of an ended request (aborting it if it has not). Unknown ids are ignored."""
        self.abort(request_id)
        self._requests.pop(request_id, None)
        self._pending = [piece for piece in self._pending if piece.request_id != request_id]

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.has_work

    def stats(self) -> MemoryStats:
        return self.manager.stats()

    # -- steps

    @uninterrupted
    def step(self) -> list[StreamPiece]:
        """Run one step; returns the pieces that it brought, the ends of aborted requests among them."""
        plan = self.scheduler.schedule()
        try:
            self._run_items(plan.items)
            if plan.chunks:
                self._run_chunks(plan.chunks)
        finally:
            # Whatever was not committed (an interrupt, a failing forward pass) is as if it had not been scheduled.
            for chunk in plan.chunks:
                tables = chunk.sequence.tables
                if tables is not None and tables.num_prepared > tables.num_tokens:
                    self.manager.commit_append(tables, 0)
        self.num_steps += 1
        pieces, self._pending = self._pending, []
        return pieces

    def _run_items(self, items: Sequence[PlanItem]) -> None:
        """Copies on write: all of a step's in one call per KV group, before anything is written."""
        for group, cache in enumerate(self.caches):
            copies = [item for item in items if item.group == group]
            if copies:
                pairs = ([frame_of(item.source) for item in copies], [frame_of(item.destination) for item in copies])
                self.device.ops.copy_blocks(cache.view, *pairs)
        for item in items:
            self.manager.complete(item.ticket)

    def _run_chunks(self, chunks: Sequence[Chunk]) -> None:
        now = time.monotonic()
        for chunk in chunks:
            request = chunk.sequence.request
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
        try:
            logits = self._forward(chunks)
            outcomes = self._sample(chunks, logits)
        except Exception as error:
            if len(chunks) == 1:
                self._fail(chunks[0].sequence, error)
                return
            # Which request is to blame? Each alone: what a token computes does not depend on its company, and K/V
            # written twice are the same K/V.
            for chunk in chunks:
                if chunk.sequence.finish_reason is None:
                    self._run_chunks([chunk])
            return
        # Only now does anything change: an interrupt before this leaves every sequence as it was.
        # And the token comes before the commit: interrupted in between, its predecessor is merely computed once more.
        first = 0
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            self._accept(chunk, logits[first : first + chunk.rows], outcome)
            first += chunk.rows
            if chunk.sequence.tables is not None:  # None: that was its last token, and its blocks are free again
                self.manager.commit_append(chunk.sequence.tables, chunk.count)

    def _forward(self, chunks: Sequence[Chunk]) -> Array:
        """Logits [R, V] on the host, of the chunks that sample, in order."""
        batch = build_batch(chunks, self.manager, self.caches, self.config, self.device, self._inputs)
        views = [cache.view for cache in self.caches]
        if self.decoder.prepare(batch.max_position):
            self._captured.clear()
        # A step of decoding alone differs from the last one of as many sequences in nothing but what its buffers hold
        # and in its attention plans: it is captured once.
        decoding = all(chunk.count == chunk.rows == 1 for chunk in chunks)
        known = self._captured.get(len(chunks)) if decoding else None
        if known is not None and all(a is b for a, b in zip(known.views, views, strict=True)):
            known.step.replay(batch.plans)
            return self.device.download(known.logits)
        with self.device.capture(batch.plans) as step:
            logits = self.decoder.forward(batch, views)
        step.replay()
        if decoding:
            self._captured[len(chunks)] = CapturedStep(step, logits, views)
        return self.device.download(logits)

    def _sample(self, chunks: Sequence[Chunk], logits: Array) -> list[int | Exception | None]:
        """The next token of each chunk that samples (None for others), or what went wrong with that sequence alone."""
        outcomes: list[int | Exception | None] = [None] * len(chunks)
        ends = list(accumulate(chunk.rows for chunk in chunks))
        good = []
        for index, chunk in enumerate(chunks):
            line = logits[ends[index] - chunk.rows : ends[index]]
            if chunk.rows and not np.isfinite([line.max(), line.min()]).all():  # NaN makes the maximum NaN
                where = f"step {self.num_steps}, position {len(chunk.sequence.tokens)}"
                outcomes[index] = StepError(f"the model's logits are not finite ({where})")
            elif chunk.samples:
                good.append(index)
        lines = {index: logits[ends[index] - 1] for index in good}
        for index in list(good):
            sequence = chunks[index].sequence
            if sequence.request.params.adjusts:
                try:
                    lines[index] = adjust(lines[index].copy(), sequence)
                except Exception as error:
                    outcomes[index] = error
                    good.remove(index)
        if good:
            sequences = [chunks[index].sequence for index in good]
            plain = len(good) == len(logits) and not any(line.request.params.adjusts for line in sequences)
            chosen = logits if plain else np.stack([lines[index] for index in good])
            tokens = self.device.ops.sample(chosen, sample_rows(sequences))
            for index, token in zip(good, tokens, strict=True):
                outcomes[index] = token
        return outcomes

    def _accept(self, chunk: Chunk, logits: Array, outcome: int | Exception | None) -> None:
        """What a chunk brought: log-probabilities of its prompt tokens, its next token, or the end of its request."""
        sequence = chunk.sequence
        try:
            if isinstance(outcome, Exception):
                raise outcome
            if sequence.request.wants_prompt_logprobs:
                self._score_prompt(chunk, logits)
            if outcome is not None:
                self._append(sequence, logits[-1], outcome)
        except Exception as error:
            self._fail(sequence, error)

    def _score_prompt(self, chunk: Chunk, logits: Array) -> None:
        request = chunk.sequence.request
        count = request.params.prompt_logprobs
        assert count is not None  # wants_prompt_logprobs
        position = chunk.start + chunk.count - chunk.rows
        for row in logits:
            position += 1
            # After a preemption positions come again; they are scored once.
            if position == len(request.prompt_logprobs) and position < len(request.prompt_ids):
                request.prompt_logprobs.append(best_logprobs(row, request.prompt_ids[position], count))

    def _append(self, sequence: TokenSequence, logits: Array, token: int) -> None:
        """A new token: its log-probabilities, its text, and whether it is the last."""
        request, params = sequence.request, sequence.request.params
        sequence.tokens.append(token)
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        logprobs = None
        if params.logprobs is not None:
            logprobs = best_logprobs(logits, token, params.logprobs)
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs[token]
        if token in request.stop_ids:
            text = sequence.stream.push(token)[0] if params.include_stop_str_in_output else ""
            self._finish(sequence, "stop", token, [token], text, logprobs)
            return
        text, stop = sequence.stream.push(token)
        if stop is not None:
            self._finish(sequence, "stop", stop, [token], text, logprobs)
        elif len(sequence.tokens) >= request.max_total:
            self._finish(sequence, "length", None, [token], text, logprobs)
        else:
            self._emit(sequence, text, [token], logprobs)

    def _emit(self, sequence: TokenSequence, text: str, tokens: list[int], logprobs: dict[int, float] | None) -> None:
        listed = None if logprobs is None else [logprobs]
        self._pending.append(StreamPiece(sequence.request.request_id, sequence.index, text, tokens, listed))

    def _finish(
        self, sequence: TokenSequence, reason: FinishReason, stop: int | str | None, tokens: list[int], text: str = "",
        logprobs: dict[int, float] | None = None, state: RequestState = RequestState.FINISHED,
    ) -> None:  # fmt: skip
        """End a sequence; the request ends with its last one. Exactly one piece carries the finish reason."""
        request = sequence.request
        rest, matched = sequence.stream.finish()
        if matched is not None and reason == "length":
            reason, stop = "stop", matched
        sequence.finish_reason, sequence.stop_reason = reason, stop
        usage = None
        if not any(True for _ in request.live_sequences):
            request.state = state
            request.finished_time = time.monotonic()
            self.scheduler.remove(request)
            usage = request.usage()
        listed = None if logprobs is None else [logprobs]
        piece = StreamPiece(request.request_id, sequence.index, text + rest, tokens, listed, reason, stop, usage)
        self._pending.append(piece)

    def _fail(self, sequence: TokenSequence, error: Exception) -> None:
        """End one request because its step failed; the others go on."""
        request = sequence.request
        kind = "" if isinstance(error, StepError) else f"{type(error).__name__}: "
        request.error = f"request {request.request_id}: {kind}{error}"
        for other in list(request.live_sequences):
            self._finish(other, "error", None, [], state=RequestState.ERROR)

    def check_idle(self) -> None:
        """BlockError unless free + cached == total in every pool; for when no request is left."""
        self.manager.audit()
        for group, pool in enumerate(self.manager.pools):
            if pool.num_free + pool.num_cached != pool.num_blocks:
                raise BlockError(
                    f"KV group {group}: {pool.num_free} free + {pool.num_cached} cached of {pool.num_blocks} blocks"
                )


def sample_rows(sequences: Sequence[TokenSequence]) -> SampleRows:
    """The sampler's settings for the next token of each sequence."""
    params = [sequence.request.params for sequence in sequences]
    return SampleRows(
        temperature=[p.temperature for p in params],
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        seed=[sequence.request.seed for sequence in sequences],
        sample=[sequence.index for sequence in sequences],
        position=[len(sequence.tokens) for sequence in sequences],
    )


def best_logprobs(logits: Array, token: int, count: int) -> dict[int, float]:
    """Log-probabilities (of the unmodified logits) of the `count` best tokens, best first, and of the chosen one.

    float64: log p_i = l_i - M - log(sum exp(l - M)).
    """
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    best: list[int] = []
    if count:
        candidates = np.argpartition(-wide, min(count, len(wide)) - 1)[:count]
        # argpartition is free to choose among equals at the edge; ids decide, as everywhere
        edge = wide[candidates].min()
        candidates = np.concatenate([np.flatnonzero(wide > edge), np.flatnonzero(wide == edge)])[:count]
        best = sorted((int(i) for i in candidates), key=lambda i: (-wide[i], i))
    if token not in best:
        best.append(token)
    return {i: float(wide[i]) for i in best}
