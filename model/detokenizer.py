"""Token ids to text, as a stream: what may be shown so far, without ever showing half a character.

The `tokenizers` library decodes a whole list of ids. Decoding a growing list again for every token costs quadratic
time, and decoding a window of it is not exact. So the decoders of language models are built here again as stages that
keep their state between tokens; the concatenation of all pieces equals the library's `decode` of all ids, character for
character. Facts of each stage are those of the library's `decoders` (version 0.23), on which the tests compare them.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from cupaged.errors import TokenizerError


class Stage(Protocol):
    """One step from tokens to text: strings in, strings out, at once or later."""

    def feed(self, strings: list[str]) -> list[str]: ...
    def end(self) -> list[str]: ...


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet (openai/gpt-2, `bytes_to_unicode`): printable Latin-1 is itself, the n-th other byte 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in table]
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table


class ByteLevel:
    """Tokens are bytes written in GPT-2's alphabet. An incomplete UTF-8 tail waits; hopeless bytes become U+FFFD."""

    def __init__(self) -> None:
        self._bytes = byte_of_char()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def __copy__(self) -> ByteLevel:
        twin = ByteLevel()
        twin._utf8.setstate(self._utf8.getstate())
        return twin

    def feed(self, strings: list[str]) -> list[str]:
        return [self._utf8.decode(self._to_bytes(string)) for string in strings]

    def end(self) -> list[str]:
        return [self._utf8.decode(b"", True)]

    def _to_bytes(self, string: str) -> bytes:
        try:
            return bytes([self._bytes[char] for char in string])
        except KeyError:  # an added token such as "<|a b|>": the library takes it as plain text
            return string.encode()


class ByteFallback:
    """Tokens "<0xE4>" are bytes, others are text. A run of byte tokens is shown when it ends.

    It cannot be shown earlier: if the run as a whole is not UTF-8, each of its bytes becomes U+FFFD, those of complete
    characters at its start too.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def __copy__(self) -> ByteFallback:
        twin = ByteFallback()
        twin._run += self._run
        return twin

    def feed(self, strings: list[str]) -> list[str]:
        out: list[str] = []
        for string in strings:
            byte = self._byte(string)
            if byte is None:
                out += self.end()
                out.append(string)
            else:
                self._run.append(byte)
        return out

    def end(self) -> list[str]:
        if not self._run:
            return []
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return [text]

    @staticmethod
    def _byte(string: str) -> int | None:
        if len(string) != 6 or not string.startswith("<0x") or not string.endswith(">"):
            return None
        try:
            return bytes.fromhex(string[3:5])[0]
        except (ValueError, IndexError):
            return None


class Replace:
    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content

    def feed(self, strings: list[str]) -> list[str]:
        return [string.replace(self._pattern, self._content) for string in strings]

    def end(self) -> list[str]:
        return []


class Metaspace:
    """The mark (usually U+2581) is a space; those of the very first token vanish if encoding had put one there."""

    def __init__(self, mark: str, drop_first: bool) -> None:
        self._mark = mark
        self._drop = drop_first

    def feed(self, strings: list[str]) -> list[str]:
        out: list[str] = []
        for string in strings:
            out.append(string.replace(self._mark, "" if self._drop else " "))
            self._drop = False
        return out

    def end(self) -> list[str]:
        return []


class StripStart:
    """Remove up to `count` leading characters: of each token, or once of the whole text if it stands after Fuse."""

    def __init__(self, char: str, count: int, once: bool) -> None:
        self._char, self._count, self._once = char, count, once
        self._left = count

    def feed(self, strings: list[str]) -> list[str]:
        return [self._strip(string) for string in strings]

    def end(self) -> list[str]:
        return []

    def _strip(self, string: str) -> str:
        if not self._once:
            self._left = self._count
        cut = 0
        while cut < min(self._left, len(string)) and string[cut] == self._char:
            cut += 1
        self._left = self._left - cut if cut == len(string) else 0
        return string[cut:]


class JoinWithSpaces:
    """A tokenizer without a decoder: its tokens are words."""

    def __init__(self) -> None:
        self._first = True

    def feed(self, strings: list[str]) -> list[str]:
        out: list[str] = []
        for string in strings:
            out.append(string if self._first else " " + string)
            self._first = False
        return out

    def end(self) -> list[str]:
        return []


MakeStages = Callable[[], list[Stage]]


def compile_decoder(spec: Mapping[str, Any] | None) -> MakeStages:
    """Read a decoder as written in tokenizer.json (key "decoder"; None: absent); the result makes fresh stages.

    Raises TokenizerError for what is not supported here: decoders that no language model uses (WordPiece, CTC,
    BPEDecoder), regular expressions in Replace, and orders whose result depends on the whole text.
    """
    if spec is None:
        return lambda: [JoinWithSpaces()]
    parts = spec["decoders"] if spec.get("type") == "Sequence" else [spec]
    makers: list[Callable[[], Stage]] = []
    fused = False  # after Fuse (or ByteLevel) what comes in are fragments of one string, not tokens
    for part in parts:
        if part.get("type") == "Fuse":
            fused = True
        else:
            makers.append(_compile_part(part, fused))
            fused = fused or part.get("type") == "ByteLevel"
    return lambda: [make() for make in makers]


def _compile_part(part: Mapping[str, Any], fused: bool) -> Callable[[], Stage]:
    kind = part.get("type")
    if kind == "Replace":
        pattern, content = part["pattern"].get("String"), part["content"]
        if pattern and (len(pattern) == 1 or not fused):
            return lambda: Replace(pattern, content)
        raise TokenizerError("decoder Replace is supported for a plain string, before Fuse (after it, one character)")
    if kind == "Strip":
        char, start, stop = part["content"], part["start"], part["stop"]
        if stop:
            raise TokenizerError(f"decoder Strip with stop={stop} is not supported: only 0")
        return lambda: StripStart(char, start, once=fused)
    if not fused:
        if kind == "ByteLevel":
            return ByteLevel
        if kind == "ByteFallback":
            return ByteFallback
        if kind == "Metaspace":
            mark, drop = part["replacement"], part["prepend_scheme"] != "never"
            return lambda: Metaspace(mark, drop)
    raise TokenizerError(
        f"decoder {kind!r}{' after Fuse' if fused else ''} is not supported;"
        " supported are ByteLevel, ByteFallback, Metaspace, Replace, Fuse, Strip"
    )


class Detokenizer:
    """The text of one sequence, token by token. `"".join(pushes) + finish()` equals `decode` of all ids.

    Made by `Tokenizer.detokenizer()`. `string_of(id)` is the token as the vocabulary writes it, or None for a token
    that leaves no trace (unknown to the vocabulary, or a special one that is skipped).
    """

    def __init__(self, string_of: Callable[[int], str | None], stages: Sequence[Stage]) -> None:
        self._string_of = string_of
        self._stages = stages

    def fork(self) -> Detokenizer:
        """Another one with the same tokens behind it, for a sequence that branches here."""
        return Detokenizer(self._string_of, [copy.copy(stage) for stage in self._stages])

    def push(self, token_id: int) -> str:
        """Take the next token; returns the new text that is certain, which may be ""."""
        string = self._string_of(token_id)
        return "" if string is None else self.push_string(string)

    def push_string(self, string: str) -> str:
        """As `push`, for a token given as the vocabulary writes it."""
        strings = [string]
        for stage in self._stages:
            strings = stage.feed(strings)
        return "".join(strings)

    def finish(self) -> str:
        """No token follows: the rest of the text. An incomplete character becomes U+FFFD, as in `decode`."""
        strings: list[str] = []
        for stage in self._stages:
            strings = stage.feed(strings) + stage.end()
        return "".join(strings)
