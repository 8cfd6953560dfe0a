"""Looking ahead: how long sequences will get, and whether a waiting request can run without somebody being preempted.

Nobody knows an output's length before it ends. But lengths of recent requests tell how long those that run will go on,
and so when their blocks come back. Admission asks for the **peak**: of the blocks in use at every predicted end from
now on, the most ("past-future" scheduling; Gong et al. 2025).

Predictions are soft. They hold a request back that could begin; they never stop one that runs, never keep one waiting
while nothing runs, and say nothing before some requests have ended. A request that is held back stays the first of
the queue. Results do not depend on any of this.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupaged.memory import BlockManager, Match, Pool, blocks_for, pool_of

if TYPE_CHECKING:
    from cupaged.request import Request, Sequence

WINDOW = 256  # lengths that are remembered of a class of prompts
FEWEST = 8  # lengths from which a quantile is taken
# Of the lengths that a sequence may still reach, the one to reckon with. Low: blocks come back all the time, and those
# that are kept free for a long answer stand idle. On lengths as ShareGPT's this avoids two of three preemptions at
# under 1 % of the throughput; larger quantiles avoid more and cost more.
QUANTILE = 0.2
PATIENCE = 8  # steps until a request that is held back is looked at again, if nobody ends before


class Lengths:
    """The last `window` lengths, kept sorted. Adding one takes O(window), asking O(log window)."""

    def __init__(self, window: int) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._window = window

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, length: int) -> None:
        if len(self._recent) == self._window:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(length)
        insort(self._sorted, length)

    def quantile_above(self, low: int, quantile: float) -> int | None:
        """The smallest length of which `quantile` of those above `low` are not longer; None if fewer than FEWEST are
        above it."""
        first = bisect_right(self._sorted, low)
        count = len(self._sorted) - first
        if count < FEWEST:
            return None
        return self._sorted[first + min(count - 1, int(quantile * count))]


class LengthPredictor:
    """Output lengths to expect, from those of recent sequences whose prompts were about as long (powers of two).

    A sequence that its own max_tokens cut off counts as that long. One that was aborted or failed does not count.
    """

    def __init__(self, window: int = WINDOW, quantile: float = QUANTILE) -> None:
        self.quantile = quantile
        self._window = window
        self._all = Lengths(window)
        self._classes: dict[int, Lengths] = {}

    def add(self, prompt: int, output: int) -> None:
        """A sequence with a prompt of so many tokens has ended after `output` tokens."""
        self._all.add(output)
        self._classes.setdefault(prompt.bit_length(), Lengths(self._window)).add(output)

    @property
    def ready(self) -> bool:
        """Whether enough is known for a prediction."""
        return len(self._all) >= FEWEST

    def remaining(self, prompt: int, done: int, most: int) -> int:
        """Tokens that a sequence still generates, which has generated `done` and may generate `most` more: 0 .. most.

        By its class, if that has enough lengths above `done`; by all classes, if these have. One that has outlived them
        is expected to go on for as long again: not to its limit, which may be the whole context, and would keep others
        out of an empty pool. Before anything is known, `most`.
        """
        same = self._classes.get(prompt.bit_length())
        length = None if same is None else same.quantile_above(done, self.quantile)
        if length is None:
            length = self._all.quantile_above(done, self.quantile)
        if length is None:
            return min(most, done) if self.ready else most
        return min(most, length - done)


@dataclass(frozen=True, slots=True)
class Occupant:
    """Something that holds blocks and will give them back after `steps` steps.

    own: blocks that come back. listed: blocks of its table, those it shares with others included. tokens: of it now;
    one more in each step, 0 for blocks that do not grow. window: of the KV group; with one, blocks do not become more
    than it spans.
    """

    own: int
    steps: int
    listed: int = 0
    tokens: int = 0
    window: int | None = None

    def blocks(self, step: int, block_size: int) -> int:
        """Blocks in so many steps from now, if it is still there then."""
        if not self.tokens:
            return self.own
        more = max(0, blocks_for(self.tokens + step, block_size) - self.listed)
        if self.window is not None:
            more = min(more, max(0, blocks_for(self.window, block_size) + 1 - self.own))
        return self.own + more


def peak(occupants: Iterable[Occupant], block_size: int) -> int:
    """The most blocks that will be in use at once. Blocks only become more between two ends, so ends are looked at.
    O(n^2)."""
    rest = sorted(occupants, key=lambda each: each.steps)
    most = 0
    for index, ending in enumerate(rest):
        if index == 0 or ending.steps != rest[index - 1].steps:
            most = max(most, sum(each.blocks(ending.steps, block_size) for each in rest[index:]))
    return most


@dataclass(slots=True)
class Held:
    """The head of the queue is held back since step `since`. needed: its blocks at that time, per KV group."""

    request: Request
    since: int
    needed: tuple[int, ...]
    tokens: tuple[int, ...]  # of its sequences, when it was held back
    steps: int  # for which it was expected to run
    looked: int
    ends: int
    avoided: bool = False


class Foresight:
    """Predictions about the requests of a scheduler. Counters: see `EngineStats`."""

    def __init__(self, manager: BlockManager, predictor: LengthPredictor | None = None) -> None:
        self.manager = manager
        self.predictor = predictor or LengthPredictor()
        self.held_back = 0
        self.avoided = 0
        self._held: Held | None = None

    def ended(self, sequence: Sequence) -> None:
        """A sequence has ended or lost its blocks. Its length counts if it has come to its end."""
        if sequence.finish_reason in ("stop", "length") and sequence.stop_reason != "kv_memory":
            self.predictor.add(len(sequence.request.prompt_ids), len(sequence.output_ids))

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that a sequence is expected to generate from now on."""
        request = sequence.request
        most = max(0, request.max_total - len(sequence.tokens))
        if request.params.beam_width is not None:  # beams go on while any of them may get better
            return most
        return self.predictor.remaining(len(request.prompt_ids), len(sequence.output_ids), most)

    # -- admission

    def is_holding(self, head: Request | None) -> bool:
        """Whether the first of the queue is being held back."""
        return self._held is not None and self._held.request is head

    def holds_back(
        self,
        request: Request,
        stem: int,
        match: Match,
        needed: tuple[int, ...],
        running: list[Request],
        step: int,
        ends: int,
    ) -> bool:
        """Whether a request that could begin shall wait, because blocks are expected to run out if it does not.

        needed: free blocks per KV group that it takes at once. step: the present one. ends: how many have ended.
        """
        if not self.predictor.ready or not running:
            return False
        held = self._held if self._held is not None and self._held.request is request else None
        if held is not None and held.ends == ends and step - held.looked < PATIENCE:
            return True
        if all(
            peak(self._occupants(group, request, stem, match, running), spec.block_size) <= pool.num_blocks
            for group, (spec, pool) in enumerate(zip(self.manager.groups, self.manager.pools, strict=True))
        ):
            self._held = None
            return False
        if held is None:
            self.held_back += 1
            live = request.live_sequences
            steps = max(self.remaining(sequence) for sequence in live)
            lengths = tuple(len(sequence.tokens) for sequence in live)
            self._held = Held(request, step, needed, lengths, steps, step, ends)
        else:
            held.looked, held.ends = step, ends
        return True

    def watch(self, step: int, available: list[int]) -> None:
        """While the head is held back, in each step: whether blocks, of which so many are available per KV group, would
        have run out by now if it had been let in."""
        held = self._held
        if held is None or held.avoided or step - held.since > held.steps:
            return
        for group, spec in enumerate(self.manager.groups):
            grown = sum(
                blocks_for(tokens + 1 + step - held.since, spec.block_size) - blocks_for(tokens + 1, spec.block_size)
                for tokens in held.tokens
            )
            if held.needed[group] + grown > available[group]:
                held.avoided = True
                self.avoided += 1
                return

    def _occupants(
        self, group: int, request: Request, stem: int, match: Match, running: list[Request]
    ) -> Iterator[Occupant]:
        """Who will hold blocks of a KV group if a waiting request is let in. Blocks that several use are one occupant,
        which stays until the last of them ends."""
        pool, size = self.manager.pools[group], self.manager.groups[group].block_size
        window = self.manager.groups[group].window
        begun = self.manager.shared_blocks(group, match)[: len(match.nodes) * (match.unit // size)]
        taken = {ref for ref in begun if ref >= 0}
        shared: dict[int, int] = {}
        counted = 0
        for other in running:
            for sequence in other.live_sequences:
                steps, tokens = self.remaining(sequence), len(sequence.tokens)
                if sequence.tables is None:
                    listed = 0 if other.stem is None else other.stem // size
                    yield from [Occupant(0, steps, listed, tokens, window)] * _lines(other)
                    continue
                own = 0
                refs = sequence.tables.tables[group].refs
                for ref in refs:
                    if ref < 0 or pool_of(ref) is not Pool.DEVICE:
                        continue
                    if ref in taken or pool.count(ref) > 1:
                        shared[ref] = max(steps, shared.get(ref, 0))
                    else:
                        own += 1
                counted += own
                yield Occupant(own, steps, len(refs), tokens, window)
                listed = tokens // size
                yield from [Occupant(0, steps, listed, tokens, window)] * (_lines(other) - 1)
        new = request.live_sequences
        longest = max(self.remaining(sequence) for sequence in new)
        kept = 0  # cached blocks come into use, blocks in use stay so
        for ref in taken:
            kept += pool.count(ref) == 0
            shared[ref] = max(longest, shared.get(ref, 0))
        for steps in shared.values():
            yield Occupant(1, steps)
        listed = max(len(begun), stem // size if len(new) > 1 or _lines(request) > 1 else 0)
        yield Occupant(listed - len(begun), longest)
        for sequence in new:
            line = Occupant(0, self.remaining(sequence), listed, len(sequence.tokens), window)
            yield from [line] * _lines(request)
        # Of others: requests that are stopped and keep their blocks, copies under way.
        yield Occupant(max(0, pool.num_used - counted - (len(shared) - kept)), 0x7FFFFFFF)


def _lines(request: Request) -> int:
    """For how many lines of tokens one sequence stands: beams that have not branched yet are one."""
    return request.places if request.params.beam_width is not None and len(request.live_sequences) == 1 else 1
