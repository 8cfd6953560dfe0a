"""Launches of sampling on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.errors import DeviceError
from cupaged.kernels.cuda.sampling import SETTINGS
from cupaged.kernels.philox import uniform
from cupaged.kernels.reference import sampling
from streamdouble.heap import Pointer
from streamdouble.launch_dense import Defines, Grid

Array = np.ndarray


def sample_max(grid: Grid, defines: Defines, logits: Pointer, best: Pointer, maxima: Pointer, vocabulary: int) -> None:
    rows = logits.view((grid[0], vocabulary), np.float32)
    ids = np.argmax(rows, axis=1)
    best.view((grid[0],), np.int32)[...] = ids
    maxima.view((grid[0],), np.float32)[...] = rows[np.arange(grid[0]), ids]


def sample_broken(grid: Grid, defines: Defines, logits: Pointer, flags: Pointer, vocabulary: int) -> None:
    rows = logits.view((grid[0], vocabulary), np.float32)
    flags.view((grid[0],), np.int32)[...] = ~np.isfinite(rows).all(axis=1)


def _settings(settings: Pointer, count: int) -> Array:
    return settings.view((count * SETTINGS.itemsize,), np.uint8).view(SETTINGS)


def sample_weights(
    grid: Grid, defines: Defines, logits: Pointer, maxima: Pointer, settings: Pointer, weights: Pointer,
    vocabulary: int,
) -> None:  # fmt: skip
    if grid[1] * 1024 < vocabulary:
        raise DeviceError(f"sample_weights: a grid of {grid[1]} for {vocabulary} tokens")
    rows = logits.view((grid[0], vocabulary), np.float32).astype(np.float64)
    highest = maxima.view((grid[0],), np.float32).astype(np.float64)
    made = weights.view((grid[0], vocabulary), np.float64)
    for index, row in enumerate(_settings(settings, grid[0])):
        if row["temperature"] >= sampling.GREEDY_BELOW:
            made[index] = np.exp((rows[index] - highest[index]) / row["temperature"])


def sample_select(
    grid: Grid, defines: Defines, logits: Pointer, weights: Pointer, best: Pointer, settings: Pointer,
    tokens: Pointer, vocabulary: int,
) -> None:  # fmt: skip
    chosen = tokens.view((grid[0],), np.int32)
    rows = logits.view((grid[0], vocabulary), np.float32)
    made = weights.view((grid[0], vocabulary), np.float64)
    for index, row in enumerate(_settings(settings, grid[0])):
        if row["temperature"] < sampling.GREEDY_BELOW:
            chosen[index] = best.view((grid[0],), np.int32)[index]
        elif np.isfinite(made[index]).all():  # of others the caller looks at no token
            chosen[index] = _drawn(rows[index], made[index], row)


def _drawn(logits: Array, weights: Array, row: Any) -> int:
    """Steps 3 to 6 of cupaged/kernels/reference/sampling.py, from weights that are there."""
    kept = sampling._top_k(logits, int(row["top_k"]))
    if row["top_p"] < 1:
        kept = sampling._top_p(logits, weights, kept, float(row["top_p"]))
    kept = kept[weights[kept] >= row["min_p"]]
    running = np.cumsum(weights[kept])
    threshold = uniform(int(row["seed"]), int(row["sample"]), int(row["position"])) * running[-1]
    index = int(np.searchsorted(running, threshold, side="right"))
    return int(kept[min(index, len(kept) - 1)])
