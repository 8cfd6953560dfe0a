"""From the logits of a step to the next tokens: who chooses from which row, and what went wrong with whom."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from cupaged.errors import StepError
from cupaged.kernels.interface import Array, SampleRows
from cupaged.logits import adjust
from cupaged.request import Sequence as TokenSequence
from cupaged.step_logits import StepLogits
from cupaged.step_plan import Chunk

# What a chunk brings: next tokens and the sequences that they are for; or what went wrong with its request.
Outcome = list[tuple[TokenSequence, int]] | Exception


def takers(chunk: Chunk) -> list[TokenSequence]:
    """The sequences that choose their next token from a chunk's last row: a whole group at the end of its stem."""
    request = chunk.sequence.request
    if not chunk.samples or request.params.beam_width is not None:
        return []
    return [chunk.sequence] if request.stem is None else request.live_sequences


def choose(chunks: Sequence[Chunk], logits: StepLogits, step: int) -> list[Outcome]:
    """What each chunk brings, from the logits [R, V] of all wanted rows. `step`: its number, for messages."""
    if len(logits) == len(chunks) and all(chunk.rows == 1 and _is_plain(chunk) for chunk in chunks):
        sequences = [chunk.sequence for chunk in chunks]
        tokens = logits.sample(sample_rows(sequences))
        return [
            [(sequence, token)] if token >= 0 else not_finite(step, sequence)
            for sequence, token in zip(sequences, tokens, strict=True)
        ]
    ends = list(accumulate(chunk.rows for chunk in chunks))
    broken = logits.broken_rows()
    outcomes: list[Outcome] = [[] for _ in chunks]
    taking: list[tuple[int, list[TokenSequence]]] = []
    for index, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
        if broken is not None and broken[end - chunk.rows : end].any():
            outcomes[index] = not_finite(step, chunk.sequence)
            continue
        group = takers(chunk)
        if group:
            taking.append((index, group))
    rows: list[Array] = []
    good: list[tuple[int, list[TokenSequence]]] = []
    for index, group in taking:
        try:
            rows += [adjusted(logits.host[ends[index] - 1], sequence) for sequence in group]
            good.append((index, group))
        except Exception as error:
            outcomes[index] = error
            rows = rows[: sum(len(group) for _, group in good)]
    if rows:
        tokens = logits.sample_from(rows, sample_rows([sequence for _, group in good for sequence in group]))
        rest = iter(tokens)
        for index, group in good:
            outcomes[index] = [(sequence, next(rest)) for sequence in group]
    return outcomes


def _is_plain(chunk: Chunk) -> bool:
    """Whether a chunk's sequence chooses its next token by itself, from the logits as they are."""
    request = chunk.sequence.request
    return chunk.samples and request.plain and request.stem is None


def not_finite(step: int, sequence: TokenSequence) -> StepError:
    return StepError(f"the model's logits are not finite (step {step}, position {len(sequence.tokens)})")


def adjusted(row: Array, sequence: TokenSequence) -> Array:
    """The row that a sequence's next token is chosen from: the model's own, or an adjusted copy."""
    return adjust(row.copy(), sequence) if sequence.request.params.adjusts else row


def sample_rows(sequences: Sequence[TokenSequence]) -> SampleRows:
    """The sampler's settings for the next token of each sequence."""
    params = [sequence.request.params for sequence in sequences]
    return SampleRows(
        temperature=[p.temperature for p in params],
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        seed=[sequence.request.seed for sequence in sequences],
        sample=[sequence.index for sequence in sequences],
        position=[len(sequence.tokens) for sequence in sequences],
    )
