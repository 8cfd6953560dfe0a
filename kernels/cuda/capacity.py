"""Where a work plan lies in device memory, by capacities rather than by what it holds now.

A captured step is replayed with other work plans: their words go into the buffer that the captured launches read. So
offsets and grids follow from capacities alone, which are lengths rounded up to powers of two, and the kernels read how
many items there are from the buffer.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from cupaged.kernels.cuda.plan import ITEM_FIELDS, WorkPlan
from cupaged.kernels.interface import NO_BLOCK, Array


@dataclass(frozen=True, slots=True)
class Capacity:
    """What there is room for. tokens, tables: of a batch, as they are; items, entries of `WorkPlan.tokens`, columns of
    tables, partial results: at least so many. merges: as many as tokens, or 0 where no token has several parts."""

    tokens: int
    tables: int
    items: int
    entries: int
    width: int
    merges: int
    states: int

    @classmethod
    def of(cls, work: WorkPlan, tables: Array) -> Capacity:
        """Of a plan and its tables [S, W], with room to grow."""
        return cls(
            tokens=work.num_tokens,
            tables=tables.shape[0],
            items=_grown(len(work.items)),
            entries=_grown(len(work.tokens)),
            width=_grown(tables.shape[1]),
            merges=work.num_tokens if len(work.merges) else 0,
            states=_grown(work.num_states),
        )

    def holds(self, other: Capacity) -> bool:
        """Whether a plan of the other capacity fits where one of this lies, for the same launches."""
        mine, theirs = astuple(self), astuple(other)
        return mine[:2] == theirs[:2] and all(a >= b for a, b in zip(mine[2:], theirs[2:], strict=True))

    def with_room_of(self, other: Capacity) -> Capacity:
        """As this, and as much as the other has room for, where both are of the same batch."""
        mine, theirs = astuple(self), astuple(other)
        return Capacity(*map(max, mine, theirs)) if mine[:2] == theirs[:2] else self

    def sizes(self) -> dict[str, int]:
        """int32 words of each array, in their order: items first, which is read in 16-byte loads."""
        return {
            "items": self.items * len(ITEM_FIELDS),
            "num_items": 1,
            "num_merges": 1,
            "tokens": self.entries,
            "positions": self.tokens,
            "state_starts": self.tokens,
            "state_counts": self.tokens,
            "merges": self.merges,
            "tables": self.tables * self.width,
        }

    @property
    def words(self) -> int:
        return sum(self.sizes().values())

    def views(self, words: Array) -> dict[str, Array]:
        """The arrays in a buffer of `words` int32, on the device or the host."""
        found, start = {}, 0
        for name, size in self.sizes().items():
            found[name] = words[start : start + size]
            start += size
        return found


def pack(work: WorkPlan, tables: Array, capacity: Capacity) -> Array:
    """The words [capacity.words] int32 of a plan; what lies beyond its lengths is never read."""
    words = np.zeros(capacity.words, np.int32)
    views = capacity.views(words)
    wide = np.full((capacity.tables, capacity.width), NO_BLOCK, np.int32)
    wide[:, : tables.shape[1]] = tables
    parts = {
        "items": work.items.reshape(-1),
        "num_items": np.array([len(work.items)]),
        "num_merges": np.array([len(work.merges)]),
        "tokens": work.tokens,
        "positions": work.positions,
        "state_starts": work.state_starts,
        "state_counts": work.state_counts,
        "merges": work.merges,
        "tables": wide.reshape(-1),
    }
    for name, values in parts.items():
        views[name][: values.size] = values
    return words


def _grown(count: int) -> int:
    """The next power of two; 0 stays 0: a kernel without work is not launched."""
    return 1 << (count - 1).bit_length() if count else 0
