"""A model shaped like SmolLM2 with random weights (a tiny one where the GPU is pretended): what changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_device
import pytest

from cupaged import LLM, SamplingParams
from cupaged.bench.gpu_check.models import write_model
from cupaged.bench.gpu_check.sizes import SMOLLM2, TINY
from cupaged.bench.gpu_check.steps import prompts

MODEL = SMOLLM2 if gpu_device.is_real() else TINY.small
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True, logprobs=2)
PROMPTS = prompts(6, 40, MODEL.vocab)
CLOSE = 1e-3  # two logits nearer than this may change places between two implementations


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("random") / "model", MODEL)


def told(llm: LLM, params: SamplingParams = PARAMS, asked: Any = PROMPTS) -> list[Any]:
    """Tokens and their log-probabilities, bit for bit."""
    outputs = [output.outputs[0] for output in llm.generate(asked, params)]
    llm.engine.check_idle()
    return [(output.token_ids, output.logprobs) for output in outputs]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    """Bit for bit on a GPU; NumPy's products, which the pretended one has, depend on the number of rows."""
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert a == (b if gpu_device.is_real() else pytest.approx(b, abs=1e-3))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_graphs_change_nothing(path: Path, dtype: str, deterministic: bool) -> None:
    found = []
    for graphs in (True, False):
        options = {"dtype": dtype, "deterministic": deterministic, "graphs": graphs, "tokenizer": False}
        with gpu_device.on_gpu(path, **options) as llm:
            found.append((told(llm), told(llm, DRAWN)))
            used: Any = llm.engine.device
            assert used.graphs.failure is None and (used.graphs.launched > 10) is graphs
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_alone_or_in_company_and_in_chunks_the_bits_are_the_same_if_deterministic(path: Path, dtype: str) -> None:
    options = {"dtype": dtype, "deterministic": True, "tokenizer": False, "prefix_cache": False}
    with gpu_device.on_gpu(path, **options) as llm:
        together = told(llm)
        assert_same([told(llm, asked=[prompt])[0] for prompt in PROMPTS], together)
    with gpu_device.on_gpu(path, seed=1, max_batch_tokens=16, **options) as llm:
        assert_same(told(llm), together)


def test_by_default_the_same_batch_gives_the_same_bits(path: Path) -> None:
    with gpu_device.on_gpu(path, dtype="float16", tokenizer=False, prefix_cache=False) as llm:
        assert told(llm) == told(llm)


@pytest.mark.parametrize("deterministic", [True, False])
def test_tokens_are_those_of_the_cpu(path: Path, deterministic: bool) -> None:
    """Greedily, until a step whose two best are too close to call."""
    with gpu_device.on_gpu(path, deterministic=deterministic, tokenizer=False) as llm:
        ours = told(llm)
    with LLM(path, device="cpu", dtype="float32", tokenizer=False) as llm:
        theirs = told(llm)
    compared = 0
    for (mine, _), (cpu, logprobs) in zip(ours, theirs, strict=True):
        for step, (a, b) in enumerate(zip(mine, cpu, strict=True)):
            if a != b:
                first, second = sorted(logprobs[step].values())[-2:][::-1]
                assert first - second < CLOSE, (step, a, b)
                break
            compared += 1
    assert compared > 30
