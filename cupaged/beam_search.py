"""Beam search as arithmetic: which continuations go on, which are finished, and when the search is over.

The rules are those of Hugging Face's `generate(num_beams=..., do_sample=False)`, vectorised version, for one prompt:

* A step looks at the best `max(2, 1 + e) * width` continuations of all running beams, `e` being the number of ids that
  end a text: even if every beam's ends are among them, `width` others are left.
* The best `width` of them that have not ended go on. Those that have, and are among the best `width` of all, are
  finished; of the finished, the best `width` by score are kept.
* The score of L new tokens (the ending one counted) is the sum of their log-probabilities / L ** length_penalty.
* Once `width` are finished the search ends: at once if `early_stopping` is True; else when the best running beam cannot
  score better than the worst of them, taken at its present length, or at the greatest one where `early_stopping` is
  "never" and the penalty favours length.

Ties: the better ranked beam, then the lower token id; among finished of one score, the one finished first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import numpy as np

from cupaged.kernels.interface import Array

GROUP = 64  # elements of which only the maximum is looked at first

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running beam, by its rank, with one more token. `total`: the sum of log-probabilities with it."""

    beam: int
    token: int
    total: float


@dataclass(slots=True)
class BeamSearch(Generic[T]):
    """The state of one search apart from its running beams. `max_new`: tokens to generate at most."""

    width: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    max_new: int
    num_ends: int
    finished: list[tuple[float, T]] = field(default_factory=list)  # (score, what it is), best first; `width` at most

    @property
    def num_candidates(self) -> int:
        return max(2, 1 + self.num_ends) * self.width

    def candidates(self, scores: Array, totals: Sequence[float]) -> list[Candidate]:
        """The continuations that a step looks at, best first. scores float64 [B, V] of B beams with sums `totals`."""
        return best_candidates(scores + np.asarray(totals, np.float64)[:, None], self.num_candidates)

    def score(self, total: float, length: int) -> float:
        return total / float(length) ** self.length_penalty

    def finish(self, item: T, total: float, length: int) -> None:
        """An output of `length` new tokens is complete; the worst goes if there are more than `width`."""
        score = self.score(total, length)
        place = sum(known >= score for known, _ in self.finished)
        self.finished.insert(place, (score, item))
        del self.finished[self.width :]

    def over(self, best_total: float, length: int) -> bool:
        """Whether the search ends though beams of `length` new tokens, the best with `best_total`, could go on."""
        if len(self.finished) < self.width:
            return False
        if self.early_stopping is True:
            return True
        far = self.early_stopping == "never" and self.length_penalty > 0
        return self.score(best_total, self.max_new if far else length) <= self.finished[-1][0]


def best_candidates(sums: Array, count: int) -> list[Candidate]:
    """The `count` greatest entries of sums float64 [B, V], in descending order; -inf is none. Fewer if there are fewer.

    Cost: two passes over B * V numbers, not a sort. The `count`-th greatest of the maxima of groups of 64 is not above
    the `count`-th greatest number, so that only what reaches it, a few more than `count`, need be sorted.
    """
    flat = sums.reshape(-1)
    whole = flat.size // GROUP * GROUP
    maxima = np.concatenate([flat[:whole].reshape(-1, GROUP).max(axis=1), flat[whole:]])
    bound = -np.inf if len(maxima) <= count else np.partition(maxima, len(maxima) - count)[len(maxima) - count]
    found = np.flatnonzero(flat >= bound)
    order = np.lexsort((found, -flat[found]))[:count]
    vocab = sums.shape[1]
    return [
        Candidate(int(index) // vocab, int(index) % vocab, float(flat[index]))
        for index in found[order]
        if flat[index] != -np.inf
    ]
