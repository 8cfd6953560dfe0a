"""The model families as tables: what each fixes, what its config leaves out, and how its files name the weights.

A family is data. The decoder knows only `ModelConfig`; the readers (hub_model.py, gguf_model.py) know only this table.
Defaults are those of the family's configuration class in Hugging Face Transformers, which writes a key only where it
differs; they are facts about the architecture, not guesses of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cupaged.errors import ModelFileError, UnsupportedModelError
from cupaged.kernels.interface import Activation
from cupaged.model.config import KVGroup, RopeConfig
from cupaged.model.config_values import quote

WindowRule = Literal["none", "all", "switched"]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    window: which layers may have a sliding window: "none"; "all" if `sliding_window` is set (Mistral); "switched" by
    `use_sliding_window`, from layer `max_window_layers` on or as `layer_types` says (Qwen).
    attention_bias: "key" if the config key of that name adds biases to q, k, v and o; "qkv" if q, k, v always have
    them; "none". mlp_bias: whether the key of that name counts.
    """

    name: str
    architecture: str  # the class name in config.json's `architectures`
    gguf_architecture: str
    attention_bias: Literal["key", "qkv", "none"]
    mlp_bias: bool
    qk_norm: bool
    window: WindowRule
    default_kv_heads: int | None  # None: as many as there are query heads
    default_head_dim: int | None  # None: hidden_size / num_attention_heads
    default_max_position: int
    default_window: int | None = None
    default_bos: int | None = None
    default_eos: int | None = None
    gguf_permuted: bool = False  # the GGUF converter interleaved the rows of Q and K


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    gguf_architecture="llama",
    attention_bias="key",
    mlp_bias=True,
    qk_norm=False,
    window="none",
    default_kv_heads=None,
    default_head_dim=None,
    default_max_position=2048,
    default_bos=1,
    default_eos=2,
    gguf_permuted=True,
)
MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    gguf_architecture="llama",
    attention_bias="none",
    mlp_bias=False,
    qk_norm=False,
    window="all",
    default_kv_heads=8,
    default_head_dim=None,
    default_max_position=131072,
    default_window=4096,
    default_bos=1,
    default_eos=2,
    gguf_permuted=True,
)
QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    gguf_architecture="qwen2",
    attention_bias="qkv",
    mlp_bias=False,
    qk_norm=False,
    window="switched",
    default_kv_heads=32,
    default_head_dim=None,
    default_max_position=32768,
    default_window=4096,
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    gguf_architecture="qwen3",
    attention_bias="key",
    mlp_bias=False,
    qk_norm=True,
    window="switched",
    default_kv_heads=32,
    default_head_dim=128,
    default_max_position=32768,
    default_window=4096,
)

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}

# GGUF has no architecture of its own for Mistral: its files say llama, and are.
GGUF_FAMILIES: dict[str, Family] = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}

# `hidden_act` to the decoder's activations (transformers.activations.ACT2FN).
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class NameTable:
    """Canonical weight names to a file's. A layer's weight is `layers.{i}.{stem}.{weight|bias}`."""

    layer: str  # with {i}
    stems: Mapping[str, str]
    whole: Mapping[str, str]  # names outside the layers
    ignored: tuple[str, ...] = field(default=())  # patterns of tensors that hold no weights, with {i} for any number

    def file_name(self, canonical: str) -> str:
        if canonical in self.whole:
            return self.whole[canonical]
        _, index, stem, kind = canonical.split(".")
        return f"{self.layer.format(i=index)}.{self.stems[stem]}.{kind}"


HUB_NAMES = NameTable(
    layer="model.layers.{i}",
    stems={
        "attention_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    whole={
        "embed.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "final_norm.weight": "model.norm.weight",
    },
    # Rotary frequencies that older Transformers saved as buffers: they follow from the config, rope.py computes them.
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)

GGUF_NAMES = NameTable(
    layer="blk.{i}",
    stems={
        "attention_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "mlp_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    },
    whole={
        "embed.weight": "token_embd.weight",
        "head.weight": "output.weight",
        "final_norm.weight": "output_norm.weight",
    },
)


def unknown_architecture(where: str, name: object) -> UnsupportedModelError:
    """The error for an architecture that no table describes; names it and the known ones."""
    return UnsupportedModelError(
        f"{where}: architecture {quote(name)} is not supported; supported: {', '.join(FAMILIES)}"
    )


def check_heads(where: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuse head counts that no grouped-query attention has, and head sizes that cannot be rotated in pairs."""
    if kv_heads > heads or heads % kv_heads:
        raise ModelFileError(
            f"{where}: {heads} attention heads and {kv_heads} KV heads; the heads must be a multiple of the KV heads"
        )
    if head_dim % 2:
        raise UnsupportedModelError(f"{where}: head_dim is {head_dim}; rotary embedding needs an even one")


def head_dim_from(where: str, hidden_size: int, heads: int) -> int:
    """hidden_size / heads, for files that do not give head_dim."""
    if hidden_size % heads:
        raise ModelFileError(
            f"{where}: hidden size {hidden_size} is not a multiple of {heads} attention heads, and no head_dim is given"
        )
    return hidden_size // heads


def kv_groups(windows: Sequence[int | None], rope: RopeConfig) -> tuple[KVGroup, ...]:
    """One group for each distinct window, ordered by first layer. windows: one entry per layer, None for all keys."""
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    return tuple(KVGroup(tuple(members), window, rope) for window, members in layers.items())
