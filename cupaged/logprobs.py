"""Log-probabilities of the model, from its logits: what outputs report, and what candidates are compared by."""

from __future__ import annotations

import numpy as np

from cupaged.kernels.interface import Array


def log_softmax(logits: Array) -> Array:
    """float64 of the same shape, normalised along the last axis: log p_i = l_i - M - log(sum exp(l - M))."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def best_logprobs(logits: Array, token: int, count: int) -> dict[int, float]:
    """Log-probabilities (of the unmodified logits) of the `count` best tokens, best first, and of the chosen one."""
    wide = log_softmax(logits)
    best: list[int] = []
    if count:
        candidates = np.argpartition(-wide, min(count, len(wide)) - 1)[:count]
        # argpartition is free to choose among equals at the edge; ids decide, as everywhere
        edge = wide[candidates].min()
        candidates = np.concatenate([np.flatnonzero(wide > edge), np.flatnonzero(wide == edge)])[:count]
        best = sorted((int(i) for i in candidates), key=lambda i: (-wide[i], i))
    if token not in best:
        best.append(token)
    return {i: float(wide[i]) for i in best}
