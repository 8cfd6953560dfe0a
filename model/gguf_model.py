"""A GGUF file's metadata to `ModelConfig`, and its tensors to weight sources in Hugging Face's row order.

Key names are those of ggml's docs/gguf.md and of the `gguf` package's constants. Nothing in a GGUF says whether biases
exist or the head is tied: the tensors do.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from cupaged.errors import ModelFileError, UnsupportedModelError
from cupaged.kernels.interface import WeightSource
from cupaged.model.config import ModelConfig, RopeConfig
from cupaged.model.config_values import NORM_EPS, ROPE_FACTOR, ROPE_THETA, Values, quote
from cupaged.model.families import GGUF_FAMILIES, GGUF_NAMES, Family, check_heads, head_dim_from, kv_groups
from cupaged.model.gguf_file import GGUFFile
from cupaged.model.quants import dequantise
from cupaged.model.weights import StoredWeight, UnpermutedHeads

_MAX_LAYERS = 4096
_DEFAULT_THETA = 10000.0
_ROPE_DIVISORS = "rope_freqs.weight"

# Keys below the architecture's name that change the arithmetic elsewhere, with the values that leave it as ours is.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (1.0,),
    "attention.scale": (0.0,),  # 0 asks for the usual 1/sqrt(head_dim)
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window_pattern": (),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (1.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (1.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}

_WITHOUT_EFFECT = frozenset(
    ("tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length", "max_position_embeddings")
)


def gguf_config(file: GGUFFile) -> ModelConfig:
    """ModelConfig of an open GGUF file. ModelFileError for a missing or impossible value, UnsupportedModelError for an
    architecture or option that is not implemented; a UserWarning names unknown keys of the architecture."""
    where = str(file.path)
    general = Values(file.metadata, where)
    name = general.text("general.architecture")
    if name is None:
        raise general.missing("general.architecture")
    family = GGUF_FAMILIES.get(name)
    if family is None:
        raise UnsupportedModelError(
            f"{where}: architecture {quote(name)} is not supported; supported in GGUF: {', '.join(GGUF_FAMILIES)}"
        )
    prefix = f"{name}."
    values = Values({k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}, where)
    layers = values.integer("block_count", high=_MAX_LAYERS)
    hidden = values.integer("embedding_length")
    heads = _uniform(values, "attention.head_count", layers)
    kv_heads = _uniform(values, "attention.head_count_kv", layers, heads)
    head_dim = values.optional_integer("attention.key_length") or head_dim_from(where, hidden, heads)
    value_dim = values.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(f"{where}: heads of {head_dim} for keys and {value_dim} for values; must be equal")
    check_heads(where, heads, kv_heads, head_dim)
    built = ModelConfig(
        family=family.name,
        vocab_size=_vocab_size(file, values, general),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_uniform(values, "feed_forward_length", layers),
        max_position=values.integer("context_length"),
        norm_eps=_shortest(values.number("attention.layer_norm_rms_epsilon", within=NORM_EPS)),
        kv_groups=kv_groups([_window(values, family)] * layers, _rope(file, values, head_dim)),
        qkv_bias=_has(file, "q.bias") if family.attention_bias == "key" else family.attention_bias == "qkv",
        output_bias=_has(file, "o.bias"),
        mlp_bias=_has(file, "up.bias"),
        qk_norm=family.qk_norm,
        tied_head=GGUF_NAMES.file_name("head.weight") not in file.tensors,
        bos_token_id=general.optional_integer("tokenizer.ggml.bos_token_id", low=0),
        eos_token_ids=_eos(general),
    )
    _check_leftovers(values, family)
    return built


def gguf_weights(file: GGUFFile, config: ModelConfig) -> tuple[dict[str, StoredWeight], Mapping[str, int]]:
    """(stored tensors by file name, heads by file name of those tensors whose rows are permuted).

    The tensor of rotary divisors is left out: `gguf_config` has read it.
    """
    stored = {
        name: StoredWeight(name, tensor.shape, tensor.dtype, file.raw(name), partial(file.drop, name))
        for name, tensor in file.tensors.items()
        if name != _ROPE_DIVISORS
    }
    permuted: dict[str, int] = {}
    if GGUF_FAMILIES[str(file.metadata["general.architecture"])].gguf_permuted:
        for layer in range(config.num_layers):
            for kind in ("weight", "bias"):
                permuted[GGUF_NAMES.file_name(f"layers.{layer}.q.{kind}")] = config.num_heads
                permuted[GGUF_NAMES.file_name(f"layers.{layer}.k.{kind}")] = config.num_kv_heads
    return stored, permuted


def in_hub_order(weight: StoredWeight, permuted: Mapping[str, int]) -> WeightSource:
    """The weight itself, or its rows put back where the converter permuted them."""
    heads = permuted.get(weight.name)
    return weight if heads is None else UnpermutedHeads(weight, heads)


def _uniform(values: Values, key: str, layers: int, default: int | None = None) -> int:
    """A count that the format lets vary by layer, but that must be equal for all layers here."""
    value = values.data.get(key)
    if isinstance(value, list) and value:
        if len(value) != layers or any(item != value[0] for item in value):
            raise UnsupportedModelError(f"{values.where}: {key} differs between layers: {quote(value)}")
        values.get(key)
        return Values({key: value[0]}, values.where).integer(key)
    return values.integer(key, default)


def _vocab_size(file: GGUFFile, values: Values, general: Values) -> int:
    tokens = general.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        return values.integer("vocab_size", len(tokens))
    embedding = file.tensors.get(GGUF_NAMES.file_name("embed.weight"))
    return values.integer("vocab_size", embedding.shape[0] if embedding and embedding.shape else None)


def _window(values: Values, family: Family) -> int | None:
    """Architecture llama covers Mistral, whose window holds for all layers. Qwen's converter writes none: which layers
    it would hold for is not in the file."""
    window = values.integer("attention.sliding_window", 0, low=0) or None
    if window is not None and family.window == "switched":
        raise UnsupportedModelError(
            f"{values.where}: attention.sliding_window {window} is not supported in a GGUF of {family.name}"
        )
    return window


def _rope(file: GGUFFile, values: Values, head_dim: int) -> RopeConfig:
    theta = values.number("rope.freq_base", _DEFAULT_THETA, ROPE_THETA)
    rotary = values.integer("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise UnsupportedModelError(f"{values.where}: rope.dimension_count {rotary} is not the head size {head_dim}")
    kind = values.text("rope.scaling.type")
    # The factor of a file from before scaling types, which knew linear scaling only.
    old_factor = values.optional_number("rope.scale_linear", ROPE_FACTOR)
    factor = values.optional_number("rope.scaling.factor", ROPE_FACTOR)
    if kind not in (None, "none", "linear"):
        raise UnsupportedModelError(
            f"{values.where}: rope.scaling.type {quote(kind)} is not supported; supported: none, linear"
        )
    if kind is None and factor is not None:
        kind = "linear"
    scale = 1.0 if kind == "none" else factor or old_factor or 1.0
    divisors = _divisors(file, rotary)
    if divisors and scale != 1.0:
        raise UnsupportedModelError(f"{values.where}: {_ROPE_DIVISORS} together with a linear scaling of {scale}")
    if divisors:
        return RopeConfig(theta, rotary, "divisors", divisors=divisors)
    return RopeConfig(theta, rotary, "linear", factor=scale) if scale != 1.0 else RopeConfig(theta, rotary)


def _divisors(file: GGUFFile, rotary_dim: int) -> tuple[float, ...]:
    """What llama.cpp divides each pair's angle by; the converter bakes llama3 scaling into it. () if absent or ones."""
    tensor = file.tensors.get(_ROPE_DIVISORS)
    if tensor is None:
        return ()
    where = f"{file.path}: {_ROPE_DIVISORS}"
    if tensor.dtype != "F32" or tensor.shape != (rotary_dim // 2,):
        raise ModelFileError(f"{where} is {tensor.dtype} {list(tensor.shape)}; expected F32 [{rotary_dim // 2}]")
    factors = dequantise("F32", file.raw(_ROPE_DIVISORS))[0]
    low, high = ROPE_FACTOR
    if not ((factors >= low) & (factors <= high)).all():  # false for NaN, too
        raise ModelFileError(f"{where} holds a value that is not from {low:g} to {high:g}")
    return () if (factors == 1).all() else tuple(factors.tolist())


def _shortest(value: float) -> float:
    """The decimal that a float32 of the file was written from: 1e-05, not 9.999999747378752e-06. The Hub's config has
    that number, and both must give the same arithmetic."""
    return float(str(np.float32(value)))


def _has(file: GGUFFile, stem: str) -> bool:
    return GGUF_NAMES.file_name(f"layers.0.{stem}") in file.tensors


def _eos(general: Values) -> tuple[int, ...]:
    """End of sequence, of turn and of message: each ends a generation (llama.cpp's end-of-generation set)."""
    found: list[int] = []
    for kind in ("eos", "eot", "eom"):
        found.extend(general.token_ids(f"tokenizer.ggml.{kind}_token_id"))
    return tuple(dict.fromkeys(found))


def _check_leftovers(values: Values, family: Family) -> None:
    unknown: list[str] = []
    for key in values.untouched():
        value: Any = values.data[key]
        if key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                raise UnsupportedModelError(f"{values.where}: {key} {quote(value)} is not supported by {family.name}")
        elif key not in _WITHOUT_EFFECT:
            unknown.append(quote(key, 40))
    if unknown:
        warnings.warn(
            f"{values.where}: keys unknown to architecture {family.gguf_architecture}, without effect: "
            f"{', '.join(unknown)}",
            stacklevel=2,
        )
