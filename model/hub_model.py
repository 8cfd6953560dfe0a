"""A Hub folder's config.json (and generation_config.json) to `ModelConfig`.

Two dialects are met: before Transformers 5 (`torch_dtype`, `rope_theta` and `rope_scaling` at the top level, no
`layer_types`) and today's (`dtype`, `rope_parameters`, `layer_types`). Both are read, mixed ones too where they agree.
A key that would change the arithmetic and is not implemented is refused by name; a key that is not known at all is
named in a warning. Code that a folder brings along (`auto_map`) is never looked at.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from cupaged.errors import ModelFileError, UnsupportedModelError
from cupaged.model.config import ModelConfig, RopeConfig
from cupaged.model.config_values import NORM_EPS, ROPE_FACTOR, ROPE_THETA, Values, quote
from cupaged.model.families import (
    ACTIVATIONS,
    FAMILIES,
    Family,
    check_heads,
    head_dim_from,
    kv_groups,
    unknown_architecture,
)

_MAX_LAYERS = 4096
_DEFAULT_THETA = 10000.0

# Keys that change the arithmetic in other architectures, with the values that leave it as ours is. Null always does.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False, 0),
    "clip_qkv": (),
    "compression_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "moe_intermediate_size": (0,),
    "n_routed_experts": (0,),
    "no_rope_layers": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
}

# Keys without a bearing on inference here: provenance, training, caching, classification heads, other programs' notes.
# Sampling settings at the top level are those of old generation configs; a request brings its own.
_WITHOUT_EFFECT = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _name_or_path
    architectures attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id hidden_dropout id2label initializer_range is_decoder is_llama_config label2id length_penalty
    max_length max_sequence_length max_window_layers min_length model_type neftune_noise_alpha no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states output_scores
    pad_token_id prefix pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop
    return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
"""


def hub_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None, where: str) -> ModelConfig:
    """ModelConfig of a parsed config.json; `generation` is generation_config.json or None; `where` names the file.

    `tied_head` and `stored_dtype` say what the config claims; checkpoint.py corrects them by what the files hold.
    ModelFileError for a missing or impossible value, UnsupportedModelError for an architecture or option that is not
    implemented; a UserWarning names unknown keys.
    """
    values = Values(config, where)
    family = _family(values)
    hidden = values.integer("hidden_size")
    heads = values.integer("num_attention_heads")
    layers = values.integer("num_hidden_layers", high=_MAX_LAYERS)
    # A null here has always meant "one KV head per head"; only an absent key means the family's default.
    kv_default = heads if values.present("num_key_value_heads") else family.default_kv_heads or heads
    kv_heads = values.integer("num_key_value_heads", kv_default)
    head_dim = values.optional_integer("head_dim") or family.default_head_dim or head_dim_from(where, hidden, heads)
    check_heads(where, heads, kv_heads, head_dim)
    rope = _rope(values, head_dim)
    qkv_bias, output_bias = _attention_bias(values, family)
    built = ModelConfig(
        family=family.name,
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=values.integer("intermediate_size"),
        max_position=values.integer("max_position_embeddings", family.default_max_position),
        norm_eps=values.number("rms_norm_eps", 1e-6, NORM_EPS),
        kv_groups=kv_groups(_windows(values, family, layers), rope),
        activation=_activation(values),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=_mlp_bias(values, family),
        qk_norm=family.qk_norm,
        tied_head=values.flag("tie_word_embeddings", False),  # the default of all these families
        bos_token_id=_bos(values, generation, where, family),
        eos_token_ids=_eos(values, generation, where, family),
    )
    _check_leftovers(values, family)
    return built


def _family(values: Values) -> Family:
    """By `model_type`, or in its absence by `architectures`; a head other than the language model's is refused."""
    architectures = values.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise values.wrong("architectures", "a list of names")
    model_type = values.text("model_type")
    if model_type is None:
        if not architectures:
            raise ModelFileError(f"{values.where}: model_type is missing; supported: {', '.join(FAMILIES)}")
        family = next((entry for entry in FAMILIES.values() if entry.architecture == architectures[0]), None)
        if family is None:
            raise unknown_architecture(values.where, architectures[0])
        return family
    family = FAMILIES.get(model_type)
    if family is None:
        known = {entry.architecture for entry in FAMILIES.values()}
        named = architectures[0] if architectures and architectures[0] not in known else model_type
        raise unknown_architecture(values.where, named)
    if architectures and family.architecture not in architectures:
        raise UnsupportedModelError(
            f"{values.where}: model_type {model_type} with architecture {quote(architectures[0])} is not supported; "
            f"supported: {family.architecture}"
        )
    return family


def _activation(values: Values) -> Any:
    name = values.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{values.where}: hidden_act {quote(name)} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _attention_bias(values: Values, family: Family) -> tuple[bool, bool]:
    """(q, k, v have biases, o has one)."""
    if family.attention_bias == "key":
        bias = values.flag("attention_bias", False)
        return bias, bias
    if family.attention_bias == "qkv":
        # Not an option of this family: some configs carry the key as a description, and the weights must hold the
        # biases either way.
        values.flag("attention_bias", True)
        return True, False
    if values.flag("attention_bias", False):
        raise UnsupportedModelError(f"{values.where}: attention_bias is true, which {family.name} does not have")
    return False, False


def _mlp_bias(values: Values, family: Family) -> bool:
    bias = values.flag("mlp_bias", False)
    if bias and not family.mlp_bias:
        raise UnsupportedModelError(f"{values.where}: mlp_bias is true, which {family.name} does not have")
    return bias


def _windows(values: Values, family: Family, layers: int) -> list[int | None]:
    """The sliding window of each layer, as Transformers' configuration class of the family derives it."""
    kinds = values.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ModelFileError(f"{values.where}: layer_types must be a list with one entry per layer ({layers})")
        for kind in kinds:
            if kind not in known:
                raise UnsupportedModelError(
                    f"{values.where}: layer_types has {quote(kind)}; supported: {', '.join(known)}"
                )
    if family.window == "none":
        window = None
        implied = ["full_attention"] * layers
    elif family.window == "all":
        # An absent key is the family's default, an explicit null is no window (Mistral 7B v0.2).
        window = values.optional_integer("sliding_window")
        if window is None and not values.present("sliding_window"):
            window = family.default_window
        implied = [known[window is not None]] * layers
    else:
        # Switched off, the key still stands in most of these configs, with any value.
        window = None
        values.get("sliding_window")
        if values.flag("use_sliding_window", False):
            window = values.optional_integer("sliding_window")
            if window is None and not values.present("sliding_window"):
                window = family.default_window
        first = values.integer("max_window_layers", 28, low=0)
        implied = [known[window is not None and layer >= first] for layer in range(layers)]
    if kinds is None or kinds == implied:
        return [window if kind == "sliding_attention" else None for kind in implied]
    # Only a family that switches layer by layer may say so layer by layer, and only with a window to switch.
    if family.window != "switched" or (window is None and "sliding_attention" in kinds):
        raise UnsupportedModelError(
            f"{values.where}: layer_types contradicts the sliding window of {family.name} "
            f"(sliding_window {quote(values.data.get('sliding_window'))}, "
            f"use_sliding_window {quote(values.data.get('use_sliding_window'))})"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


# What each kind of scaling reads beside the theta; other keys with a value are refused, since they would do something
# in the kind that they belong to.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ROPE_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def _rope(values: Values, head_dim: int) -> RopeConfig:
    """Rotary settings from `rope_parameters` (today) or `rope_theta` and `rope_scaling` (before Transformers 5)."""
    table: dict[str, Any] = {}
    sections = [name for name in ("rope_parameters", "rope_scaling") if values.table(name) is not None]
    for name in sections:
        for key, value in values.data[name].items():
            first = value if value is None else table.setdefault(key, value)
            if first is not value and first != value:  # by identity first: NaN is refused later, as what it is
                raise ModelFileError(f"{values.where}: rope_parameters and rope_scaling disagree on {quote(key)}")
    rope = Values(table, f"{values.where}: {sections[0] if sections else 'rope_parameters'}")
    theta = rope.optional_number("rope_theta", ROPE_THETA)
    outer = values.optional_number("rope_theta", ROPE_THETA)
    if theta is not None and outer is not None and theta != outer:
        raise ModelFileError(f"{values.where}: rope_theta is {outer} at the top level and {theta} in {sections[0]}")
    theta = theta or outer or _DEFAULT_THETA
    if rope.optional_number("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModelError(
            f"{rope.where}: partial_rotary_factor {table['partial_rotary_factor']} is not supported; supported: 1.0"
        )
    # `type` is the older name. Where both stand, `rope_type` is the one that counts, as in Transformers.
    kind = rope.text("rope_type") or rope.text("type")
    if kind is None and "rope_scaling" in sections and "factor" in table:
        raise ModelFileError(f"{rope.where}: rope_type is missing; supported: {', '.join(_ROPE_KEYS)}")
    kind = kind or "default"
    if kind not in _ROPE_KEYS:
        raise UnsupportedModelError(
            f"{rope.where}: rope_type {quote(kind)} is not supported; supported: {', '.join(_ROPE_KEYS)}"
        )
    for key in table:
        if key not in _ROPE_COMMON and key not in _ROPE_KEYS[kind]:
            raise UnsupportedModelError(f"{rope.where}: {quote(key)} is not supported with rope_type {kind}")
    if kind == "linear":
        return RopeConfig(theta, head_dim, "linear", factor=rope.number("factor", within=ROPE_FACTOR))
    if kind == "llama3":
        factor, low, high = (
            rope.number(key, within=ROPE_FACTOR) for key in ("factor", "low_freq_factor", "high_freq_factor")
        )
        if low >= high:
            raise ModelFileError(f"{rope.where}: low_freq_factor {low} must be below high_freq_factor {high}")
        original = rope.integer("original_max_position_embeddings")
        return RopeConfig(theta, head_dim, "llama3", factor, low, high, original)
    return RopeConfig(theta, head_dim)


def _eos(values: Values, generation: Mapping[str, Any] | None, where: str, family: Family) -> tuple[int, ...]:
    """Union of both files' eos ids, in order. The family's default stands in only if neither file has the key."""
    others = _generation(generation, where)
    ids = (*values.token_ids("eos_token_id"), *others.token_ids("eos_token_id"))
    if values.present("eos_token_id") or others.present("eos_token_id") or family.default_eos is None:
        return tuple(dict.fromkeys(ids))
    return (family.default_eos,)


def _bos(values: Values, generation: Mapping[str, Any] | None, where: str, family: Family) -> int | None:
    others = _generation(generation, where)
    for source in (values, others):
        ids = source.token_ids("bos_token_id")
        if len(ids) > 1:
            raise source.wrong("bos_token_id", "one token id or null")
        if ids:
            return ids[0]
    if values.present("bos_token_id") or others.present("bos_token_id"):
        return None
    return family.default_bos


def _generation(generation: Mapping[str, Any] | None, where: str) -> Values:
    return Values(generation or {}, where.removesuffix("config.json") + "generation_config.json")


def _check_leftovers(values: Values, family: Family) -> None:
    """Refuse what would change the arithmetic, name what nobody knows."""
    unknown: list[str] = []
    without_effect = frozenset(_WITHOUT_EFFECT.split())
    for key in values.untouched():
        if key in _NEUTRAL:
            value = values.data[key]
            if value not in _NEUTRAL[key]:
                raise UnsupportedModelError(
                    f"{values.where}: {key} {quote(value)} is not supported by {family.name} here"
                )
        elif key in ("qk_norm", "use_qk_norm"):
            if values.data[key] is not family.qk_norm:
                raise UnsupportedModelError(
                    f"{values.where}: {key} {quote(values.data[key])} is not supported; {family.name} "
                    f"{'always' if family.qk_norm else 'never'} has it"
                )
        elif key == "use_sliding_window" and values.data[key] is False:
            continue
        elif key not in without_effect:
            unknown.append(quote(key, 40))
    if unknown:
        warnings.warn(
            f"{values.where}: keys unknown to family {family.name}, without effect: {', '.join(unknown)}", stacklevel=2
        )
