"""What the decoder needs to know of a model, as frozen data. Families (families.py) fill it from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cupaged.kernels.interface import Activation


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a KV group. `rotary_dim` <= head_dim; frequencies per rope.py."""

    theta: float
    rotary_dim: int
    scaling: Literal["default", "linear", "llama3", "divisors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    divisors: tuple[float, ...] = ()  # for "divisors": one per pair, as GGUF's rope_freqs.weight holds them


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one attention pattern: they share a block size and a block table."""

    layers: tuple[int, ...]
    window: int | None  # keys a query sees, its own included; None: all
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm_eps: float
    kv_groups: tuple[KVGroup, ...]
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stored_dtype: str = "F32"  # what most weights are stored as: F32, F16, BF16, Q8_0, Q4_1

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def group_of_layer(self, layer: int) -> int:
        for index, group in enumerate(self.kv_groups):
            if layer in group.layers:
                return index
        raise KeyError(layer)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V that one token takes in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes
