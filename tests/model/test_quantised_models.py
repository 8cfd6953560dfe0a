"""Models whose matrices are stored in each block format compute what the same model in float32 computes."""

from __future__ import annotations

from pathlib import Path

import gguf as public
import numpy as np
import pytest
from checkpoints import Bare, NumpyDevice
from model_files import F32, LLAMA_CONFIG, STRING, U32, gguf_model, permuted, write_folder
from test_quants import BLOCK_FORMATS, blocks

from cupaged import LLM, SamplingParams
from cupaged.errors import UnsupportedModelError
from cupaged.model.checkpoint import open_checkpoint
from cupaged.model.quants import FORMATS

HIDDEN, HEADS, KV_HEADS, VOCABULARY = 256, 4, 2, 48
SHAPES = {
    "token_embd": ("model.embed_tokens", VOCABULARY, HIDDEN),
    "output": ("lm_head", VOCABULARY, HIDDEN),
    "blk.0.attn_q": ("model.layers.0.self_attn.q_proj", HIDDEN, HIDDEN),
    "blk.0.attn_k": ("model.layers.0.self_attn.k_proj", HIDDEN // 2, HIDDEN),
    "blk.0.attn_v": ("model.layers.0.self_attn.v_proj", HIDDEN // 2, HIDDEN),
    "blk.0.attn_output": ("model.layers.0.self_attn.o_proj", HIDDEN, HIDDEN),
    "blk.0.ffn_gate": ("model.layers.0.mlp.gate_proj", 512, HIDDEN),
    "blk.0.ffn_up": ("model.layers.0.mlp.up_proj", 512, HIDDEN),
    "blk.0.ffn_down": ("model.layers.0.mlp.down_proj", HIDDEN, 512),
}
NORMS = {
    "blk.0.attn_norm": "model.layers.0.input_layernorm",
    "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    "output_norm": "model.norm",
}
METADATA = {
    "general.architecture": (STRING, "llama"),
    "llama.block_count": (U32, 1),
    "llama.context_length": (U32, 64),
    "llama.embedding_length": (U32, HIDDEN),
    "llama.feed_forward_length": (U32, 512),
    "llama.attention.head_count": (U32, HEADS),
    "llama.attention.head_count_kv": (U32, KV_HEADS),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.vocab_size": (U32, VOCABULARY),
}
CHANGES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
}


def quantised(name: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Stored rows uint8 [rows, row bytes]: by the public package's own quantiser where it has one, else random."""
    kind = public.GGMLQuantizationType[name]
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * np.float32(0.05)
    try:
        return public.quantize(values, kind)
    except NotImplementedError:
        # Scales such that values are of the order of 0.05: the small integer scales of K formats reach 31 or 63.
        scale = 0.05 / 128 if FORMATS[name].block == 256 or name == "IQ4_NL" else 0.01
        return blocks(name, rows, columns, seed, scale).reshape(rows, -1)


def write_both(name: str, folder: Path) -> tuple[Path, Path]:
    """(GGUF, Hub folder) of one model: its matrices in format `name`, and what they are in float32."""
    kind = public.GGMLQuantizationType[name]
    tensors, weights = {}, {}
    for seed, (ours, (theirs, rows, columns)) in enumerate(SHAPES.items()):
        raw = quantised(name, rows, columns, seed)
        weights[f"{theirs}.weight"] = np.ascontiguousarray(public.dequantize(raw, kind))
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(ours)
        tensors[f"{ours}.weight"] = (kind.value, (rows, columns), (permuted(raw, heads) if heads else raw).tobytes())
    for ours, theirs in NORMS.items():
        norm = np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32)
        weights[f"{theirs}.weight"] = norm
        tensors[f"{ours}.weight"] = (0, (HIDDEN,), norm.tobytes())
    file = folder / "model.gguf"
    file.write_bytes(gguf_model(METADATA, tensors))
    return file, write_folder(folder / "hub", weights, LLAMA_CONFIG, **CHANGES)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_M06_logits_are_those_of_the_dequantised_model(tmp_path: Path, name: str) -> None:
    """Both models run the same float32 kernels, so equal weights in equal places give equal bits: Q and K too, whose
    rows the GGUF has in another order."""
    file, folder = write_both(name, tmp_path)
    assert open_checkpoint(file).config.stored_dtype == name
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    found = Bare(file, NumpyDevice(), num_blocks=2).logits(ids)
    assert found.shape == (len(ids), VOCABULARY)
    assert np.isfinite(found).all()
    assert len({row.argmax() for row in found}) > 1  # not a constant
    assert found.tobytes() == Bare(folder, NumpyDevice(), num_blocks=2).logits(ids).tobytes()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_tokens_are_those_of_the_dequantised_model(tmp_path: Path, name: str) -> None:
    """The whole way, through the CPU's kernels."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    tokens = []
    for path in write_both(name, tmp_path):
        with LLM(path, device="cpu", dtype="float32", kv_memory="1MiB") as llm:
            (out,) = llm.generate([3, 1, 4, 1, 5], params)
            tokens.append(out.outputs[0].token_ids)
    assert len(tokens[0]) == 6
    assert tokens[0] == tokens[1]


def test_other_formats_are_refused_by_name_before_any_weight_is_read(tmp_path: Path) -> None:
    others = set(public.GGML_QUANT_SIZES) - {public.GGMLQuantizationType[name] for name in FORMATS}
    blocks_of_256 = [kind for kind in others if public.GGML_QUANT_SIZES[kind][0] == 256 and kind.name != "Q8_K"]
    assert len(blocks_of_256) >= 8
    for kind in blocks_of_256:
        size = public.GGML_QUANT_SIZES[kind][1]
        tensors = {
            f"{ours}.weight": (kind.value, (rows, columns), bytes(rows * columns // 256 * size))
            for ours, (_, rows, columns) in SHAPES.items()
        }
        tensors |= {f"{ours}.weight": (0, (HIDDEN,), bytes(4 * HIDDEN)) for ours in NORMS}
        path = tmp_path / f"{kind.name}.gguf"
        path.write_bytes(gguf_model(METADATA, tensors))
        with pytest.raises(UnsupportedModelError, match=rf"weight type {kind.name} is not supported; supported: F32, "):
            open_checkpoint(path)
