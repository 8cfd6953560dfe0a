"""Tokenizers from GGUF of model "llama": ids are those of Google's sentencepiece, for whatever vocabulary."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_text import hostile
from sentencepiece_truth import Published, processor, sentencepiece
from tokenizers import decoders

from cupaged.errors import TokenizerError
from cupaged.model.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WRITTEN = ["<|user|>", "<b>", "<b><i>", "\n\n", "\n\n\n", "\t", "   ", "    "]


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    tokenizer = load_tokenizer(Path("model.gguf"), "gguf", metadata)
    assert tokenizer is not None
    return tokenizer


def prefixed(**keys: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


@lru_cache(maxsize=1)
def trained() -> dict[str, Any]:
    """A vocabulary of 3000 pieces that sentencepiece itself learns from the tests' own source, byte fallback on."""
    words: list[str] = []
    for file in sorted(Path(__file__).parent.glob("*.py")):
        words += file.read_text(encoding="utf-8").splitlines()
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words[:6000]),
        model_writer=model,
        model_type="bpe",
        vocab_size=3000,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=[token.replace(" ", SPACE) for token in WRITTEN],
        num_threads=1,
        minloglevel=2,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    count = sp.GetPieceSize()
    kinds = []
    for i in range(count):
        flags = {UNKNOWN: sp.IsUnknown(i), CONTROL: sp.IsControl(i), UNUSED: sp.IsUnused(i), BYTE: sp.IsByte(i)}
        kinds.append(next((kind for kind, true in flags.items() if true), NORMAL))
    tokens = [sp.IdToPiece(i) for i in range(count)]
    written = {token.replace(" ", SPACE): token for token in WRITTEN}
    for i, token in enumerate(tokens):
        if token in written:
            tokens[i], kinds[i] = written[token], USER_DEFINED
    return prefixed(
        model="llama",
        tokens=tokens,
        scores=[sp.GetScore(i) for i in range(count)],
        token_type=kinds,
        bos_token_id=sp.bos_id(),
        eos_token_id=sp.eos_id(),
        unknown_token_id=sp.unk_id(),
        add_space_prefix=False,
    )


def assert_same(metadata: Mapping[str, Any], texts: list[str]) -> None:
    """Ids equal to sentencepiece's, and streaming equal to decoding, for all texts."""
    ours, truth = build(metadata), Published(metadata)
    assert len(texts) > 100
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == truth.ids(text), repr(text)
        stream = ours.detokenizer(skip_special_tokens=False)
        streamed = "".join(stream.push(token_id) for token_id in ids) + stream.finish()
        assert streamed == ours.decode(ids, skip_special_tokens=False), repr(text)


def without(texts: list[str], tokens: list[str]) -> list[str]:
    """The texts that hold none of `tokens`, nor would with a space in front, however spaces are written."""
    return [text for text in texts if not any(token in f" {text}".replace(SPACE, " ") for token in tokens)]


CONTROLS = ["<unk>", "<s>", "</s>"]  # sentencepiece never takes them from text


def test_T07_a_learned_vocabulary_on_hostile_text() -> None:
    texts = without(hostile(WRITTEN, 900), CONTROLS)
    assert_same(trained(), texts)
    tokenizer = build(trained())
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace(SPACE, " ")


def test_T07_a_space_before_the_text() -> None:
    """Without user-defined tokens, which sentencepiece looks for after it has put the space, the others before."""
    metadata = trained() | {"tokenizer.ggml.add_space_prefix": True}
    assert_same(metadata, without(hostile([], 500), [*CONTROLS, *WRITTEN]))
    tokenizer = build(metadata)
    first = tokenizer.token_string(tokenizer.encode("the", add_special_tokens=False)[0])
    assert first is not None and first.startswith(SPACE)
    assert tokenizer.decode(tokenizer.encode("the")) == "the"


def test_T07_a_space_before_text_that_follows_a_written_token() -> None:
    """As llama.cpp and Hugging Face's Llama have it: each stretch of text gets its space."""
    tokenizer = build(trained() | {"tokenizer.ggml.add_space_prefix": True})
    alone = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the</s>the<b>the") == [1, *alone, 2, *alone, tokenizer.encode("<b>")[1], *alone]
    assert tokenizer.encode("</s></s>", add_special_tokens=False) == [2, 2]


def test_surplus_spaces_are_left_out_where_the_file_says_so() -> None:
    texts = without(hostile([], 500), [*CONTROLS, *WRITTEN])
    texts = [text for text in texts if SPACE not in text]
    for before in (False, True):
        changes = {"tokenizer.ggml.remove_extra_whitespaces": True, "tokenizer.ggml.add_space_prefix": before}
        assert_same(trained() | changes, texts)
    ids = build(trained() | {"tokenizer.ggml.remove_extra_whitespaces": True}).encode("  a   b ")
    assert build(trained()).decode(ids) == "a b"


@pytest.mark.parametrize("seed", range(40))
def test_random_vocabularies_of_few_letters(seed: int) -> None:
    """Equal scores, pieces that overlap, repeat and hold spaces, unused pieces, with and without byte tokens."""
    rng = random.Random(seed)
    letters = ["a", "b", SPACE, "é"][: rng.randrange(2, 5)]
    pieces = {"".join(rng.choice(letters) for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(3, 60))}
    normal = sorted(pieces | set(letters if rng.random() < 0.7 else letters[:1]))
    tokens = ["<unk>", "<s>", "</s>", *(BYTES if rng.random() < 0.5 else []), *normal]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * (len(tokens) - 3 - len(normal))]
    unused = rng.choice([0.0, 0.3])
    kinds += [UNUSED if len(piece) > 1 and rng.random() < unused else NORMAL for piece in normal]
    metadata = prefixed(
        model="llama",
        tokens=tokens,
        scores=[float(-rng.randrange(rng.choice([2, 5, 1000]))) for _ in tokens],
        token_type=kinds,
        unknown_token_id=0,
        add_space_prefix=False,
    )
    ours, truth = build(metadata), processor(metadata)
    for _ in range(100):
        text = "".join(rng.choice([*letters, " ", "c"]) for _ in range(rng.randrange(40)))
        assert ours.encode(text, add_special_tokens=False) == truth.EncodeAsIds(text), (text, tokens)


def test_decoding_is_that_of_the_library_and_of_sentencepiece() -> None:
    """sentencepiece shows the whole characters of a run of byte tokens that is no UTF-8 as a whole; Hugging Face and
    llama.cpp's servers do not agree there, so that only sound runs are compared with it."""
    tokenizer, truth = build(trained()), processor(trained())
    rng = np.random.default_rng(0)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    library = decoders.Sequence(steps)
    count = tokenizer.vocab_size
    for _ in range(300):
        ids = rng.integers(0, count, rng.integers(0, 20)).tolist()
        strings = [tokenizer.token_string(i) or "" for i in ids]
        assert tokenizer.decode(ids, skip_special_tokens=False) == library.decode(strings)
    for text in without(hostile(WRITTEN, 300), CONTROLS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == truth.DecodeIds(ids) == text.replace(SPACE, " ")


def test_control_tokens_are_special_and_written_in_text_user_defined_ones_only_written() -> None:
    tokenizer = build(trained())
    ids = tokenizer.encode("a</s>b<|user|>c")
    assert ids[0] == 1
    assert ids[2] == 2
    assert tokenizer.decode(ids) == "ab<|user|>c"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>b<|user|>c"
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.special_tokens["eos_token"] == "</s>"


def test_the_longest_written_token_is_taken_and_the_leftmost_first() -> None:
    tokenizer = build(trained())
    strings = [tokenizer.token_string(i) for i in tokenizer.encode("<b><i>\n\n\n\n     x", add_special_tokens=False)]
    assert strings[:4] == ["<b><i>", "\n\n\n", "<0x0A>", "    "]


def test_the_frame_is_what_the_file_says_and_else_llama_cpps() -> None:
    text = build(trained()).encode("x", add_special_tokens=False)
    assert build(trained()).encode("x") == [1, *text]
    assert build(trained() | {"tokenizer.ggml.add_bos_token": False}).encode("x") == text
    assert build(trained() | {"tokenizer.ggml.add_eos_token": np.True_}).encode("x") == [1, *text, 2]
    silent = {key: value for key, value in trained().items() if not key.endswith("_token_id")}
    assert build(silent).encode("x") == [1, *text]
    assert build(silent).eos_token_ids == {2}


def test_half_a_surrogate_pair_is_refused_wherever_it_stands() -> None:
    for text in ("\ud800", "ab\udfffc", "<b>\ud83d", "\udc00</s>"):
        with pytest.raises(TokenizerError, match="half a surrogate pair"):
            build(trained()).encode(text)
    with pytest.raises(TokenizerError, match="text is needed, not int"):
        build(trained()).encode(5)  # type: ignore[arg-type]


def test_long_text_takes_time_in_proportion() -> None:
    tokenizer = build(trained())
    for text in ("a" * 100_000, " " * 100_000, "ab" * 50_000, "<" * 100_000, "好" * 50_000):
        start = time.process_time()
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert time.process_time() - start < 3  # about 0.2 s


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scores": None}, r"tokenizer\.ggml\.scores is missing"),
        ({"scores": [0.0]}, "scores has 1 entries for 5 tokens"),
        ({"scores": [0.0, 0.0, float("nan"), 0.0, 0.0]}, "not finite"),
        ({"scores": [0.0, 0.0, float("inf"), 0.0, 0.0]}, "not finite"),
        ({"scores": ["a"] * 5}, "scores is not a list of numbers"),
        ({"scores": 7}, "scores has 0 entries"),
        ({"token_type": [2, 3, 3, 1, 9]}, "token_type holds 9; known are 1 to 6"),
        ({"token_type": [2, 3, 3, 1, 1.5]}, r"token_type holds 1\.5; known are 1 to 6"),
        ({"token_type": [2, 3, 3, 1, 6]}, "<0x00> is missing"),
        ({"tokens": ["<unk>", "<s>", "</s>", "a", "a"]}, "'a' stands twice, as ids 3 and 4"),
        ({"token_type": [1, 3, 3, 1, 1]}, "neither byte tokens nor an unknown token"),
        ({"unknown_token_id": -1}, "unknown_token_id is -1"),
        ({"unknown_token_id": 1.0}, r"unknown_token_id is 1\.0, a token id is needed"),
        ({"bos_token_id": [1]}, r"bos_token_id is \[1\], a token id is needed"),
        ({"add_space_prefix": 1}, "add_space_prefix is 1, true or false is needed"),
        ({"remove_extra_whitespaces": "no"}, "remove_extra_whitespaces is 'no'"),
        ({"precompiled_charsmap": [1, 2, 3]}, "precompiled_charsmap is not supported"),
        ({"model": "t5"}, "tokenizer model 't5' is not supported; supported are gpt2 .* and llama"),
        ({"model": ["llama"]}, r"tokenizer model \['llama'\] is not supported"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_files_name(changes: dict[str, Any], named: str) -> None:
    keys = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", "a", "b"],
        "scores": [0.0] * 5,
        "token_type": [2, 3, 3, 1, 1],
    }
    assert build(prefixed(**keys)).encode("ab") == [1, 0, 3, 4]  # the space before has no token: unknown
    with pytest.raises(TokenizerError, match=named) as caught:
        build(prefixed(**{**keys, **changes}))
    assert str(caught.value).startswith("model.gguf: ")


def test_a_space_sign_in_the_text_is_not_mixed_up_with_spaces_beside_it() -> None:
    """As in the tokenizers that models publish: the written token first, then the space."""
    tokenizer = build(trained())
    (run,) = tokenizer.encode(SPACE * 3, add_special_tokens=False)
    assert tokenizer.token_string(run) == "   "  # as converters write it
    alone = tokenizer.encode(" ", add_special_tokens=False)
    assert tokenizer.encode(f" {SPACE * 3} ", add_special_tokens=False) == [*alone, run, *alone]
