"""The named rules by which byte-level BPE cuts text: each against an independent statement of it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hostile_text import hostile
from tokenizer_support import smollm2, smollm2_metadata
from tokenizers import Tokenizer as Backend

from cupaged.model.detokenizer import byte_of_char
from cupaged.model.pretokenizers import PRE_TOKENIZERS
from cupaged.model.tokenizer import load_tokenizer

# Unicode's White_Space, which is not what str.isspace says (that takes U+001C to U+001F too).
WHITE = set("\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}


def kind(char: str) -> str:
    """L letter, N number, S white space, O other."""
    if char in WHITE:
        return "S"
    major = unicodedata.category(char)[0]
    return major if major in "LN" else "O"


def gpt2_words(text: str) -> Iterator[str]:
    """The rule of openai/gpt-2 (encoder.py): 's|'t|'re|'ve|'m|'ll|'d| ?L+| ?N+| ?O+|S+(?!not S)|S+, by hand."""
    at = 0
    while at < len(text):
        suffix = next((s for s in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(s, at)), None)
        if suffix:
            end = at + len(suffix)
        else:
            first = at + (text[at] == " " and at + 1 < len(text) and kind(text[at + 1]) != "S")
            end = first
            while end < len(text) and kind(text[end]) == kind(text[first]):
                end += 1
            if kind(text[first]) == "S" and end < len(text) and end - first > 1:
                end -= 1  # the last blank before a word is left to it
        yield text[at:end]
        at = end


def smollm2_words(text: str) -> Iterator[str]:
    """Each number character by itself, first of all."""
    stretch = ""
    for char in text:
        if kind(char) == "N":
            yield from gpt2_words(stretch)
            yield char
            stretch = ""
        else:
            stretch += char
    yield from gpt2_words(stretch)


@lru_cache(maxsize=1)
def published() -> tuple[dict[str, int], dict[tuple[str, str], int], list[str]]:
    """(ids by token, ranks by pair, control tokens) of SmolLM2."""
    metadata = smollm2_metadata()
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    return (
        {token: i for i, token in enumerate(tokens)},
        ranks,
        [t for t, k in zip(tokens, kinds, strict=True) if k == 3],
    )


@lru_cache
def char_of_byte(byte: int) -> str:
    return next(char for char, value in byte_of_char().items() if value == byte)


def bpe(word: str) -> list[int]:
    """Byte-level BPE as published with GPT-2: again and again all places of the best-ranked pair, left to right.

    Bytes without a token leave no trace (SmolLM2 has none for 21 of the 256), as in Hugging Face's tokenizers.
    """
    ids, ranks, _ = published()
    symbols = [char_of_byte(byte) for byte in word.encode() if char_of_byte(byte) in ids]
    while len(symbols) > 1:
        best = min(pairwise(symbols), key=lambda pair: ranks.get(pair, 1 << 60))
        if best not in ranks:
            break
        merged, at = [], 0
        while at < len(symbols):
            size = 2 if tuple(symbols[at : at + 2]) == best else 1
            merged.append("".join(symbols[at : at + size]))
            at += size
        symbols = merged
    return [ids[symbol] for symbol in symbols]


def smollm2_ids(text: str) -> list[int]:
    ids, _, controls = published()
    out: list[int] = []
    for part in re.split(f"({'|'.join(re.escape(token) for token in sorted(controls, key=len, reverse=True))})", text):
        if part in controls:
            out.append(ids[part])
        else:
            for word in smollm2_words(part):
                out += bpe(word)
    return out


def test_T07_smollm2_on_500_hostile_texts() -> None:
    """The truth is GPT-2's published algorithm, above, with SmolLM2's digits and control tokens."""
    ours = smollm2()
    texts = hostile(published()[2], 500)
    assert sum(any(token in text for token in published()[2]) for text in texts) > 50
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == smollm2_ids(text), repr(text)
        for skip in (False, True):
            stream = ours.detokenizer(skip)
            assert "".join(stream.push(i) for i in ids) + stream.finish() == ours.decode(ids, skip), repr(text)
        if all(char_of_byte(byte) in published()[0] for byte in text.encode()):
            assert ours.decode(ids, skip_special_tokens=False) == text


def cut(name: str, text: str) -> list[str]:
    """The words that rule `name` cuts `text` into, as text."""
    backend = Backend.from_str('{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{},"merges":[]}}')
    PRE_TOKENIZERS[name].install(backend, space_before=False)
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    bytes_of = byte_of_char()
    assert backend.pre_tokenizer is not None
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [bytes(bytes_of[char] for char in word).decode() for word in words]


TEXT = "I'LL don't 12345 x=3+4;\r\n\n  naïveCafé  HTTPServer_v2 東京は１２３ ...\t!?/ a/b\n/c"
# Words are parted by bars.
EXPECTED = {
    "gpt-2": "I|'|LL| don|'t| 12345| x|=|3|+|4|;|\r\n\n | naïveCafé| |"
    " HTTPServer|_|v|2| 東京は|１２３| ...|\t|!?/| a|/|b|\n|/|c",
    "smollm": "I|'|LL| don|'t| |1|2|3|4|5| x|=|3|+|4|;|\r\n\n |"
    " naïveCafé| | HTTPServer|_|v|2| 東京は|１|２|３| ...|\t|!?/| a|/|b|\n|/|c",
    "llama-bpe": "I|'LL| don|'t| |123|45| x|=|3|+|4|;\r\n\n| |"
    " naïveCafé| | HTTPServer|_v|2| 東京は|１２３| ...|\t|!?/| a|/b|\n|/c",
    "qwen2": "I|'LL| don|'t| |1|2|3|4|5| x|=|3|+|4|;\r\n\n|"
    " | naïveCafé| | HTTPServer|_v|2| 東京は|１|２|３| ...|\t|!?/| a|/b|\n|/c",
    "tekken": "I|'LL| don|'t| |1|2|3|4|5| x|=|3|+|4|;\r\n\n| |"
    " naïve|Café| | HTTPServer|_v|2| 東京は|１|２|３| ...|\t|!?/| a|/b|\n|/c",
    "gpt-4o": "I'LL| don't| |123|45| x|=|3|+|4|;\r\n\n| | naïve|"
    "Café| | HTTPServer|_v|2| 東京は|１２３| ...|\t|!?/| a|/b|\n|/c",
    "deepseek-coder": "I|'|LL| don|'|t| |1|2|3|4|5| x|=|3|+|4|;|\r|\n|"
    "\n| | naïveCafé| | HTTPServer|_|v|2| |東京は|１|２|３| ...|\t!?/| a|/|b|\n|/|c",
    "deepseek-v3": "I|'LL| don|'t| |123|45| x|=|3|+|4|;\r\n\n| |"
    " naïveCafé| | HTTPServer|_v|2| |東京は|１２３| ...|\t|!?/| a|/b|\n|/c",
}
SAME = {
    "gpt-2": ("phi-2", "mpt", "olmo"),
    "smollm": ("starcoder", "refact", "command-r"),
    "llama-bpe": ("llama3", "llama-v3", "dbrx", "smaug-bpe"),
    "qwen2": ("deepseek-r1-qwen", "stablelm2"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_T07_a_text_of_all_cases_is_cut_as_the_rule_says(name: str) -> None:
    """By hand, from each model's published expression."""
    assert cut(name, TEXT) == EXPECTED[name].split("|")
    for other in SAME.get(name, ()):
        assert cut(other, TEXT) == EXPECTED[name].split("|"), other


def test_every_rule_is_tested_here_or_with_the_small_vocabularies() -> None:
    assert {*EXPECTED, *(name for names in SAME.values() for name in names), "default"} == set(PRE_TOKENIZERS)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_T07_no_rule_loses_or_moves_a_character(name: str) -> None:
    for text in hostile([], 400, seed=1):
        expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[name].nfc else text
        assert "".join(cut(name, text)) == expected


def tiny(pre: str, **changes: Any) -> Mapping[str, Any]:
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": ["<s>", "a", "b", "c", "ab", "abc", "Ã", "©", "Ã©", "e", "Ì", "ģ"],
        "token_type": [3] + [1] * 11,
        "merges": ["a b", "Ã ©"],
        "bos_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def ids(pre: str, text: str, **changes: Any) -> list[int]:
    tokenizer = load_tokenizer(Path("model.gguf"), "gguf", tiny(pre, **changes))
    assert tokenizer is not None
    return tokenizer.encode(text)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_what_a_name_says_beside_its_rule(name: str) -> None:
    """Llama 3 and Tekken take a word that is a token without merging, and put BOS in front if the file is silent."""
    rule = PRE_TOKENIZERS[name]
    eager = name in ("llama-bpe", "llama3", "llama-v3", "tekken")
    assert (rule.whole_words, rule.add_bos) == (eager, eager)
    assert ids(name, "abc") == ([0, 5] if eager else [4, 3])
    assert ids(name, "abc", add_bos_token=False) == ([5] if eager else [4, 3])
    assert ids(name, "abc", bos_token_id=None) == ([5] if eager else [4, 3])
    composed = name in ("mpt", "olmo", "command-r", "qwen2")
    assert ids(name, "e\u0301", add_bos_token=False) == ([8] if composed else [9, 10, 11])
