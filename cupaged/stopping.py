"""Stop strings in a stream of text: nothing of a stop string is shown, and nothing else is withheld for long."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, wherever the pieces are cut.

    The rule: text is read one character at a time, and **the stop string that is complete first wins**; of several that
    become complete at the same character, the longest. So of "ab" and "abc" the first always wins, and of "ab" and
    "xab" the second where an x stands before. The result does not depend on how the text is cut into pieces, and
    generation ends at the first moment at which it can.

    Text after the stop string is dropped. The stop string itself is shown only with `include`.

    The matcher is the automaton of Aho & Corasick ("Efficient string matching", 1975): its state is the longest suffix
    of the text that begins some stop string, which is precisely what must be held back. Time is linear in the text,
    whatever the number of stop strings; memory is linear in their total length.
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        """`stop` are non-empty strings (SamplingParams checks them); none at all is fine: everything passes through."""
        self._include = include
        self._held = ""
        self._state = 0
        self._matched: str | None = None
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [0]
        self._stop_at: list[str | None] = [None]
        for string in stop:
            self._insert(string)
        self._link()

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._fail.append(0)
                self._stop_at.append(None)
            state = following
        self._stop_at[state] = string

    def _link(self) -> None:
        """Breadth first: `fail` is the longest proper suffix that is a state too; a stop ending there ends here."""
        queue = list(self._next[0].values())
        for state in queue:
            for char, following in self._next[state].items():
                queue.append(following)
                self._fail[following] = self._step(self._fail[state], char)
            if self._stop_at[state] is None:
                self._stop_at[state] = self._stop_at[self._fail[state]]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    @property
    def idle(self) -> bool:
        """Whether there are no stop strings: every text may be shown at once."""
        return len(self._next) == 1

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, None while it goes on."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece; returns what may be shown now and the stop string that was completed, if any.

        After a match every further piece is dropped: the result is ``("", matched)``.
        """
        if self._matched is not None:
            return "", self._matched
        if self.idle:
            return text, None
        state = self._state
        for index, char in enumerate(text):
            state = self._step(state, char)
            stop = self._stop_at[state]
            if stop is not None:
                end = len(self._held) + index + 1
                emit = (self._held + text)[: end if self._include else end - len(stop)]
                self._matched, self._held, self._state = stop, "", 0
                return emit, stop
        self._state = state
        pending = self._held + text
        keep = len(pending) - self._depth[state]
        self._held = pending[keep:]
        return pending[:keep], None

    def flush(self) -> str:
        """The text ends here (eos, length): what was held back is no stop string after all. "" after a match."""
        held, self._held, self._state = self._held, "", 0
        return held
