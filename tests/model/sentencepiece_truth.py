"""Google's sentencepiece as the truth for vocabularies of GGUF files: a model file is written from the metadata.

The file is a protocol buffer (sentencepiece_model.proto), written here field by field: only a few are needed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

import sentencepiece

SPACE = "\u2581"
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
_BPE = 2


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def processor(metadata: Mapping[str, Any]) -> Any:
    """A processor with the pieces, scores, types and options of `tokenizer.ggml.*`."""
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    unknown = keys["unknown_token_id"]
    pieces = []
    for i, (token, score, kind) in enumerate(zip(keys["tokens"], keys["scores"], keys["token_type"], strict=True)):
        # Converters write spaces in user-defined tokens; the unknown token must have its own type.
        piece = token.replace(" ", SPACE) if kind == USER_DEFINED else token
        kind = UNKNOWN if i == unknown else CONTROL if kind == UNKNOWN else kind
        body = _bytes(1, piece.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _int(3, kind)
        pieces.append(_bytes(1, body))
    trainer = _int(3, _BPE) + _int(35, int(BYTE in keys["token_type"])) + _int(40, unknown)
    trainer += _bytes(45, keys["tokens"][unknown].encode())
    normalizer = _bytes(1, b"identity") + _bytes(2, b"") + _int(3, int(keys.get("add_space_prefix", True)))
    normalizer += _int(4, int(keys.get("remove_extra_whitespaces", False))) + _int(5, 1)
    proto = b"".join(pieces) + _bytes(2, trainer) + _bytes(3, normalizer)
    loaded = sentencepiece.SentencePieceProcessor()
    loaded.LoadFromSerializedProto(proto)
    return loaded


class Published:
    """sentencepiece, with one difference that the tokenizers on the Hub and llama.cpp have: user-defined tokens are
    looked for before spaces are written as pieces write them, so a "\u2581" that stands in the text does not run
    together with spaces beside it.

    (Compared by hand with Gemma 3's published tokenizer.json, which may not be kept here: 6,000 hostile texts, control
    tokens in them, no difference.)
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.original = processor(metadata)
        pieces = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
        written = {token.replace(" ", SPACE): i for i, (token, kind) in enumerate(pieces) if kind == USER_DEFINED}
        self._spaced = {token: i for token, i in written.items() if SPACE in token}
        longest_first = sorted(self._spaced, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def ids(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._split.split(text):
            if part in self._spaced:
                ids.append(self._spaced[part])
            elif part:
                ids += self.original.EncodeAsIds(part)
        return ids
