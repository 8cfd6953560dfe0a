"""Beam search on the golden checkpoints against Hugging Face's generate(): sequences, order and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA, with_config
from engine_support import tiny

from cupaged import SamplingParams

CASES = json.loads((DATA / "beams.json").read_text())["cases"]


def name_of(case: dict[str, Any]) -> str:
    options = f"{case['num_beams']}-{case['length_penalty']:g}-{case['early_stopping']}"
    return f"{case['model']}-{len(case['prompt_ids'])}-{options}".lower()


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_beams_are_those_of_hugging_face(case: dict[str, Any], tmp_path: Path) -> None:
    model = with_config(DATA / case["model"], tmp_path / "model", eos_token_id=case["eos_ids"])
    params = SamplingParams(
        max_tokens=case["max_new_tokens"], beam_width=case["num_beams"], n=case["num_beams"],
        length_penalty=case["length_penalty"], early_stopping=case["early_stopping"],
    )  # fmt: skip
    with tiny(model) as llm:
        (output,) = llm.generate([case["prompt_ids"]], params)
        llm.engine.check_idle()
    assert [completion.token_ids for completion in output.outputs] == [line["ids"] for line in case["sequences"]]
    for completion, line in zip(output.outputs, case["sequences"], strict=True):
        assert completion.score == pytest.approx(line["score"], abs=1e-3)
        ended = completion.token_ids[-1] in (case["eos_ids"] or ())
        assert completion.finish_reason == ("stop" if ended else "length")
