"""Builders of small model files, sound and damaged, byte by byte: the readers are not tested with themselves."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent.parent / "golden_data"

# GGUF value types
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
# GGML tensor types
T_F32, T_F16, T_Q4_1, T_Q8_0, T_IQ2_XS, T_BF16 = 0, 1, 3, 8, 17, 30


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def payload(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        item, values = value
        return struct.pack("<IQ", item, len(values)) + b"".join(payload(item, entry) for entry in values)
    return struct.pack(f"<{_CODES[kind]}", value)


def pair(key: str, kind: int, value: Any) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload(kind, value)


def info(name: str, dims: list[int], kind: int = T_F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(
    pairs: list[bytes],
    infos: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    pair_count: int | None = None,
    info_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(infos) if info_count is None else info_count,
        len(pairs) if pair_count is None else pair_count,
    )
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data if infos else head


def gguf_model(
    metadata: dict[str, tuple[int, Any]], tensors: dict[str, tuple[int, tuple[int, ...], bytes]], version: int = 3
) -> bytes:
    """A whole file: metadata as (type, value), tensors as (type, shape with rows first, stored bytes)."""
    infos, data = [], b""
    for name, (kind, shape, raw) in tensors.items():
        infos.append(info(name, list(reversed(shape)), kind, len(data)))
        data += raw + bytes(-len(raw) % 32)
    return gguf([pair(key, kind, value) for key, (kind, value) in metadata.items()], infos, data, version=version)


def safetensors(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A sound safetensors file: tensors as (dtype, shape, stored bytes)."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def llama_weights(tied: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights of LLAMA_CONFIG under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (24, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (16,),
            f"{prefix}post_attention_layernorm.weight": (16,),
            f"{prefix}self_attn.q_proj.weight": (16, 16),
            f"{prefix}self_attn.k_proj.weight": (8, 16),
            f"{prefix}self_attn.v_proj.weight": (8, 16),
            f"{prefix}self_attn.o_proj.weight": (16, 16),
            f"{prefix}mlp.gate_proj.weight": (20, 16),
            f"{prefix}mlp.up_proj.weight": (20, 16),
            f"{prefix}mlp.down_proj.weight": (16, 20),
        }
    if not tied:
        shapes["lm_head.weight"] = (24, 16)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_folder(
    folder: Path, weights: dict[str, np.ndarray], config: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """A Hub folder of F32 weights; `changes` go over the config (a value of `...` removes the key)."""
    merged = {**(LLAMA_CONFIG if config is None else config), **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in merged.items() if value is not ...}))
    (folder / "model.safetensors").write_bytes(
        safetensors({name: ("F32", array.shape, array.tobytes()) for name, array in weights.items()})
    )
    return folder


_GGUF_STEMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter stores them: within a head, halves interleaved (i, i + d/2 side by side)."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def llama_gguf(
    weights: dict[str, np.ndarray], arch: str = "llama", **changes: tuple[int, Any]
) -> tuple[dict[str, tuple[int, Any]], dict[str, tuple[int, tuple[int, ...], bytes]]]:
    """(metadata, tensors) of the GGUF that a converter makes of `llama_weights`; architecture llama permutes Q and K.

    `changes` are metadata below the architecture, with "__" for ".".
    """
    metadata: dict[str, tuple[int, Any]] = {
        "general.architecture": (STRING, arch),
        f"{arch}.block_count": (U32, 2),
        f"{arch}.context_length": (U32, 64),
        f"{arch}.embedding_length": (U32, 16),
        f"{arch}.feed_forward_length": (U32, 20),
        f"{arch}.attention.head_count": (U32, 4),
        f"{arch}.attention.head_count_kv": (U32, 2),
        f"{arch}.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        f"{arch}.rope.freq_base": (F32, 10000.0),
        f"{arch}.vocab_size": (U32, 24),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
    }
    for key, value in changes.items():
        metadata[f"{arch}.{key.replace('__', '.')}"] = value
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]] = {}
    for name, array in weights.items():
        if name in _GGUF_WHOLE:
            stored = _GGUF_WHOLE[name]
        else:
            _, _, layer, stem = name.split(".", 3)
            stem, kind = stem.rsplit(".", 1)
            stored = f"blk.{layer}.{_GGUF_STEMS[stem]}.{kind}"
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(stem)
            if heads and arch == "llama":
                array = permuted(array, heads)
        tensors[stored] = (T_F32, array.shape, array.tobytes())
    return metadata, tensors
