"""The frames of one pool: who is free, who is in use and how often, who may be reused.

Pure bookkeeping: the arrays behind the frames are `cupaged.cache`'s. Not thread-safe: one engine thread owns a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from cupaged.errors import BlockError, OptionError, OutOfBlocks
from cupaged.memory.blockref import MAX_FRAMES, Pool, make_ref
from cupaged.memory.table import distinct_blocks


class FrameState(IntEnum):
    """Life of a frame: FREE -> FILLING -> READY -> FREE, by way of DRAINING where a copy still needs the contents."""

    FREE = 0  # on the free list
    FILLING = 1  # in use, some slots not yet written
    READY = 2  # every slot written; never written again until it is free
    DRAINING = 3  # no longer in use, but an end of an unfinished plan item: not to be handed out before that is done


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of frames. free + cached + used == total; shared (count > 1) and draining frames are among the used."""

    total: int
    free: int
    cached: int
    used: int
    shared: int
    draining: int


class BlockPool:
    """`num_blocks` frames of one pool and KV group, with a reference count each.

    `allocate` gives a block with count 1, `fork` adds 1, `free` takes 1, and at 0 the block is free again. All of these
    are O(1) per block. Wrong calls raise BlockError and change nothing.

    Reuse order: the frame freed last is handed out first; frames never used come in ascending order. So the part of the
    arrays that was ever touched stays as small as the peak use, and a use after free shows soon.

    Every frame is usable: none is set aside (padding writes to slot -1), so `num_blocks` is the one number to hold a
    request's need against.
    """

    def __init__(self, num_blocks: int, pool: Pool = Pool.DEVICE, group: int = 0) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or not 1 <= num_blocks <= MAX_FRAMES:
            raise OptionError(f"num_blocks is {num_blocks!r:.40}: 1 to {MAX_FRAMES} are allowed")
        self.num_blocks = num_blocks
        self.pool = pool
        self.group = group
        self._base = make_ref(0, pool)  # reference = base + frame; blocks of other pools and formats fall out of range
        self._counts = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._states = [FrameState.FREE] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: set[int] = set()
        self._num_cached = 0
        self._num_stuck = 0  # cached frames that are pinned: they would drain first
        self._num_shared = 0
        self._num_draining = 0
        self.reclaim: Callable[[int], object] | None = None  # asked to `forget` cached blocks until so many are free

    @property
    def num_free(self) -> int:
        """Frames on the free list."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Frames that `allocate` can hand out now: free ones, and cached ones if there is somebody to give them up."""
        return len(self._free) + (self._num_cached - self._num_stuck if self.reclaim is not None else 0)

    @property
    def num_coming(self) -> int:
        """Frames that will be available when the copies under way are done."""
        return self._num_draining + (self._num_stuck if self.reclaim is not None else 0)

    @property
    def num_cached(self) -> int:
        """Frames with count 0 whose contents are kept for reuse (see `keep`)."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Frames that are neither free nor cached: in use, or draining."""
        return self.num_blocks - len(self._free) - self._num_cached

    def stats(self) -> PoolStats:
        """All counts at once; O(1)."""
        return PoolStats(
            total=self.num_blocks,
            free=self.num_free,
            cached=self.num_cached,
            used=self.num_used,
            shared=self._num_shared,
            draining=self._num_draining,
        )

    def count(self, ref: int) -> int:
        """Reference count of a block; 0 if it is free, cached or draining. BlockError if it is not of this pool."""
        return self._counts[self._frame(ref)]

    def used_once(self, ref: int) -> bool:
        """Whether it is a block of this pool, and has exactly one user."""
        frame = ref - self._base
        return 0 <= frame < self.num_blocks and self._counts[frame] == 1

    def pins(self, ref: int) -> int:
        """How many unfinished plan items have the block as an end. BlockError if it is not of this pool."""
        return self._pins[self._frame(ref)]

    def state(self, ref: int) -> FrameState:
        """State of a block's frame. BlockError if it is not of this pool."""
        return self._states[self._frame(ref)]

    def allocate(self) -> int:
        """Reference of a free block, now FILLING with count 1. OutOfBlocks if there is none."""
        return self.allocate_many(1)[0]

    def allocate_many(self, n: int) -> list[int]:
        """`n` blocks as by `allocate`, or OutOfBlocks (holding both numbers) and none."""
        if n < 0:
            raise OptionError(f"{n} blocks asked: 0 or more are allowed")
        if n > len(self._free):
            if n > self.num_available:
                raise OutOfBlocks(n, self.num_available)
            assert self.reclaim is not None
            self.reclaim(n)
        frames = [self._free.pop() for _ in range(n)]
        for frame in frames:
            self._counts[frame] = 1
            self._states[frame] = FrameState.FILLING
        return [self._base + frame for frame in frames]

    def fork(self, refs: int | Iterable[int]) -> None:
        """Add 1 to the count of a block, or of each distinct block of a table; NO_BLOCK entries of a table are skipped.

        A cached block is in use again. BlockError if a block is free, draining or foreign; then no count changed.
        """
        frames = self._frames(refs)
        for frame in frames:
            if not self._counts[frame] and frame not in self._kept:
                raise BlockError(f"fork of block {self._name(frame)}, which is not in use")
        for frame in frames:
            self._counts[frame] += 1
            if self._counts[frame] == 2:
                self._num_shared += 1
            elif self._counts[frame] == 1:
                self._num_cached -= 1
                self._num_stuck -= self._pins[frame] > 0

    def free(self, refs: int | Iterable[int]) -> None:
        """Take 1 from the count of a block, or of each distinct block of a table; NO_BLOCK entries are skipped.

        At 0 the block becomes cached if it is kept, draining if it is pinned, and else free. BlockError if a block is
        not in use (double free) or foreign; then no count changed.
        """
        frames = self._frames(refs)
        for frame in frames:
            if not self._counts[frame]:
                raise BlockError(f"double free of block {self._name(frame)}, which is not in use")
        for frame in frames:
            self._counts[frame] -= 1
            if self._counts[frame] == 1:
                self._num_shared -= 1
            elif not self._counts[frame]:
                if frame in self._kept:
                    self._num_cached += 1
                    self._num_stuck += self._pins[frame] > 0
                else:
                    self._retire(frame)

    def mark_ready(self, ref: int) -> None:
        """The last slot of a block in use is written: FILLING becomes READY. BlockError if the block is not in use."""
        frame = self._frame(ref)
        if not self._counts[frame]:
            raise BlockError(f"block {self._name(frame)} cannot become ready: it is not in use")
        self._states[frame] = FrameState.READY

    def pin(self, ref: int) -> None:
        """A plan item now reads or writes the block: it is not handed out anew before as many `unpin` calls.

        Pins do not count as use: when the last user frees a pinned block it drains. BlockError if it is not in use.
        """
        frame = self._frame(ref)
        if not self._counts[frame]:
            raise BlockError(f"block {self._name(frame)} cannot be pinned: it is not in use")
        self._pins[frame] += 1

    def unpin(self, ref: int) -> None:
        """A plan item with this block is finished; a draining block without another becomes free."""
        frame = self._frame(ref)
        if not self._pins[frame]:
            raise BlockError(f"block {self._name(frame)} is not pinned")
        self._pins[frame] -= 1
        if self._pins[frame]:
            return
        if self._states[frame] is FrameState.DRAINING:
            self._num_draining -= 1
            self._release(frame)
        elif frame in self._kept and not self._counts[frame]:
            self._num_stuck -= 1

    def keep(self, ref: int) -> None:
        """Keep a READY block's contents: at count 0 it becomes cached, until `fork` uses it again or `forget` ends it.

        For an index of contents, which alone knows what may go first: `allocate` asks it by `reclaim`.
        """
        frame = self._frame(ref)
        if not self._counts[frame] or self._states[frame] is not FrameState.READY:
            raise BlockError(f"block {self._name(frame)} cannot be kept: it is not in use and ready")
        self._kept.add(frame)

    def forget(self, ref: int) -> None:
        """End `keep`: a cached block becomes free (or drains, if pinned). BlockError if the block is not kept."""
        frame = self._frame(ref)
        if frame not in self._kept:
            raise BlockError(f"block {self._name(frame)} is not kept")
        self._kept.remove(frame)
        if not self._counts[frame]:
            self._num_cached -= 1
            self._num_stuck -= self._pins[frame] > 0
            self._retire(frame)

    def audit(self) -> None:
        """Recount everything, O(num_blocks). BlockError names the first inconsistency."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise BlockError(f"free list of {self._where()} holds a frame twice")
        cached = used = shared = draining = stuck = 0
        for frame, (count, pins, state) in enumerate(zip(self._counts, self._pins, self._states, strict=True)):
            kept = frame in self._kept
            if count < 0 or pins < 0:
                raise BlockError(f"block {self._name(frame)} has count {count} and {pins} pins")
            if count or kept:
                right = state in (FrameState.FILLING, FrameState.READY)
            else:
                right = state is (FrameState.DRAINING if pins else FrameState.FREE)
            if not right or (kept and state is not FrameState.READY):
                raise BlockError(
                    f"block {self._name(frame)} is {state.name} with count {count}, {pins} pins" + ", kept" * kept
                )
            if (frame in free) != (state is FrameState.FREE):
                raise BlockError(f"block {self._name(frame)} is {state.name}, but on the free list: {frame in free}")
            cached += kept and not count
            stuck += kept and not count and pins > 0
            used += bool(count) or state is FrameState.DRAINING
            shared += count > 1
            draining += state is FrameState.DRAINING
        found = PoolStats(self.num_blocks, len(free), cached, used, shared, draining)
        if found != self.stats():
            raise BlockError(f"{self._where()} says {self.stats()}, counted {found}")
        if stuck != self._num_stuck:
            raise BlockError(f"{self._where()}: {stuck} cached blocks are pinned, counted {self._num_stuck}")
        if len(free) + cached + used != self.num_blocks:
            raise BlockError(f"{self._where()}: {len(free)} free + {cached} cached + {used} used != {self.num_blocks}")

    def _retire(self, frame: int) -> None:
        """A frame that nobody uses or keeps any more."""
        if self._pins[frame]:
            self._states[frame] = FrameState.DRAINING
            self._num_draining += 1
        else:
            self._release(frame)

    def _release(self, frame: int) -> None:
        self._states[frame] = FrameState.FREE
        self._free.append(frame)

    def _frame(self, ref: int) -> int:
        frame = ref - self._base
        if not 0 <= frame < self.num_blocks:
            raise BlockError(f"block reference {ref:#x} is not of {self._where()} ({self.num_blocks} plain blocks)")
        return frame

    def _frames(self, refs: int | Iterable[int]) -> list[int]:
        if isinstance(refs, Iterable):
            return [self._frame(ref) for ref in distinct_blocks(refs)]
        return [self._frame(refs)]

    def _where(self) -> str:
        return f"the {self.pool.name.lower()} pool of group {self.group}"

    def _name(self, frame: int) -> str:
        return f"{frame} of {self._where()}"
