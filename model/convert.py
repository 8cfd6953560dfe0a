"""Any model that can be loaded, written as a folder in the Hub's layout with weights of one precision.

From a GGUF everything is made anew: config.json in the dialect of Transformers 5, the tokenizer as tokenizer.json. From
a Hub folder the files stay as they are, but for the weights and the precision named in config.json. The folder appears
under its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from cupaged.errors import ModelFileError, OptionError, UnsupportedModelError
from cupaged.kernels.interface import StorageType
from cupaged.model.checkpoint import Checkpoint, open_checkpoint
from cupaged.model.config import ModelConfig, RopeConfig
from cupaged.model.config_values import quote
from cupaged.model.families import ACTIVATIONS, FAMILIES, HUB_NAMES
from cupaged.model.hub_model import hub_config
from cupaged.model.regular_file import open_regular
from cupaged.model.rope import inverse_frequencies
from cupaged.model.safetensors_writer import MAX_SHARD_BYTES, weight_bytes, write_weights
from cupaged.model.tokenizer import Tokenizer, load_tokenizer
from cupaged.model.tokenizer_json import frame, tokenizer_json

Json = dict[str, Any]
_STORED: dict[str, StorageType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json",
)  # fmt: skip
_SPARE_BYTES = 64 << 20  # for the tokenizer and headers, when the disk's room is checked beforehand


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. weight_bytes: of the tensors; files: names in the folder."""

    folder: Path
    dtype: StorageType
    tensors: int
    weight_bytes: int
    files: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    dtype: StorageType | None = None,
    progress: Callable[[int, int], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Converted:
    """Write the model at `source` (folder or .gguf) as the folder `target`, which must be absent or empty.

    dtype: of all weights; None: the stored one, or float16 where that is a quantised format. progress(done, total)
    counts bytes. OptionError for an unusable target or dtype; ModelFileError if the source cannot be loaded, if a value
    does not fit the dtype, or if the disk is full; UnsupportedModelError if the Hub's layout has no word for the model.
    Nothing is left behind then.
    """
    if dtype is not None and dtype not in get_args(StorageType):
        raise OptionError(f"dtype: {quote(dtype)} is not one of {', '.join(get_args(StorageType))}")
    check_target(target)
    checkpoint = open_checkpoint(source)
    dtype = dtype or _STORED.get(checkpoint.config.stored_dtype, "float16")
    tensors = {HUB_NAMES.file_name(name): weight for name, weight in checkpoint.tensors.items()}
    total = weight_bytes(tensors, dtype)
    write_rest = _copy_files if checkpoint.kind == "hub" else _make_files
    try:
        free = shutil.disk_usage(target.absolute().parent).free
        if total + _SPARE_BYTES > free:
            raise ModelFileError(f"{target}: the weights need {total} bytes, {free} are free")
        with _appearing(target) as folder:
            write_rest(checkpoint, folder, dtype)
            write_weights(folder, tensors, dtype, progress, max_shard_bytes)
            files = tuple(sorted(path.name for path in folder.iterdir()))
    except OSError as error:
        raise ModelFileError(f"{target}: cannot be written ({error.strerror or error})") from None
    return Converted(target, dtype, len(tensors), total, files)


def check_target(target: Path) -> None:
    """OptionError unless `target` can become a new folder: absent or empty, in a folder that is there."""
    wrong = None
    try:
        os.path.realpath(target)  # says, unlike exists(), what is wrong with a name
        if target.is_dir():
            if any(target.iterdir()):
                wrong = "the folder is not empty; give a new or an empty one"
        elif target.exists() or target.is_symlink():
            wrong = "is not a folder; give a new or an empty one"
        elif not target.absolute().parent.is_dir():
            wrong = f"there is no folder {target.absolute().parent}"
    except (OSError, ValueError) as error:
        wrong = f"cannot be looked at ({getattr(error, 'strerror', None) or error})"
    if wrong is not None:
        raise OptionError(f"target {quote(str(target))}: {wrong}")


@contextlib.contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place at the end, or is removed if the end is not reached."""
    place = Path(os.path.realpath(target))
    partial = place.parent / f".{place.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        partial.mkdir()
        yield partial
        if place.exists():
            place.rmdir()  # empty, or else this fails: what somebody put there meanwhile stays
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_json(path: Path, data: Json) -> None:
    # A config may hold half a surrogate pair, which Python writes as JSON does: \ud800.
    path.write_bytes((json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))


def _copy_files(checkpoint: Checkpoint, folder: Path, dtype: StorageType) -> None:
    config = {key: value for key, value in checkpoint.metadata["config.json"].items() if key != "torch_dtype"}
    config["dtype"] = dtype
    if bool(config.get("tie_word_embeddings", False)) != checkpoint.config.tied_head:
        config["tie_word_embeddings"] = checkpoint.config.tied_head  # as the files have it
    _write_json(folder / "config.json", config)
    for name in _COPIED:
        if (checkpoint.path / name).exists():
            _copy(checkpoint.path / name, folder / name)


def _copy(source: Path, target: Path) -> None:
    try:
        original = open_regular(source)
    except OSError as error:
        raise ModelFileError(f"{source}: cannot be read ({error.strerror or error})") from None
    with original, target.open("xb") as copy:
        shutil.copyfileobj(original, copy)


def _make_files(checkpoint: Checkpoint, folder: Path, dtype: StorageType) -> None:
    tokenizer = load_tokenizer(checkpoint.path, "gguf", checkpoint.metadata)
    config = checkpoint.config
    if tokenizer is not None:
        ends = dict.fromkeys((*config.eos_token_ids, *sorted(tokenizer.eos_token_ids)))
        config = replace(config, eos_token_ids=tuple(ends))
    data, generation = config_json(config, dtype, str(checkpoint.path))
    _write_json(folder / "config.json", data)
    _write_json(folder / "generation_config.json", generation)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(
            tokenizer_json(tokenizer, checkpoint.metadata, str(checkpoint.path)), encoding="utf-8"
        )
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, config))


def config_json(config: ModelConfig, dtype: StorageType, where: str) -> tuple[Json, Json]:
    """(config.json, generation_config.json) of a model. `where` names its file in messages.

    What is written is read back, and must give the same ModelConfig: UnsupportedModelError names what would be lost.
    """
    windows = {group.window for group in config.kv_groups}
    # Mistral has no architecture of its own in GGUF; the Hub's Llama has no window.
    name = "mistral" if config.family == "llama" and windows != {None} else config.family
    if name not in FAMILIES:
        raise UnsupportedModelError(f"{where}: models of family {name} cannot be converted; {', '.join(FAMILIES)} can")
    config = replace(config, family=name, kv_groups=_with_hub_rope(config, where))
    family = FAMILIES[name]
    ends = list(config.eos_token_ids)
    tokens: Json = {"bos_token_id": config.bos_token_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    data: Json = {
        "architectures": [family.architecture],
        "model_type": name,
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": next(key for key, value in ACTIVATIONS.items() if value == config.activation),
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": _rope_json(config.kv_groups[0].rope),
        "tie_word_embeddings": config.tied_head,
        **tokens,
    }
    if family.attention_bias == "key":
        data["attention_bias"] = config.qkv_bias
    if family.mlp_bias:
        data["mlp_bias"] = config.mlp_bias
    window = next((group.window for group in config.kv_groups if group.window is not None), None)
    if family.window == "all":
        data["sliding_window"] = window
    elif family.window == "switched":
        kinds = ["full_attention" if group.window is None else "sliding_attention" for group in config.kv_groups]
        data["sliding_window"] = window
        data["use_sliding_window"] = window is not None
        data["layer_types"] = [kinds[config.group_of_layer(layer)] for layer in range(config.num_layers)]
    read = hub_config(data, tokens, where)
    lost = [
        field.name
        for field in fields(ModelConfig)
        if field.name != "stored_dtype" and getattr(read, field.name) != getattr(config, field.name)
    ]
    if lost:
        raise UnsupportedModelError(f"{where}: cannot be converted, config.json of {name} has no {', '.join(lost)}")
    return data, tokens


def _rope_json(rope: RopeConfig) -> Json:
    data: Json = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.scaling in ("linear", "llama3"):
        data["factor"] = rope.factor
    if rope.scaling == "llama3":
        data["low_freq_factor"] = rope.low_freq_factor
        data["high_freq_factor"] = rope.high_freq_factor
        data["original_max_position_embeddings"] = rope.original_max_position
    return data


def _with_hub_rope(config: ModelConfig, where: str) -> tuple[Any, ...]:
    """The KV groups, with a GGUF's frequency divisors given back the parameters of Llama 3 that they came from.

    llama.cpp's converter bakes the scaling into a tensor. All of Meta's Llama 3.x share all parameters but the factor,
    which is the largest divisor; the divisors that follow from them must be those of the file.
    """
    groups = []
    for group in config.kv_groups:
        rope = group.rope
        if rope.scaling == "divisors":
            found = RopeConfig(rope.theta, rope.rotary_dim, "llama3", max(rope.divisors), 1.0, 4.0, 8192)
            plain = inverse_frequencies(RopeConfig(rope.theta, rope.rotary_dim))
            if not np.allclose(plain / inverse_frequencies(found), rope.divisors, rtol=1e-6, atol=0):
                raise UnsupportedModelError(f"{where}: cannot be converted: its rope_freqs are not those of Llama 3")
            rope = found
        groups.append(replace(group, rope=rope))
    return tuple(groups)


def _tokenizer_config(tokenizer: Tokenizer, config: ModelConfig) -> Json:
    """The names of special tokens, the frame, and the chat template."""
    before, behind = frame(tokenizer)
    data: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
        "add_bos_token": before is not None,
        "add_eos_token": behind is not None,
    }
    if tokenizer.chat_template is not None:
        data["chat_template"] = tokenizer.chat_template
    return data
