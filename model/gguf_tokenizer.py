"""A tokenizer from the metadata of a GGUF file: GPT-2's byte-level BPE.

GGUF stores the vocabulary and the merges but only the *name* of the pre-tokenizer, the rule that cuts text into words
before merging. A wrong rule gives plausible but wrong ids, so names that are not in the table here are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cupaged.errors import TokenizerError
from cupaged.model.tokenizer import SpecialTokens, Tokenizer, backend_error, frame_with

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import PreTokenizer

# Token types of the format (ggml, docs/gguf.md): 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5

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

# The cutting rule of GPT-2 (openai/gpt-2, encoder.py), less its last alternative, \s+: what no part matches is cut too.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _gpt2(add_prefix_space: bool) -> PreTokenizer:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)


def _smollm(add_prefix_space: bool) -> PreTokenizer:
    """Every digit by itself, the rest as GPT-2."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)])


def _default(add_prefix_space: bool) -> PreTokenizer:
    """What llama.cpp does (llama-vocab.cpp) with files whose converter did not know the model's own rule.

    Four cuts one after the other: punctuation, GPT-2's words, runs of digits, and those in threes.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    cuts = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
    splits: list[PreTokenizer] = [Split(Regex(cut), behavior="isolated") for cut in cuts]
    return Sequence([*splits, ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[bool], PreTokenizer]] = {"gpt-2": _gpt2, "smollm": _smollm, "default": _default}


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
    """The tokenizer of GGUF key-value pairs (`tokenizer.ggml.*`, `tokenizer.chat_template`); None if they hold none.

    `tokens` and `merges` are sequences of str, `token_type` of integers. `source` names the file in messages. Raises
    TokenizerError for another tokenizer model or pre-tokenizer than those above, naming it, and for data that do not
    fit together.
    """
    model = metadata.get(_PREFIX + "model")
    if model in (None, "none", "no_vocab"):
        return None
    if model != "gpt2":
        raise TokenizerError(
            f"{source}: tokenizer model {model!r} is not supported; supported is gpt2 (byte-level BPE)"
        )
    pre = metadata.get(_PREFIX + "pre")
    if pre not in _PRE_TOKENIZERS:
        named = "no pre-tokenizer is named" if pre is None else f"pre-tokenizer {pre!r} is not supported"
        raise TokenizerError(f"{source}: {named}; supported are {', '.join(_PRE_TOKENIZERS)}")

    tokens = _strings(metadata, "tokens", source)
    types = _types(metadata, len(tokens), source)
    backend = _bpe(tokens, types, _strings(metadata, "merges", source), source)
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre](_flag(metadata, "add_space_prefix", source))
    backend.decoder = _byte_level_decoder()
    _add_special(backend, tokens, types)

    ids = {name: _token_id(metadata, name, len(tokens), source) for name in {*_NAMES, *_ENDS}}
    # Byte-level models get no frame unless the file says so.
    bos = _framing(metadata, "bos", ids, source)
    eos = _framing(metadata, "eos", ids, source)
    if bos is not None or eos is not None:
        frame_with(backend, bos, eos)
    texts: dict[str, str | list[str]] = {
        hub_name: tokens[token_id] for name, hub_name in _NAMES.items() if (token_id := ids[name]) is not None
    }
    ends = frozenset(token_id for name in _ENDS if (token_id := ids[name]) is not None)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{source}: tokenizer.chat_template is not a string")
    return Tokenizer(backend, SpecialTokens(texts, ids["bos"], ends), template, source)


def _bpe(tokens: list[str], types: list[int], merges: list[str], source: str) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    # Unused entries are padding without a text. They must not be in the vocabulary: decoding would show their names.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    used = len(tokens) - types.count(UNUSED)
    if len(vocab) != used:
        seen: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if types[i] != UNUSED and seen.setdefault(token, i) != i:
                raise TokenizerError(f"{source}: token {token!r} stands twice, as ids {seen[token]} and {i}")
    pairs: list[tuple[str, str]] = []
    for i, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise TokenizerError(f"{source}: {_PREFIX}merges[{i}] is {merge!r}, two tokens and a space are needed")
        pairs.append((left, right))
    try:
        return Backend(models.BPE(vocab=vocab, merges=pairs))
    except BaseException as error:
        raise backend_error(source, error) from None


def _byte_level_decoder() -> Any:
    from tokenizers.decoders import ByteLevel

    return ByteLevel()


def _add_special(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special (parsed in text, skipped in output), user-defined ones only parsed."""
    from tokenizers import AddedToken

    for kinds, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds and token
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _strings(metadata: Mapping[str, Any], key: str, source: str) -> list[str]:
    value = metadata.get(_PREFIX + key)
    if value is None:
        raise TokenizerError(f"{source}: {_PREFIX}{key} is missing")
    strings = list(value) if _is_array(value) else []
    if not strings or set(map(type, strings)) != {str}:
        raise TokenizerError(f"{source}: {_PREFIX}{key} is not a list of strings")
    return strings


def _types(metadata: Mapping[str, Any], count: int, source: str) -> list[int]:
    value = metadata.get(_PREFIX + "token_type")
    if value is None:
        raise TokenizerError(f"{source}: {_PREFIX}token_type is missing")
    types = [int(kind) for kind in value] if _is_array(value) else []
    if len(types) != count:
        raise TokenizerError(f"{source}: {_PREFIX}token_type has {len(types)} entries for {count} tokens")
    return types


def _is_array(value: Any) -> bool:
    """A list, a tuple, or a NumPy array (which is no Sequence)."""
    return not isinstance(value, (str, bytes)) and (isinstance(value, Sequence) or hasattr(value, "tolist"))


def _token_id(metadata: Mapping[str, Any], name: str, count: int, source: str) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    try:
        token_id = int(value)
    except (TypeError, ValueError):
        raise TokenizerError(f"{source}: {key} is {value!r}, a token id is needed") from None
    if not 0 <= token_id < count:
        raise TokenizerError(f"{source}: {key} is {token_id}, the vocabulary has ids 0 .. {count - 1}")
    return token_id


def _framing(metadata: Mapping[str, Any], name: str, ids: Mapping[str, int | None], source: str) -> int | None:
    """The id that add_bos_token / add_eos_token asks for, None if it does not."""
    if not _flag(metadata, f"add_{name}_token", source):
        return None
    if ids[name] is None:
        raise TokenizerError(f"{source}: {_PREFIX}add_{name}_token is set, but no {name}_token_id")
    return ids[name]


def _flag(metadata: Mapping[str, Any], key: str, source: str) -> bool:
    value = metadata.get(_PREFIX + key, False)
    if value not in (False, True):  # NumPy's bool compares equal too
        raise TokenizerError(f"{source}: {_PREFIX}{key} is {value!r}, true or false is needed")
    return bool(value)
