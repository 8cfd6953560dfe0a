"""Where a request's blocks shall be when there are too few: what to do with a victim, and how it comes back.

Plain functions of counts and measured speeds; the scheduler asks them. Whatever they answer, the tokens are the same.

Ways out, for a victim that must give up some blocks:

    IN_PLACE   its first blocks move to the host and are read there; it goes on running
    SWAP       its last blocks move to the host, as many as are needed; it stops, and waits
    RECOMPUTE  all its blocks are free at once; it waits, and computes its K/V anew

Costs in seconds, for b bytes that must go, t tokens stored, s steps still to run, speeds in bytes or tokens a second:

    IN_PLACE   b/to_host + s*b*extra      extra = 0 where host memory is the device's own, else 1/to_device: each step
                                          reads these bytes over the link
    SWAP       b/to_host + b/to_device    out, and back again
    RECOMPUTE  t/prefill

The cheapest that is possible wins; among equals the first of the list. Swapping is possible where the host pool has
room for all of the victim's blocks: one that is swapped in part and then must be computed anew was moved for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_UNMEASURED = 1.0  # any speed will do for both directions, while none is known


class Way(Enum):
    """What becomes of blocks that must leave the device, or that are to be had back."""

    IN_PLACE = "in place"
    SWAP = "swap"
    RECOMPUTE = "recompute"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured while running; None until then. Copies in bytes a second, prefill in tokens a second.

    `unified`: kernels read host memory as fast as the device's own.
    """

    to_host: float | None = None
    to_device: float | None = None
    prefill: float | None = None
    unified: bool = False

    def out(self, size: int) -> float:
        return size / (self.to_host or self.to_device or _UNMEASURED)

    def back(self, size: int) -> float:
        return size / (self.to_device or self.to_host or _UNMEASURED)

    def reading(self, size: int, steps: int) -> float:
        """What it costs to read so many bytes on the host in so many steps, more than on the device."""
        return 0.0 if self.unified else steps * self.back(size)

    def computing(self, tokens: int) -> float:
        """Without a measurement: more than any copy, since copying a token's K/V is usually the faster."""
        return float("inf") if self.prefill is None else tokens / self.prefill


@dataclass(frozen=True, slots=True)
class Victim:
    """What a victim has: bytes that must go; blocks on the device that it could lose, and of these how many it does not
    write to; tokens stored, each distinct one once; steps it has still to run at most."""

    size: int
    blocks: int
    old_blocks: int
    tokens: int
    steps: int


def way_out(victim: Victim, needed: int, host_free: int, speeds: Speeds, in_place: bool) -> Way:
    """How a victim gives up `needed` blocks. `in_place`: kernels can read host blocks."""
    costs: dict[Way, float] = {}
    moves = min(needed, victim.blocks)
    if in_place and victim.old_blocks >= moves and host_free >= moves:
        costs[Way.IN_PLACE] = speeds.out(victim.size) + speeds.reading(victim.size, victim.steps)
    if host_free >= victim.blocks:
        costs[Way.SWAP] = speeds.out(victim.size) + speeds.back(victim.size)
    costs[Way.RECOMPUTE] = speeds.computing(victim.tokens)
    return min(costs, key=costs.__getitem__)


@dataclass(frozen=True, slots=True)
class Parked:
    """A request that waits with blocks on the host: their bytes, tokens stored, steps it has still to run at most;
    whether the device has room for all its blocks now, for those only that it writes to, or could ever have for all."""

    size: int
    tokens: int
    steps: int
    fits: bool
    fits_in_place: bool
    fits_ever: bool = True


def way_back(parked: Parked, speeds: Speeds, in_place: bool) -> Way:
    """How a request comes back: SWAP is to fetch its blocks ahead of its next step; WAIT if there is no room.

    Blocks are read in place only if that beats fetching and computing them anew. Where these must wait for room, it
    does if it costs nothing: waiting takes nothing from others, as reading over the link in every step would. A
    sequence that is longer than the device's pool has no other way.
    """
    costs: dict[Way, float] = {}
    if in_place and parked.fits_in_place:
        costs[Way.IN_PLACE] = speeds.reading(parked.size, parked.steps)
    if parked.fits:
        costs[Way.SWAP] = speeds.back(parked.size)
        costs[Way.RECOMPUTE] = speeds.computing(parked.tokens)
    elif parked.fits_ever and costs.get(Way.IN_PLACE):
        return Way.WAIT
    return min(costs, key=costs.__getitem__) if costs else Way.WAIT
