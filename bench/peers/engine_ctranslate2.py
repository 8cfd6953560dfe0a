"""CTranslate2, from a folder in its own format, which `prepare` makes of a Hub folder by its own converter.

Variants: "" (int8 weights and products) and "f32". It has no tokenizer of its own: tokenizer.json of the Hub folder is
read with the library that its documentation uses. Several samples of one prompt: see `run`.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any


def _kind(variant: str) -> str:
    return "float32" if variant == "f32" else "int8"


def prepare(weights: str, folder: str, variant: str) -> str:
    """Needs transformers and torch beside ctranslate2."""
    target = Path(folder) / f"ctranslate2-{_kind(variant)}"
    if not (target / "tokenizer.json").is_file():
        converters = importlib.import_module("ctranslate2.converters")
        converters.TransformersConverter(weights).convert(str(target), quantization=_kind(variant), force=True)
        shutil.copy(Path(weights) / "tokenizer.json", target / "tokenizer.json")
    return str(target)


class Engine:
    def __init__(self, weights: str, threads: int, variant: str, text: bool) -> None:
        ctranslate2 = importlib.import_module("ctranslate2")
        self.version = str(ctranslate2.__version__)
        self._generator = ctranslate2.Generator(
            weights, "cpu", compute_type=_kind(variant), inter_threads=1, intra_threads=threads
        )
        self._tokens = json.loads((Path(weights) / "vocabulary.json").read_text(encoding="utf-8"))
        self._tokenizer = None
        if text:
            tokenizers = importlib.import_module("tokenizers")
            self._tokenizer = tokenizers.Tokenizer.from_file(str(Path(weights) / "tokenizer.json"))

    def _generate(self, prompts: list[list[int]], new: int, **options: Any) -> int:
        results = self._generator.generate_batch(
            [[self._tokens[token] for token in prompt] for prompt in prompts],
            max_length=new, min_length=new, include_prompt_in_result=False, **options,
        )  # fmt: skip
        return sum(len(ids) for result in results for ids in result.sequences_ids)

    def first(self, prompt: Any) -> None:
        ids = self._tokenizer.encode(prompt).ids if isinstance(prompt, str) and self._tokenizer else prompt
        self._generate([ids], 1, sampling_topk=1)

    def run(self, prompts: list[list[int]], new: int, samples: int) -> int:
        if samples == 1:
            return self._generate(prompts, new, sampling_topk=1)
        # The prompt as a "static prompt" is computed once and its state copied to all rows; with `num_hypotheses` the
        # same took 2.7 times as long.
        (prompt,) = prompts
        static = [self._tokens[token] for token in prompt[:-1]]
        return self._generate([prompt[-1:]] * samples, new, sampling_topk=0, static_prompt=static)
