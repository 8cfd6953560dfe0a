"""Who runs when: the orders of warps and blocks in which a launch may be interpreted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cudabench.errors import BenchError

_MOST_STEPS = 64  # of one team, before another has its turn in a random order


@dataclass(slots=True)
class Team:
    """Warps that advance together: those of its threads that stand at one instruction execute it as one operation.

    ready: instruction -> threads that may execute it. meeting: threads at a warp operation some lanes of which are
    still on their way.
    """

    ready: dict[int, np.ndarray] = field(default_factory=dict)
    meeting: dict[int, np.ndarray] = field(default_factory=dict)


class Schedule:
    """An order, of one launch.

    forward: all warps side by side, a cp.async lands as late as its wait allows. reverse: the last warp of every block
    as far ahead as it can get, then the one before it; copies land at once; blocks backwards, in four goes.
    random:SEED: warps are dealt to as many teams as a block has warps, teams take turns of random length; copies land
    at once or late, and blocks come in four goes, by chance.
    """

    def __init__(self, order: str) -> None:
        self.kind, _, seed = order.partition(":")
        if self.kind not in ("forward", "reverse", "random") or seed.isdecimal() != (self.kind == "random"):
            raise BenchError(f"order: {order!r} is not forward, reverse or random:SEED")
        self._random = np.random.default_rng(int(seed or 0))

    def goes(self, count: int, most: int) -> list[np.ndarray]:
        """The numbers of `count` blocks: those that run together, at most `most`, one go after the other."""
        if self.kind == "forward":
            blocks = np.arange(count)
        else:
            blocks = self._random.permutation(count) if self.kind == "random" else np.arange(count)[::-1]
            most = min(most, -(-count // 4))
        return [blocks[first : first + most] for first in range(0, count, most)]

    def team_of(self, warp: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, int]:
        """(the team of each thread, number of teams), for threads of such a block and such a warp within it."""
        count = int(warp.max()) + 1
        if self.kind == "forward" or count == 1:
            return np.zeros(len(warp), np.int64), 1
        if self.kind == "reverse":
            return count - 1 - warp, count
        dealt = np.stack([self._random.permutation(count) for _ in range(int(block.max()) + 1)])
        return dealt[block, warp], count

    def turn(self, teams: list[Team]) -> tuple[Team, int] | None:
        """(the team whose turn it is, how many instructions it may execute); None if no thread can go on."""
        able = [team for team in teams if team.ready]
        if not able:
            return None
        if self.kind != "random":
            return able[0], 1 << 62
        return able[self._random.integers(len(able))], int(self._random.integers(1, _MOST_STEPS + 1))

    def lands_at_once(self, count: int) -> np.ndarray:
        """Whether each of `count` copies by cp.async arrives when it is issued, not when it is waited for."""
        if self.kind == "random":
            return self._random.random(count) < 0.5
        return np.full(count, self.kind == "reverse")
