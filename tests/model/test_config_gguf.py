"""GGUF metadata to ModelConfig: the same configuration as the Hub's, and what must be refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from model_files import ARRAY, BOOL, F32, F64, LLAMA_CONFIG, STRING, U32, gguf_model, llama_gguf, llama_weights

from cupaged.errors import ModelFileError, UnsupportedModelError
from cupaged.model.config import ModelConfig, RopeConfig
from cupaged.model.gguf_file import GGUFFile
from cupaged.model.gguf_model import gguf_config
from cupaged.model.hub_model import hub_config


def hub(**changes: Any) -> ModelConfig:
    return hub_config({**LLAMA_CONFIG, **changes}, None, "folder/config.json")


def rope(config: ModelConfig) -> RopeConfig:
    return config.kv_groups[0].rope


def from_gguf(path: Path, arch: str = "llama", tied: bool = False, **changes: Any) -> ModelConfig:
    metadata, tensors = llama_gguf(llama_weights(tied), arch, **changes)
    path.write_bytes(gguf_model({k: v for k, v in metadata.items() if v is not ...}, tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return gguf_config(GGUFFile(path))


def test_gguf_and_hub_give_one_config(tmp_path: Path) -> None:
    assert from_gguf(tmp_path / "m.gguf") == hub()
    assert from_gguf(tmp_path / "m.gguf", tied=True) == hub(tie_word_embeddings=True)
    assert from_gguf(tmp_path / "m.gguf", attention__sliding_window=(U32, 8)).kv_groups[0].window == 8


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 3), (2, 4), (4, 8)])
def test_K12_gguf_head_counts_that_do_not_divide_name_both(heads: int, kv_heads: int, tmp_path: Path) -> None:
    counts = {"attention__head_count": (U32, heads), "attention__head_count_kv": (U32, kv_heads)}
    with pytest.raises(ModelFileError, match=f"{heads} attention heads and {kv_heads} KV heads"):
        from_gguf(tmp_path / "m.gguf", **counts)


def test_M13_gguf_eos_is_sequence_turn_and_message(tmp_path: Path) -> None:
    metadata, tensors = llama_gguf(llama_weights())
    metadata["tokenizer.ggml.eot_token_id"] = (U32, 9)
    metadata["tokenizer.ggml.eom_token_id"] = (U32, 8)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_model(metadata, tensors))
    assert gguf_config(GGUFFile(path)).eos_token_ids == (2, 9, 8)


def test_gguf_defaults_and_uniform_arrays(tmp_path: Path) -> None:
    config = from_gguf(
        tmp_path / "m.gguf",
        attention__head_count=(ARRAY, (U32, [4, 4])),
        attention__head_count_kv=(ARRAY, (U32, [2, 2])),
        rope__freq_base=...,
        vocab_size=...,
        rope__dimension_count=(U32, 4),
        attention__key_length=(U32, 4),
        attention__value_length=(U32, 4),
        rope__scaling__type=(STRING, "none"),
        attention__causal=(BOOL, 1),
    )
    assert config == hub()
    assert from_gguf(tmp_path / "m.gguf", attention__head_count_kv=...).num_kv_heads == 4


def test_gguf_linear_scaling(tmp_path: Path) -> None:
    expected = RopeConfig(1e4, 4, "linear", factor=2.0)
    old = from_gguf(tmp_path / "m.gguf", rope__scale_linear=(F32, 2.0))
    new = from_gguf(tmp_path / "m.gguf", rope__scaling__type=(STRING, "linear"), rope__scaling__factor=(F32, 2.0))
    assert rope(old) == rope(new) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope__scaling__type": (STRING, "yarn")}, "rope.scaling.type 'yarn' is not supported; supported: none"),
        ({"rope__dimension_count": (U32, 2)}, "rope.dimension_count 2 is not the head size 4"),
        ({"attention__value_length": (U32, 8)}, "4 for keys and 8 for values"),
        ({"attention__head_count_kv": (ARRAY, (U32, [2, 1]))}, r"head_count_kv differs between layers: \[2, 1\]"),
        ({"expert_count": (U32, 8)}, "expert_count 8 is not supported"),
        ({"attention__scale": (F32, 0.5)}, "attention.scale 0.5"),
        ({"attention__causal": (BOOL, 0)}, "attention.causal False"),
        (
            {"attention__layer_norm_rms_epsilon": (F64, 1e300)},
            r"epsilon is 1e\+300; it must be a number from 1e-30 to 1$",
        ),
        ({"attention__layer_norm_rms_epsilon": (F64, 1e-300)}, "epsilon is 1e-300; it must be"),
        ({"attention__layer_norm_rms_epsilon": (F32, 3e38)}, "it must be a number from 1e-30 to 1$"),
        ({"rope__freq_base": (F32, float("inf"))}, r"rope.freq_base is inf; it must be a number from 1 to 1e\+18"),
        ({"rope__freq_base": (F64, 1e300)}, r"rope.freq_base is 1e\+300"),
        ({"rope__scaling__factor": (F32, 1e-38)}, "rope.scaling.factor is .*it must be a number from 1e-06"),
        ({"rope__scale_linear": (F32, 1e38)}, "rope.scale_linear is .*it must be a number from 1e-06"),
        ({"block_count": ...}, "block_count is missing"),
        ({"context_length": (STRING, "64")}, "context_length is '64'"),
        ({"context_length": (BOOL, 1)}, "context_length is True"),
    ],
)
def test_gguf_settings_that_are_not_implemented_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        from_gguf(tmp_path / "m.gguf", **changes)


def test_gguf_unknown_keys_of_the_architecture_are_named_in_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_model(*llama_gguf(llama_weights(), brand__new=(F32, 0.5))))
    with pytest.warns(UserWarning, match=r"unknown to architecture llama.*'brand\.new'"):
        gguf_config(GGUFFile(path))


def test_gguf_unknown_and_missing_architecture(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; supported in GGUF: llama, qwen2, qwen3"):
        from_gguf(path, "mamba")
    metadata, tensors = llama_gguf(llama_weights())
    del metadata["general.architecture"]
    path.write_bytes(gguf_model(metadata, tensors))
    with pytest.raises(ModelFileError, match=r"general\.architecture is missing"):
        gguf_config(GGUFFile(path))


def test_gguf_window_of_qwen_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"attention\.sliding_window 8 is not supported in a GGUF of qwen2"):
        from_gguf(tmp_path / "m.gguf", "qwen2", attention__sliding_window=(U32, 8))
