"""Opening a model: a Hub folder or a GGUF file as configuration plus weights under canonical names.

Opening is strict and cheap: headers are read, every expected tensor is matched to one of the file's and its shape
compared, and all that is wrong is said in one error. No weight is read before someone asks for its rows.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from cupaged.errors import ModelFileError
from cupaged.kernels.interface import WeightSource
from cupaged.model.config import ModelConfig
from cupaged.model.config_values import NOT_THERE, absence, quote, read_json
from cupaged.model.families import GGUF_NAMES, HUB_NAMES, NameTable
from cupaged.model.gguf_file import GGUFFile
from cupaged.model.gguf_model import gguf_config, gguf_weights, in_hub_order
from cupaged.model.hub_model import hub_config
from cupaged.model.quants import format_of
from cupaged.model.safetensors_file import open_folder
from cupaged.model.weights import StoredWeight, release

_COMPARED_ROWS = 4096
_MAX_PROBLEMS = 200  # far above what a wrong model gives; a hostile file may hold a million strangers


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model. `tensors` has exactly the names of `expected_parameters(config)`.

    metadata: of a GGUF its metadata; of a Hub folder the parsed JSON objects by file name (config.json, and
    generation_config.json and tokenizer_config.json where present). weight_bytes: as stored, used tensors only.
    """

    path: Path
    kind: Literal["hub", "gguf"]
    config: ModelConfig
    tensors: Mapping[str, WeightSource]
    metadata: Mapping[str, Any]
    weight_bytes: int


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder in the Hub's layout, or a .gguf file.

    ModelFileError if something is missing, damaged or does not fit its configuration; UnsupportedModelError if it is
    sound but not implemented. Nothing is written, and nothing of the folder is imported.
    """
    path = Path(path)
    reason = absence(path)
    if reason:
        raise ModelFileError(f"{path}: {reason}")
    if path.is_dir():
        return _open_hub(path)
    if path.suffix.lower() in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise ModelFileError(f"{path}: pickles are never loaded, because loading one can run code")
    if path.suffix.lower() == ".safetensors":
        raise ModelFileError(f"{path}: give the folder that holds it and its config.json, {path.parent}")
    return _open_gguf(path)


def expected_parameters(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name to shape of every weight of a model with this configuration. Matrices are [outputs, inputs]."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        matrices = {
            "q": (query, hidden, config.qkv_bias),
            "k": (kv, hidden, config.qkv_bias),
            "v": (kv, hidden, config.qkv_bias),
            "o": (hidden, query, config.output_bias),
            "gate": (mlp, hidden, config.mlp_bias),
            "up": (mlp, hidden, config.mlp_bias),
            "down": (hidden, mlp, config.mlp_bias),
        }
        prefix = f"layers.{layer}."
        shapes[f"{prefix}attention_norm.weight"] = (hidden,)
        shapes[f"{prefix}mlp_norm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}k_norm.weight"] = (config.head_dim,)
        for stem, (rows, columns, bias) in matrices.items():
            shapes[f"{prefix}{stem}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{stem}.bias"] = (rows,)
    shapes["final_norm.weight"] = (hidden,)
    if not config.tied_head:
        shapes["head.weight"] = (config.vocab_size, hidden)
    return shapes


def _open_hub(folder: Path) -> Checkpoint:
    metadata: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = folder / name
        reason = absence(path)
        if reason is None:
            metadata[name] = read_json(path)
        elif reason != NOT_THERE:
            raise ModelFileError(f"{path}: {reason}")
    if "config.json" not in metadata:
        hint = next((f"; give the path of {quote(entry.name)} itself" for entry in sorted(folder.glob("*.gguf"))), "")
        raise ModelFileError(f"{folder}: no config.json there, so it is no model folder{hint}")
    config = hub_config(metadata["config.json"], metadata.get("generation_config.json"), str(folder / "config.json"))
    files = open_folder(folder)
    stored = {
        name: StoredWeight(
            name, file.tensors[name].shape, file.tensors[name].dtype, file.raw(name), partial(file.drop, name)
        )
        for name, file in files.items()
    }
    config = _settle_head(config, stored, folder)
    config, tensors, weight_bytes = _match(folder, config, HUB_NAMES, stored, lambda weight: weight)
    return Checkpoint(folder, "hub", config, tensors, MappingProxyType(metadata), weight_bytes)


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    config = gguf_config(file)
    stored, permuted = gguf_weights(file, config)
    config, tensors, weight_bytes = _match(
        path, config, GGUF_NAMES, stored, lambda weight: in_hub_order(weight, permuted)
    )
    return Checkpoint(path, "gguf", config, tensors, file.metadata, weight_bytes)


def _settle_head(config: ModelConfig, stored: dict[str, StoredWeight], folder: Path) -> ModelConfig:
    """A tied head that is stored all the same: dropped if it equals the embeddings, else used, with a warning.

    Never dropped silently: a fine-tuned head under a stale `tie_word_embeddings` would give other logits.
    """
    name = HUB_NAMES.file_name("head.weight")
    head, embed = stored.get(name), stored.get(HUB_NAMES.file_name("embed.weight"))
    if not config.tied_head or head is None:
        return config
    same = embed is not None and _same(head, embed)
    for weight in (head, embed):
        if weight is not None:
            release(weight)  # all of both may have been looked at
    if same:
        del stored[name]
        return config
    warnings.warn(
        f"{folder}: tie_word_embeddings is true, but {name} is stored and differs from the embeddings; using it",
        stacklevel=2,
    )
    return replace(config, tied_head=False)


def _same(one: StoredWeight, other: StoredWeight) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    rows = one.raw.shape[0]
    return all(
        np.array_equal(one.raw[first : first + _COMPARED_ROWS], other.raw[first : first + _COMPARED_ROWS])
        for first in range(0, rows, _COMPARED_ROWS)
    )


def _match(
    path: Path,
    config: ModelConfig,
    names: NameTable,
    stored: Mapping[str, StoredWeight],
    arrange: Callable[[StoredWeight], WeightSource],
) -> tuple[ModelConfig, Mapping[str, WeightSource], int]:
    """Match the file's tensors to the expected ones; (config with its stored_dtype, sources, bytes as stored)."""
    if config.num_layers > len(stored):
        raise ModelFileError(f"{path}: {config.num_layers} layers configured, but only {len(stored)} tensors stored")
    expected = expected_parameters(config)
    problems: list[str] = []
    used: dict[str, StoredWeight] = {}
    for canonical, shape in expected.items():
        name = names.file_name(canonical)
        weight = stored.get(name)
        if weight is None:
            hint = " (and the head is not tied)" if canonical == "head.weight" else ""
            problems.append(f"{name} is missing, expected {list(shape)}{hint}")
        elif weight.shape != shape:
            problems.append(f"{name} has shape {list(weight.shape)}, expected {list(shape)}")
        else:
            used[canonical] = weight
    claimed = {names.file_name(canonical) for canonical in expected}
    ignored = [re.compile(re.escape(pattern).replace(r"\{i\}", r"\d+")) for pattern in names.ignored]
    for name in stored:
        if name not in claimed and not any(pattern.fullmatch(name) for pattern in ignored):
            problems.append(f"{quote(name)} is stored but not part of {config.family}")
    if problems:
        raise ModelFileError(f"{path}: weights do not fit the configuration: {'; '.join(_grouped(problems))}")
    sizes: Counter[str] = Counter()
    for weight in used.values():
        format_of(weight.dtype, f"{path}: {weight.name}")
        sizes[weight.dtype] += int(np.prod(weight.shape, dtype=np.int64))
    tensors = {canonical: arrange(weight) for canonical, weight in used.items()}
    config = replace(config, stored_dtype=sizes.most_common(1)[0][0])
    return config, MappingProxyType(tensors), sum(weight.nbytes for weight in used.values())


def _grouped(problems: list[str]) -> list[str]:
    """Problems that differ only in the layer become one, with the layers in braces: `layers.{0-29}.x is missing`."""
    layers: dict[tuple[str, str], list[int]] = {}
    for problem in problems:
        found = re.search(r"(?:layers|blk)\.(\d+)", problem)
        if found is None:
            layers[problem, ""] = []
        else:
            key = (problem[: found.start(1)], problem[found.end(1) :])
            layers.setdefault(key, []).append(int(found[1]))
    lines = [
        before if not numbers else f"{before}{numbers[0] if len(numbers) == 1 else _ranges(numbers)}{after}"
        for (before, after), numbers in layers.items()
    ]
    rest = len(lines) - _MAX_PROBLEMS
    return lines if rest <= 0 else [*lines[:_MAX_PROBLEMS], f"and {rest} more"]


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) + "}"
