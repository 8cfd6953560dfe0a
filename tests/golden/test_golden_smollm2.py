"""SmolLM2-135M-Instruct against Hugging Face's greedy continuations, from its GGUF file and from a Hub folder of it.

The recorded run used the GGUF's weights rounded to float16, which is what the Hub folder holds; the GGUF itself is run
on the unrounded ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA, smollm2_gguf
from hub_folder import write_hub_folder
from recording import Job, Run, run

from cupaged import LLM, SamplingParams

CASES = json.loads((DATA / "smollm2-135m.json").read_text())["cases"]
CLOSE = 0.02  # a step may fall either way if the two best logits are closer than this
# Largest difference of the recorded first-step logits, which have four decimals. Measured: hub 6e-5, gguf 0.012.
FIRST_STEP = {"gguf": 0.03, "hub": 3e-4}


@pytest.fixture(scope="module", params=["gguf", "hub"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LLM]]:
    path: Path = smollm2_gguf()
    if request.param == "hub":
        path = write_hub_folder(path, tmp_path_factory.mktemp("smollm2"))
    with LLM(path, device="cpu", dtype="float32", kv_memory="64MiB") as llm:
        yield request.param, llm


@pytest.fixture(scope="module")
def continued(model: tuple[str, LLM]) -> Run:
    """All cases at once, up to 64 tokens each."""
    params = SamplingParams(max_tokens=64, temperature=0)
    return run(model[1].engine, {str(i): Job(case["prompt_ids"], params) for i, case in enumerate(CASES)})


def test_prompt_ids_are_those_of_the_tokenizer(model: tuple[str, LLM]) -> None:
    _, llm = model
    assert llm.tokenizer is not None
    for case in CASES:
        if case["kind"] == "chat":
            text = llm.render_chat([{"role": "user", "content": case["prompt"]}])
            ids = llm.tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = llm.tokenizer.encode(case["prompt"])
        assert ids == case["prompt_ids"], case["prompt"]


def test_first_step_logits(model: tuple[str, LLM], continued: Run) -> None:
    kind, _ = model
    errors = []
    for index, case in enumerate(CASES):
        first: dict[str, Any] = case["first_step"]
        row = continued.logits[str(index), len(case["prompt_ids"])].astype(np.float64)
        errors.append(float(np.abs(row[first["ids"]] - first["logits"]).max()))
        errors.append(abs(math.log(np.exp(row - row.max()).sum()) + row.max() - first["logsumexp"]))
    print(f"{kind}: largest error of first-step logits {max(errors):.1e}")
    assert max(errors) < FIRST_STEP[kind]


def test_greedy_tokens_are_those_of_transformers(model: tuple[str, LLM], continued: Run) -> None:
    compared = 0
    for index, case in enumerate(CASES):
        ours, theirs = continued.outputs[str(index)].token_ids, case["greedy_ids"]
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if same is None:
            assert len(ours) == len(theirs), case["prompt"]
            assert continued.outputs[str(index)].finish_reason == ("stop" if len(theirs) < 64 else "length")
        else:
            assert case["gaps"][same] < CLOSE, (case["prompt"], same)
        compared += len(theirs) if same is None else same
    assert compared > 300  # of 468: the rule must not have excused nearly everything


def test_text_is_that_of_the_recorded_tokens(model: tuple[str, LLM], continued: Run) -> None:
    """Where the tokens are the recorded ones, so is the text, less the end-of-text token, which is not shown."""
    same = [i for i, case in enumerate(CASES) if continued.outputs[str(i)].token_ids == case["greedy_ids"]]
    assert len(same) >= 4
    for index in same:
        assert continued.outputs[str(index)].text == CASES[index]["text"].removesuffix("<|im_end|>")
