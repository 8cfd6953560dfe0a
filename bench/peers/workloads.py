"""What every runtime is asked to do. Rates are tokens a second of wall time, of one call that does all of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

VOCABULARY = range(300, 30_000)  # ids of whole words in every vocabulary of 32,000 and more; none is a special token
SEED = 20_240


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` prompts of `prompt` random tokens, each continued by `new` tokens in `samples` ways.

    counted: what the rate counts, "new" tokens (of all streams and samples) or "prompt" tokens.
    """

    name: str
    title: str
    streams: int
    prompt: int
    new: int
    samples: int = 1
    counted: str = "new"

    @property
    def tokens(self) -> int:
        return self.streams * (self.prompt if self.counted == "prompt" else self.new * self.samples)

    def job(self, round_number: int) -> dict[str, Any]:
        """The message for a worker. Each round has prompts of its own, so that nothing cached of earlier ones helps."""
        rng = random.Random(f"{SEED} {self.name} {round_number}")
        prompts = [rng.choices(VOCABULARY, k=self.prompt) for _ in range(self.streams)]
        return {"prompts": prompts, "new": self.new, "samples": self.samples}


# Decoding starts from 8 tokens, so that nearly all of its time is decoding. Prefill ends with the first new token.
WORKLOADS = (
    Workload("decode", "decode, 1 stream", 1, 8, 128),
    Workload("streams4", "4 streams of 64+64", 4, 64, 64),
    Workload("streams16", "16 streams of 64+64", 16, 64, 64),
    Workload("streams32", "32 streams of 64+64", 32, 64, 64),
    Workload("prefill512", "prefill 512", 1, 512, 1, counted="prompt"),
    Workload("prefill2048", "prefill 2,048", 1, 2048, 1, counted="prompt"),
    Workload("samples8", "8 samples of 64 over 1,024 shared tokens", 1, 1024, 64, 8),
)

# Measured on a process of its own, from its start.
FIRST_TEXT, FIRST_IDS, MEMORY = "first_text", "first_ids", "memory"
FIRST_PROMPTS: dict[str, str | list[int]] = {
    FIRST_TEXT: "The capital of France is",
    FIRST_IDS: [504, 3575, 282, 4649, 314],  # the same, as SmolLM2 counts
}
MEMORY_WORKLOAD = Workload(MEMORY, "peak memory at 2,048 tokens", 1, 2032, 16)


@dataclass(frozen=True, slots=True)
class StartUp:
    """A figure of a fresh process; less is better. limit: the project's own goal for it, in `unit`."""

    name: str
    title: str
    unit: str
    limit: float


STARTUPS = (
    StartUp(FIRST_TEXT, "first token from process start, text", "s", 0.7),
    StartUp(FIRST_IDS, "first token from process start, ids", "s", 0.5),
    StartUp(MEMORY, "peak memory at 2,048 tokens", "MiB", 300.0),
)
