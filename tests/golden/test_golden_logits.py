"""Logits of real architectures, as Hugging Face computes them: in one prefill, in chunks, and token by token."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from checkpoints import DATA, FOLDERS, Bare, NumpyDevice, expected
from recording import GREEDY

from cupaged import LLM
from cupaged.device import get_device

# Largest difference from Hugging Face's float32 logits, which reach +-7. Measured here: 1e-5 (qwen3) to 2e-5 (qwen2).
TOLERANCE = 1e-4
CHUNKS = (None, 1, 3, 16, 17)
# The same with narrow K/V: what rounding K and V costs. Measured: float16 0.006 (qwen3) to 0.017 (llama-tied-mqa),
# bfloat16, whose unit is 8 times as large, 0.046 (qwen3) to 0.206 (llama-linear-rope).
KV_BOUNDS = {"float16": 0.03, "bfloat16": 0.3}
# And between two implementations, of which a K or V on the edge is rounded to either side: measured 0.0006. Beside
# bfloat16 the CPU rounds query and weights, too: 0.096.
KV_AGREEMENT = {"float16": 0.003, "bfloat16": 0.2}


@lru_cache
def bare(folder: str, kv_dtype: str = "float32", device: str = "cpu") -> Bare:
    return Bare(DATA / folder, get_device("cpu") if device == "cpu" else NumpyDevice(), kv_dtype=kv_dtype)


def largest_error(model: Bare, folder: str, chunk: int | None) -> float:
    table = np.random.default_rng(7).permutation(model.cache.num_blocks).tolist()
    return max(float(np.abs(model.logits(ids, chunk, table) - logits).max()) for ids, logits, _ in expected(folder))


@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_are_those_of_transformers(folder: str) -> None:
    errors = {chunk: largest_error(bare(folder), folder, chunk) for chunk in CHUNKS}
    print(f"{folder}: largest error {max(errors.values()):.1e}")
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("folder", FOLDERS)
def test_chunks_change_no_bit_of_the_logits(folder: str) -> None:
    ids, _, _ = expected(folder)[3]
    whole = bare(folder).logits(ids)
    for chunk in CHUNKS[1:]:
        assert np.array_equal(bare(folder).logits(ids, chunk), whole), chunk


@pytest.mark.parametrize("folder", ["mistral-window", "qwen3"])
@pytest.mark.parametrize("chunk", [None, 17])
def test_reference_operations_give_the_same_logits(folder: str, chunk: int | None) -> None:
    assert largest_error(bare(folder, device="reference"), folder, chunk) < TOLERANCE


@pytest.mark.parametrize("kv_dtype", KV_BOUNDS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_narrow_kv_stays_within_its_bounds(folder: str, kv_dtype: str) -> None:
    error = largest_error(bare(folder, kv_dtype), folder, None)
    print(f"{folder}: largest error with {kv_dtype} K/V {error:.4f}")
    assert KV_BOUNDS[kv_dtype] / 100 < error < KV_BOUNDS[kv_dtype]  # the lower end: the option has an effect


@pytest.mark.parametrize("kv_dtype", KV_BOUNDS)
def test_what_narrow_kv_costs_is_rounding_alone(kv_dtype: str) -> None:
    ids, _, _ = expected("llama")[3]
    ours, theirs = bare("llama", kv_dtype).logits(ids), bare("llama", kv_dtype, "reference").logits(ids)
    assert np.abs(ours - theirs).max() < KV_AGREEMENT[kv_dtype]


@pytest.mark.parametrize("folder", FOLDERS)
def test_greedy_tokens_are_those_of_transformers(folder: str) -> None:
    prompts = [ids for ids, _, _ in expected(folder)]
    with LLM(DATA / folder, device="cpu", dtype="float32", kv_dtype="float32") as llm:
        together = llm.generate(prompts, GREEDY)
        llm.engine.check_idle()
    assert [output.token_ids for output in together] == [greedy for _, _, greedy in expected(folder)]
    assert {output.finish_reason for output in together} == {"length"}
