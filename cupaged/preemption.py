"""Room for those who need it: whose blocks leave the device, and how they come back.

When a running request lacks blocks they are taken from those that arrived after it, the latest first, whether these run
or wait; a request's sequences are one victim. Which way blocks go `residency.py` decides; frames that are swapped out
can be used when the copy is done, so whoever needs them sits out a step. Where nobody arrived later a request gives
its own first blocks to the host, and reads them there; or it stops, and holds what it has until an older one needs it.

A request that was stopped comes back in front of all that arrived later, when the blocks for its next step are free,
and not before some request or sample has ended since. So it is stopped at most once for each of these. The oldest
request is never stopped for another one: somebody always gets on.

What moves: first blocks first where they can be read on the host, so that the last ones, which are written to, stay;
last blocks first otherwise, so that the first ones, which forks share, are the last to go.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

from cupaged.memory import BlockManager, Pool, SequenceTables, make_ref
from cupaged.request import Request, RequestState
from cupaged.residency import Parked, Speeds, Victim, Way, way_back, way_out

if TYPE_CHECKING:
    from cupaged.scheduler import Scheduler
from cupaged.step_plan import Draft

_FIRST_ON_HOST = make_ref(0, Pool.PINNED_HOST)  # of plain blocks; those on the device come before it


class Given(Enum):
    """What became of a wish for blocks."""

    NOW = "they are free"
    LATER = "they will be, when copies are done; until then they are reserved"
    NEVER = "there is nobody left to take them from"


class Room:
    """Makes room on behalf of a scheduler. `speeds` and `block_bytes` (per KV group) are the engine's to tell."""

    def __init__(self, scheduler: Scheduler, manager: BlockManager) -> None:
        self.scheduler = scheduler
        self.manager = manager
        self.speeds = Speeds()
        self.block_bytes = [1] * len(manager.groups)
        self.way_out = way_out
        self.way_back = way_back
        self.ends = 0  # requests and samples that have ended
        self.by_swap = 0
        self.by_recompute = 0
        self.read_in_place = 0
        self._swaps = any(manager.host_pools)

    # -- taking

    def make(self, draft: Draft, request: Request, needed: tuple[int, ...]) -> Given:
        """Room for `needed` blocks per KV group, from those that arrived later or the request itself."""
        draft.preempted = True  # nobody is let in while somebody lacks blocks
        for victim in self._later(request):
            if not any(self._lacking(draft, needed)):
                break
            self._take_from(draft, victim, needed)
        if any(self._lacking(draft, needed)):
            self._spill(draft, request, needed)
        if any(self._lacking(draft, needed)):
            return Given.NEVER
        if self.is_there(draft, needed):
            return Given.NOW
        draft.reserved = [n + r for n, r in zip(needed, draft.reserved, strict=True)]
        return Given.LATER

    def is_there(self, draft: Draft, needed: tuple[int, ...]) -> bool:
        """Whether so many blocks are free and not reserved."""
        pools = self.manager.pools
        return all(n + r <= pool.num_available for n, r, pool in zip(needed, draft.reserved, pools, strict=True))

    def stop(self, draft: Draft, request: Request, way: Way) -> None:
        """A running request waits again, at its place by rank. SWAP: it keeps its blocks until they are needed."""
        draft.preempted = True
        scheduler = self.scheduler
        self._withdraw(draft, request)
        scheduler.running.remove(request)
        request.state = RequestState.WAITING
        request.stopped_at = self.ends
        request.preemptions += 1
        scheduler.preemptions += 1
        if way is Way.RECOMPUTE:
            self.by_recompute += 1
            self._drop(request)
        else:
            self.by_swap += 1
        scheduler.add(request)

    def stop_itself(self, draft: Draft, request: Request) -> None:
        """There is nobody to take blocks from. Without a host pool the request gives its own up at once."""
        self.stop(draft, request, Way.SWAP if self._swaps else Way.RECOMPUTE)

    def _later(self, request: Request) -> Iterator[Request]:
        """Requests that arrived after this one and have blocks on the device, the latest first."""
        scheduler = self.scheduler
        others = [other for other in (*scheduler.running, *scheduler.waiting) if other.rank > request.rank]
        for other in sorted(others, key=lambda r: r.rank, reverse=True):
            if any(self._blocks_on(Pool.DEVICE, other)):
                yield other

    def _lacking(self, draft: Draft, needed: tuple[int, ...]) -> list[int]:
        """Per KV group, blocks that will not be free even when all copies are done."""
        return [
            max(0, need + reserved - pool.num_available - pool.num_coming)
            for need, reserved, pool in zip(needed, draft.reserved, self.manager.pools, strict=True)
        ]

    def _take_from(self, draft: Draft, victim: Request, needed: tuple[int, ...]) -> None:
        self._withdraw(draft, victim)
        tables = tables_of(victim)
        for each in tables:
            self.manager.trim(each)  # blocks without a token are free at once
        lacking = self._lacking(draft, needed)
        if not any(lacking):
            return
        own = [self.manager.own_blocks(group, tables) for group in range(len(lacking))]
        old = [self._old(group, tables, refs) for group, refs in enumerate(own)]
        way = self._way_out(victim, lacking, own, old)
        if way is Way.RECOMPUTE:
            if victim.state is RequestState.RUNNING:
                self.stop(draft, victim, way)
            else:
                self.by_recompute += 1
                self._drop(victim)
            return
        if way is Way.SWAP and victim.state is RequestState.RUNNING:
            self.stop(draft, victim, way)
        for group, count in enumerate(lacking):
            refs = old[group][:count]
            if way is Way.SWAP and not self.manager.in_place:
                refs = own[group][::-1][:count]
            elif way is Way.SWAP:
                refs = (old[group] + [ref for ref in own[group] if ref not in old[group]])[:count]
            draft.items += self.manager.swap_out(group, refs)

    def _way_out(self, victim: Request, lacking: list[int], own: list[list[int]], old: list[list[int]]) -> Way:
        hosts = self.manager.host_pools
        if any(lack and host is None for lack, host in zip(lacking, hosts, strict=True)):
            return Way.RECOMPUTE
        short = [group for group, lack in enumerate(lacking) if lack]
        moves = [min(lacking[group], len(own[group])) for group in short]
        costs = Victim(
            size=sum(count * self.block_bytes[group] for group, count in zip(short, moves, strict=True)),
            blocks=max(len(own[group]) for group in short),
            old_blocks=min(len(old[group]) for group in short),
            tokens=self._tokens(victim),
            steps=steps_left(victim),
        )
        host_free = min(host.num_free for group in short if (host := hosts[group]) is not None)
        return self.way_out(costs, max(moves), host_free, self.speeds, self.manager.in_place)

    def _spill(self, draft: Draft, request: Request, needed: tuple[int, ...]) -> None:
        """Move the request's own first blocks to the host, where it goes on reading them: if that costs nothing, or if
        there is no older one whose end it could wait for."""
        others = self.scheduler.running and self.scheduler.running[0] is not request
        if not self.manager.in_place or (others and not self.speeds.unified):
            return
        self._withdraw(draft, request)
        tables = tables_of(request)
        for group, count in enumerate(self._lacking(draft, needed)):
            host = self.manager.host_pools[group]
            refs = self._old(group, tables, self.manager.own_blocks(group, tables))[:count]
            if host is not None and refs:
                self._clear_host(group, request, len(refs))
                draft.items += self.manager.swap_out(group, refs[: host.num_free])

    def _clear_host(self, group: int, request: Request, count: int) -> None:
        """Room in the host pool, from requests that wait and arrived later: they compute their K/V anew."""
        host = self.manager.host_pools[group]
        for other in reversed(self.scheduler.waiting):
            if host is None or host.num_free >= count or other.rank < request.rank:
                return
            if self.manager.blocks_in(Pool.PINNED_HOST, group, tables_of(other)):
                self.by_recompute += 1
                self._drop(other)

    def _drop(self, request: Request) -> None:
        """Give all blocks of a request up; its K/V are computed anew."""
        self.scheduler.release(request)
        request.stem = None

    def _withdraw(self, draft: Draft, request: Request) -> None:
        self.scheduler.withdraw(draft, lambda chunk: chunk.sequence.request is request)

    # -- giving back

    def is_parked(self, request: Request) -> bool:
        """Whether a waiting request still has blocks somewhere."""
        return any(sequence.tables is not None for sequence in request.live_sequences)

    def must_wait(self, request: Request) -> bool:
        """Whether a stopped request has to wait for an end, so that it is not let in only to be stopped again."""
        return request.stopped_at == self.ends and bool(self.scheduler.running)

    def bring_back(self, draft: Draft, request: Request) -> bool:
        """Let a parked request run again, if there is room; fetches go into the draft. If it has no blocks afterwards,
        they are to be computed anew."""
        if not self.scheduler.running:  # it is the oldest: those behind it must not hold what it needs
            given = self._make_for_return(draft, request)
            if given is not Given.NOW:
                if given is Given.NEVER:  # its samples take turns then, from the start
                    self._drop(request)
                return given is Given.NEVER
            if any(self._lacking(draft, self._needs(request))):  # longer than the device's pool
                self._fetch(draft, request, whole=False)
                return True
        way = self._way_back(draft, request)
        if way is Way.WAIT:
            return False
        if way is Way.RECOMPUTE:
            self.by_recompute += 1
            self._drop(request)
        else:
            self._fetch(draft, request, whole=way is Way.SWAP)
        return True

    def _make_for_return(self, draft: Draft, request: Request) -> Given:
        """Room for all of a request that is alone, or for the blocks that it writes to."""
        needed = self._needs(request)
        for victim in self._later(request):
            if any(self._lacking(draft, needed)):
                self._take_from(draft, victim, needed)
        if not any(self._lacking(draft, needed)):
            return Given.NOW if self.is_there(draft, needed) else Given.LATER
        if not self.manager.in_place:
            return Given.NEVER
        return self.make(draft, request, tuple(len(refs) for refs in self._fetches(request, written=True)))

    def _needs(self, request: Request) -> tuple[int, ...]:
        """Blocks per KV group that a parked request needs to have all of itself on the device and run a step."""
        return tuple(len(refs) + self._growth(group, request) for group, refs in enumerate(self._fetches(request)))

    def fetch_ahead(self, draft: Draft) -> None:
        """Fetch host blocks of running requests where there is room and reading them in place costs more."""
        if not self._swaps or self.speeds.unified or not self._host_in_use():
            return
        for request in self.scheduler.running:
            if any(self._blocks_on(Pool.PINNED_HOST, request)) and self._way_back(draft, request) is Way.SWAP:
                self._fetch(draft, request, whole=True)

    def note_reads(self, draft: Draft) -> None:
        """Count what the step reads on the host, and put the requests that do so first: they take longest. The order of
        a request's own chunks stays: beams are told apart by it."""
        if not self._swaps or not self._host_in_use():
            return
        for chunk in list(draft.chunks):  # fetched for one that shares it, a block is on its way for all its users
            if chunk.sequence.tables is not None and not self.manager.settled(chunk.sequence.tables):
                self._withdraw(draft, chunk.sequence.request)
        reading: set[str] = set()
        for chunk in draft.chunks:
            if chunk.sequence.tables is not None:
                reads = sum(ref >= _FIRST_ON_HOST for table in chunk.sequence.tables.tables for ref in table.refs)
                if reads:
                    reading.add(chunk.sequence.request.request_id)
                    self.read_in_place += reads
        draft.chunks.sort(key=lambda chunk: chunk.sequence.request.request_id not in reading)

    def _way_back(self, draft: Draft, request: Request) -> Way:
        groups = range(len(self.manager.groups))
        promised = [self.scheduler.promised(group, besides=request) for group in groups]
        growth = [self._growth(group, request) for group in groups]
        whole, written = self._fetches(request), self._fetches(request, written=True)
        pools = self.manager.pools
        free = [pools[g].num_available - promised[g] - draft.reserved[g] for g in groups]
        held = [len(self.manager.blocks_in(Pool.DEVICE, g, tables_of(request))) for g in groups]
        parked = Parked(
            size=sum(len(refs) * self.block_bytes[g] for g, refs in enumerate(whole)),
            tokens=self._tokens(request),
            steps=steps_left(request),
            fits=all(len(whole[g]) + growth[g] <= free[g] for g in groups),
            fits_in_place=all(len(written[g]) + growth[g] <= free[g] for g in groups),
            fits_ever=all(held[g] + len(whole[g]) + growth[g] <= pools[g].num_blocks for g in groups),
        )
        return self.way_back(parked, self.speeds, self.manager.in_place)

    def _fetch(self, draft: Draft, request: Request, whole: bool) -> None:
        for group, refs in enumerate(self._fetches(request, written=not whole)):
            if refs:
                draft.items += self.manager.swap_in(group, refs)

    def _fetches(self, request: Request, written: bool = False) -> list[list[int]]:
        """Per KV group the request's blocks on the host; `written`: those only that its next tokens go into."""
        tables = tables_of(request)
        found = []
        for group in range(len(self.manager.groups)):
            refs = self.manager.blocks_in(Pool.PINNED_HOST, group, tables)
            old = self._old(group, tables, refs) if written else []
            found.append([ref for ref in refs if ref not in old])
        return found

    def _growth(self, group: int, request: Request) -> int:
        """New blocks that a parked request's next step takes: for known tokens and one more, and copies on write."""
        copies = self.manager.copies_due(group, tables_of(request))
        return copies + self.scheduler.promised_to(group, request)

    def most_tokens(self, request: Request) -> int:
        """The most tokens that a sequence can be given slots for at once: its other sequences' last blocks stay."""
        if not self.manager.in_place:
            return max(1, self.manager.longest_sequence)
        others = len(tables_of(request))
        return max(
            1,
            min(
                (pool.num_blocks - others) * spec.block_size
                for pool, spec in zip(self.manager.pools, self.manager.groups, strict=True)
            ),
        )

    # -- looking

    def _old(self, group: int, tables: list[SequenceTables], refs: list[int]) -> list[int]:
        """Those blocks that are full in every sequence: never written again."""
        size = self.manager.groups[group].block_size
        young = {ref for each in tables for ref in each.tables[group].refs[each.num_tokens // size :]}
        return [ref for ref in refs if ref not in young]

    def _blocks_on(self, where: Pool, request: Request) -> list[list[int]]:
        tables = tables_of(request)
        return [self.manager.blocks_in(where, group, tables) for group in range(len(self.manager.groups))]

    def _host_in_use(self) -> bool:
        return any(host is not None and host.num_used for host in self.manager.host_pools)

    def _tokens(self, request: Request) -> int:
        """Tokens to compute anew if the request loses everything, shared blocks once; those that a window has passed,
        too."""
        tables = tables_of(request)
        blocks = {place for each in tables for place in enumerate(each.tables[0].refs)}
        return min(len(blocks) * self.manager.groups[0].block_size, sum(each.num_tokens for each in tables))


def tables_of(request: Request) -> list[SequenceTables]:
    """The tables of a request's sequences that have some."""
    return [sequence.tables for sequence in request.live_sequences if sequence.tables is not None]


def steps_left(request: Request) -> int:
    """Steps that a request has still to run at most."""
    return max((request.max_total - len(sequence.tokens) for sequence in request.live_sequences), default=0)
