"""Sampling on a GPU: settings packed for the kernels, and three launches for some rows at a time. See sample.cu."""

from __future__ import annotations

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.cuda.arrays import contiguous
from cupaged.kernels.cuda.launch import Backend, Launcher
from cupaged.kernels.interface import Array, SampleRows

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
        broken = self._backend.download(self._broken_flags(logits)) != 0
        return broken if broken.any() else None

    def _broken_flags(self, logits: Array) -> Array:
        count, vocabulary = logits.shape
        flags = self._backend.empty((count,), np.int32)
        self._launch("sample.cu", "sample_broken", (count,), 256, {}, logits=logits, flags=flags, vocabulary=vocabulary)
        return flags

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
        tokens = self._backend.empty((count,), np.int32)
        best = self._backend.empty((count,), np.int32)
        maxima = self._backend.empty((count,), np.float32)
        settings = self._backend.upload(pack_settings(rows, vocabulary).view(np.uint8))
        step = max(1, min(count, WEIGHT_BYTES // (8 * vocabulary)))
        weights = self._backend.empty((step * vocabulary,), np.float64)
        self._launch(
            "sample.cu", "sample_max", (count,), 256, {}, logits=logits, best=best, maxima=maxima, vocabulary=vocabulary
        )
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
        flags = self._broken_flags(logits) if checked else None
        chosen = [int(token) for token in self._backend.download(tokens)]
        if flags is None:
            return chosen
        return [-1 if flag else token for token, flag in zip(chosen, self._backend.download(flags), strict=True)]


def pack_settings(rows: SampleRows, vocabulary: int) -> Array:
    """The settings of R rows as SETTINGS [R]; a top_k beyond the vocabulary is none."""
    packed = np.zeros(len(rows.seed), SETTINGS)
    packed["temperature"], packed["top_p"], packed["min_p"] = rows.temperature, rows.top_p, rows.min_p
    packed["seed"] = [seed & 0xFFFFFFFFFFFFFFFF for seed in rows.seed]
    packed["position"], packed["sample"] = list(rows.position), list(rows.sample)
    packed["top_k"] = [k if 0 < k < vocabulary else 0 for k in rows.top_k]
    return packed
