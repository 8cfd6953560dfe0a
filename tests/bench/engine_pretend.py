"""A runtime that takes no time, for tests of what runs runtimes. Its variant says how it behaves."""

import os
from pathlib import Path
from typing import Any


def prepare(weights: str, folder: str, variant: str) -> str:
    if variant == "unpreparable":
        raise ValueError("this file\ncannot be made")
    made = Path(folder) / f"made-for-{variant}"
    made.write_text(weights)
    return str(made)


class Engine:
    version = "pretend 1"

    def __init__(self, weights: str, threads: int, variant: str, text: bool) -> None:
        if variant == "refuses":
            raise RuntimeError("no such model")
        print("a library that writes on stdout")
        self.variant, self.weights, self.text = variant, weights, text

    def first(self, prompt: Any) -> None:
        assert isinstance(prompt, str) == self.text

    def run(self, prompts: list[list[int]], new: int, samples: int) -> int:
        if self.variant == "dies":
            os.write(2, b"the last words\n")
            os._exit(7)
        if self.variant == "raises" and len(prompts) > 1:
            raise MemoryError("too many streams")
        with open(os.environ["PRETEND_LOG"], "a") as log:
            log.write(f"{self.variant or 'ours'} {len(prompts)}x{len(prompts[0])}+{new} of {samples}\n")
        return len(prompts) * new * samples - (self.variant == "short")
