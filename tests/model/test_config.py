"""config.json to ModelConfig: both dialects, defaults, windows, and what must be refused."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
from model_files import GOLDEN, LLAMA_CONFIG

from cupaged.errors import ModelFileError, UnsupportedModelError
from cupaged.model.config import ModelConfig, RopeConfig
from cupaged.model.hub_model import hub_config
from cupaged.model.rope import rope_rows

QWEN2 = {**LLAMA_CONFIG, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA_CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}
MISTRAL = {**LLAMA_CONFIG, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def read(base: dict[str, Any] | None = None, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """hub_config of a base config with changes; `...` removes a key. A warning is an error here."""
    merged = {**(LLAMA_CONFIG if base is None else base), **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return hub_config({k: v for k, v in merged.items() if v is not ...}, generation, "folder/config.json")


def rope(config: ModelConfig) -> RopeConfig:
    return config.kv_groups[0].rope


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("llama", {"family": "llama", "num_kv_heads": 2, "head_dim": 16, "norm_eps": 1e-5, "tied_head": False}),
        ("llama-tied-mqa", {"family": "llama", "num_kv_heads": 1, "tied_head": True}),
        ("mistral-window", {"family": "mistral", "qkv_bias": False}),
        ("qwen2", {"family": "qwen2", "qkv_bias": True, "output_bias": False, "tied_head": True}),
        ("qwen3", {"family": "qwen3", "qk_norm": True, "head_dim": 32, "qkv_bias": False}),
    ],
)
def test_golden_configs_of_both_dialects(folder: str, expected: dict[str, Any]) -> None:
    config = read(json.loads((GOLDEN / folder / "config.json").read_text()))
    assert {key: getattr(config, key) for key in expected} == expected
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.max_position) == (320, 64, 3, 256)
    assert (config.bos_token_id, config.eos_token_ids, config.activation) == (1, (2,), "silu")


def test_both_dialects_give_one_config() -> None:
    scaling = {"factor": 2.0}
    old = read(torch_dtype="bfloat16", rope_theta=5e5, rope_scaling={"type": "linear", **scaling})
    new = read(
        dtype="bfloat16",
        rope_parameters={"rope_type": "linear", "rope_theta": 5e5, **scaling},
        layer_types=["full_attention"] * 2,
    )
    assert old == new
    assert rope(new) == RopeConfig(5e5, 4, "linear", factor=2.0)


def test_M01_rope_type_counts_where_both_names_stand() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    expected = RopeConfig(5e5, 4, "llama3", 8.0, 1.0, 4.0, 32)
    for names in ({"rope_type": "llama3"}, {"type": "llama3"}, {"type": "linear", "rope_type": "llama3"}):
        assert rope(read(rope_theta=5e5, rope_scaling={**names, **llama3})) == expected
        assert rope(read(rope_parameters={"rope_theta": 5e5, **names, **llama3})) == expected


def test_absent_rope_settings_are_the_default() -> None:
    assert rope(read()) == rope(read(rope_scaling=None, rope_parameters=None)) == RopeConfig(10000.0, 4)
    assert rope(read(rope_parameters={"rope_theta": 7e4, "rope_type": "default"})).theta == 7e4
    assert rope(read(rope_theta=7e4, rope_parameters={"rope_theta": 7e4, "rope_type": "default"})).theta == 7e4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, UnsupportedModelError, "rope_type 'yarn'.*default, linear"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "'dynamic'"),
        ({"rope_scaling": {"factor": 2.0}}, ModelFileError, "rope_type is missing"),
        ({"rope_scaling": {"type": "linear"}}, ModelFileError, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ModelFileError, "factor is '2'"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, ModelFileError, "must be a number from 1e-06"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, UnsupportedModelError, "mrope"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ModelFileError, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            ModelFileError,
            "must be below",
        ),
        ({"rope_scaling": "linear"}, ModelFileError, "rope_scaling is 'linear'; it must be an object"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, ModelFileError, "rope_theta is 10000.0 at"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 4.0}},
            ModelFileError,
            "disagree on 'factor'",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, UnsupportedModelError, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, UnsupportedModelError, "'full_attention'"),
    ],
)
def test_other_rope_settings_are_refused_by_name(
    changes: dict[str, Any], error: type[ModelFileError], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(**changes)


def test_M07_head_dim_from_config_else_hidden_by_heads() -> None:
    assert read().head_dim == read(head_dim=None).head_dim == 4
    nemo = read(MISTRAL, hidden_size=5120, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    assert nemo.head_dim == 128
    qwen3 = read(QWEN3, hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    assert (qwen3.head_dim, rope(qwen3).rotary_dim) == (128, 128)
    # Qwen3's own default is 128, whatever hidden_size / heads is (Qwen3-0.6B: 1024 / 16 = 64).
    assert read(QWEN3, head_dim=...).head_dim == 128
    with pytest.raises(ModelFileError, match="hidden size 18 is not a multiple of 4"):
        read(hidden_size=18)
    with pytest.raises(UnsupportedModelError, match="head_dim is 5"):
        read(head_dim=5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 3), (2, 4), (4, 8)])
def test_K12_head_counts_that_do_not_divide_name_both(heads: int, kv_heads: int) -> None:
    with pytest.raises(ModelFileError, match=f"{heads} attention heads and {kv_heads} KV heads"):
        read(num_attention_heads=heads, num_key_value_heads=kv_heads)


def test_kv_heads_absent_or_null() -> None:
    assert read(num_key_value_heads=...).num_kv_heads == 4
    assert read(num_key_value_heads=None).num_kv_heads == 4
    # Mistral's own default is 8; a null still means one per head.
    mistral = {**MISTRAL, "num_attention_heads": 16, "hidden_size": 64}
    assert read(mistral, num_key_value_heads=...).num_kv_heads == 8
    assert read(mistral, num_key_value_heads=None).num_kv_heads == 16


def test_M13_eos_is_the_union_of_config_and_generation_config() -> None:
    assert read(eos_token_id=128001, generation={"eos_token_id": [128001, 128009]}).eos_token_ids == (128001, 128009)
    assert read(eos_token_id=[5, 6], generation={"eos_token_id": 7}).eos_token_ids == (5, 6, 7)
    assert read(eos_token_id=None, generation={"eos_token_id": [3]}).eos_token_ids == (3,)
    assert read(eos_token_id=None).eos_token_ids == ()
    # Absent everywhere: the family's default. Absent in one file alone: the other one decides.
    assert read().eos_token_ids == (2,)
    assert read(generation={"eos_token_id": [9]}).eos_token_ids == (9,)
    assert read(QWEN2).eos_token_ids == ()
    for wrong in ("2", True, [1, "2"], -1, 2.5):
        with pytest.raises(ModelFileError, match=r"config\.json: eos_token_id is"):
            read(eos_token_id=wrong)
    with pytest.raises(ModelFileError, match=r"folder/generation_config\.json: eos_token_id is 'x'"):
        read(generation={"eos_token_id": "x"})


def test_bos_comes_from_the_first_file_that_has_it() -> None:
    assert read(bos_token_id=5, generation={"bos_token_id": 6}).bos_token_id == 5
    assert read(generation={"bos_token_id": 6}).bos_token_id == 6
    assert read(bos_token_id=None).bos_token_id is None
    assert read().bos_token_id == 1
    with pytest.raises(ModelFileError, match="one token id or null"):
        read(bos_token_id=[1, 2])


def windows(config: ModelConfig) -> list[int | None]:
    return [config.kv_groups[config.group_of_layer(layer)].window for layer in range(config.num_layers)]


def test_windows_of_mistral() -> None:
    assert windows(read(MISTRAL, sliding_window=7)) == [7, 7]
    assert windows(read(MISTRAL, sliding_window=None)) == [None, None]
    assert windows(read(MISTRAL)) == [4096, 4096]
    with pytest.raises(UnsupportedModelError, match="layer_types contradicts"):
        read(MISTRAL, sliding_window=7, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ModelFileError, match="sliding_window is 0"):
        read(MISTRAL, sliding_window=0)


@pytest.mark.parametrize("base", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_windows_of_qwen_follow_the_switch_and_the_layers(base: dict[str, Any]) -> None:
    off = read(base, sliding_window=7, use_sliding_window=False, max_window_layers=0)
    assert windows(off) == [None, None]
    assert windows(read(base, sliding_window=0, use_sliding_window=False)) == [None, None]
    on = {"sliding_window": 7, "use_sliding_window": True}
    assert windows(read(base, **on)) == [None, None]  # max_window_layers is 28 if absent
    mixed = read(base, **on, max_window_layers=1)
    assert windows(mixed) == [None, 7]
    assert [group.layers for group in mixed.kv_groups] == [(0,), (1,)]
    assert windows(read(base, **on, max_window_layers=0)) == [7, 7]
    assert windows(read(base, **on, layer_types=["sliding_attention", "full_attention"])) == [7, None]
    with pytest.raises(UnsupportedModelError, match="layer_types contradicts"):
        read(base, sliding_window=7, layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["full_attention"], "one entry per layer"),
        ("full_attention", "one entry per layer"),
        (["full_attention", "chunked_attention"], "'chunked_attention'"),
        (["full_attention", "sliding_attention"], "contradicts"),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(kinds: object, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        read(layer_types=kinds)


def test_biases_and_activation() -> None:
    llama = read(attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh")
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.activation) == (True, True, True, "gelu_tanh")
    qwen3 = read(QWEN3, attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.output_bias) == (True, True)
    for base, key in ((MISTRAL, "attention_bias"), (QWEN2, "mlp_bias"), (QWEN3, "mlp_bias"), (MISTRAL, "mlp_bias")):
        with pytest.raises(UnsupportedModelError, match=f"{key} is true"):
            read(base, **{key: True})
    with pytest.raises(UnsupportedModelError, match="hidden_act 'xielu' is not supported; supported: silu"):
        read(hidden_act="xielu")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("query_pre_attn_scalar", 256),
        ("embedding_multiplier", 12.0),
        ("logits_scaling", 8.0),
        ("num_local_experts", 8),
        ("quantization_config", {"quant_method": "gptq"}),
        ("use_bidirectional_attention", True),
        ("is_causal", False),
        ("qk_norm", True),
        ("rope_interleaved", True),
        ("is_encoder_decoder", True),
    ],
)
def test_keys_that_change_the_arithmetic_are_refused_unless_neutral(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {key} "):
        read(**{key: value})
    assert read(**{key: None}) == read()


def test_unknown_keys_are_named_in_a_warning_and_harmless_ones_are_not() -> None:
    config = {**LLAMA_CONFIG, "sliding_window": 16, "brand_new_gate": 0.5, "nothing": None, "use_cache": True}
    with pytest.warns(UserWarning, match=r"config\.json: keys unknown to family llama.*'brand_new_gate', 'sliding_w"):
        hub_config(config, None, "folder/config.json")
    assert read(
        embedding_multiplier=1.0,
        rope_interleaved=False,
        use_sliding_window=False,
        _name_or_path="x",
        unsloth_version="1",
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -16),
        ("hidden_size", True),
        ("hidden_size", "16"),
        ("hidden_size", 16.5),
        ("hidden_size", float("nan")),
        ("hidden_size", 10**30),
        ("num_hidden_layers", 10**6),
        ("vocab_size", [24]),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", True),
        ("rms_norm_eps", 1e39),
        ("rms_norm_eps", 3.5e38),
        ("rms_norm_eps", 1.01),
        ("rms_norm_eps", 1e-31),
        ("rms_norm_eps", 10**400),
        ("rope_theta", 0),
        ("rope_theta", 0.5),
        ("rope_theta", 1e39),
        ("tie_word_embeddings", "false"),
        ("model_type", 5),
        ("architectures", "LlamaForCausalLM"),
    ],
)
def test_impossible_values_are_refused_with_file_key_and_value(key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=rf"folder/config\.json: {key} is .*it must be"):
        read(**{key: value})


@pytest.mark.parametrize("value", [1e39, 1e-39, 1e7, 1e-7, 0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_rope_numbers_that_would_overflow_or_vanish_are_refused(key: str, value: float) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {**llama3, "original_max_position_embeddings": 64, key: value}
    with pytest.raises(ModelFileError, match=rf"rope_scaling: {key} is .*it must be a number from 1e-06 to 1e\+06"):
        read(rope_scaling=scaling)
    if key == "factor":
        with pytest.raises(ModelFileError, match=r"factor is .*it must be a number from 1e-06"):
            read(rope_scaling={"type": "linear", key: value})


@pytest.mark.parametrize("theta", [1.0, 1e18])
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_every_rope_within_the_bounds_has_finite_tables(theta: float, factor: float) -> None:
    last = 2**31 - 1
    llama3 = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1e-6, "high_freq_factor": 1e6}
    for scaling in ({"type": "linear", "factor": factor}, {**llama3, "original_max_position_embeddings": last}):
        rows = rope_rows(rope(read(rope_theta=theta, rope_scaling=scaling)), last - 2, last)
        assert np.allclose(rows[:, :2] ** 2 + rows[:, 2:] ** 2, 1, atol=1e-6)


def test_the_bounds_of_eps_themselves_are_taken() -> None:
    assert [read(rms_norm_eps=eps).norm_eps for eps in (1, 1e-30)] == [1.0, 1e-30]


def test_missing_sizes_are_refused_by_name() -> None:
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        with pytest.raises(ModelFileError, match=f"{key} is missing"):
            read(**{key: ...})
    assert read(hidden_size=16.0).hidden_size == 16


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'"),
        ({"model_type": "gpt2", "architectures": ...}, "'gpt2'"),
        ({"model_type": ..., "architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification'"),
    ],
)
def test_an_unknown_architecture_is_refused_naming_it_and_the_known(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{named} is not supported; supported: .*lama"):
        read(**changes)


def test_an_architecture_is_enough() -> None:
    assert read(model_type=...).family == "llama"
    assert read(architectures=None).family == "llama"
    with pytest.raises(ModelFileError, match="model_type is missing; supported: llama, mistral, qwen2, qwen3"):
        read(model_type=..., architectures=...)
