"""A stream of tokens shows, in the end, exactly what decoding all of them gives, and never half a character."""

from __future__ import annotations

import time
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_support import DECODERS, small, smollm2

from cupaged.errors import TokenizerError
from cupaged.model.detokenizer import ByteFallback, ByteLevel, Detokenizer, byte_of_char, compile_decoder
from cupaged.model.tokenizer import Tokenizer

CHAR_OF_BYTE = {byte: char for char, byte in byte_of_char().items()}

# name, tokens as bytes, what may be shown after each token and at the end
SPLIT_CHARACTERS = [
    ("emoji 2+2", [b"a", b"\xf0\x9f", b"\x98\x80", b"b"], ["a", "", "\U0001f600", "b", ""]),
    ("emoji 1x4", [b"\xf0", b"\x9f", b"\x98", b"\x80"], ["", "", "", "\U0001f600", ""]),
    ("e acute", [b"caf", b"\xc3", b"\xa9"], ["caf", "", "\u00e9", ""]),
    ("hangul", [b"\xec\x82", b"\xbc"], ["", "\uc0bc", ""]),
    ("tail, then more", [b"\xe7\x99", b"\xba x"], ["", "\u767a x", ""]),
    ("cut off at the end", [b"ok", b"\xe7\x99"], ["ok", "", "\ufffd"]),
    ("hopeless byte", [b"a", b"\xff", b"b"], ["a", "\ufffd", "b", ""]),
]


@pytest.mark.parametrize("name, tokens, shown", SPLIT_CHARACTERS, ids=[case[0] for case in SPLIT_CHARACTERS])
def test_T01_characters_split_over_byte_level_tokens(name: str, tokens: list[bytes], shown: list[str]) -> None:
    stream = Detokenizer(lambda _: None, [ByteLevel()])
    pieces = [stream.push_string("".join(CHAR_OF_BYTE[byte] for byte in token)) for token in tokens]
    assert [*pieces, stream.finish()] == shown


@pytest.mark.parametrize("name, tokens, shown", SPLIT_CHARACTERS[:5], ids=[case[0] for case in SPLIT_CHARACTERS[:5]])
def test_T01_characters_split_over_byte_fallback_tokens(name: str, tokens: list[bytes], shown: list[str]) -> None:
    stream = Detokenizer(lambda _: None, [ByteFallback()])
    pieces = [stream.push_string(f"<0x{byte:02X}>") for token in tokens for byte in token]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == "".join(shown)


def test_T01_a_run_of_byte_tokens_waits_for_its_end() -> None:
    """That is `decode`'s own rule: one bad byte and the whole run is U+FFFD, complete characters included."""
    tokenizer = small("gemma")
    good, bad = [0xE4, 0xBD, 0xA0], [0xE4, 0xBD, 0xA0, 0xFF]
    for run, text in ((good, "你"), (bad, "\ufffd" * 4)):
        ids = [string_id(tokenizer, f"<0x{byte:02X}>") for byte in run]
        stream = tokenizer.detokenizer()
        assert [stream.push(token) for token in ids] == [""] * len(ids)
        assert stream.push(string_id(tokenizer, "a")) == text + "a"
        assert tokenizer.decode(ids) == text


def string_id(tokenizer: Tokenizer, string: str) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_string(i) == string)


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stream_equals_decode_for_every_decoder(kind: str, data: st.DataObject) -> None:
    tokenizer = small(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=12))
    check_stream(tokenizer, ids, data.draw(st.booleans()))


@settings(max_examples=300, deadline=None)
@given(
    # The first 300 ids are special tokens and single bytes: most lists then hold broken UTF-8.
    ids=st.lists(st.one_of(st.integers(0, 49160), st.integers(0, 300)), max_size=20),
    skip=st.booleans(),
)
def test_stream_equals_decode_on_a_real_vocabulary(ids: list[int], skip: bool) -> None:
    check_stream(smollm2(), ids, skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_text_survives_the_way_through_ids_and_stream(text: str) -> None:
    tokenizer = smollm2()
    pieces, rest = check_stream(tokenizer, tokenizer.encode(text), skip=False)
    # This vocabulary has no token for 21 of the 256 bytes, and BPE without an unknown token leaves those out.
    known = bytes(byte for byte in text.encode() if CHAR_OF_BYTE[byte] in single_byte_tokens())
    assert "".join(pieces) + rest == known.decode(errors="replace")


@lru_cache(maxsize=1)
def single_byte_tokens() -> frozenset[str | None]:
    return frozenset(map(smollm2().token_string, range(300)))


def check_stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> tuple[list[str], str]:
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [stream.push(token) for token in ids]
    rest = stream.finish()
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) + rest == whole
    return pieces, rest


@pytest.mark.parametrize(
    "kind, strings, pieces",
    [
        ("llama", ["▁a", "▁▁", "▁", "b"], ["a", "  ", " ", "b"]),
        ("llama", ["▁", "▁a"], ["", " a"]),
        ("gemma", ["▁a", "▁▁", "▁", "b"], [" a", "  ", " ", "b"]),
        ("metaspace", ["▁a", "▁▁", "▁", "b"], ["a", "  ", " ", "b"]),
        ("metaspace", ["▁▁", "▁a"], ["", " a"]),
        ("metaspace-never", ["▁a", "▁a"], [" a", " a"]),
    ],
)
def test_T03_the_leading_space_rule_applies_once(kind: str, strings: list[str], pieces: list[str]) -> None:
    tokenizer = small(kind)
    ids = [string_id(tokenizer, string) for string in strings]
    stream = tokenizer.detokenizer()
    assert [stream.push(token) for token in ids] == pieces
    assert stream.finish() == ""
    assert tokenizer.decode(ids) == "".join(pieces)


def test_T03_a_skipped_special_token_does_not_use_the_rule_up() -> None:
    tokenizer = small("llama")
    ids = [1, string_id(tokenizer, "▁a")]
    assert check_stream(tokenizer, ids, skip=True)[0] == ["", "a"]
    assert check_stream(tokenizer, ids, skip=False)[0] == ["<s>", " a"]


@pytest.mark.parametrize("kind, token", [("byte-level", "Ã"), ("llama", "<0xF0>"), ("metaspace", "▁a")])
def test_cost_is_linear(kind: str, token: str) -> None:
    """60,000 tokens of one sort, unfinished characters included: some 0.1 s; a quadratic way takes minutes."""
    tokenizer = small(kind)
    stream = tokenizer.detokenizer()
    token_id = string_id(tokenizer, token)
    start = time.perf_counter()
    length = sum(len(stream.push(token_id)) for _ in range(60_000)) + len(stream.finish())
    assert time.perf_counter() - start < 5
    assert length == len(tokenizer.decode([token_id] * 60_000))


@pytest.mark.parametrize(
    "spec, named",
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "CTC"}, "CTC"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),
        ({"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "}, "Replace"),
        ({"type": "Strip", "content": " ", "start": 0, "stop": 1}, "stop=1"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}, "ByteFallback"),
    ],
)
def test_unknown_decoders_are_refused_by_name(spec: dict[str, object], named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        compile_decoder(spec)
