"""What streams hold, and who runs next: random, by a seed, within what streams and events allow."""

from __future__ import annotations

import ctypes
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamdouble.heap import POISON


class Event:
    """A point in a stream; `at`: the double's clock when it was reached."""

    __slots__ = ("at", "done", "stream", "timed")

    def __init__(self, stream: Stream, timed: bool) -> None:
        self.stream = stream
        self.timed = timed
        self.done = False
        self.at = 0.0


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Work] = deque()
        self.recorded: list[Work] | None = None  # while it is captured

    def last(self) -> Event:
        """A point behind everything."""
        event = Event(self, timed=False)
        self.queue.append(Record(event))
        return event


class Work(ABC):
    """Something queued. `step` runs a part of it and says how long that took, and whether it was the last part."""

    def ready(self) -> bool:
        return True

    @abstractmethod
    def step(self, rng: random.Random, now: float) -> tuple[float, bool]: ...

    def again(self) -> Work:
        """The same for another run of a graph."""
        return self


class Call(Work):
    """A launch or another thing that is done in one go."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def step(self, rng: random.Random, now: float) -> tuple[float, bool]:
        self._run()
        return 5e-6, True


class Copy(Work):
    """Bytes from address to address, at random in pieces."""

    def __init__(self, target: int, source: int, size: int) -> None:
        self.target, self.source, self.size = target, source, size
        self._done = 0

    def step(self, rng: random.Random, now: float) -> tuple[float, bool]:
        left = self.size - self._done
        count = rng.randint(1, left) if left > 1 and rng.random() < 0.4 else left
        ctypes.memmove(self.target + self._done, self.source + self._done, count)
        self._done += count
        return 1e-6 + count / 2e10, self._done == self.size

    def again(self) -> Copy:
        return Copy(self.target, self.source, self.size)


class Poison(Work):
    """The region was given back to the pool: what runs on the compute stream from here on may be somebody else's."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size

    def step(self, rng: random.Random, now: float) -> tuple[float, bool]:
        ctypes.memset(self.start, POISON, self.size)
        return 0.0, True


class Record(Work):
    def __init__(self, event: Event) -> None:
        self.event = event

    def step(self, rng: random.Random, now: float) -> tuple[float, bool]:
        self.event.at = now
        self.event.done = True
        return 0.0, True


class Wait(Work):
    def __init__(self, event: Event) -> None:
        self.event = event

    def ready(self) -> bool:
        return self.event.done

    def step(self, rng: random.Random, now: float) -> tuple[float, bool]:
        return 0.0, True


class GraphLaunch(Work):
    """The nodes of a graph one after the other, with other streams' work in between."""

    def __init__(self, nodes: Sequence[Work]) -> None:
        self._nodes = deque(node.again() for node in nodes)

    def step(self, rng: random.Random, now: float) -> tuple[float, bool]:
        if not self._nodes:
            return 0.0, True
        took, last = self._nodes[0].step(rng, now)
        if last:
            self._nodes.popleft()
        return took, not self._nodes


@dataclass(frozen=True)
class Bias:
    """How a machine behaves. `most`: parts of work that run at a call of the host, at most (None: all that can).
    `slow`: streams that hardly come to their turn. `company`: how likely others run while one is waited for."""

    most: int | None
    slow: tuple[str, ...] = ()
    company: float = 0.5


BIASES = {
    "fair": Bias(6),
    "late": Bias(0, company=0.0),
    "at once": Bias(None),
    "compute behind": Bias(12, slow=("compute",)),
    "copies behind": Bias(8, slow=("to_host", "to_device"), company=0.05),
    "fetches behind": Bias(8, slow=("to_device",)),
    "stores behind": Bias(8, slow=("to_host",)),
}
_SLOW = 0.02


class Scheduler:
    """Runs heads of streams in a random order. `bias`: a name of BIASES, or None for another one every so often."""

    def __init__(self, seed: int, bias: str | None) -> None:
        self.rng = random.Random(seed)
        self.streams: list[Stream] = []
        self.clock = 0.0
        self.error: BaseException | None = None
        self.ran = 0  # parts of work so far
        self._moody = bias is None
        self._bias = BIASES[bias or self.rng.choice(list(BIASES))]

    def some(self) -> None:
        """What happens to run at a call of the host."""
        if self._moody and self.rng.random() < 0.02:
            self._bias = BIASES[self.rng.choice(list(BIASES))]
        most = self._bias.most
        left = self.rng.randint(0, most) if most is not None else 1 << 30
        while left > 0 and self.one():
            left -= 1

    def one(self) -> bool:
        """A part of the work at the head of some stream. False: there is none that may run, or would yet."""
        ready = [stream for stream in self.streams if stream.queue and stream.queue[0].ready()]
        if self._bias.slow:
            slow = self._bias.slow
            ready = [stream for stream in ready if stream.name not in slow or self.rng.random() < _SLOW]
        if not ready:
            return False
        self._run(ready[0] if len(ready) == 1 else self.rng.choice(ready))
        return True

    def until(self, event: Event) -> None:
        """What must run before the event, and in between what happens to."""
        while not event.done:
            if self.rng.random() < self._bias.company:
                self.one()
                continue
            head = event.stream.queue[0]
            if isinstance(head, Wait) and not head.ready():
                self.until(head.event)
            else:
                self._run(event.stream)

    def all(self) -> None:
        while left := [stream for stream in self.streams if stream.queue]:
            self.until(self.rng.choice(left).last())

    def _run(self, stream: Stream) -> None:
        work = stream.queue[0]
        self.ran += 1
        try:
            took, last = work.step(self.rng, self.clock)
        except Exception as error:
            self.error = self.error or error
            took, last = 0.0, True
        self.clock += took
        if last:
            stream.queue.popleft()
