"""What a long prompt costs sequences that decode, and what they cost it. `cupaged bench pace`.

Each round, on one engine: the prompt alone; so many sequences decoding alone; the same with the prompt arriving among
them. A gap is the time from one token of a decoding sequence to its next; all decode in the same steps, so it is the
time between steps. Of the last part only gaps while the prompt was being computed count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cupaged.budget import FLOOR
from cupaged.errors import OptionError
from cupaged.llm import LLM
from cupaged.sampling import SamplingParams

_SHORT = 32  # tokens of the prompts of those that decode
_WARM = 8  # steps of decoding before gaps count
_ALONE = 60  # gaps without the prompt in a round
_MOST = 2000  # steps of a round: a prompt that gets on takes fewer


@dataclass(frozen=True, slots=True)
class Company:
    """`decodes` sequences that decode, and a prompt of `prompt` tokens that arrives."""

    decodes: int = 16
    prompt: int = 2000


@dataclass(slots=True)
class Gaps:
    """Seconds between tokens of all rounds, and the prompt's tokens a second, a value a round."""

    without: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    speed_alone: list[float] = field(default_factory=list)
    speed_beside: list[float] = field(default_factory=list)

    def gap_ratio(self, share: float) -> float:
        """The gap that `share` of all gaps do not exceed, with the prompt over without."""
        return quantile(self.beside, share) / quantile(self.without, share)

    @property
    def speed_ratio(self) -> float:
        """The prompt's speed beside those that decode over its speed alone: medians."""
        return statistics.median(self.speed_beside) / statistics.median(self.speed_alone)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def check(llm: LLM, company: Company) -> None:
    """OptionError for what the model's positions, its K/V memory or a step cannot hold."""
    memory, engine = llm.info()["kv_cache"], llm.engine
    if company.prompt >= memory["max_model_len"]:
        raise OptionError(
            f"--prompt-tokens {company.prompt}: the model has {memory['max_model_len']} positions for a sequence"
        )
    steps = _WARM + _ALONE + 2 * -(-company.prompt // FLOOR)
    if _SHORT + steps > memory["max_model_len"]:
        raise OptionError(
            f"--prompt-tokens {company.prompt}: takes up to {steps} steps, and a sequence has "
            f"{memory['max_model_len']} positions to decode on meanwhile"
        )
    if company.decodes >= engine.scheduler.max_sequences:
        raise OptionError(
            f"--decodes {company.decodes}: one more sequence is needed, and {engine.scheduler.max_sequences} can run"
        )
    needed = company.prompt + company.decodes * (_SHORT + _WARM + _ALONE)
    if needed > memory["tokens_that_fit"]:
        raise OptionError(
            f"--decodes {company.decodes}, --prompt-tokens {company.prompt}: need room for {needed} tokens in K/V "
            f"memory, which has {memory['tokens_that_fit']}; give more by --kv-memory"
        )


def measure(llm: LLM, company: Company, rounds: int, begins: Callable[[int], None] | None = None) -> Gaps:
    """Gaps and speeds of so many rounds; one before them, number 0, warms, and tells the engine what its steps cost.

    `begins(number)` is called before each.
    """
    check(llm, company)
    gaps = Gaps()
    rng = np.random.default_rng(0)
    for number in range(rounds + 1):
        if begins is not None:
            begins(number)
        one = Gaps()
        _round(llm, company, rng, one)
        if number:
            gaps.without += one.without
            gaps.beside += one.beside
            gaps.speed_alone += one.speed_alone
            gaps.speed_beside += one.speed_beside
    return gaps


def _round(llm: LLM, company: Company, rng: np.random.Generator, gaps: Gaps) -> None:
    engine = llm.engine
    vocabulary, left = engine.config.vocab_size, llm.info()["kv_cache"]["max_model_len"] - _SHORT
    decoding = SamplingParams(max_tokens=left, temperature=0, ignore_eos=True)
    first = SamplingParams(max_tokens=1, temperature=0)
    names: list[str] = []

    def add(length: int, params: SamplingParams) -> str:
        names.append(engine.add_request(rng.integers(0, vocabulary, length).tolist(), params))
        return names[-1]

    def steps(gap_to: list[float] | None, count: int, prompt: str | None = None) -> float:
        """Step `count` times, or until the prompt has its token; how long that took."""
        began = last = time.perf_counter()
        for _ in range(count):
            pieces = engine.step()
            now = time.perf_counter()
            if gap_to is not None:
                gap_to.append(now - last)
            last = now
            if prompt is not None and any(piece.request_id == prompt for piece in pieces):
                break
        return last - began

    try:
        alone = add(company.prompt, first)
        gaps.speed_alone.append(company.prompt / steps(None, _MOST, alone))
        for _ in range(company.decodes):
            add(_SHORT, decoding)
        while any(not engine.request(name).sequences[0].output_ids for name in names[1:]):
            engine.step()
        steps(None, _WARM)
        steps(gaps.without, _ALONE)
        beside = add(company.prompt, first)
        gaps.speed_beside.append(company.prompt / steps(gaps.beside, _MOST, beside))
    finally:
        for name in names:
            engine.abort(name)
        while engine.has_work:
            engine.step()
        for name in names:
            engine.forget(name)
