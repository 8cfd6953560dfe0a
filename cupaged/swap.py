"""The swap engine: carries out the block manager's swaps on a device's two copy streams, and measures them.

Order, so that no copy reads what is not yet written and none overwrites what is still read:

* a swap out waits for all compute issued before it: the last writes of the block, the last reads of the host frame;
* a swap in waits for the same: the last reads of its device frame;
* either waits for the swap that fills its source, if that is still under way;
* the manager hands out neither end of a swap before its ticket is completed, and the scheduler runs no sequence with a
  block on its way: so compute never waits for a copy, except where nothing else is left to do.

There is no staging buffer that could be reused too early: the host pool itself is the memory that copies run from and
to. What is bounded is the amount of copies under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cupaged.cache import PagedKVCache
from cupaged.device.base import CopyStream, Device, Transfer
from cupaged.memory import PlanItem, SwapIn, SwapOut

MAX_BYTES_UNDER_WAY = 256 << 20
_SMOOTHING = 0.25  # weight of the newest copy in a measured speed


@dataclass(frozen=True, slots=True)
class Refused:
    """A transfer that the device did not take."""

    error: BaseException
    seconds: float | None = None

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class SwapEngine:
    """`caches`: one per KV group. Copies of one direction are done in the order issued."""

    def __init__(self, device: Device, caches: Sequence[PagedKVCache], limit: int = MAX_BYTES_UNDER_WAY) -> None:
        self.device = device
        self.caches = caches
        self.limit = limit
        self.speed: dict[CopyStream, float] = {}  # bytes a second, measured; nothing before the first copy is done
        self._under_way: deque[tuple[PlanItem, Transfer]] = deque()
        self._filling: dict[tuple[int, int], Transfer] = {}  # (group, block) -> the swap that fills it
        self._spoilt: dict[int, BaseException] = {}  # ticket of a swap under way -> why what it reads is not there

    @property
    def busy(self) -> bool:
        """Whether copies were started that `finished` has not returned."""
        return bool(self._under_way)

    def start(self, items: Sequence[PlanItem]) -> None:
        """Issue swaps, in order. Blocks only while more than `limit` bytes are under way.

        A swap that the device refuses is one that `finished` returns with its error. What is raised is no error (a
        KeyboardInterrupt), and only when all are under way.
        """
        waits: set[CopyStream] = set()
        interrupt: BaseException | None = None
        for item in items:
            try:
                transfer = self._issue(item, waits)
            except BaseException as error:
                transfer = Refused(error)
                interrupt = interrupt if isinstance(error, Exception) else error
            self._under_way.append((item, transfer))
            self._filling[item.group, item.destination] = transfer
        if interrupt is not None:
            raise interrupt

    def _issue(self, item: PlanItem, waits: set[CopyStream]) -> Transfer:
        """waits: streams that wait already for the compute issued before these swaps."""
        assert isinstance(item, SwapOut | SwapIn)
        stream: CopyStream = "to_host" if isinstance(item, SwapOut) else "to_device"
        if stream not in waits:
            self.device.wait(stream, self.device.record("compute"))
            waits.add(stream)
        cache = self.caches[item.group]
        while (pending := self._bytes_pending()) and pending + cache.bytes_per_block > self.limit:
            self.wait()
        earlier = self._filling.get((item.group, item.source))
        if earlier is not None:
            if earlier.error is not None:
                raise earlier.error
            self.device.wait(stream, earlier)
        pairs = list(zip(cache.pieces(item.source), cache.pieces(item.destination), strict=True))
        return self.device.copy(stream, pairs)

    def finished(self) -> list[tuple[PlanItem, BaseException | None]]:
        """Swaps that are done since the last call, each with what went wrong, or None. Never blocks."""
        ended: list[tuple[PlanItem, BaseException | None]] = []
        waiting: deque[tuple[PlanItem, Transfer]] = deque()
        for item, transfer in self._under_way:
            if not transfer.done():
                waiting.append((item, transfer))
                continue
            size = self.caches[item.group].bytes_per_block
            self._filling.pop((item.group, item.destination), None)
            error = self._spoilt.pop(item.ticket, transfer.error)
            if error is None and transfer.seconds:
                self._measure("to_host" if isinstance(item, SwapOut) else "to_device", size / transfer.seconds)
            if error is not None:
                for later, _ in self._under_way:  # what reads that block on its way brings nothing, either
                    if later.ticket > item.ticket and (later.group, later.source) == (item.group, item.destination):
                        self._spoilt[later.ticket] = error
            ended.append((item, error))
        self._under_way = waiting
        return ended

    def wait(self) -> None:
        """Block until the oldest swap under way is done; `finished` then returns at least one."""
        pending = self._pending()
        if pending is not None:
            pending.wait()

    def _pending(self) -> Transfer | None:
        return next((transfer for _, transfer in self._under_way if not transfer.done()), None)

    def _bytes_pending(self) -> int:
        return sum(self.caches[i.group].bytes_per_block for i, transfer in self._under_way if not transfer.done())

    def _measure(self, stream: CopyStream, speed: float) -> None:
        known = self.speed.get(stream, speed)
        self.speed[stream] = known + _SMOOTHING * (speed - known)
