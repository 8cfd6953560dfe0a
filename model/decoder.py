"""The decoder: one forward pass as plain array code on a device's operations, without a branch on a family's name.

Pre-norm transformer (Touvron et al. 2023, "LLaMA", section 2.2): attention over paged K/V, then a gated MLP, each added
to the residual stream. All buffers are preallocated, so that a step can be captured and replayed. What is computed for
a token depends on the token, its position and the K/V before it, never on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupaged.kernels.interface import Array, AttentionPlan, KVView, Operations
from cupaged.model.config import ModelConfig
from cupaged.model.parameters import LayerParameters, Parameters
from cupaged.model.rope import ROWS_PER_BLOCK, rope_rows

_OF_LOGITS = ("last", "last_qkv", "logits")  # buffers of as many rows as logits are wanted; the others have T

Empty = Callable[[tuple[int, ...], Any], Array]
Upload = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step. T tokens of any number of sequences, each sequence's in a row; G KV groups.

    token_ids, positions int32 [T] on the device; slots, one int64 [T] per KV group: where each token's K/V go;
    plans: one attention plan per KV group; logit_rows int32 [R]: the tokens whose logits are wanted, in order.
    max_position: the largest of `positions`. last_plan: an attention plan of the wanted tokens alone, where they are
    fewer than T: of the others the last layer only makes keys and values.
    """

    token_ids: Array
    positions: Array
    slots: Sequence[Array]
    plans: Sequence[AttentionPlan]
    logit_rows: Array
    max_position: int
    last_plan: AttentionPlan | None = None

    @property
    def all_plans(self) -> list[AttentionPlan]:
        """What a capture of the step depends on."""
        return [*self.plans, *([] if self.last_plan is None else [self.last_plan])]


def scratch_shapes(config: ModelConfig, max_tokens: int, max_logits: int) -> dict[str, tuple[int, int]]:
    """The scratch buffers of a decoder, all float32."""
    heads = config.num_heads + 2 * config.num_kv_heads
    widths = {
        "residual": config.hidden_size,
        "hidden": config.hidden_size,
        "delta": config.hidden_size,
        "qkv": heads * config.head_dim,
        "attended": config.num_heads * config.head_dim,
        "gate_up": 2 * config.intermediate_size,
        "active": config.intermediate_size,
    }
    shapes = {name: (max_tokens, width) for name, width in widths.items()}
    of_logits = zip(_OF_LOGITS, (config.hidden_size, widths["qkv"], config.vocab_size), strict=True)
    return shapes | {name: (max_logits, width) for name, width in of_logits}


class Decoder:
    """A model's forward pass. Holds parameters, scratch for `max_tokens` tokens, and the rotary tables."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, ops: Operations, empty: Empty, upload: Upload,
        max_tokens: int, max_logits: int,
    ) -> None:  # fmt: skip
        self.config = config
        self.parameters = parameters
        self.ops = ops
        self._upload = upload
        shapes = scratch_shapes(config, max_tokens, max_logits)
        self._buffers = {name: empty(shape, np.float32) for name, shape in shapes.items()}
        self._rope = [upload(rope_rows(group.rope, 0, ROWS_PER_BLOCK)) for group in config.kv_groups]
        self._group = [config.group_of_layer(layer) for layer in range(config.num_layers)]
        self._index = [config.kv_groups[g].layers.index(layer) for layer, g in enumerate(self._group)]

    def prepare(self, max_position: int) -> bool:
        """Extend the rotary tables to a position, doubling. Not part of `forward`, which may be captured.

        True if a table was replaced: captures made before hold the old one.
        """
        replaced = False
        for index, group in enumerate(self.config.kv_groups):
            rows = self._rope[index].shape[0]
            while rows <= max_position:
                rows *= 2
            if rows > self._rope[index].shape[0]:
                self._rope[index] = self._upload(rope_rows(group.rope, 0, rows))
                replaced = True
        return replaced

    def forward(self, batch: ForwardBatch, caches: Sequence[KVView]) -> Array:
        """Logits [R, V] float32 of the tokens in `batch.logit_rows`, in a buffer that the next call overwrites.

        caches: the K/V of each KV group, whose layers are numbered within the group. `prepare(batch.max_position)` must
        have been called.
        """
        ops, config, parameters = self.ops, self.config, self.parameters
        count, wanted = len(batch.token_ids), len(batch.logit_rows)
        buffers = {name: buffer[:count] for name, buffer in self._buffers.items() if name not in _OF_LOGITS}
        last, logits = self._buffers["last"][:wanted], self._buffers["logits"][:wanted]
        ops.embed(batch.token_ids, parameters.embed, buffers["residual"], config.embedding_scale)
        pending = None  # what the last block added; the next norm adds it to the residual stream
        for layer, weights in enumerate(parameters.layers):
            plan, cache = batch.plans[self._group[layer]], caches[self._group[layer]]
            self._norm(pending, buffers["residual"], weights.attention_norm, buffers["hidden"])
            self._write_kv(layer, weights, buffers, batch, cache)
            if layer == len(parameters.layers) - 1:
                if wanted == 0:
                    return logits
                if batch.last_plan is not None:
                    plan = batch.last_plan
                    buffers = self._wanted(buffers, batch.logit_rows)
            self._attention(layer, weights, buffers, plan, cache)
            self._norm(buffers["delta"], buffers["residual"], weights.mlp_norm, buffers["hidden"])
            ops.matmul(buffers["hidden"], weights.gate_up, buffers["gate_up"], weights.gate_up_bias, x_spent=True)
            ops.gated_activation(buffers["gate_up"], config.activation, buffers["active"], spent=True)
            ops.matmul(buffers["active"], weights.down, buffers["delta"], weights.down_bias, x_spent=True)
            pending = buffers["delta"]
        if pending is not None:
            ops.add(buffers["residual"], pending)
        if batch.last_plan is None:
            ops.take_rows(buffers["residual"], batch.logit_rows, last)
        ops.rms_norm(last, parameters.final_norm, config.norm_eps, last)
        ops.matmul(last, parameters.head, logits, precise=True, x_spent=True)
        return logits

    def _norm(self, added: Array | None, residual: Array, weight: Array, out: Array) -> None:
        if added is None:
            self.ops.rms_norm(residual, weight, self.config.norm_eps, out)
        else:
            self.ops.rms_norm(added, weight, self.config.norm_eps, out, residual)

    def _wanted(self, buffers: dict[str, Array], rows: Array) -> dict[str, Array]:
        """Buffers of the tokens in `rows` alone, with what the last layer still needs of them."""
        narrow = {name: buffer[: len(rows)] for name, buffer in buffers.items()}
        for name, target in (("residual", "last"), ("qkv", "last_qkv")):
            narrow[name] = self._buffers[target][: len(rows)]
            self.ops.take_rows(buffers[name], rows, narrow[name])
        return narrow

    def _heads(self, buffers: dict[str, Array]) -> tuple[Array, int]:
        """([T, H + 2 KVH, D] of queries, keys and values, H)."""
        config, qkv = self.config, buffers["qkv"]
        return qkv.reshape(len(qkv), config.num_heads + 2 * config.num_kv_heads, config.head_dim), config.num_heads

    def _write_kv(
        self, layer: int, weights: LayerParameters, buffers: dict[str, Array], batch: ForwardBatch, cache: KVView
    ) -> None:
        """hidden [T, K] -> qkv [T, (H + 2 KVH) * D], normed and turned by position; keys and values to the cache."""
        ops, config, group = self.ops, self.config, self._group[layer]
        # Keys and values are precise, and stay; queries need not be. Mean KL and same best token on 8,192 tokens (bench
        # quality): nothing precise 0.0021 and 96.8 %, values 0.0017 and 97.2-97.4 %, keys and values 0.0015 and 97.2 %,
        # all three 0.0014 and 97.3 %.
        kept = config.num_heads * config.head_dim
        ops.matmul(
            buffers["hidden"],
            weights.qkv,
            buffers["qkv"],
            weights.qkv_bias,
            precise=True,
            precise_from=kept,
            x_spent=True,
        )
        heads, queries = self._heads(buffers)
        keys = queries + config.num_kv_heads
        query, key, value = heads[:, :queries], heads[:, queries:keys], heads[:, keys:]
        if weights.q_norm is not None and weights.k_norm is not None:
            ops.head_norm(query, weights.q_norm, config.norm_eps)
            ops.head_norm(key, weights.k_norm, config.norm_eps)
        ops.rope(heads[:, :keys], batch.positions, self._rope[group])
        ops.write_kv(key, value, cache, self._index[layer], batch.slots[group])

    def _attention(
        self, layer: int, weights: LayerParameters, buffers: dict[str, Array], plan: AttentionPlan, cache: KVView
    ) -> None:
        """qkv -> delta [T, K], of the plan's T tokens."""
        ops, config = self.ops, self.config
        heads, queries = self._heads(buffers)
        attended = buffers["attended"].reshape(len(heads), queries, config.head_dim)  # [T, H, D]
        ops.paged_attention(
            heads[:, :queries], cache, self._index[layer], plan, attended, config.scale, config.attention_soft_cap
        )
        ops.matmul(buffers["attended"], weights.output, buffers["delta"], weights.output_bias, x_spent=True)
