"""Who runs this step, with how many tokens: continuous batching, first come first served, prompts in chunks.

A step has a budget of tokens. Sequences that decode take one each, first, and never wait for a prompt; the rest of the
budget goes to prompt chunks in order of arrival (SplitFuse; Agrawal et al. 2023, "SARATHI"). When blocks run out, the
request that arrived last loses all of its blocks and waits again at its place in the queue; what it had generated is
kept and its K/V computed anew, to the same bits, since a token's arithmetic depends on its position alone. The oldest
request is never a victim, so somebody always gets on.

The sequences of one request are a group: they are let in and preempted together. What they have in common is computed
once (`Request.stem`). Beams step together or not at all, for the next ones are chosen among all. A request that is
alone and outgrows the pool: of its samples the last ones wait until others have ended; beams end here, with what they
have.

Policy only: blocks are the manager's, arrays the device's.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable

from cupaged.ahead import Ahead
from cupaged.budget import TokenBudget
from cupaged.errors import OutOfBlocks
from cupaged.foresight import Foresight
from cupaged.memory import BlockManager, Match, PlanItem, blocks_for
from cupaged.preemption import Given, Room
from cupaged.request import Request, RequestState, Sequence, common_stem
from cupaged.step_plan import Chunk, Draft, StepPlan


class Scheduler:
    """Queues of requests over a block manager. `max_tokens` and `max_sequences` bound a step."""

    def __init__(self, manager: BlockManager, max_tokens: int, max_sequences: int) -> None:
        self.manager = manager
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []  # by rank
        self.preemptions = 0
        self.forks = 0
        self.room = Room(self, manager)
        self.step = 0
        self.foresight: Foresight | None = None  # None: admit what fits at present, take blocks as they are needed
        self.ahead: Ahead | None = None
        self.look_ahead(True)
        self.budget = TokenBudget(math.inf)  # prompts take all that decodes leave of a step

    def look_ahead(self, wanted: bool) -> None:
        """Predict lengths, to admit requests and to take blocks by; or do not. Counters begin anew."""
        self.foresight = Foresight(self.manager) if wanted else None
        self.ahead = None if self.foresight is None else Ahead(self.manager, self.foresight)

    # -- requests and their blocks

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.rank)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and give its blocks back."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self.release(request)
        self.room.ends += 1

    def release(self, request: Request) -> None:
        """Give back the blocks of all sequences of a request."""
        for sequence in request.sequences:
            self.release_sequence(sequence)

    def release_sequence(self, sequence: Sequence) -> None:
        """Give back the blocks of one sequence; those that others share stay theirs."""
        if sequence.tables is not None:
            if self.foresight is not None and self.ahead is not None:
                self.foresight.ended(sequence)
                self.ahead.ended(sequence, self.step)
            self.manager.free(sequence.tables)
            sequence.tables = None

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence without blocks share those of another; no block is taken. Whoever writes first copies."""
        assert parent.tables is not None and child.tables is None
        child.tables = self.manager.fork(parent.tables)
        child.request.forks += 1
        self.forks += 1

    def spread(self, request: Request) -> None:
        """The stem is computed: from here on each sequence has blocks of its own, the stem's shared by all."""
        leader, *others = request.live_sequences
        for sequence in others:
            self.fork(leader, sequence)
        request.stem = None

    # -- a step

    def schedule(self) -> StepPlan:
        """The next step. Blocks for it are taken; the engine commits or drops them."""
        self.step += 1
        draft = Draft(self.max_tokens, [0] * len(self.manager.groups))
        self.room.fetch_ahead(draft)
        others = [request for request in list(self.running) if not self._decode(draft, request)]
        if draft.preempted:
            others = list(self.running)
        if others or self.waiting:  # prompts beside those that decode
            if any(chunk.sequence.request.watched for chunk in draft.chunks):
                draft.budget = self.budget.prompt_tokens(len(draft.chunks), draft.budget)
            for request in others:
                self._take_request(draft, request, decoding=False)
            self._admit(draft)
        if self.foresight is not None and self.waiting and self.foresight.is_holding(self.waiting[0]):
            spare = [0 if self.ahead is None else self.ahead.unused(g) for g in range(len(self.manager.pools))]
            available = [pool.num_available + spare[g] - self.promised(g) for g, pool in enumerate(self.manager.pools)]
            self.foresight.watch(self.step, available)
        self.room.note_reads(draft)
        return StepPlan(tuple(draft.chunks), tuple(draft.items), tuple(draft.outgrown))

    def _decode(self, draft: Draft, request: Request) -> bool:
        """Schedule those sequences of a running request that decode. True: it has no others."""
        if request.stem is not None or request.params.beam_width is not None:
            self._take_request(draft, request, decoding=True)
            return False
        alone = True
        for sequence in request.live_sequences:
            if sequence.num_remaining != 1:
                alone = False
            elif request.state is RequestState.RUNNING:
                self._take_next(draft, sequence)
        return alone

    def _take_next(self, draft: Draft, sequence: Sequence) -> None:
        """`_take` of a sequence that decodes. Nearly always its last block has room, and is its own."""
        tables = sequence.tables
        if (
            tables is not None and draft.budget > 0 and len(draft.chunks) < self.max_sequences
            and not any(draft.reserved) and not self.manager.arriving
            and not sequence.request.wants_prompt_logprobs and self.manager.append_in_place(tables)
        ):  # fmt: skip
            draft.chunks.append(Chunk(sequence, tables.num_tokens, 1, True, 1))
            draft.budget -= 1
        else:
            self._take(draft, sequence)

    def _take_request(self, draft: Draft, request: Request, decoding: bool) -> None:
        """Schedule those sequences of a running request that decode, or those that compute known tokens."""
        sequences = request.live_sequences
        if request.stem is not None:
            sequences = sequences[:1]
        elif request.params.beam_width is not None and all(sequence.num_remaining == 1 for sequence in sequences):
            if decoding:
                self._take_together(draft, request, sequences)
            return
        for sequence in sequences:
            if request.state is RequestState.RUNNING and (sequence.num_remaining == 1) == decoding:
                self._take(draft, sequence)

    def _take_together(self, draft: Draft, request: Request, sequences: list[Sequence]) -> None:
        """All beams of a request, or none."""
        if request.state is not RequestState.RUNNING or draft.budget < len(sequences):
            return
        if len(draft.chunks) + len(sequences) > self.max_sequences:
            return
        for sequence in sequences:
            if not self._take(draft, sequence):
                self.withdraw(draft, lambda chunk: chunk.sequence.request is request)
                return

    def _take(self, draft: Draft, sequence: Sequence) -> bool:
        """Schedule as much of a running sequence as budget and blocks allow, making room if need be."""
        request = sequence.request
        if len(draft.chunks) >= self.max_sequences or draft.budget <= 0:
            return False
        if sequence.tables is None and not self._resume(draft, sequence):
            return False
        count = min(self._goal(sequence) - sequence.num_computed, draft.budget)
        scored = request.wants_prompt_logprobs
        if scored:
            count = min(count, draft.prompt_rows)
        if count <= 0 or sequence.tables is None or not self.manager.settled(sequence.tables):
            return False  # its blocks are on their way
        while (items := self._prepare(draft, sequence, count)) is None:
            if sequence.tables is None or request.state is not RequestState.RUNNING:
                return False
            if self._give_back():
                continue
            count = min(count, self.room.most_tokens(request))
            given = self.room.make(draft, request, self.manager.blocks_needed(sequence.tables, count))
            if given is Given.LATER or (given is Given.NEVER and not self._give_up(draft, sequence)):
                return False
        start = sequence.num_computed
        samples = start + count == len(sequence.tokens)
        draft.chunks.append(Chunk(sequence, start, count, samples, count if scored else int(samples)))
        draft.prompt_rows -= count if scored else 0
        draft.items += items
        draft.budget -= count
        request.copies += len(items)
        return True

    def _goal(self, sequence: Sequence) -> int:
        """How many of a sequence's tokens may be computed now."""
        request = sequence.request
        if request.stem is not None:
            return request.stem
        if request.params.beam_width is not None:
            beams = request.live_sequences
            if any(beam.num_remaining > 1 for beam in beams) and len(beams) > 1:
                return len(sequence.tokens) - 1  # the last tokens of all beams are computed in one step
        return len(sequence.tokens)

    def _resume(self, draft: Draft, sequence: Sequence) -> bool:
        """A table again for a sample that `_suspend` had taken it from, once all of it fits."""
        if draft.preempted:
            return False
        self._give_back()
        if any(
            self._blocks(group, sequence) > pool.num_available - self.promised(group)
            for group, pool in enumerate(self.manager.pools)
        ):
            return False
        self._begin(draft, sequence, self._match(sequence, len(sequence.tokens)))
        return True

    # -- room

    def _prepare(self, draft: Draft, sequence: Sequence, count: int) -> list[PlanItem] | None:
        """Blocks for the next tokens, if they are free and not reserved."""
        assert sequence.tables is not None
        if any(draft.reserved) and not self.room.is_there(draft, self.manager.blocks_needed(sequence.tables, count)):
            return None
        blocks = sum(table.num_blocks for table in sequence.tables.tables)
        try:
            items = self.manager.prepare_append(sequence.tables, count)
        except OutOfBlocks:
            return None
        if self.ahead is not None and count == 1 and sum(table.num_blocks for table in sequence.tables.tables) > blocks:
            self.ahead.extend(sequence, self.step, self.promised)
        return items

    def _give_back(self) -> bool:
        """Blocks taken ahead go back; whether there were any."""
        return self.ahead is not None and self.ahead.give_back(self.step)

    def _give_up(self, draft: Draft, sequence: Sequence) -> bool:
        """There is nobody to take blocks from for this sequence: its request, or a sample of it, stops. True: that made
        room."""
        request = sequence.request
        if len(self.running) > 1:
            self.room.stop_itself(draft, request)
            return False
        holders = [other for other in request.live_sequences if other.tables is not None]
        if request.params.beam_width is None and len(holders) > 1:
            self._suspend(draft, holders[-1])
            return sequence.tables is not None
        draft.outgrown.append(request)
        return False

    def _suspend(self, draft: Draft, sequence: Sequence) -> None:
        """Take the blocks of one sample of a request; its K/V are computed anew when there is room."""
        self.withdraw(draft, lambda chunk: chunk.sequence is sequence)
        self.release_sequence(sequence)
        draft.preempted = True
        sequence.request.preemptions += 1
        self.preemptions += 1

    def withdraw(self, draft: Draft, gone: Callable[[Chunk], bool]) -> None:
        """Take chunks out of the step again. Their copies stay in the plan: the blocks are in the tables already."""
        for chunk in [chunk for chunk in draft.chunks if gone(chunk)]:
            draft.chunks.remove(chunk)
            draft.budget += chunk.count
            draft.prompt_rows += chunk.rows if chunk.sequence.request.wants_prompt_logprobs else 0
            if chunk.sequence.tables is not None:
                self.manager.commit_append(chunk.sequence.tables, 0)

    # -- admission

    def _admit(self, draft: Draft) -> None:
        """Let waiting requests in, in order, while the whole of the first one's tokens and one more each fit.

        Admitting what fits only in part would have it preempted soon; and after a preemption nobody is admitted in the
        same step, so that blocks just freed serve those who needed them. A request that is alone is let in whatever it
        needs: its sequences then take turns.
        """
        while self.waiting and not draft.preempted and not draft.outgrown and draft.budget:
            request = self.waiting[0]
            if self.room.is_parked(request) or self._suspended:
                self._give_back()
            if self.running and (self._suspended or self.room.must_wait(request)):
                return
            if self.room.is_parked(request) and not self.room.bring_back(draft, request):
                return
            stem = common_stem(request.live_sequences) if len(request.live_sequences) > 1 else None
            leader = request.live_sequences[0]
            match = Match()
            if not self.room.is_parked(request):
                match = self._match(leader, len(leader.tokens) if stem is None else stem)
                if self.running and not self._may_begin(request, stem or 0, match):
                    return
            self.waiting.pop(0)
            request.state = RequestState.RUNNING
            insort(self.running, request, key=lambda r: r.rank)
            if self.room.is_parked(request):
                for decoding in (True, False):
                    self._take_request(draft, request, decoding)
                continue
            request.stem = stem
            self._begin(draft, leader, match)
            if request.first_scheduled_time is None:
                request.cached_tokens = min(match.num_tokens, len(request.prompt_ids) - 1)
            self._take(draft, leader)

    def _match(self, sequence: Sequence, end: int) -> Match:
        """What is known of a sequence's first `end` tokens, but for the last: that one is computed."""
        request, prefixes = sequence.request, self.manager.prefixes
        if prefixes is None or request.wants_prompt_logprobs:
            return Match()  # the log-probabilities need every token's logits
        return prefixes.match(sequence.tokens, end - 1, request.params.cache_salt)

    def _begin(self, draft: Draft, sequence: Sequence, match: Match) -> None:
        """A table for a sequence that has none, with what is known of its tokens."""
        try:
            sequence.tables, items = self.manager.adopt(match)
            draft.items += items
        except OutOfBlocks:  # it was let in because it is alone, whatever it needs
            sequence.tables = self.manager.create()

    @property
    def _suspended(self) -> bool:
        """Whether samples of a running request wait for room: then they come first."""
        return any(
            sequence.tables is None
            for request in self.running
            if request.stem is None
            for sequence in request.live_sequences
        )

    def _may_begin(self, request: Request, stem: int, match: Match) -> bool:
        """Whether a waiting request can run beside those that do: in places of a step, in blocks now, and in blocks
        that these are expected to need."""
        if sum(other.places for other in self.running) + request.places > self.max_sequences:
            return False
        sequences, pools = request.live_sequences, self.manager.pools
        needed = tuple(
            self._needed(group, sequences, stem) - self.manager.in_use(group, match) for group in range(len(pools))
        )
        while any(
            need > pool.num_available - self.promised(g)
            for g, (need, pool) in enumerate(zip(needed, pools, strict=True))
        ):
            if not self._give_back():
                return False
        return self.foresight is None or not self.foresight.holds_back(
            request, stem, match, needed, self.running, self.step, self.room.ends
        )

    def _needed(self, group: int, sequences: list[Sequence], stem: int) -> int:
        """Blocks of a KV group for sequences that have none: all known tokens and one more each, the stem's once."""
        shared = stem // self.manager.groups[group].block_size
        return shared + sum(self._blocks(group, sequence) - shared for sequence in sequences)

    def _blocks(self, group: int, sequence: Sequence) -> int:
        """Blocks of a KV group for all known tokens of a sequence and one more."""
        tokens = min(len(sequence.tokens) + 1, self.manager.longest_sequence)
        return blocks_for(tokens, self.manager.groups[group].block_size)

    def promised(self, group: int, besides: Request | None = None) -> int:
        """Blocks that running requests, all or all but one, still need for tokens that are known, and one more each."""
        return sum(self.promised_to(group, request) for request in self.running if request is not besides)

    def promised_to(self, group: int, request: Request) -> int:
        """Blocks that a request with blocks still needs for tokens that are known already, and one more each."""
        promised = 0
        shared = 0 if request.stem is None else request.stem // self.manager.groups[group].block_size
        for sequence in request.live_sequences:
            if sequence.tables is not None:
                promised += max(0, self._blocks(group, sequence) - sequence.tables.tables[group].num_blocks)
            elif request.stem is not None:
                promised += self._blocks(group, sequence) - shared
        return promised
