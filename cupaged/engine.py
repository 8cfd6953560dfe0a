"""The engine: requests in, pieces of their results out. One step = schedule -> copies -> forward -> sample -> commit.

Not thread-safe: one thread at a time owns an engine (`LLM` holds a lock around it).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from cupaged.beams import advance
from cupaged.budget import TokenBudget
from cupaged.cache import PagedKVCache
from cupaged.choosing import Outcome, choose
from cupaged.device.base import Device
from cupaged.errors import BlockError, RequestError, StepError, shown
from cupaged.forward import ForwardPasses
from cupaged.interrupts import uninterrupted
from cupaged.kernels.interface import Array
from cupaged.logprobs import best_logprobs, log_softmax
from cupaged.memory import BlockManager, CopyBlock, PlanItem, frame_of, group_stats
from cupaged.model.config import ModelConfig
from cupaged.model.decoder import Decoder
from cupaged.outputs import FinishReason, StreamPiece
from cupaged.registry import MakeDetokenizer, Registry, for_one
from cupaged.request import Request, RequestState
from cupaged.request import Sequence as TokenSequence
from cupaged.request_checks import RequestChecks
from cupaged.residency import Speeds
from cupaged.sampling import SamplingParams
from cupaged.scheduler import Scheduler
from cupaged.stats import EngineStats, stats_of
from cupaged.step_logits import StepLogits
from cupaged.step_plan import Chunk, StepPlan
from cupaged.swap import SwapEngine

_log = logging.getLogger("cupaged")


class Engine:
    """Serves requests on one decoder with one cache per KV group.

    `max_model_len`: positions of the longest sequence, at most what the pool holds. `eos_ids` end a text.
    `make_detokenizer(skip_special_tokens)`: None for a model without a tokenizer; texts are then empty. `pace`: see
    budget.py.
    """

    def __init__(
        self, config: ModelConfig, decoder: Decoder, caches: Sequence[PagedKVCache], manager: BlockManager,
        device: Device, *, max_model_len: int, max_tokens: int, max_sequences: int, eos_ids: frozenset[int],
        make_detokenizer: MakeDetokenizer | None = None, encode: Callable[[str], list[int]] | None = None,
        pace: float = math.inf,
    ) -> None:  # fmt: skip
        self.config = config
        self.decoder = decoder
        self.caches = list(caches)
        self.manager = manager
        self.device = device
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(manager, max_tokens, max_sequences)
        self.scheduler.budget = TokenBudget(pace)
        self.scheduler.room.block_bytes = [cache.bytes_per_block for cache in self.caches]
        self.scheduler.room.speeds = Speeds(unified=device.unified)
        self.swaps = SwapEngine(device, self.caches)
        self.eos_ids = eos_ids
        self.num_steps = 0
        has_text = make_detokenizer is not None
        checks = RequestChecks(config.vocab_size, max_model_len, max_sequences, manager, encode, has_text)
        self._peaks = [0] * len(manager.pools)
        self._peak_waste = [0] * len(manager.pools)
        self.passes = ForwardPasses(config, decoder, len(self.caches), manager, device, max_tokens, max_sequences)
        self._registry = Registry(checks, eos_ids, make_detokenizer)
        self._requests = self._registry.by_id
        self._pending: list[StreamPiece] = []

    # -- requests

    @uninterrupted
    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
        priority: int = 0,
        watched: bool = True,
        followed: bool = True,
    ) -> str:
        """Queue a request; returns its id. A smaller `priority` goes first, then who came earlier.

        watched: somebody reads the tokens as they come, so that prompts computed beside it shall leave it its pace.
        followed: False for one of which `step` shall give the last piece of each output only, with no text but what it
        ends with; `request(id).output()` has all of it at any time.

        RequestError (CapacityError for lengths), and nothing queued, if it cannot be served: empty, an id outside the
        vocabulary, too long, an id that is in use.
        """
        request = self._registry.new(prompt_ids, params, request_id, prompt, priority)
        request.watched, request.followed = watched, followed
        self._start(request)
        return request.request_id

    @uninterrupted
    def fork(
        self,
        request_id: str,
        token_ids: Sequence[int] = (),
        params: SamplingParams | None = None,
        *,
        index: int = 0,
        length: int | None = None,
        new_id: str | None = None,
    ) -> str:
        """Branch off a request: a new one that goes on from its tokens so far, sharing the blocks of their K/V.

        The prompt of the new request are the tokens of the other one (prompt and output; of several outputs those of
        `index`), or the first `length` of them, and then `token_ids`. It gives what `add_request` with that prompt
        gives, and differs from it in nothing but the work: `usage.cached_tokens` of the prompt need not be computed.
        So a fork may be taken at any time, and parent and child go on, end, are aborted, preempted and forgotten each
        by itself. From a request that has ended, or at a `length` that cuts into what is computed, it is the prefix
        cache that finds what is known; with prompt_logprobs the whole prompt is computed.

        params: by default those of the other request, for one output. Returns the id of the new request. RequestError:
        no such request or output, or what `add_request` refuses.
        """
        line, tokens = self._registry.line(request_id, index, length)
        if params is None:
            params = for_one(line.request.params)
        try:
            continuation = list(token_ids)
        except TypeError:
            raise RequestError(f"token_ids: a list of token ids is needed, got {shown(token_ids)}") from None
        request = self._registry.new([*tokens, *continuation], params, new_id, None, line.request.rank[0])
        computed = line.num_computed
        shared = 0 < computed <= len(tokens) and computed < len(request.prompt_ids) and params.prompt_logprobs is None
        if self._start(request) and shared:
            self.scheduler.fork(line, request.sequences[0])
            request.cached_tokens = computed
            request.stem = len(request.prompt_ids) if len(request.sequences) > 1 else None
        return request.request_id

    def _start(self, request: Request) -> bool:
        """Queue a new request. False: there is nothing to do for it, and it has ended."""
        if request.params.max_tokens == 0:
            for sequence in request.sequences:
                self._finish(sequence, "length", None, [])
            return False
        self.scheduler.add(request)
        return True

    def check_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as plain ints, if this engine can serve it; RequestError otherwise, naming value and limit."""
        return self._registry.checks.check(prompt_ids, params)

    @uninterrupted
    def abort(self, request_id: str, reason: str | None = None) -> bool:
        """End a request at once; its blocks are free again. False if there is no such request or it has ended.

        `reason` becomes the stop_reason of its outputs.
        """
        request = self._requests.get(request_id)
        if request is None or request.state.terminal:
            return False
        for sequence in request.live_sequences:
            self._finish(sequence, "abort", reason, [], state=RequestState.ABORTED)
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

    def stats(self) -> EngineStats:
        """Counters and the state of memory; O(sequences)."""
        return stats_of(self, self._peaks, self._peak_waste)

    # -- steps

    @uninterrupted
    def step(self) -> list[StreamPiece]:
        """Run one step; returns the pieces that it brought, the ends of aborted requests among them."""
        began = time.perf_counter()
        self._settle()
        plan = self.scheduler.schedule()
        while self._only_copies(plan):
            plan = self.scheduler.schedule()
        peaks = [max(peak, pool.num_used) for peak, pool in zip(self._peaks, self.manager.pools, strict=True)]
        grown, self._peaks = peaks != self._peaks, peaks
        try:
            self._run_items(plan.items)
            for request in plan.outgrown:
                # Its best outputs may be ones that had ended before, which do not show it.
                _log.warning("request %s: its beams outgrew the KV memory; the search ended early", request.request_id)
                for sequence in request.live_sequences:
                    self._finish(sequence, "length", "kv_memory", [])
            chunks = [chunk for chunk in plan.chunks if chunk.sequence.tables is not None]  # others failed just now
            if chunks:
                self._run_chunks(chunks)
        finally:
            # Whatever was not committed (an interrupt, a failing forward pass) is as if it had not been scheduled.
            for chunk in plan.chunks:
                tables = chunk.sequence.tables
                if tables is not None and tables.num_prepared > tables.num_tokens:
                    self.manager.commit_append(tables, 0)
        self.num_steps += 1
        decodes = sum(chunk.count == 1 for chunk in plan.chunks)
        self.scheduler.budget.note(decodes, plan.num_tokens - decodes, time.perf_counter() - began)
        if grown:
            self._peak_waste = [group_stats(self.manager, group).waste_slots for group in range(len(peaks))]
        pieces, self._pending = self._pending, []
        return pieces

    def _run_items(self, items: Sequence[PlanItem]) -> None:
        """Copies on write: all of a step's in one call per KV group, before anything is written. Then swaps start."""
        if not items:
            return
        copies = [item for item in items if isinstance(item, CopyBlock)]
        interrupt: BaseException | None = None
        for group, cache in enumerate(self.caches):
            own = [item for item in copies if item.group == group]
            if own:
                pairs = ([frame_of(item.source) for item in own], [frame_of(item.destination) for item in own])
                try:
                    self.device.ops.copy_blocks(cache.view, *pairs)
                except BaseException as error:
                    for item in own:
                        self._lose(item, error)
                    interrupt = interrupt if isinstance(error, Exception) else error
        for item in copies:
            self.manager.complete(item.ticket)
        self.swaps.start([item for item in items if not isinstance(item, CopyBlock)])
        if interrupt is not None:
            raise interrupt

    def _only_copies(self, plan: StepPlan) -> bool:
        """Where a step has nothing to do but to wait for copies: do that, and say so."""
        if plan.chunks or plan.outgrown or self._pending or not (plan.items or self.swaps.busy):
            return False
        self._run_items(plan.items)
        self.swaps.wait()
        self._settle()
        return True

    def _settle(self) -> None:
        """Copies that are done: their frames are free for others. One that failed ends those who need the block."""
        if not self.swaps.busy:
            return
        for item, error in self.swaps.finished():
            if error is not None:
                self._lose(item, error)
            self.manager.complete(item.ticket)
        speed = self.swaps.speed
        self.scheduler.room.speeds = Speeds(
            speed.get("to_host"), speed.get("to_device"), self.passes.prefill_speed, self.device.unified
        )

    def _lose(self, item: PlanItem, error: BaseException) -> None:
        """A copy failed: requests that have its destination in their tables end."""
        for request in list(self._requests.values()):
            tables = [sequence.tables for sequence in request.live_sequences if sequence.tables is not None]
            if any(item.destination in each.tables[item.group].refs for each in tables):
                self._fail(request, StepError(f"a KV block could not be copied ({error})"))

    def _run_chunks(self, chunks: Sequence[Chunk]) -> None:
        now = time.monotonic()
        for chunk in chunks:
            request = chunk.sequence.request
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
        try:
            logits = self._forward(chunks)
            outcomes = choose(chunks, logits, self.num_steps)
            if any(_looks_at_logits(chunk) for chunk in chunks):
                _ = logits.host  # brought here now: what fails does so while nothing has changed
        except Exception as error:
            requests = list(dict.fromkeys(chunk.sequence.request for chunk in chunks))
            if len(requests) == 1:
                self._fail(requests[0], error)
                return
            # Which request is to blame? Each alone: what a token computes does not depend on its company, and K/V
            # written twice are the same K/V.
            for request in requests:
                if not request.state.terminal:
                    self._run_chunks([chunk for chunk in chunks if chunk.sequence.request is request])
            return
        # Only now does anything change: an interrupt before this leaves every sequence as it was.
        first = 0
        beams: dict[Request, list[Array]] = {}
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            first += chunk.rows
            self._accept(chunk, logits, first, outcome)
            if chunk.samples and chunk.sequence.request.search is not None:
                beams.setdefault(chunk.sequence.request, []).append(logits.host[first - 1])
        interrupts = [self._advance_beams(request, rows) for request, rows in beams.items()]
        for interrupt in filter(None, interrupts):
            raise interrupt

    def _forward(self, chunks: Sequence[Chunk]) -> StepLogits:
        """Logits of the rows that the chunks want, in order."""
        return self.passes.run(chunks, self.caches)

    def _accept(self, chunk: Chunk, logits: StepLogits, stop: int, outcome: Outcome) -> None:
        """What a chunk brought: log-probabilities of its prompt tokens, next tokens, or the end of its request.

        Its rows of the logits are those before `stop`.
        """
        sequence = chunk.sequence
        request = sequence.request
        if sequence.tables is None:  # the request has ended with another of its chunks
            return
        try:
            if isinstance(outcome, Exception):
                raise outcome
            if request.wants_prompt_logprobs:
                self._score_prompt(chunk, logits.host[stop - chunk.rows : stop])
            self.manager.commit_append(sequence.tables, chunk.count)
            self.manager.remember(sequence.tables, sequence.tokens, request.params.cache_salt)
            self.manager.slide(sequence.tables)
            if request.stem == sequence.tables.num_tokens:
                self.scheduler.spread(request)
            for taker, token in outcome:
                self._append(taker, logits, stop - 1, token)
        except Exception as error:
            self._fail(request, error)

    def _advance_beams(self, request: Request, rows: list[Array]) -> BaseException | None:
        """Returns what came up that is no failure of a request: a KeyboardInterrupt of its logits_processor, say. That
        ends the request, too: the K/V of its beams are committed, and nothing is left for it to compute."""
        if request.state.terminal:  # one of its chunks failed
            return None
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        try:
            advance(request, rows, self.scheduler)
        except BaseException as error:
            self._fail(request, error)
            return None if isinstance(error, Exception) else error
        if not request.sequences:
            self._end(request, RequestState.FINISHED)
        return None

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

    def _append(self, sequence: TokenSequence, logits: StepLogits, row: int, token: int) -> None:
        """A new token, chosen from a row of the logits: its log-probabilities, its text, and whether it is the last."""
        request, params = sequence.request, sequence.request.params
        sequence.tokens.append(token)
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        logprobs = None
        if params.logprobs is not None:
            logprobs = best_logprobs(logits.host[row], token, params.logprobs)
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs[token]
        elif params.picks:
            sequence.cumulative_logprob += float(log_softmax(logits.host[row])[token])
        if token in request.stop_ids:
            text = sequence.stream.push(token)[0] if params.include_stop_str_in_output else ""
            self._finish(sequence, "stop", token, [token], text, logprobs)
            return
        text, stop = sequence.stream.push(token) if request.followed else ("", sequence.stream.put(token))
        if stop is not None:
            self._finish(sequence, "stop", stop, [token], text, logprobs)
        elif len(sequence.tokens) >= request.max_total:
            self._finish(sequence, "length", None, [token], text, logprobs)
        elif request.followed and not params.picks:
            listed = None if logprobs is None else [logprobs]
            self._pending.append(StreamPiece(request.request_id, sequence.index, text, [token], listed))

    def _finish(
        self, sequence: TokenSequence, reason: FinishReason, stop: int | str | None, tokens: list[int], text: str = "",
        logprobs: dict[int, float] | None = None, state: RequestState = RequestState.FINISHED,
    ) -> None:  # fmt: skip
        """End a sequence; the request ends with its last one. Exactly one piece of each output has a finish reason."""
        request = sequence.request
        rest, matched = sequence.stream.finish()
        if matched is not None and reason == "length":
            reason, stop = "stop", matched
        sequence.finish_reason, sequence.stop_reason = reason, stop
        self.scheduler.release_sequence(sequence)
        self.scheduler.room.ends += 1
        ended = not request.live_sequences
        if not request.params.picks:
            listed = None if logprobs is None else [logprobs]
            usage = request.usage() if ended else None
            piece = StreamPiece(request.request_id, sequence.index, text + rest, tokens, listed, reason, stop, usage)
            self._pending.append(piece)
        if ended:
            self._end(request, state)

    def _end(self, request: Request, state: RequestState) -> None:
        """A request is over; where its outputs had to be picked, they go out now."""
        self.scheduler.remove(request)
        request.state = state
        request.finished_time = time.monotonic()
        if request.search is not None:
            request.sequences = request.reports
        if request.params.picks:
            self._pending += request.pieces()

    def _fail(self, request: Request, error: BaseException) -> None:
        """End one request because its step failed; the others go on."""
        kind = "" if isinstance(error, StepError) else f"{type(error).__name__}: "
        request.error = f"request {request.request_id}: {kind}{error}"
        for sequence in request.live_sequences:
            self._finish(sequence, "error", None, [], state=RequestState.ERROR)

    def check_idle(self) -> None:
        """BlockError unless free + cached == total in every pool; for when no request is left."""
        while self.swaps.busy:  # of requests that have ended
            self.swaps.wait()
            self._settle()
        self.manager.audit()
        for group, host in enumerate(self.manager.host_pools):
            if host is not None and host.num_free != host.num_blocks:
                raise BlockError(f"KV group {group}: {host.num_free} free of {host.num_blocks} blocks of the host pool")
        for group, pool in enumerate(self.manager.pools):
            if pool.num_free + pool.num_cached != pool.num_blocks:
                raise BlockError(
                    f"KV group {group}: {pool.num_free} free + {pool.num_cached} cached of {pool.num_blocks} blocks"
                )


def _looks_at_logits(chunk: Chunk) -> bool:
    """Whether rows of a chunk are looked at on the host when its token is accepted."""
    request = chunk.sequence.request
    chooses = request.params.logprobs is not None or request.params.picks
    return (chunk.samples and chooses) or request.wants_prompt_logprobs
