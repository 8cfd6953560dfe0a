"""What a request gives back, shaped as vLLM's users know it."""

from __future__ import annotations

from dataclasses import dataclass, field

FinishReason = str  # "stop" | "length" | "abort" | "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `cached_tokens` of the prompt came from blocks computed earlier."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds on `time.monotonic()`'s clock, None until the event happened; and what its memory cost.

    `forks`: sequences that began by sharing another one's blocks; `copies_on_write`: blocks copied because a shared
    one was to be written.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0
    forks: int = 0
    copies_on_write: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence. `logprobs[i]` maps token id to log-probability: the k best and the chosen one.

    `index` counts the outputs from 0, best first where they were picked; `score` is what they were picked by: the mean
    log-probability with best_of, the sum by length penalty with beams, None otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # None unless logprobs were asked
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None
    # The eos or stop token id, or the stop string; None for length and abort. "kv_memory": beams that were alone and
    # had no room to grow ended with "length" before they were as long as asked (the log says so, too, for outputs that
    # had ended before may be the better ones).
    stop_reason: int | str | None = None
    score: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """Result of one request; `.text`, `.token_ids`, `.finish_reason` are those of `outputs[0]`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    metrics: RequestMetrics
    finished: bool = True
    error: str | None = None  # set when finish_reason is "error"
    prompt_logprobs: list[dict[int, float] | None] | None = None  # a token each; None for the first, which has none

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """A piece of a stream: new text (may be empty) and the tokens behind it, of the output `index`.

    The last piece of each output has a finish_reason, and the last piece of the request the usage. With n > 1 the
    pieces of the outputs come interleaved. Where outputs are picked (best_of above n, beams) each comes whole, in one
    piece, at the end.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
