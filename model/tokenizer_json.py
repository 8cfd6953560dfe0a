"""A tokenizer.json from a GGUF's tokenizer.

A byte-level BPE one is the library's already, and writes itself. SentencePiece's is not (see sentencepiece.py): it is
written as Hugging Face's own converters write it, as BPE whose merges follow from the pieces' scores. That is what
repositories of such models hold; it orders pairs where SentencePiece orders unions, and can differ for contrived text.
So whatever is written is compared on texts of all kinds with what it was made from, and refused if it gives other ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cupaged.errors import TokenizerError
from cupaged.model.config_values import quote
from cupaged.model.sentencepiece import CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED
from cupaged.model.tokenizer import Tokenizer
from cupaged.model.tokenizer_frame import frame_with

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_PREFIX = "tokenizer.ggml."
# Kinds of text that tokenizers treat differently.
_PROBES = (
    "", " ", "  ", "a", " a", "a ", "Hello, world!", "The quick brown fox jumps over the lazy dog.", "a  b   c    d",
    "\n", "\n\n\n", "\t\tx", "line one\nline two\r\n\r\n  indented\n\tand more", "I'm we've they'll DON'T",
    "1", "12", "123", "1234567890", "3.14159, 1,000,000 and 2e-10", "x=y+z*(a-b)/c; // !?", "def f(x):\n    return x\n",
    "naïve café Ünïcödé ß", "Ελληνικά, русский, українська", "日本語 中文字 한국어", "العربية עברית हिन्दी ไทย",
    "👍 👩‍👩‍👧‍👦 🇩🇪 é e\u0301", "\u00a0\u200b\ufeff\u3000", "\x00\x01\x7f", "<s></s>[INST] <0x0A> <pad><unk>",
    "https://example.org/a_b?c=d&e=%20#f", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ABCDEFghijKLMN0pQ", "_▁_▁▁ ▁",
)  # fmt: skip


def tokenizer_json(tokenizer: Tokenizer, metadata: Mapping[str, Any], source: str) -> str:
    """The text of the file. `metadata`: what `tokenizer` was made from. TokenizerError if it would not be the same."""
    if metadata.get(_PREFIX + "model") == "llama":
        backend = _sentencepiece(metadata, tokenizer, source)
    else:
        backend = tokenizer._backend
    text: str = backend.to_str(pretty=True)
    _compare(tokenizer, text, source)
    return text + "\n"


def frame(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """The ids that the tokenizer puts before and behind a text (None: none)."""
    bare, framed = (tokenizer.encode("a", add_special_tokens=flag) for flag in (False, True))
    before = next(start for start in range(len(framed)) if framed[start : start + len(bare)] == bare)
    return framed[0] if before else None, framed[-1] if before + len(bare) < len(framed) else None


def _compare(tokenizer: Tokenizer, text: str, source: str) -> None:
    from tokenizers import Tokenizer as Backend

    written = Backend.from_str(text)
    special = [word for word in tokenizer.special_tokens.values() if isinstance(word, str)]
    for probe in (*_PROBES, *special, *(f"a{word} b" for word in special)):
        for framed in (True, False):
            ids = tokenizer.encode(probe, framed)
            same_text = written.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids, False)
            if written.encode(probe, add_special_tokens=framed).ids != ids or not same_text:
                raise TokenizerError(
                    f"{source}: cannot be converted, its tokenizer as tokenizer.json gives other ids for {quote(probe)}"
                )


def _sentencepiece(metadata: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> Backend:
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    if metadata.get(_PREFIX + "remove_extra_whitespaces"):
        raise TokenizerError(f"{source}: cannot be converted, tokenizer.json has no remove_extra_whitespaces")
    tokens: list[str] = list(metadata[_PREFIX + "tokens"])
    types = [int(kind) for kind in metadata[_PREFIX + "token_type"]]
    scores = [float(score) for score in metadata[_PREFIX + "scores"]]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    merges = merges_by_score(tokens, scores, types)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    add_space = bool(metadata.get(_PREFIX + "add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if add_space else spaces
    decoder = json.loads(tokenizer._backend.decoder.__getstate__())
    backend.decoder = decoders.Sequence([_decoder(step) for step in decoder["decoders"]])
    for kinds, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        written = [token for token, kind in zip(tokens, types, strict=True) if kind in kinds and token]
        # Those of spaces are looked for after a space has become what it is in pieces.
        added = [
            AddedToken(token, special=special, normalized=not add_space and (" " in token or SPACE in token))
            for token in written
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    before, behind = frame(tokenizer)
    frame_with(backend, before, behind)
    return backend


def _decoder(step: Mapping[str, Any]) -> Any:
    from tokenizers import decoders

    if step["type"] == "Replace":
        return decoders.Replace(step["pattern"]["String"], step["content"])
    if step["type"] == "Strip":
        return decoders.Strip(step["content"], step["start"], step["stop"])
    return {"ByteFallback": decoders.ByteFallback, "Fuse": decoders.Fuse}[step["type"]]()


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of pieces whose union is a piece, the union with the highest score first, then the lowest id."""
    known = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    order = sorted((i for i in range(len(tokens)) if types[i] == NORMAL), key=lambda i: (-scores[i], i))
    return [
        (token[:at], token[at:])
        for token in (tokens[i] for i in order)
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]
