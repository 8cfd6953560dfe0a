"""Paging is invisible: a request's logits are the same bits alone and in any company, whatever the memory manager does.

The baseline runs each request alone on an engine with the default options; every other run must repeat its logits bit
for bit, though it differs in company, chunks, block size, threads, layout, placement or preemption.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA, smollm2_gguf, with_config
from engine_support import block_bytes, greedy, mix, poison, prompt, scatter, tiny, use_layout
from recording import Job, Run, alone, assert_same_bits, run

from cupaged import LLM

# Three models that differ in all that attention and the cache can differ in.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral-window": {"kv_dtype": "float16", "dtype": "auto"},
    "qwen3": {"dtype": "bfloat16"},
}
COMPANY: dict[str, dict[str, Any]] = {
    "as it is": {},
    "blocks of 8": {"block_size": 8},
    "blocks of 32": {"block_size": 32},
    "blocks of 1": {"block_size": 1},
    "one token a step": {"max_batch_tokens": 1},
    "chunks of 5": {"max_batch_tokens": 5},
    "chunks of 17, blocks of 8": {"max_batch_tokens": 17, "block_size": 8},
    "chunks of 64, 3 sequences": {"max_batch_tokens": 64, "max_sequences": 3},
    "2 threads": {"threads": 2},
    "3 threads, chunks of 33": {"threads": 3, "max_batch_tokens": 33},
    "layer-major": {"layout": "layer_major"},
    "layer-major, blocks of 32, 2 threads": {"layout": "layer_major", "block_size": 32, "threads": 2},
    "preempted": {"blocks": 12},
    "preempted, blocks of 8, chunks of 20": {"blocks": 24, "block_size": 8, "max_batch_tokens": 20},
}


def engine_for(folder: str | Path, *, layout: str | None = None, blocks: int | None = None, **options: Any) -> LLM:
    """An LLM with `blocks` KV blocks in `layout`, scattered and poisoned."""
    if blocks is not None:
        with tiny(folder, **options) as probe:
            options["kv_memory"] = blocks * block_bytes(probe)
    llm = tiny(folder, **options)
    if layout is not None:
        use_layout(llm.engine, layout)
    scatter(llm.engine, seed=5)
    poison(llm.engine)
    return llm


def jobs_of(seed: int) -> dict[str, Job]:
    """A random mix, and four short prompts that grow long: what a small pool lets in and cannot keep."""
    growing = {f"growing{n}": Job(prompt(5 + n, n), greedy(60), arrives=n) for n in range(4)}
    return growing | mix(seed)


@lru_cache
def baseline(folder: str, seed: int) -> tuple[dict[str, Job], Run]:
    jobs = jobs_of(seed)
    with tiny(folder, **MODELS[folder]) as llm:
        return jobs, alone(llm.engine, jobs)


@pytest.mark.parametrize("company", COMPANY)
@pytest.mark.parametrize("folder", MODELS)
def test_together_equals_alone_bit_for_bit(folder: str, company: str) -> None:
    options = COMPANY[company]
    jobs, whole = baseline(folder, seed=1)
    with engine_for(folder, **{**MODELS[folder], **options}) as llm:
        assert_same_bits(run(llm.engine, jobs), whole)
        if "blocks" in options and folder != "mistral-window":  # which needs so few blocks that nobody is stopped
            assert llm.engine.scheduler.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 142))
@pytest.mark.parametrize("folder", MODELS)
def test_together_equals_alone_in_a_random_company(folder: str, seed: int) -> None:
    names = list(COMPANY)
    options = COMPANY[names[seed % len(names)]]
    jobs = jobs_of(seed)
    with tiny(folder, **MODELS[folder]) as llm:
        whole = alone(llm.engine, jobs)
    with engine_for(folder, **{**MODELS[folder], **options}) as llm:
        assert_same_bits(run(llm.engine, jobs), whole)


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with 2048 positions: contexts of several parts (512 tokens), rotary tables that grow."""
    return with_config(DATA / "llama", tmp_path_factory.mktemp("long") / "llama", max_position_embeddings=2048)


def test_contexts_of_several_parts_too(long_llama: Path) -> None:
    lengths = (509, 1100, 63, 1, 512, 1030)
    jobs = {f"job{n}": Job(prompt(n, seed=n), greedy(6), arrives=i) for i, n in enumerate(lengths)}
    with tiny(long_llama) as llm:
        whole = alone(llm.engine, jobs)
    for options in (
        {"max_batch_tokens": 100, "block_size": 32, "threads": 2},
        {"max_batch_tokens": 2048, "threads": 3},
    ):
        with engine_for(long_llama, **options) as llm:
            assert_same_bits(run(llm.engine, jobs), whole)


@pytest.mark.parametrize(("kv_dtype", "lengths"), [("float32", (5, 130, 40)), ("auto", (90, 12, 33, 17))])
def test_the_real_model_alone_together_and_preempted(kv_dtype: str, lengths: tuple[int, ...]) -> None:
    jobs = {f"job{i}": Job(prompt(n, i, 49152), greedy(4), arrives=i) for i, n in enumerate(lengths)}
    with LLM(smollm2_gguf(), device="cpu", kv_dtype=kv_dtype, kv_memory="64MiB") as llm:
        whole = alone(llm.engine, jobs)
        assert_same_bits(run(llm.engine, jobs), whole)
        blocks, bytes_of_8 = -(-max(lengths) // 8) + 3, block_bytes(llm) // 2
    options: dict[str, Any] = {"device": "cpu", "kv_dtype": kv_dtype, "threads": 1}
    with LLM(smollm2_gguf(), **options, block_size=8, max_batch_tokens=48, kv_memory=blocks * bytes_of_8) as llm:
        use_layout(llm.engine, "layer_major")
        scatter(llm.engine, seed=5)
        assert_same_bits(run(llm.engine, jobs), whole)
