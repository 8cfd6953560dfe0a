"""SmolLM2-135M-Instruct against Hugging Face's greedy continuations, from its GGUF file and from a Hub folder of it.

The recorded run used the GGUF's weights rounded to float16, which is what the Hub folder holds; the GGUF itself is run
on the unrounded ones.
"""

from __future__ import annotations

import json
import math
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


@pytest.mark.parametrize("kind", FIRST_STEP)
def test_the_real_model_continues_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """One test, so that the model is loaded once: prompt ids, first-step logits, greedy tokens, text."""
    path = smollm2_gguf()
    if kind == "hub":
        path = write_hub_folder(path, tmp_path / "smollm2")
    with LLM(path, device="cpu", dtype="float32", kv_memory="64MiB") as llm:
        assert [prompt_ids(llm, case) for case in CASES] == [case["prompt_ids"] for case in CASES]
        params = SamplingParams(max_tokens=64, temperature=0)
        jobs = {str(i): Job(case["prompt_ids"], params) for i, case in enumerate(CASES)}
        result = run(llm.engine, jobs)
    error = first_step_error(result)
    print(f"{kind}: largest error of first-step logits {error:.1e}")
    assert error < FIRST_STEP[kind]
    check_greedy(result)


def prompt_ids(llm: LLM, case: dict[str, Any]) -> list[int]:
    assert llm.tokenizer is not None
    if case["kind"] != "chat":
        return llm.tokenizer.encode(case["prompt"])
    text = llm.render_chat([{"role": "user", "content": case["prompt"]}])
    return llm.tokenizer.encode(text, add_special_tokens=False)


def first_step_error(result: Run) -> float:
    errors = []
    for index, case in enumerate(CASES):
        first: dict[str, Any] = case["first_step"]
        row = result.logits[str(index), len(case["prompt_ids"])].astype(np.float64)
        errors.append(float(np.abs(row[first["ids"]] - first["logits"]).max()))
        errors.append(abs(math.log(np.exp(row - row.max()).sum()) + row.max() - first["logsumexp"]))
    return max(errors)


def check_greedy(result: Run) -> None:
    """Greedy tokens equal, or different only from a step on that was close; where they are equal, so is the text."""
    compared = equal = 0
    for index, case in enumerate(CASES):
        output, theirs = result.outputs[str(index)], case["greedy_ids"]
        pairs = zip(output.token_ids, theirs, strict=False)
        first = next((i for i, (ours, recorded) in enumerate(pairs) if ours != recorded), None)
        compared += len(theirs) if first is None else first
        if first is not None:
            assert case["gaps"][first] < CLOSE, (case["prompt"], first)
            continue
        equal += 1
        assert output.token_ids == theirs
        assert output.finish_reason == ("stop" if len(theirs) < 64 else "length")
        assert output.text == case["text"].removesuffix("<|im_end|>")  # which ends a text and is not shown
    assert (compared > 300, equal >= 4) == (True, True)  # of 468 tokens in 8 cases: nothing was excused wholesale
