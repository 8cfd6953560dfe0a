"""Conversion: what is written is read back as the same model, and nothing half-written stays."""

from __future__ import annotations

import errno
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA, FOLDERS, Bare, NumpyDevice
from model_files import ARRAY, BOOL, F32, I32, STRING, T_F32, U32, gguf_model, llama_gguf, llama_weights, write_folder
from safetensors.numpy import load_file

from cupaged.errors import ModelFileError, OptionError, TokenizerError, UnsupportedModelError
from cupaged.model import convert as conversion
from cupaged.model import tokenizer_json as writer
from cupaged.model.checkpoint import Checkpoint, open_checkpoint
from cupaged.model.config import RopeConfig
from cupaged.model.convert import convert
from cupaged.model.rope import inverse_frequencies
from cupaged.model.safetensors_writer import to_bfloat16, write_weights
from cupaged.model.tokenizer import load_tokenizer

TOKENS = ["<unk>", "<s>", "</s>", "<|end|>", *"abcdefghij", "Ġ", "ab", "abc", "Ġab", "cd", "de", "x", "y", "z", "Ċ"]


def tokenizer_pairs(**changes: tuple[int, Any]) -> dict[str, tuple[int, Any]]:
    """A byte-level tokenizer with as many tokens as `llama_weights` has rows."""
    pairs = {
        "model": (STRING, "gpt2"),
        "pre": (STRING, "gpt-2"),
        "tokens": (ARRAY, (STRING, TOKENS)),
        "token_type": (ARRAY, (I32, [2, 3, 3, 3, *[1] * (len(TOKENS) - 4)])),
        "merges": (ARRAY, (STRING, ["a b", "ab c", "Ġ ab", "c d", "d e"])),
        "unknown_token_id": (U32, 0),
        "eot_token_id": (U32, 3),
        "add_bos_token": (BOOL, True),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in pairs.items()}


def write_gguf(path: Path, extra: dict[str, tuple[int, Any]] | None = None, **changes: Any) -> Path:
    metadata, tensors = llama_gguf(llama_weights(), **changes)
    path.write_bytes(gguf_model(metadata | (extra or {}), tensors))
    return path


def values(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: weight.float32(0, weight.shape[0]) for name, weight in checkpoint.tensors.items()}


def same_config(one: Checkpoint, other: Checkpoint, *apart: str) -> bool:
    names = [name for name in one.config.__slots__ if name not in ("stored_dtype", *apart)]
    return all(getattr(one.config, name) == getattr(other.config, name) for name in names)


def logits(path: Path, dtype: str) -> np.ndarray:
    return Bare(path, NumpyDevice(), dtype=dtype).logits([1, 5, 9, 14, 3, 3, 20])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_gguf_becomes_a_hub_folder_of_the_same_model(tmp_path: Path, dtype: Any) -> None:
    template = {"tokenizer.chat_template": (STRING, "{{ bos_token }}{{ messages[0]['content'] }}")}
    source = write_gguf(tmp_path / "m.gguf", tokenizer_pairs() | template)
    written = convert(source, tmp_path / "hub", dtype)
    gguf, hub = open_checkpoint(source), open_checkpoint(tmp_path / "hub")
    assert same_config(gguf, hub) and hub.config.stored_dtype == {"float32": "F32", "float16": "F16"}.get(dtype, "BF16")
    assert hub.config.eos_token_ids == (2, 3)
    narrow: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "float32": lambda a: a,
        "float16": lambda a: a.astype(np.float16).astype(np.float32),
        "bfloat16": lambda a: (to_bfloat16(a).astype(np.uint32) << 16).view(np.float32),
    }
    before, after = values(gguf), values(hub)
    assert before.keys() == after.keys() and all(np.array_equal(narrow[dtype](before[n]), after[n]) for n in before)
    if dtype == "float32":
        assert np.array_equal(logits(source, "float32"), logits(tmp_path / "hub", "float32"))
    else:
        assert (
            np.abs(logits(source, "float32") - logits(tmp_path / "hub", "float32")).max()
            < {"float16": 0.1, "bfloat16": 0.8}[dtype]
        )
    assert written.files == (
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    )  # fmt: skip
    assert written.weight_bytes == sum(a.size for a in before.values()) * (4 if dtype == "float32" else 2)

    # The tokenizer too.
    old = load_tokenizer(source, "gguf", gguf.metadata)
    new = load_tokenizer(tmp_path / "hub", "hub", hub.metadata["config.json"])
    assert old is not None and new is not None
    for text in ("abcdef ab", "cd<|end|>x\ny", "", " </s>ab"):
        for special in (True, False):
            assert new.encode(text, special) == old.encode(text, special)
    assert new.encode("ab")[0] == 1 == new.bos_token_id
    assert new.eos_token_ids == old.eos_token_ids == {2, 3} and new.special_tokens == old.special_tokens
    assert new.chat_template == old.chat_template == template["tokenizer.chat_template"][1]
    assert new.decode(range(24)) == old.decode(range(24))


PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    "<|end|>",
    *"abcdefghij",
    "▁",
    "ab",
    "abc",
    "▁ab",
    "bc",
    "cd",
    "▁a",
    "de",
    "▁▁",
    "cde",
]


def sentencepiece_pairs(space_before: bool, **changes: tuple[int, Any]) -> dict[str, tuple[int, Any]]:
    scores = [0.0] * 14 + [-1.0, -3.0, -2.0, -5.0, -4.0, -6.0, -8.0, -7.0, -9.0, -6.5]
    pairs = {
        "model": (STRING, "llama"),
        "tokens": (ARRAY, (STRING, PIECES)),
        "scores": (ARRAY, (F32, scores)),
        "token_type": (ARRAY, (I32, [2, 3, 3, 4, *[1] * (len(PIECES) - 4)])),
        "unknown_token_id": (U32, 0),
        "add_space_prefix": (BOOL, space_before),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in pairs.items()}


@pytest.mark.parametrize("space_before", [True, False])
def test_a_sentencepiece_vocabulary_becomes_merges_that_give_the_same_ids(tmp_path: Path, space_before: bool) -> None:
    source = write_gguf(tmp_path / "m.gguf", sentencepiece_pairs(space_before))
    convert(source, tmp_path / "hub")
    old = load_tokenizer(source, "gguf", open_checkpoint(source).metadata)
    new = load_tokenizer(tmp_path / "hub", "hub", {})
    assert old is not None and new is not None and old.encode("a")[0] == 1
    random = np.random.default_rng(0)
    letters = [*"abcdefx  ▁", "<|end|>", "</s>"]
    for _ in range(300):
        text = "".join(random.choice(letters, random.integers(0, 14)))
        ids = old.encode(text)
        assert new.encode(text) == ids and new.encode(text, False) == old.encode(text, False), text
        assert new.decode(ids) == old.decode(ids) and new.decode(ids, False) == old.decode(ids, False), text


def test_a_tokenizer_that_would_give_other_ids_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeezing = sentencepiece_pairs(True, remove_extra_whitespaces=(BOOL, True))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json has no remove_extra_whitespaces"):
        convert(write_gguf(tmp_path / "m.gguf", squeezing), tmp_path / "hub")
    monkeypatch.setattr(writer, "merges_by_score", lambda *arguments: [])
    with pytest.raises(TokenizerError, match=r"its tokenizer as tokenizer\.json gives other ids for ' '"):
        convert(write_gguf(tmp_path / "m.gguf", sentencepiece_pairs(True)), tmp_path / "hub")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    weights = llama_weights()
    convert(write_folder(tmp_path / "in", weights), tmp_path / "out", "float16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(np.array_equal(stored[name], weights[name].astype(np.float16)) for name in weights)


@pytest.mark.parametrize("folder", FOLDERS)
def test_hub_folders_stay_the_same_model(folder: str, tmp_path: Path) -> None:
    convert(DATA / folder, tmp_path / "out", "float32", max_shard_bytes=100_000)
    before, after = open_checkpoint(DATA / folder), open_checkpoint(tmp_path / "out")
    assert before.config == after.config or same_config(before, after)
    old, new = values(before), values(after)
    assert old.keys() == new.keys() and all(np.array_equal(old[name], new[name]) for name in old)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 1 and json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["metadata"]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["dtype"] == "float32" and "torch_dtype" not in written


@pytest.mark.parametrize("folder", FOLDERS)
def test_config_json_in_todays_dialect_gives_the_config_it_was_made_of(folder: str) -> None:
    config = open_checkpoint(DATA / folder).config
    data, _ = conversion.config_json(config, "float16", "here")  # reads it back itself, and raises for a difference
    assert data["model_type"] == config.family and {"rope_parameters", "dtype"} <= data.keys()
    assert {"rope_theta", "rope_scaling", "torch_dtype"}.isdisjoint(data)


def test_a_windowed_gguf_becomes_a_mistral(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", attention__sliding_window=(U32, 8))
    convert(source, tmp_path / "hub", "float32")
    gguf, hub = open_checkpoint(source), open_checkpoint(tmp_path / "hub")
    assert hub.config.family == "mistral" and same_config(gguf, hub, "family")


def llama3_gguf(path: Path, rope: RopeConfig) -> Path:
    divisors = inverse_frequencies(RopeConfig(rope.theta, 4)) / inverse_frequencies(rope)
    metadata, tensors = llama_gguf(llama_weights())
    tensors["rope_freqs.weight"] = (T_F32, (2,), divisors.astype("<f4").tobytes())
    path.write_bytes(gguf_model(metadata, tensors))
    return path


def test_baked_scaling_of_another_kind_than_llama3s_is_refused(tmp_path: Path) -> None:
    rope = RopeConfig(10000.0, 4, "llama3", 8.0, 1.0, 4.0, 512)  # Llama 3 would not scale a pair of 628 positions
    with pytest.raises(UnsupportedModelError, match="rope_freqs are not those of Llama 3"):
        convert(llama3_gguf(tmp_path / "m.gguf", rope), tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_baked_llama3_scaling_is_given_its_parameters_back() -> None:
    config = open_checkpoint(DATA / "llama3-rope").config
    full = RopeConfig(500000.0, config.head_dim, "llama3", 8.0, 1.0, 4.0, 8192)
    factors = inverse_frequencies(RopeConfig(500000.0, config.head_dim)) / inverse_frequencies(full)
    baked = RopeConfig(500000.0, config.head_dim, "divisors", divisors=tuple(map(float, factors.astype(np.float32))))
    groups = tuple(conversion.replace(group, rope=baked) for group in config.kv_groups)
    data, _ = conversion.config_json(conversion.replace(config, kv_groups=groups), "float16", "here")
    assert data["rope_parameters"] == {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_what_config_json_has_no_word_for_is_refused_by_name() -> None:
    config = open_checkpoint(DATA / "llama").config
    with pytest.raises(UnsupportedModelError, match=r"config\.json of llama has no logit_soft_cap, embedding_scale"):
        conversion.config_json(conversion.replace(config, logit_soft_cap=30.0, embedding_scale=2.0), "float16", "m")
    with pytest.raises(UnsupportedModelError, match="models of family other cannot be converted; llama, mistral"):
        conversion.config_json(conversion.replace(config, family="other"), "float16", "m")


def test_M08_a_head_of_its_own_under_a_tied_config_is_kept_and_said(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", llama_weights(), tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="differs from the embeddings"):
        convert(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert open_checkpoint(tmp_path / "out").config.tied_head is False


def test_half_a_surrogate_pair_in_a_config_is_written_as_it_was(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", llama_weights(), _name_or_path="a\ud800ü")
    convert(source, tmp_path / "target")
    raw = (tmp_path / "target" / "config.json").read_bytes()
    assert json.loads(raw)["_name_or_path"] == "a\ud800ü"
    assert "\\ud800ü".encode() in raw


def test_the_tokenizer_of_a_hub_folder_is_copied_as_it_is(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", llama_weights())
    texts = {"tokenizer.json": "{ }", "chat_template.jinja": "{{ x }}", "generation_config.json": '{"a":1}'}
    for name, text in {**texts, "evil.py": "", "pytorch_model.bin": ""}.items():
        (source / name).write_text(text)
    written = convert(source, tmp_path / "out")
    assert set(written.files) == {*texts, "config.json", "model.safetensors"} and written.dtype == "float32"
    assert all((tmp_path / "out" / name).read_text() == text for name, text in texts.items())


def test_a_target_that_is_not_new_is_refused_and_kept(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", llama_weights())
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for target, message in (
        (tmp_path / "in", "the folder is not empty"),
        (tmp_path / "file", "is not a folder"),
        (tmp_path / "link", "is not a folder"),
        (tmp_path / "absent" / "out", "there is no folder .*absent"),
        (Path("a\0b"), "."),
    ):
        with pytest.raises(OptionError, match=f"^target .*{message}") as caught:
            convert(source, target)
        assert "\n" not in str(caught.value)
    with pytest.raises(OptionError, match="dtype: 'int8' is not one of float32, float16, bfloat16"):
        convert(source, tmp_path / "out", "int8")  # type: ignore[arg-type]
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")
    assert open_checkpoint(tmp_path / "empty").tensors and (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "in", "link"]


def test_a_value_that_does_not_fit_is_named_and_nothing_stays(tmp_path: Path) -> None:
    weights = llama_weights()
    weights["model.norm.weight"][3] = 65520.0
    source = write_folder(tmp_path / "in", weights)
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight holds 65520, which float16 cannot hold; bfloat16"):
        convert(source, tmp_path / "out", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    convert(source, tmp_path / "out", "bfloat16")
    assert open_checkpoint(tmp_path / "out").tensors["final_norm.weight"].float32(3, 4)[0] == 65536.0


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_an_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    source = write_folder(tmp_path / "in", llama_weights())

    def report(done: int, total: int) -> None:
        assert list(tmp_path.glob(".out.partial-*/config.json")) and not (tmp_path / "out").exists()
        if done > total / 2:
            raise failure

    expected = ModelFileError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        convert(source, tmp_path / "out", "float16", report)
    if isinstance(failure, OSError):
        assert str(caught.value) == f"{tmp_path / 'out'}: cannot be written (No space left on device)"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_disk_that_is_too_small_is_told_beforehand_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path / "in", llama_weights())
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    with pytest.raises(ModelFileError, match=r"the weights need \d+ bytes, 7 are free"):
        convert(source, tmp_path / "out")


class Wide:
    """64 MiB of float32 that exist only in the rows asked for."""

    shape, dtype = (4096, 4096), "F32"

    def float32(self, start: int, stop: int) -> np.ndarray:
        return np.full((stop - start, 4096), start, np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, dtype: Any) -> None:
    tracemalloc.start()
    try:
        write_weights(tmp_path, {"a": Wide()}, dtype)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20 and (tmp_path / "model.safetensors").stat().st_size > 32 << 20


def test_K20_bfloat16_rounds_to_nearest_even() -> None:
    given = np.array([1.0, -2.0, 1.00390625, 1.01171875, np.inf, np.nan, 0.0, -0.0], np.float32)
    bits = to_bfloat16(given)
    assert bits[[0, 1, 4]].tolist() == [0x3F80, 0xC000, 0x7F80]
    widened = (bits.astype(np.uint32) << 16).view(np.float32)
    assert widened[[2, 3]].tolist() == [1.0, 1.015625] and np.isnan(widened[5])
    assert np.signbit(widened[6:]).tolist() == [False, True]


def test_a_gguf_without_a_tokenizer_is_converted_without_one(tmp_path: Path) -> None:
    written = convert(write_gguf(tmp_path / "m.gguf"), tmp_path / "hub")
    assert written.files == ("config.json", "generation_config.json", "model.safetensors")
    assert written.dtype == "float32"  # as stored
