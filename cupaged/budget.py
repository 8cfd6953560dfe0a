"""How many prompt tokens a step takes beside sequences that decode, so that these keep their pace.

A step that computes a prompt chunk takes longer, and every decoding sequence waits for its next token so long. The
chunk is cut so that the step takes at most `pace` times as long as one of the same decodes alone (SARATHI's idea,
Agrawal et al. 2023, with the size of the chunk from measured times instead of profiling beforehand):

    seconds(decodes, prompt) = alone(decodes) + cost * prompt        prompt <= (pace - 1) * alone(decodes) / cost

Both are medians of recent steps: one that was slow for another reason says nothing. A chunk is at most twice as large
as those before it: of a few tokens nobody can tell what one costs. For the same reason it is twice as large as the one
before if that took less than half of the time it had. A prompt gets FLOOR tokens whatever it costs, so it always gets
on. Where nothing decodes whose tokens somebody reads as they come (`Request.watched`), or nothing has been measured,
chunks are as large as they may be: `LLM.generate` gives all results at its end, and 32 prompts of 64 tokens with 64 new
ones each took it an eighth longer at a pace of 2.

The other side of the coin: where a token of a prompt costs as much beside decodes as it does alone, prompts are
computed at most at (pace - 1) / pace of their speed, since the decodes take the rest of the time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from statistics import median

FLOOR = 16  # prompt tokens
GRAIN = 8  # chunks are multiples of so many: kernels compute rows in groups
RECENT = 9  # steps of decodes alone of which the median is taken
LATEST = 5  # of steps with prompts: what a token costs grows with the context before it
FEWEST_TOKENS = 8  # prompt tokens of a step that tells what one costs: fewer are lost in the noise


class TokenBudget:
    """Chooses the prompt tokens of a step. `pace` >= 1; infinite: no limit but the step's own."""

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self._alone: dict[int, deque[float]] = {}  # decodes -> seconds of steps of nothing else
        self._known: list[int] = []  # its keys, sorted
        self._beside: deque[float] = deque(maxlen=LATEST)  # seconds a prompt token, in steps with decodes
        self._chunks: deque[int] = deque(maxlen=LATEST)  # their prompt tokens
        self._safe = 0  # so many fit, after the last step
        self._without: deque[float] = deque(maxlen=LATEST)  # in steps without

    def note(self, decodes: int, prompt: int, seconds: float) -> None:
        """A step of so many decodes and prompt tokens took so long."""
        if math.isinf(self.pace):
            return
        if decodes and not prompt:
            if decodes not in self._alone:
                self._alone[decodes] = deque(maxlen=RECENT)
                insort(self._known, decodes)
            self._alone[decodes].append(seconds)
        elif prompt >= FEWEST_TOKENS and not decodes:
            self._without.append(seconds / prompt)
        elif prompt >= FEWEST_TOKENS and (alone := self.alone(decodes)) is not None:
            self._beside.append(max(0.0, seconds - alone) / prompt)
            self._chunks.append(prompt)
            self._safe = 2 * prompt if seconds - alone <= (self.pace - 1) * alone / 2 else 0

    def alone(self, decodes: int) -> float | None:
        """Seconds of a step of so many decodes; of the nearest number that is known; None if none is."""
        if not self._known:
            return None
        nearest = min(self._known, key=lambda known: abs(known - decodes))
        return median(self._alone[nearest])

    def cost(self) -> float | None:
        """Seconds of a prompt token: beside decodes if that is known, else alone, its share of the weights included."""
        known = self._beside or self._without
        return median(known) if known else None

    def prompt_tokens(self, decodes: int, most: int) -> int:
        """The prompt tokens of a step beside so many decodes: `most` at most, and FLOOR at least if there are so
        many."""
        if not decodes or math.isinf(self.pace):
            return most
        alone, cost = self.alone(decodes), self.cost()
        if alone is None:
            return most
        if cost is None:  # the first chunk tells
            return min(most, FLOOR)
        if self._chunks:
            most = min(most, 2 * max(self._chunks))
        count = max(self._safe, most if cost == 0 else int((self.pace - 1) * alone / cost))
        return min(most, max(FLOOR, count // GRAIN * GRAIN))
