"""From logits to a token. This docstring is the contract with the Numba and the CUDA C twins.

For one row of logits l[0..V-1] (float32; without NaN, with a finite maximum M), in float64:

0. If the rows are to be checked, one that holds NaN or an infinity gives -1.
1. temperature < 1e-5: the lowest id of those with l = M. Nothing else is looked at.
2. z = (l - M) / temperature, w = exp(z). (M first: no overflow at any temperature.)
3. top_k, if 0 < k < V: the k largest l stay; of equal ones those with the lower id. (On l, not on w: small weights
   round to equal ones.)
4. top_p, if p < 1: of what stayed, in descending l and ascending id, the shortest prefix whose running sum of w reaches
   (p - 1e-12) times the sum of all that stayed; at least one token. Both are the same running sum, so that it is the
   distribution renormalised after top_k that is measured. 1e-12 keeps ".5 + .3 reaches .8" true in binary.
5. min_p, if > 0: of what stayed, w >= min_p. (The largest w is exp(0) = 1 and always stays.)
6. total = sum of w over what stayed, added one by one in ascending id. The token is the first, in ascending id, whose
   running sum exceeds u * total, u = philox.uniform(seed, sample, position) in (0, 1).

The sums are sequential float64. Twins whose exp differs in the last bit give the same token unless u * total lies
within a relative 1e-12 or so of a step.
"""

from __future__ import annotations

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.interface import Array, SampleRows
from cupaged.kernels.philox import uniform

GREEDY_BELOW = 1e-5
TOP_P_SLACK = 1e-12


def broken_rows(logits: Array) -> Array | None:
    """bool [R]: rows of logits [R, V] that hold NaN or infinity; None if there are none."""
    broken: Array = ~np.isfinite(logits).all(axis=1)
    return broken if broken.any() else None


def sample(logits: Array, rows: SampleRows, checked: bool = False) -> list[int]:
    """A token id per row of logits [R, V] float32, as the module's docstring says.

    Settings are those of `SampleRows`, R each (KernelError otherwise), and are not checked here: `SamplingParams` did.
    Unless the rows are `checked` here, the caller has made sure that each has no NaN and a finite maximum.
    """
    for name in SampleRows.__slots__:
        if len(getattr(rows, name)) != len(logits):
            raise KernelError(f"rows.{name}: {len(getattr(rows, name))} values for {len(logits)} rows of logits")
    broken = broken_rows(logits) if checked else None
    if broken is None:
        return [_sample_row(row, rows, index) for index, row in enumerate(logits)]
    return [-1 if broken[index] else _sample_row(row, rows, index) for index, row in enumerate(logits)]


def _sample_row(logits: Array, rows: SampleRows, index: int) -> int:
    temperature = rows.temperature[index]
    if temperature < GREEDY_BELOW:
        return int(np.argmax(logits))
    wide = logits.astype(np.float64)
    weights = np.exp((wide - wide.max()) / temperature)
    kept = _top_k(logits, rows.top_k[index])
    if rows.top_p[index] < 1.0:
        kept = _top_p(logits, weights, kept, rows.top_p[index])
    if rows.min_p[index] > 0.0:
        kept = kept[weights[kept] >= rows.min_p[index]]
    running = np.cumsum(weights[kept])
    threshold = uniform(rows.seed[index], rows.sample[index], rows.position[index]) * running[-1]
    return int(kept[np.searchsorted(running, threshold, side="right")])


def _top_k(logits: Array, k: int) -> Array:
    """Ids, ascending, of the k largest logits, lower ids first among equals; all of them if k is 0 or no limit."""
    if not 0 < k < len(logits):
        return np.arange(len(logits))
    smallest = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > smallest)
    equal = np.flatnonzero(logits == smallest)[: k - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _top_p(logits: Array, weights: Array, kept: Array, p: float) -> Array:
    """Ids, ascending, of the shortest descending prefix of `kept` that holds p of its weight; at least one."""
    descending = kept[np.argsort(-logits[kept], kind="stable")]
    running = np.cumsum(weights[descending])
    length = int(np.searchsorted(running, (p - TOP_P_SLACK) * running[-1])) + 1
    return np.sort(descending[:length])
