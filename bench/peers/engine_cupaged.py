"""cupaged itself, measured like the others. Variants: "" (weights as stored) and "f32"."""

from __future__ import annotations

import importlib
from typing import Any


class Engine:
    def __init__(self, weights: str, threads: int, variant: str, text: bool) -> None:
        cupaged = importlib.import_module("cupaged")
        self.version = str(cupaged.__version__)
        dtype = "float32" if variant == "f32" else "auto"
        # 32 streams of 128 tokens and eight of 1,088 fit, as do 2,048; and not much more, so that blocks are used again
        # after the first rounds, as on a server that has run for a while, and as the peers' K/V memory is.
        self._llm = cupaged.LLM(
            weights, threads=threads, dtype=dtype, kv_dtype="float32" if variant == "f32" else "auto",
            kv_memory="128MiB" if variant != "f32" else "256MiB", device="cpu",
        )  # fmt: skip
        self._params = cupaged.SamplingParams

    def first(self, prompt: Any) -> None:
        next(iter(self._llm.stream(prompt, self._params(max_tokens=1, temperature=0, ignore_eos=True))))

    def run(self, prompts: list[list[int]], new: int, samples: int) -> int:
        if samples > 1:
            params = self._params(max_tokens=new, temperature=1.0, seed=1, ignore_eos=True, n=samples)
        else:
            params = self._params(max_tokens=new, temperature=0, ignore_eos=True)
        outputs = self._llm.generate(prompts, params)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)
