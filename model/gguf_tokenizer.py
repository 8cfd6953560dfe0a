"""A tokenizer from the metadata of a GGUF file: byte-level BPE ("gpt2"), or SentencePiece's BPE ("llama").

The first is merges over words, cut by a rule that the file only names (pretokenizers.py); the second is scores
(sentencepiece.py). Other kinds (WordPiece, Unigram, RWKV) are refused by name: no family here uses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from cupaged.errors import TokenizerError
from cupaged.model.config_values import quote
from cupaged.model.pretokenizers import PRE_TOKENIZERS
from cupaged.model.sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceEncoder,
)
from cupaged.model.tokenizer import SpecialTokens, Tokenizer, backend_error
from cupaged.model.tokenizer_frame import frame_with

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_PREFIX = "tokenizer.ggml."
# GGUF's names for special tokens and the names that chat templates know. "seperator" is spelled so in the format.
_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "seperator": "sep_token",
    "padding": "pad_token",
    "cls": "cls_token",
    "mask": "mask_token",
}
# Each ends a turn or a text (end of sequence, of turn, of message).
_ENDS = ("eos", "eot", "eom")

# The ids that llama.cpp takes for a "llama" vocabulary whose file names none (llama-vocab.cpp).
_LLAMA_IDS = {"bos": 1, "eos": 2, "unknown": 0}


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
    """The tokenizer of GGUF key-value pairs (`tokenizer.ggml.*`, `tokenizer.chat_template`); None if they hold none.

    `tokens` and `merges` are sequences of str, `token_type` of integers, `scores` of numbers. `source` names the file
    in messages. Raises TokenizerError for another tokenizer model or pre-tokenizer than those above, naming it, and for
    data that do not fit together.
    """
    model = metadata.get(_PREFIX + "model")
    if model is None or model in ("none", "no_vocab"):
        return None
    if model == "gpt2":
        return _byte_level_bpe(metadata, source)
    if model == "llama":
        return _sentencepiece(metadata, source)
    raise TokenizerError(
        f"{source}: tokenizer model {quote(model)} is not supported; supported are gpt2 (byte-level BPE) and llama"
        " (SentencePiece's BPE)"
    )


def _byte_level_bpe(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    from tokenizers.decoders import ByteLevel

    pre = metadata.get(_PREFIX + "pre")
    rule = PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    if rule is None:
        named = "no pre-tokenizer is named" if pre is None else f"pre-tokenizer {quote(pre)} is not supported"
        raise TokenizerError(f"{source}: {named}; supported are {', '.join(PRE_TOKENIZERS)}")
    tokens = _strings(metadata, "tokens", source)
    types = _types(metadata, len(tokens), source)
    merges = _merges(_strings(metadata, "merges", source), source)
    backend = _backend(tokens, types, merges, rule.whole_words, source)
    rule.install(backend, _flag(metadata, "add_space_prefix", False, source))
    backend.decoder = ByteLevel()
    _add_written(backend, tokens, types)
    ids = _special_ids(metadata, len(tokens), source)
    bos = _framing(metadata, "bos", rule.add_bos and ids["bos"] is not None, ids, source)
    eos = _framing(metadata, "eos", False, ids, source)
    if bos is not None or eos is not None:
        frame_with(backend, bos, eos)
    return Tokenizer(backend, _special(tokens, ids), _template(metadata, source), source)


class _SentencePieceTokenizer(Tokenizer):
    """The library's part is the vocabulary and decoding; encoding is `SentencePieceEncoder`'s."""

    def __init__(self, encoder: SentencePieceEncoder, frame: tuple[int | None, int | None], *arguments: Any) -> None:
        """frame: the ids to put before and behind the text. arguments: those of Tokenizer."""
        super().__init__(*arguments)
        self._encoder = encoder
        self._before, self._behind = ([] if token_id is None else [token_id] for token_id in frame)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if isinstance(text, str):
            try:
                ids = self._encoder.encode(text)
            except UnicodeEncodeError:
                pass
            else:
                return [*self._before, *ids, *self._behind] if add_special_tokens else ids
        return super().encode(text, add_special_tokens)  # which says what is wrong with it


def _sentencepiece(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    from tokenizers import decoders

    tokens = _strings(metadata, "tokens", source)
    types = _types(metadata, len(tokens), source)
    scores = _scores(metadata, len(tokens), source)
    if metadata.get(_PREFIX + "precompiled_charsmap"):
        raise TokenizerError(f"{source}: {_PREFIX}precompiled_charsmap is not supported with tokenizer model llama")
    ids = _special_ids(metadata, len(tokens), source)
    for name, token_id in _LLAMA_IDS.items():
        if ids[name] is None and token_id < len(tokens) and types[token_id] in (CONTROL, UNKNOWN):
            ids[name] = token_id
    space_before = _flag(metadata, "add_space_prefix", True, source)
    encoder = SentencePieceEncoder(
        tokens,
        scores,
        types,
        unknown=ids["unknown"],
        space_before=space_before,
        squeeze=_flag(metadata, "remove_extra_whitespaces", False, source),
        source=source,
    )
    backend = _backend(tokens, types, [], False, source)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_before else steps)
    _add_written(backend, tokens, types)
    frame = (
        _framing(metadata, "bos", ids["bos"] is not None, ids, source),
        _framing(metadata, "eos", False, ids, source),
    )
    return _SentencePieceTokenizer(encoder, frame, backend, _special(tokens, ids), _template(metadata, source), source)


def _backend(
    tokens: list[str], types: list[int], merges: list[tuple[str, str]], whole_words: bool, source: str
) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    # Unused entries are padding without a text. They must not be in the vocabulary: decoding would show their names.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    used = len(tokens) - types.count(UNUSED)
    if len(vocab) != used:
        seen: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if types[i] != UNUSED and seen.setdefault(token, i) != i:
                raise TokenizerError(f"{source}: token {quote(token)} stands twice, as ids {seen[token]} and {i}")
    try:
        return Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    except BaseException as error:
        raise backend_error(source, error) from None


def _merges(merges: list[str], source: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for i, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise TokenizerError(f"{source}: {_PREFIX}merges[{i}] is {quote(merge)}, two tokens and a space are needed")
        pairs.append((left, right))
    return pairs


def _add_written(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special (parsed in text, skipped in output), user-defined ones only parsed."""
    from tokenizers import AddedToken

    for kinds, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds and token
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _special_ids(metadata: Mapping[str, Any], count: int, source: str) -> dict[str, int | None]:
    return {name: _token_id(metadata, name, count, source) for name in {*_NAMES, *_ENDS}}


def _special(tokens: list[str], ids: Mapping[str, int | None]) -> SpecialTokens:
    texts: dict[str, str | list[str]] = {
        hub_name: tokens[token_id] for name, hub_name in _NAMES.items() if (token_id := ids[name]) is not None
    }
    ends = frozenset(token_id for name in _ENDS if (token_id := ids[name]) is not None)
    return SpecialTokens(texts, ids["bos"], ends)


def _template(metadata: Mapping[str, Any], source: str) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{source}: tokenizer.chat_template is not a string")
    return template


def _strings(metadata: Mapping[str, Any], key: str, source: str) -> list[str]:
    value = metadata.get(_PREFIX + key)
    if value is None:
        raise TokenizerError(f"{source}: {_PREFIX}{key} is missing")
    strings = list(value) if _is_array(value) else []
    if not strings or set(map(type, strings)) != {str}:
        raise TokenizerError(f"{source}: {_PREFIX}{key} is not a list of strings")
    return strings


def _types(metadata: Mapping[str, Any], count: int, source: str) -> list[int]:
    types = _numbers(metadata, "token_type", count, source)
    if not set(types) <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
        odd = next(kind for kind in types if kind not in range(NORMAL, BYTE + 1))
        raise TokenizerError(f"{source}: {_PREFIX}token_type holds {quote(odd)}; known are {NORMAL} to {BYTE}")
    return [int(kind) for kind in types]


def _scores(metadata: Mapping[str, Any], count: int, source: str) -> list[float]:
    scores = _numbers(metadata, "scores", count, source)
    if not all(map(math.isfinite, scores)):
        raise TokenizerError(f"{source}: {_PREFIX}scores holds a number that is not finite")
    return scores


def _numbers(metadata: Mapping[str, Any], key: str, count: int, source: str) -> list[Any]:
    value = metadata.get(_PREFIX + key)
    if value is None:
        raise TokenizerError(f"{source}: {_PREFIX}{key} is missing")
    numbers = list(value.tolist() if hasattr(value, "tolist") else value) if _is_array(value) else []
    if len(numbers) != count:
        raise TokenizerError(f"{source}: {_PREFIX}{key} has {len(numbers)} entries for {count} tokens")
    if not set(map(type, numbers)) <= {int, float}:
        raise TokenizerError(f"{source}: {_PREFIX}{key} is not a list of numbers")
    return numbers


def _is_array(value: Any) -> bool:
    """A list, a tuple, or a NumPy array (which is no Sequence)."""
    return not isinstance(value, (str, bytes)) and (isinstance(value, Sequence) or hasattr(value, "tolist"))


def _token_id(metadata: Mapping[str, Any], name: str, count: int, source: str) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    try:
        token_id = index(value)
    except TypeError:
        raise TokenizerError(f"{source}: {key} is {quote(value)}, a token id is needed") from None
    if not 0 <= token_id < count:
        raise TokenizerError(f"{source}: {key} is {token_id}, the vocabulary has ids 0 .. {count - 1}")
    return token_id


def _framing(
    metadata: Mapping[str, Any], name: str, default: bool, ids: Mapping[str, int | None], source: str
) -> int | None:
    """The id that add_bos_token / add_eos_token asks for, None if it does not."""
    if not _flag(metadata, f"add_{name}_token", default, source):
        return None
    if ids[name] is None:
        raise TokenizerError(f"{source}: {_PREFIX}add_{name}_token is set, but no {name}_token_id")
    return ids[name]


def _flag(metadata: Mapping[str, Any], key: str, default: bool, source: str) -> bool:
    value = metadata.get(_PREFIX + key, default)
    # NumPy's bool too; lists and arrays must not get as far as a comparison.
    if type(value).__name__ not in ("bool", "bool_"):
        raise TokenizerError(f"{source}: {_PREFIX}{key} is {quote(value)}, true or false is needed")
    return bool(value)
