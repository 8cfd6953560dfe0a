"""Who runs this step, with how many tokens: continuous batching, first come first served, prompts in chunks.

A step has a budget of tokens. Sequences that decode take one each, first, and never wait for a prompt; the rest of the
budget goes to prompt chunks in order of arrival (SplitFuse; Agrawal et al. 2023, "SARATHI"). When blocks run out, the
request that arrived last loses all of its blocks and waits again at its place in the queue; what it had generated is
kept and its K/V computed anew, to the same bits, since a token's arithmetic depends on its position alone. The oldest
request is never a victim, so somebody always gets on.

Policy only: blocks are the manager's, arrays the device's.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from cupaged.errors import OutOfBlocks
from cupaged.memory import BlockManager, PlanItem, blocks_for
from cupaged.request import Request, RequestState, Sequence

PROMPT_ROWS = 64  # tokens of prompts whose log-probabilities are wanted, in one step: their logits are V floats each


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a sequence from position `start`. `samples`: the last of them is its last known token, so that
    its logits choose the next one. `rows`: of so many of the last tokens the logits are wanted."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    rows: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does: first the plan items (copies), then one forward pass over all chunks."""

    chunks: tuple[Chunk, ...] = ()
    items: tuple[PlanItem, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True)
class _Draft:
    """A step being put together; a victim's chunks are taken out again."""

    budget: int
    prompt_rows: int = PROMPT_ROWS
    chunks: list[Chunk] = field(default_factory=list)
    items: list[PlanItem] = field(default_factory=list)
    preempted: bool = False


class Scheduler:
    """Queues of requests over a block manager. `max_tokens` and `max_sequences` bound a step."""

    def __init__(self, manager: BlockManager, max_tokens: int, max_sequences: int) -> None:
        self.manager = manager
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by arrival
        self.preemptions = 0

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.arrival)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and give its blocks back."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self.release(request)

    def release(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.tables is not None:
                self.manager.free(sequence.tables)
                sequence.tables = None

    def schedule(self) -> StepPlan:
        """The next step. Blocks for it are taken; the engine commits or drops them."""
        draft = _Draft(self.max_tokens)
        for decoding in (True, False):
            for request in list(self.running):
                for sequence in list(request.live_sequences):
                    if (sequence.num_remaining == 1) == decoding and request.state is RequestState.RUNNING:
                        self._take(draft, sequence)
        self._admit(draft)
        return StepPlan(tuple(draft.chunks), tuple(draft.items))

    def _take(self, draft: _Draft, sequence: Sequence) -> None:
        """Schedule as much of a running sequence as budget and blocks allow, making room if need be."""
        if len(draft.chunks) >= self.max_sequences:
            return
        count = min(sequence.num_remaining, draft.budget)
        scored = sequence.request.wants_prompt_logprobs
        if scored:
            count = min(count, draft.prompt_rows)
        if count == 0:
            return
        assert sequence.tables is not None  # running sequences have tables
        while True:
            try:
                items = self.manager.prepare_append(sequence.tables, count)
                break
            except OutOfBlocks:
                victim = self.running[-1]
                self._preempt(draft, victim)
                if victim is sequence.request:
                    return
        start = sequence.num_computed
        samples = count == sequence.num_remaining
        draft.chunks.append(Chunk(sequence, start, count, samples, count if scored else int(samples)))
        draft.prompt_rows -= count if scored else 0
        draft.items += items
        draft.budget -= count

    def _admit(self, draft: _Draft) -> None:
        """Let waiting requests in, in order, while the whole of the first one's tokens and one more fit.

        Admitting what fits only in part would have it preempted soon; and after a preemption nobody is admitted in the
        same step, so that blocks just freed serve those who needed them.
        """
        while self.waiting and not draft.preempted and draft.budget and len(self.running) < self.max_sequences:
            request = self.waiting[0]
            sequences = list(request.live_sequences)
            if any(
                sum(self._blocks(group, sequence) for sequence in sequences) > pool.num_free - self._promised(group)
                for group, pool in enumerate(self.manager.pools)
            ):
                return
            self.waiting.pop(0)
            request.state = RequestState.RUNNING
            insort(self.running, request, key=lambda r: r.arrival)
            for sequence in sequences:
                sequence.tables = self.manager.create()
                self._take(draft, sequence)

    def _blocks(self, group: int, sequence: Sequence) -> int:
        """Blocks of a KV group for all known tokens of a sequence and one more."""
        tokens = min(len(sequence.tokens) + 1, self.manager.longest_sequence)
        return blocks_for(tokens, self.manager.groups[group].block_size)

    def _promised(self, group: int) -> int:
        """Blocks that running sequences still need for tokens that are known already, and one more each."""
        return sum(
            max(0, self._blocks(group, sequence) - sequence.tables.tables[group].num_blocks)
            for request in self.running
            for sequence in request.live_sequences
            if sequence.tables is not None
        )

    def _preempt(self, draft: _Draft, victim: Request) -> None:
        """Take a running request's blocks away; it waits again, at its place by arrival."""
        draft.preempted = True
        gone = [chunk for chunk in draft.chunks if chunk.sequence.request is victim]
        draft.chunks = [chunk for chunk in draft.chunks if chunk.sequence.request is not victim]
        draft.budget += sum(chunk.count for chunk in gone)
        draft.prompt_rows += sum(chunk.rows for chunk in gone if victim.wants_prompt_logprobs)
        self.release(victim)
        self.running.remove(victim)
        victim.state = RequestState.WAITING
        victim.preemptions += 1
        self.preemptions += 1
        self.add(victim)
