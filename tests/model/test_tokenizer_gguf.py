"""Tokenizers made from the metadata of a GGUF file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_support import smollm2_metadata

from cupaged.errors import TokenizerError
from cupaged.model.tokenizer import Tokenizer, load_tokenizer

DIGITS = list("1234")
PLAIN = [*DIGITS, "a", "Ġ", "12", "34", "1234", "123", "Ġa", "<|c|>", "<:bos:>", "<user>", "[PAD14]", "$A"]


def metadata(**changes: Any) -> dict[str, Any]:
    """A tiny byte-level BPE; a keyword replaces the key tokenizer.ggml.KEYWORD, or removes it (None)."""
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": PLAIN,
        "token_type": [1] * 11 + [3, 3, 4, 5, 3],
        "merges": ["1 2", "3 4", "12 34", "12 3", "Ġ a"],
        "bos_token_id": 12,
        "eos_token_id": 11,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def load(**changes: Any) -> Tokenizer:
    tokenizer = load_tokenizer(Path("model.gguf"), "gguf", metadata(**changes))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    "pre, tokens",
    [("gpt-2", ["1234", "Ġa"]), ("smollm", ["1", "2", "3", "4", "Ġa"]), ("default", ["123", "4", "Ġa"])],
)
def test_the_pre_tokenizer_decides_how_digits_are_cut(pre: str, tokens: list[str]) -> None:
    tokenizer = load(pre=pre)
    assert [tokenizer.token_string(i) for i in tokenizer.encode("1234 a")] == tokens


def test_control_tokens_are_special_user_defined_ones_are_text_unused_ones_are_nothing() -> None:
    tokenizer = load()
    assert tokenizer.encode("a<|c|><user>a") == [4, 11, 13, 4]
    assert tokenizer.decode([4, 11, 13, 14, 4]) == "a<user>a"
    assert tokenizer.decode([4, 11, 13, 14, 4], skip_special_tokens=False) == "a<|c|><user>a"
    assert tokenizer.token_string(14) is None
    assert [i for i in range(16) if tokenizer.is_special(i)] == [11, 12, 15]


def test_the_frame_is_what_the_file_says() -> None:
    assert load().encode("a") == [4]
    assert load(add_bos_token=True).encode("a") == [12, 4]  # a name with ":" is no template language
    assert load(add_bos_token=np.True_, add_eos_token=True, bos_token_id=15).encode("a") == [15, 4, 11]
    assert load(add_bos_token=True).encode("a", add_special_tokens=False) == [4]


def test_M13_every_declared_end_counts() -> None:
    assert load(eot_token_id=12, eom_token_id=np.uint32(13)).eos_token_ids == {11, 12, 13}
    assert load(eos_token_id=None).eos_token_ids == frozenset()


def test_special_tokens_have_the_names_that_templates_know() -> None:
    texts = load(unknown_token_id=0, padding_token_id=11).special_tokens
    assert texts == {"bos_token": "<:bos:>", "eos_token": "<|c|>", "unk_token": "1", "pad_token": "<|c|>"}


def test_arrays_may_be_numpy() -> None:
    types = np.array([1] * 11 + [3, 3, 4, 5, 3], dtype=np.int32)
    assert load(tokens=np.array(PLAIN, dtype=object), token_type=types).encode("a<|c|>") == [4, 11]


def test_a_space_is_put_before_the_text_where_the_file_says_so() -> None:
    assert load(add_space_prefix=True).encode("a") == [10]
    assert load(add_space_prefix=False).encode("a") == [4]


def test_files_without_a_tokenizer_give_none() -> None:
    assert load_tokenizer(Path("model.gguf"), "gguf", {"general.architecture": "llama"}) is None
    assert load_tokenizer(Path("model.gguf"), "gguf", {"tokenizer.ggml.model": "none"}) is None


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model": "bert"}, "'bert' is not supported; supported are gpt2"),
        ({"pre": "qwen9"}, "'qwen9' is not supported; supported are default, gpt-2, "),
        ({"pre": ["gpt-2"]}, r"\['gpt-2'\] is not supported"),
        ({"pre": None}, "no pre-tokenizer is named"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokens": []}, "tokens is not a list of strings"),
        ({"tokens": ["a", b"b"]}, "tokens is not a list of strings"),
        ({"tokens": "abc"}, "tokens is not a list of strings"),
        ({"token_type": [1]}, "1 entries for 16 tokens"),
        ({"token_type": None}, "token_type is missing"),
        ({"token_type": ["1"] * 16}, "token_type is not a list of numbers"),
        ({"token_type": [[1]] * 16}, "token_type is not a list of numbers"),
        ({"token_type": [True] * 16}, "token_type is not a list of numbers"),
        ({"token_type": [float("nan")] * 16}, "token_type holds nan; known are 1 to 6"),
        ({"token_type": [float("inf")] * 16}, "token_type holds inf; known are 1 to 6"),
        ({"token_type": [1.5] * 16}, r"token_type holds 1\.5; known are 1 to 6"),
        ({"token_type": [99] * 16}, "token_type holds 99; known are 1 to 6"),
        ({"token_type": 1}, "0 entries for 16 tokens"),
        ({"model": ["gpt2"]}, r"\['gpt2'\] is not supported"),
        ({"model": 3}, "3 is not supported"),
        ({"pre": 1.5}, r"1\.5 is not supported"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["1 2", "12"]}, r"merges\[1\] is '12'"),
        ({"merges": ["1 a"]}, "1a"),
        ({"tokens": [*PLAIN[:-1], "a"]}, "'a' stands twice, as ids 4 and 15"),
        ({"bos_token_id": 16}, r"bos_token_id is 16, the vocabulary has ids 0 \.\. 15"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"padding_token_id": float("inf")}, "padding_token_id is inf, a token id is needed"),
        ({"padding_token_id": float("nan")}, "padding_token_id is nan, a token id is needed"),
        ({"unknown_token_id": [0]}, r"unknown_token_id is \[0\], a token id is needed"),
        ({"bos_token_id": -1}, "bos_token_id is -1, the vocabulary"),
        ({"add_bos_token": float("nan")}, "add_bos_token is nan"),
        ({"add_bos_token": [True]}, r"add_bos_token is \[True\]"),
        ({"add_space_prefix": 7}, "add_space_prefix is 7"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token is set, but no bos_token_id"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_files_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(TokenizerError, match=named) as caught:
        load(**changes)
    assert str(caught.value).startswith("model.gguf: ")


def test_a_vocabulary_of_49152_tokens_is_built_fast() -> None:
    """0.1 s on the slowest machine seen; the bound leaves room for company, and the best of three for a machine that is
    held up (one has taken more than 0.5)."""
    data = smollm2_metadata()
    seconds = []
    for _ in range(3):
        start = time.process_time()
        assert load_tokenizer(Path("model.gguf"), "gguf", data) is not None
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.3
