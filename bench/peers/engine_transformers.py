"""Hugging Face Transformers on CPU torch, float32, from a Hub folder."""

from __future__ import annotations

import importlib
from typing import Any


class Engine:
    def __init__(self, weights: str, threads: int, variant: str, text: bool) -> None:
        self._torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        self.version = f"{transformers.__version__}, torch {self._torch.__version__}"
        self._torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=self._torch.float32)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(weights) if text else None

    def _generate(self, prompts: list[list[int]], new: int, **options: Any) -> Any:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            return self._model.generate(
                ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                pad_token_id=0, **options,
            )  # fmt: skip

    def first(self, prompt: Any) -> None:
        ids = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) and self._tokenizer else prompt
        self._generate([ids], 1, do_sample=False)

    def run(self, prompts: list[list[int]], new: int, samples: int) -> int:
        if samples > 1:
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": samples}
        else:
            options = {"do_sample": False}
        output = self._generate(prompts, new, **options)
        return int(output.shape[0] * (output.shape[1] - len(prompts[0])))
