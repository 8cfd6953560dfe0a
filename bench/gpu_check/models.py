"""Random Llamas in the Hub's layout, written where the check runs: their text is noise, their work is a model's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from cupaged.bench.gpu_check.sizes import RandomModel

_PATTERN = 1 << 20  # different numbers; a weight is these over and over, from a place of its own


def write_model(folder: Path, model: RandomModel) -> Path:
    """config.json and model.safetensors (float16, matrices of deviation 0.02, norms of ones) in a new folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(model)))
    pattern = (np.random.default_rng(0).standard_normal(_PATTERN, np.float32) * 0.02).astype(np.float16)
    weights = {}
    for index, (name, shape) in enumerate(shapes(model).items()):
        if len(shape) == 1:
            weights[name] = np.ones(shape, np.float16)
        else:
            size = shape[0] * shape[1]
            start = 7919 * index % _PATTERN
            weights[name] = np.resize(np.roll(pattern, -start), size).reshape(shape)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def config(model: RandomModel) -> dict[str, object]:
    """As Transformers writes it, so that Transformers reads it, too."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads.query,
        "num_key_value_heads": model.heads.kv,
        "head_dim": model.heads.dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
    }


def shapes(model: RandomModel) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, by the names that Llama's have on the Hub."""
    query, kv = (count * model.heads.dim for count in (model.heads.query, model.heads.kv))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab, model.hidden)}
    for layer in range(model.layers):
        here = f"model.layers.{layer}"
        found |= {
            f"{here}.self_attn.q_proj.weight": (query, model.hidden),
            f"{here}.self_attn.k_proj.weight": (kv, model.hidden),
            f"{here}.self_attn.v_proj.weight": (kv, model.hidden),
            f"{here}.self_attn.o_proj.weight": (model.hidden, query),
            f"{here}.mlp.gate_proj.weight": (model.inner, model.hidden),
            f"{here}.mlp.up_proj.weight": (model.inner, model.hidden),
            f"{here}.mlp.down_proj.weight": (model.hidden, model.inner),
            f"{here}.input_layernorm.weight": (model.hidden,),
            f"{here}.post_attention_layernorm.weight": (model.hidden,),
        }
    return found | {"model.norm.weight": (model.hidden,)}


def layer_weights(model: RandomModel) -> int:
    """Weights of matrices in the layers: two operations each for every token of a prompt."""
    return sum(s[0] * s[1] for name, s in shapes(model).items() if len(s) == 2 and ".layers." in name)
