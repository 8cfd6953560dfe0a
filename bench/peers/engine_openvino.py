"""OpenVINO GenAI: its continuous-batching pipeline, which reads GGUF of the Llama kind by itself.

Several samples of one prompt share the prompt's blocks in its scheduler. K/V precision is its own choice (8 bits on
processors that it deems fit for that). So is the type that it computes in, bfloat16 where the processor multiplies it;
variant "f32" has it compute in float32, as it does on all other processors, with the same weights.
"""

from __future__ import annotations

import importlib
from typing import Any


class Engine:
    def __init__(self, weights: str, threads: int, variant: str, text: bool) -> None:
        self._genai = genai = importlib.import_module("openvino_genai")
        self._openvino = importlib.import_module("openvino")
        self._numpy = importlib.import_module("numpy")
        self.version = str(genai.__version__).split("-")[0]
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GiB, taken as it is needed
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        precision = {"INFERENCE_PRECISION_HINT": "f32"} if variant == "f32" else {}
        self._pipeline = genai.LLMPipeline(
            weights, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads, **precision
        )

    def _config(self, new: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = new
        config.ignore_eos = True
        config.apply_chat_template = False
        return config

    def _inputs(self, prompts: list[list[int]]) -> Any:
        ids = self._numpy.array(prompts, self._numpy.int64)
        tensor = self._openvino.Tensor
        return self._genai.TokenizedInputs(tensor(ids), tensor(self._numpy.ones_like(ids)))

    def first(self, prompt: Any) -> None:
        self._pipeline.generate(prompt if isinstance(prompt, str) else self._inputs([prompt]), self._config(1))

    def run(self, prompts: list[list[int]], new: int, samples: int) -> int:
        config = self._config(new)
        if samples > 1:
            config.do_sample = True
            config.temperature = 1.0
            config.num_return_sequences = samples
        result = self._pipeline.generate(self._inputs(prompts), config)
        return sum(len(tokens) for tokens in result.tokens)
