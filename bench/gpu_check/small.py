"""A small model's run that launches every kernel a model can need: what compute-sanitizer looks at."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cupaged.bench.gpu_check.models import write_model
from cupaged.bench.gpu_check.report import Row
from cupaged.bench.gpu_check.sizes import Heads, RandomModel, Sizes
from cupaged.bench.gpu_check.steps import prompts
from cupaged.llm import LLM
from cupaged.sampling import SamplingParams

MODEL = RandomModel(2, 128, 192, Heads(8, 2, 64), 320, 1024)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"dtype": "float16"},  # tensor cores: four query heads a KV head
    {"dtype": "bfloat16", "deterministic": True},
    {"dtype": "float32", "kv_dtype": "float32", "graphs": False},
    {"quantize": "q8_0", "kv_dtype": "float32"},
    {"quantize": "q4_0"},
)
# Several samples of a prompt copy blocks on write; few blocks and a host pool make blocks move.
_PROMPT, _LONG = 100, 520  # the last one is longer than the pool, and has two parts: blocks are read on the host
_MEMORY: dict[str, Any] = {"kv_memory": "320KiB", "swap_memory": "4MiB"}


def small_rows(sizes: Sizes) -> Iterator[Row]:
    """Tokens that a small model gave, by how its weights are kept. `sizes` does not matter."""
    params = [
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
        SamplingParams(n=3, max_tokens=12, temperature=0.8, top_k=20, top_p=0.9, seed=1, ignore_eos=True),
        SamplingParams(n=2, beam_width=3, max_tokens=8, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, min_p=0.01, logprobs=2, ignore_eos=True),
    ]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = write_model(Path(folder) / "model", MODEL)
        for setting in SETTINGS:
            with LLM(path, device="cuda", tokenizer=False, **_MEMORY, **setting) as llm:
                asked = [*prompts(len(params) - 1, _PROMPT, MODEL.vocab), *prompts(1, _LONG, MODEL.vocab)]
                found = llm.generate(asked, params)
                llm.engine.check_idle()
                stats = llm.stats()
            tokens = sum(len(output.token_ids) for each in found for output in each.outputs)
            label = " ".join(f"{name}={value}" for name, value in setting.items())
            yield Row(f"tokens, {label}", tokens, "")
            yield Row(f"blocks to the host, {label}", stats.swapped_out, "")
            yield Row(f"blocks read there, {label}", stats.read_in_place, "")
