"""Text to ids as SentencePiece's BPE models do it (google/sentencepiece, bpe_model.cc), from pieces and their scores.

The two neighbouring pieces whose union has the highest score are merged, the leftmost first among equals, until no
union is a piece. The `tokenizers` library cannot do exactly that: its BPE orders pairs, and of two pairs with the same
union one always goes first, wherever they stand. So the merging is here, in Python, and made fast by what vocabularies
are like: no piece goes on past the end of a word, so that text can be cut into words, and words be remembered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from cupaged.errors import TokenizerError

# Token types, the same in SentencePiece's protocol buffer and in GGUF (docs/gguf.md).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "\u2581"  # how pieces write a space
_REMEMBERED_WORDS = 1 << 16
_LONGEST_REMEMBERED = 48


class SentencePieceEncoder:
    """Encodes with one vocabulary. May be used from several threads.

    tokens, scores, types: one entry per id. unknown: the id for characters that no piece has, where there are no byte
    tokens. space_before: text at the start, and after a token written in it, gets a space in front. squeeze: leave out
    spaces at both ends and all but one of each run (`remove_extra_whitespaces`). Raises TokenizerError, beginning with
    `source`, if some byte tokens are missing, or if there are neither byte tokens nor an unknown token.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        types: Sequence[int],
        *,
        unknown: int | None,
        space_before: bool,
        squeeze: bool,
        source: str,
    ) -> None:
        self._ids = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL}
        self._unused = {token: i for i, token in enumerate(tokens) if types[i] == UNUSED} if UNUSED in types else {}
        for token, i in self._unused.items():
            self._ids.setdefault(token, i)
        self._order = [-score for score in scores]  # heapq puts the smallest first
        # Converters write user-defined tokens with spaces, control tokens too; text has no space any more when they
        # are looked for.
        written = {CONTROL, USER_DEFINED, UNKNOWN}
        self._written = {
            token.replace(" ", SPACE): i for i, token in enumerate(tokens) if types[i] in written and token
        }
        self._lengths = _lengths_by_start(self._written)
        self._starts = re.compile(f"[{_as_class({start[0] for start in self._lengths})}]") if self._lengths else None
        self._bytes = _byte_ids(tokens, types, source)
        self._unknown = -1 if unknown is None else unknown
        if not self._bytes and unknown is None:
            raise TokenizerError(f"{source}: the vocabulary has neither byte tokens nor an unknown token")
        self._space_before = space_before
        self._squeeze = squeeze
        self._words = re.compile(_word_boundary(self._ids))
        self._remembered: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without a frame. Tokens written in it (control, user-defined) are taken as such, the leftmost
        first, the longest among those. Raises UnicodeEncodeError for half a surrogate pair."""
        text.encode()  # here, because not every path below meets each character
        if self._squeeze:
            text = re.sub(" +", " ", text).strip(" ")
        ids: list[int] = []
        after_token = True
        for part in self._all_parts(text):
            if isinstance(part, int):
                ids.append(part)
                after_token = True
            else:
                self._encode_plain(SPACE + part if after_token and self._space_before else part, ids)
                after_token = False
        return ids

    def _all_parts(self, text: str) -> Iterator[str | int]:
        """`_parts` of the text as it is written, and of what is left with its spaces as pieces write them.

        In this order a SPACE that stands in the text itself is not mixed up with the spaces beside it: so it is with
        the tokenizers that models publish on the Hub, and with llama.cpp. (sentencepiece looks once, at the end.)
        """
        for part in self._parts(text):
            if isinstance(part, int):
                yield part
            else:
                yield from self._parts(part.replace(" ", SPACE))

    def _parts(self, text: str) -> Iterator[str | int]:
        """The text between written tokens, never empty, and their ids."""
        done = 0
        for start in self._starts.finditer(text) if self._starts else ():
            at = start.start()
            if at < done:
                continue
            for length in self._lengths.get(text[at : at + 2]) or self._lengths.get(start[0]) or ():
                token_id = self._written.get(text[at : at + length])
                if token_id is not None:
                    if done < at:
                        yield text[done:at]
                    yield token_id
                    done = at + length
                    break
        if done < len(text):
            yield text[done:]

    def _encode_plain(self, text: str, ids: list[int]) -> None:
        remembered = self._remembered
        for word in self._words.split(text):
            found = remembered.get(word)
            if found is None:
                found = self._encode_word(word)
                if len(word) <= _LONGEST_REMEMBERED:
                    if len(remembered) >= _REMEMBERED_WORDS:
                        remembered.clear()
                    remembered[word] = found
            # A run of unknown characters is one unknown token.
            joined = not self._bytes and found and ids and found[0] == ids[-1] == self._unknown
            ids += found[1:] if joined else found

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        for piece in self._merge(word):
            token_id = self._ids.get(piece)
            if token_id is not None:
                ids.append(token_id)
            elif self._bytes:
                ids += [self._bytes[byte] for byte in piece.encode()]
            elif not ids or ids[-1] != self._unknown:
                ids.append(self._unknown)
        return ids

    def _merge(self, word: str) -> list[str]:
        """The pieces of `word`. A symbol is named by the place where it starts: ends[place] is where it ends, 0 if it
        was merged into another."""
        ids, order, unused, count = self._ids, self._order, self._unused, len(word)
        ends = list(range(1, count + 1))
        before = list(range(-1, count - 1))
        made_of: dict[str, int] = {}  # unused pieces only take part in merging: how to take them apart again
        agenda: list[tuple[float, int, int]] = []
        for left in range(count - 1):
            token_id = ids.get(word[left : left + 2])
            if token_id is not None:
                agenda.append((order[token_id], left, left + 2))
                if unused and word[left : left + 2] in unused:
                    made_of[word[left : left + 2]] = 1
        heapify(agenda)
        while agenda:
            _, left, end = heappop(agenda)
            middle = ends[left]
            if not left < middle < end or ends[middle] != end:
                continue  # one of the two has been merged with another meanwhile
            ends[left], ends[middle] = end, 0
            pairs = []
            if before[left] >= 0:
                pairs.append((before[left], end, left))
            if end < count:
                before[end] = left
                pairs.append((left, ends[end], end))
            for start, stop, between in pairs:
                token_id = ids.get(word[start:stop])
                if token_id is not None:
                    heappush(agenda, (order[token_id], start, stop))
                    if unused and word[start:stop] in unused:
                        made_of[word[start:stop]] = between - start
        pieces: list[str] = []
        start = 0
        while start < count:
            piece = word[start : ends[start]]
            start = ends[start]
            if piece in made_of:
                pieces += _taken_apart(piece, made_of)
            else:
                pieces.append(piece)
        return pieces


def _taken_apart(piece: str, made_of: dict[str, int]) -> list[str]:
    pieces, waiting = [], [piece]
    while waiting:
        piece = waiting.pop()
        split = made_of.get(piece)
        if split is None:
            pieces.append(piece)
        else:
            waiting += (piece[split:], piece[:split])
    return pieces


def _lengths_by_start(written: dict[str, int]) -> dict[str, list[int]]:
    """The lengths of written tokens, longest first, by their first two characters (or the only one). Thousands of
    alternatives in one regular expression would be tried one by one."""
    lengths: dict[str, set[int]] = {}
    for token in written:
        lengths.setdefault(token[:2], set()).add(len(token))
    for start, known in lengths.items():
        if start[0] in lengths:
            known.add(1)
    return {start: sorted(known, reverse=True) for start, known in lengths.items()}


def _as_class(characters: set[str]) -> str:
    """The inside of a character class of a regular expression."""
    return "".join(re.escape(char) for char in sorted(characters))


def _byte_ids(tokens: Sequence[str], types: Sequence[int], source: str) -> list[int]:
    """The id of each byte's token <0x..>, [] if the vocabulary has none."""
    found = {tokens[i]: i for i, kind in enumerate(types) if kind == BYTE}
    if not found:
        return []
    ids = [found.get(f"<0x{byte:02X}>") for byte in range(256)]
    if None in ids or len(found) != 256:
        odd = f"<0x{ids.index(None):02X}> is missing" if None in ids else f"{len(found)} tokens are bytes"
        raise TokenizerError(f"{source}: {odd}; byte tokens are <0x00> to <0xFF> or none")
    return [i for i in ids if i is not None]


def _word_boundary(pieces: dict[str, int]) -> str:
    """Expression for the places where text can be cut without changing what is merged: before a space, except after
    characters that some piece has before a space."""
    before = {token[at - 1] for token in pieces if (at := token.rfind(SPACE)) > 0}
    for token in pieces:
        if token.count(SPACE) > 1:
            before.update(token[at - 1] for at in range(1, len(token)) if token[at] == SPACE)
    before.add(SPACE)
    return f"(?<![{_as_class(before)}])(?={SPACE})"
