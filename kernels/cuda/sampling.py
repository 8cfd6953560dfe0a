"""Sampling on a GPU: settings packed for the kernels, and their launches: one if all rows are greedy. See sample.cu."""

from __future__ import annotations

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.cuda.arrays import contiguous
from cupaged.kernels.cuda.launch import Backend, Launcher
from cupaged.kernels.interface import Array, SampleRows
from cupaged.kernels.reference.sampling import GREEDY_BELOW

# Rows of sample.cu: `RowSettings`.
SETTINGS = np.dtype(
    [
        ("temperature", "f8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("seed", "u8"),
        ("position", "u8"),
        ("sample", "u4"),
        ("top_k", "i4"),
    ]
)
WEIGHT_BYTES = 64 << 20  # float64 weights of the rows of one pass, at most (one row at least)


class Sampling:
    """`sample` of `interface.Operations` on a backend."""

    def __init__(self, backend: Backend, launcher: Launcher) -> None:
        self._backend = backend
        self._launch = launcher

    def broken_rows(self, logits: Array) -> Array | None:
        """bool [R] on the host: rows of logits [R, V] float32 that hold NaN or infinity; None if there are none."""
        contiguous("logits", logits, logits.shape)
        if not len(logits):
            return None
        flags = self._backend.empty((len(logits),), np.int32)
        self._flag(logits, flags)
        broken = self._backend.download(flags) != 0
        return broken if broken.any() else None

    def _flag(self, logits: Array, flags: Array) -> None:
        count, vocabulary = logits.shape
        self._launch("sample.cu", "sample_broken", (count,), 256, {}, logits=logits, flags=flags, vocabulary=vocabulary)

    def sample(self, logits: Array, rows: SampleRows, checked: bool = False) -> list[int]:
        """A token id per row of logits [R, V] float32, as `reference/sampling.py` says.

        Sums are float64 in a fixed order of their own: the same token unless the draw lies within a relative 1e-12 or
        so of a step. KernelError: settings that are not R.
        """
        count, vocabulary = logits.shape
        for name in SampleRows.__slots__:
            if len(getattr(rows, name)) != count:
                raise KernelError(f"rows.{name}: {len(getattr(rows, name))} values for {count} rows of logits")
        contiguous("logits", logits, logits.shape)
        if not count:
            return []
        results = self._backend.empty((2, count), np.int32)  # tokens, and what is wrong with a row: one download
        maxima = self._backend.empty((count,), np.float32)
        greedy = max(rows.temperature) < GREEDY_BELOW
        best = results[0] if greedy else self._backend.empty((count,), np.int32)
        self._launch(
            "sample.cu", "sample_max", (count,), 256, {}, logits=logits, best=best, maxima=maxima, vocabulary=vocabulary
        )
        if not greedy:
            self._draw(logits, rows, best, maxima, results[0])
        if not checked:
            return [int(token) for token in self._backend.download(results[0])]
        self._flag(logits, results[1])
        tokens, flags = self._backend.download(results)
        return [-1 if flag else int(token) for token, flag in zip(tokens, flags, strict=True)]

    def _draw(self, logits: Array, rows: SampleRows, best: Array, maxima: Array, tokens: Array) -> None:
        """Of each row `best`, or what is drawn by its settings; some rows at a time."""
        count, vocabulary = logits.shape
        settings = self._backend.upload(pack_settings(rows, vocabulary).view(np.uint8))
        step = max(1, min(count, WEIGHT_BYTES // (8 * vocabulary)))
        weights = self._backend.empty((step * vocabulary,), np.float64)
        for first in range(0, count, step):
            some = slice(first, min(first + step, count))
            own = settings[first * SETTINGS.itemsize :]
            grid = (some.stop - some.start, -(-vocabulary // 1024))
            self._launch(
                "sample.cu", "sample_weights", grid, 256, {},
                logits=logits[some], maxima=maxima[some], settings=own, weights=weights, vocabulary=vocabulary,
            )  # fmt: skip
            self._launch(
                "sample.cu", "sample_select", grid[:1], 256, {},
                logits=logits[some], weights=weights, best=best[some], settings=own, tokens=tokens[some],
                vocabulary=vocabulary,
            )  # fmt: skip


def pack_settings(rows: SampleRows, vocabulary: int) -> Array:
    """The settings of R rows as SETTINGS [R]; a top_k beyond the vocabulary is none."""
    packed = np.zeros(len(rows.seed), SETTINGS)
    packed["temperature"], packed["top_p"], packed["min_p"] = rows.temperature, rows.top_p, rows.min_p
    packed["seed"] = [seed & 0xFFFFFFFFFFFFFFFF for seed in rows.seed]
    packed["position"], packed["sample"] = list(rows.position), list(rows.sample)
    packed["top_k"] = [k if 0 < k < vocabulary else 0 for k in rows.top_k]
    return packed
