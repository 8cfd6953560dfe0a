"""Bytes of K/V that a token of a model takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cupaged.errors import OptionError, shown
from cupaged.model.config_values import Values, read_json


@dataclass(frozen=True, slots=True)
class KVShape:
    """What K/V consist of; `source` says where that is from."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    source: str = "published configuration"

    def token_bytes(self, element_bytes: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def formula(self, element_bytes: int) -> str:
        return (
            f"2 (K, V) x {self.layers} layers x {self.kv_heads} KV heads x {self.head_dim} x {element_bytes} bytes = "
            f"{self.token_bytes(element_bytes):,} bytes a token"
        )


SHAPES = {
    shape.name: shape
    for shape in (
        KVShape("opt-13b", 40, 40, 128),
        KVShape("opt-66b", 64, 72, 128),
        KVShape("opt-175b", 96, 96, 128),
        KVShape("llama-7b", 32, 32, 128),
        KVShape("llama-13b", 40, 40, 128),
        KVShape("llama-30b", 60, 52, 128),
        KVShape("llama-65b", 80, 64, 128),
        KVShape("llama-2-70b", 80, 8, 128),
        KVShape("llama-3-8b", 32, 8, 128),
        KVShape("llama-3-70b", 80, 8, 128),
    )
}


def find_shape(name: str) -> KVShape:
    """A name of SHAPES, or a config.json (or the folder that holds one), of any decoder that keeps K/V per layer."""
    if name.lower() in SHAPES:
        return SHAPES[name.lower()]
    path = Path(name)
    try:
        if path.is_dir():
            path = path / "config.json"
        found = path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        found = False
    if not found:
        raise OptionError(f"cannot read {shown(name)}: neither a config.json nor one of {', '.join(SHAPES)}")
    values = Values(read_json(path), str(path))
    if values.present("kv_lora_rank"):
        raise OptionError(f"{path}: kv_lora_rank: K/V compressed across heads are not simulated")
    text = values.table("text_config")
    if text is not None:
        values = Values(text, f"{path}: text_config")
    heads = values.integer("num_attention_heads")
    hidden = values.integer("hidden_size")
    return KVShape(
        path.parent.resolve().name,
        values.integer("num_hidden_layers"),
        values.integer("num_key_value_heads", heads),
        values.integer("head_dim", max(1, hidden // heads)),
        str(path),
    )
