"""What narrow weights cost: a model as it would be served against the same file in float32, on a given text.

Three figures, over the same tokens: perplexity, exp(mean -log p(next token)), of both; the mean Kullback-Leibler
divergence sum p log(p / q) of the served distribution q from the float32 one p; and how often both have the same best
token. The text is cut into windows, each read from its first token, as llama.cpp's perplexity tool does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cupaged.errors import OptionError
from cupaged.loading import LoadedModel, LoadOptions, ProgressEvent, load_model
from cupaged.model.decoder import ForwardBatch

if TYPE_CHECKING:
    from cupaged.loading import ProgressSink

_ROWS = 128  # tokens whose logits are held at a time: V floats each, twice
_SLICE = 16  # of which so many are compared at a time


@dataclass(frozen=True, slots=True)
class Quality:
    """tokens: read by both; predicted: those that had a next token. top1: share of tokens with the same best one."""

    tokens: int
    predicted: int
    exact_perplexity: float
    perplexity: float
    mean_kl: float
    top1: float
    kept: dict[str, int]

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.005 is half a percent worse than float32."""
        return self.perplexity / self.exact_perplexity - 1


@dataclass(slots=True)
class _Sums:
    predicted: int = 0
    exact_loss: float = 0.0
    loss: float = 0.0
    divergence: float = 0.0
    same: int = 0

    def add(self, exact: Any, served: Any, following: Sequence[int]) -> None:
        """Logits float32 [R, V] of R tokens in a row, and those of their next tokens that there are (R or R - 1)."""
        for first in range(0, len(exact), _SLICE):
            p, q = _log_softmax(exact[first : first + _SLICE]), _log_softmax(served[first : first + _SLICE])
            self.same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
            q_at = p_at = 0.0
            for row, token in enumerate(following[first : first + _SLICE]):
                p_at, q_at = p_at - float(p[row, token]), q_at - float(q[row, token])
                self.predicted += 1
            self.exact_loss, self.loss = self.exact_loss + p_at, self.loss + q_at
            np.subtract(p, q, out=q)
            np.exp(p, out=p)
            self.divergence += float(np.einsum("rv,rv->r", p, q, dtype=np.float64).sum())


def measure(
    weights: str | Path,
    options: LoadOptions,
    text: str,
    tokens: int,
    window: int,
    progress: ProgressSink | None = None,
) -> Quality:
    """`weights` served with `options` against the same file with weights and K/V in float32, on the first `tokens` of a
    text.

    OptionError if the text is shorter than that, or the model has no tokenizer or fewer positions than `window`.
    """
    options = replace(options, max_model_len=window, max_sequences=_ROWS, max_batch_tokens=max(_ROWS, 512))
    exact_options = replace(options, dtype="float32", kv_dtype="float32", quantize=None)
    served = load_model(weights, options, progress)
    try:
        exact = load_model(weights, exact_options, progress)
        try:
            if served.tokenizer is None:
                raise OptionError(f"{served.checkpoint.path}: a model without a tokenizer cannot read a text")
            ids = served.tokenizer.encode(text)
            if len(ids) < tokens:
                raise OptionError(f"the text has {len(ids)} tokens, {tokens} are wanted")
            sums = _Sums()
            for start in range(0, tokens, window):
                part = ids[start : min(start + window, tokens)]
                for first in range(0, len(part), _ROWS):
                    last = min(first + _ROWS, len(part))
                    pair = (_logits(exact, part, first, last), _logits(served, part, first, last))
                    sums.add(*pair, part[first + 1 : last + 1])
                    if progress is not None:
                        progress(ProgressEvent("reading the text", start + last, tokens, "tokens"))
        finally:
            exact.device.close()
    finally:
        served.device.close()
    return Quality(
        tokens,
        sums.predicted,
        math.exp(sums.exact_loss / sums.predicted),
        math.exp(sums.loss / sums.predicted),
        sums.divergence / tokens,
        sums.same / tokens,
        served.kept,
    )


def _logits(model: LoadedModel, ids: Sequence[int], start: int, stop: int) -> Any:
    """Logits [stop - start, V] of the tokens start..stop of one sequence whose blocks are 0, 1, 2, ...; earlier ones
    have been read before."""
    device, engine, config = model.device, model.engine, model.checkpoint.config
    count = stop - start
    blocks = np.arange(-(-stop // model.memory.block_size), dtype=np.int32)[None]
    positions = np.arange(start, stop)
    plan: Callable[..., Any] = device.ops.plan_attention
    batch = ForwardBatch(
        token_ids=device.upload(np.array(ids[start:stop], np.int32)),
        positions=device.upload(positions.astype(np.int32)),
        slots=[device.upload(positions.astype(np.int64)) for _ in engine.caches],
        plans=[
            plan(cache.view, blocks, [0, count], [stop], config.num_heads, group.window)
            for cache, group in zip(engine.caches, config.kv_groups, strict=True)
        ],
        logit_rows=device.upload(np.arange(count, dtype=np.int32)),
        max_position=stop - 1,
    )
    engine.decoder.prepare(batch.max_position)
    return device.download(engine.decoder.forward(batch, [cache.view for cache in engine.caches]))


def _log_softmax(logits: Any) -> Any:
    """float32 [R, V]; the sum of exponentials in float64."""
    out = logits - logits.max(axis=1, keepdims=True)
    out -= np.log(np.exp(out).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return out
