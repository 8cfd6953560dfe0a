"""What happens to logits before temperature: penalties, bias, tokens that must not come now, a user's function.

Plain NumPy on one row; requests that ask for none of it never come here. The order is that of `SamplingParams`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cupaged.errors import StepError
from cupaged.interrupts import in_main_thread
from cupaged.sampling import SamplingParams

if TYPE_CHECKING:
    from cupaged.kernels.interface import Array
    from cupaged.request import Sequence as TokenSequence


def adjust(logits: Array, sequence: TokenSequence) -> Array:
    """The logits, float32 [V], from which the next token of a sequence is chosen; may change `logits` in place.

    StepError if nothing is left to choose from, or if the logits_processor gives something else than V numbers.
    """
    request, params = sequence.request, sequence.request.params
    output = sequence.output_ids
    penalise(logits, params, request.prompt_ids, output)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        logits[list(request.stop_ids)] = -np.inf
    for words in request.bad_words:
        if completes(words, output):
            logits[words[-1]] = -np.inf
    if params.logits_processor is not None:
        logits = _processed(logits, params, sequence.tokens)
    top = logits.max()
    if np.isnan(top) or top == np.inf:
        raise StepError("the logits_processor left NaN or infinity among the logits")
    if top == -np.inf:
        raise StepError("no token is left to choose from: bias, min_tokens, bad_words and processor exclude all")
    return logits


def penalise(logits: Array, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Repetition penalty over prompt and output, once per id; presence and frequency penalty over the output."""
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array([*prompt, *output], np.int64))
        values = logits[seen]
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output)
        ids = np.fromiter(counts.keys(), np.int64, len(counts))
        times = np.fromiter(counts.values(), np.float32, len(counts))
        lower = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * times
        logits[ids] -= lower


def completes(words: Sequence[int], output: Sequence[int]) -> bool:
    """Whether one more token, the last of `words`, would complete them at the end of `output`."""
    head = len(words) - 1
    return head == 0 or list(output[-head:]) == list(words[:-1])


def _processed(logits: Array, params: SamplingParams, tokens: Sequence[int]) -> Array:
    assert params.logits_processor is not None
    try:
        result = params.logits_processor(list(tokens), logits)
    except BaseException as error:
        # Signals are held back during a step, so this is what the function itself raised. On the main thread a
        # KeyboardInterrupt or SystemExit of it means the program; on an engine's thread it can only mean its request.
        if not isinstance(error, Exception) and in_main_thread():
            raise
        raise StepError(f"the logits_processor raised {type(error).__name__}: {error}".rstrip(": ")) from error
    if result is None:
        return logits
    try:
        with np.errstate(over="ignore"):  # what becomes infinite is named by the caller
            changed = np.asarray(result, np.float32)
    except (TypeError, ValueError) as error:
        raise StepError(f"the logits_processor returned {type(result).__name__}, not logits ({error})") from None
    if changed.shape != logits.shape:
        raise StepError(f"the logits_processor returned shape {changed.shape}, not {logits.shape}")
    return changed
