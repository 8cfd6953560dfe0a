"""What the kernel tests share: float64 attention written another way, and caches filled with poison around the context.

`attend` forms the whole score matrix and masks it, on K and V that never were in blocks: it shares neither code nor
shape with the implementations.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupaged.cache import PagedKVCache

BFLOAT16_NAN = 0x7FC0


@dataclasses.dataclass
class NumpyDevice:
    """The least a cache needs: kernels, and memory as NumPy gives it (so pools need not be aligned)."""

    ops: Any
    k_transposed: bool = False

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    empty_host = empty


class ArraySource:
    """A weight as a file would give it."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array, np.float32)
        self.shape = self.array.shape
        self.dtype = "F32"

    def float32(self, start: int, stop: int) -> np.ndarray:
        return self.array[start:stop]

    def blocks(self, start: int, stop: int) -> None:
        return None

    @property
    def parts(self) -> tuple[ArraySource]:
        return (self,)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Finite float32 values as float64, rounded to a storage type: by arithmetic for bfloat16, which has 8 bits."""
    wide = values.astype(np.float64)
    if dtype == "float32":
        return wide
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float64)
    fraction, exponent = np.frexp(wide)
    return np.ldexp(np.rint(fraction * 256) / 256, exponent)  # rint: ties to even


def rough_exp2(x: np.ndarray) -> np.ndarray:
    """2**x within 1.02e-4, by the polynomial that the CPU uses for weights which are then rounded to bfloat16."""
    whole = np.rint(x)
    f = x - whole
    return np.ldexp(1 + f * (0.6932829 + f * (0.242211 + f * 5.500895e-2)), whole.astype(int))


def attend(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    rounding: bool = False,
) -> np.ndarray:
    """Causal attention in float64: queries [T, H, D], the last T of n positions, over keys and values [n, KVH, D].

    rounding: scaled queries and the softmax's weights are rounded to bfloat16, as the CPU does beside bfloat16 K/V, and
    weights are `rough_exp2`, of which it knows a ten-thousandth before they are.
    """
    count, heads, dim = query.shape
    context, kv_heads, _ = keys.shape
    out = np.zeros((count, heads, dim))
    if context == 0:
        return out
    own = np.arange(context - count, context)[:, None]
    at = np.arange(context)[None, :]
    mask = at <= own
    if window is not None:
        mask &= at > own - window
    for head in range(heads):
        shared = head // (heads // kv_heads)
        if rounding:
            factor = np.float32(scale if soft_cap is not None else scale * np.log2(np.e))
            scores = rounded(query[:, head] * factor, "bfloat16") @ keys[:, shared].T * (scale / np.float64(factor))
        else:
            scores = query[:, head].astype(np.float64) @ keys[:, shared].T * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.where(mask, np.exp(scores), 0.0)  # test data keep scores far from overflow
        if rounding:  # relative to any power of two: it is all the same
            weights = np.where(mask, rounded(rough_exp2(scores * np.log2(np.e)), "bfloat16"), 0.0)
        total = weights.sum(1) + (0.0 if sinks is None else np.exp(np.float64(sinks[head])))
        seen = mask.any(1)
        out[seen, head] = (weights @ values[:, shared])[seen] / total[seen, None]
    return out


def rounds(ops: Any, dtype: str) -> bool:
    """Whether attention of these kernels takes query and weights as bfloat16 beside K/V of this type."""
    return dtype == "bfloat16" and type(ops).__name__ == "CpuOperations"


def split(rows: np.ndarray, *shape: int) -> np.ndarray:
    """`rows` (perhaps strided) in another shape, never a copy."""
    view = rows.reshape(shape)
    assert view.size == 0 or np.shares_memory(view, rows)
    return view


def poison(array: np.ndarray) -> None:
    """NaN in every slot."""
    array[:] = BFLOAT16_NAN if array.dtype == np.uint16 else np.nan


@dataclasses.dataclass
class Paged:
    """Sequences in a cache: their block tables, and the very K and V (float64, rounded as stored) outside of blocks."""

    ops: Any
    cache: PagedKVCache
    layer: int
    tables: np.ndarray
    contexts: list[int]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    view: Any = None

    def __post_init__(self) -> None:
        self.view = self.cache.view if self.view is None else self.view

    def run(self, queries: Sequence[np.ndarray], contexts: Sequence[int] | None = None, **options: Any) -> np.ndarray:
        """Attention through the operations under test, rows of all sequences together: [T, H, D]."""
        contexts = self.contexts if contexts is None else list(contexts)
        query = np.concatenate(list(queries)).astype(np.float32)
        starts = np.cumsum([0] + [len(q) for q in queries]).tolist()
        scale, window = options.pop("scale", self.cache.head_dim**-0.5), options.pop("window", None)
        plan = self.ops.plan_attention(self.view, self.tables, starts, contexts, query.shape[1], window)
        assert plan.num_tokens == len(query)
        count, heads, dim = query.shape
        around = np.full((count + 2, heads * dim + 7), 777, np.float32)  # what lies around the rows must stay
        out = split(around[1:-1, 3:-4], count, heads, dim)
        self.ops.paged_attention(query, self.view, self.layer, plan, out, scale, **options)
        result = out.copy()
        out[...] = 777
        assert (around == 777).all()
        return result

    def expected(self, queries: Sequence[np.ndarray], **options: Any) -> np.ndarray:
        scale = options.pop("scale", self.cache.head_dim**-0.5)
        options["rounding"] = rounds(self.ops, self.cache.dtype)
        rows = zip(queries, self.keys, self.values, strict=True)
        return np.concatenate([attend(q, k, v, scale, **options) for q, k, v in rows])

    def select(self, sequences: Sequence[int]) -> Paged:
        """The same cache with some of the sequences."""
        pick = list(sequences)
        lists = ([getattr(self, name)[s] for s in pick] for name in ("contexts", "keys", "values"))
        return Paged(self.ops, self.cache, self.layer, self.tables[pick], *lists, view=self.view)


def contents(contexts: Sequence[int], kv_heads: int, dim: int, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """float32 K and V of sequences: functions of seed and position, not of how they will be stored."""
    rng = np.random.default_rng(seed)
    pairs = [rng.standard_normal((2, context, kv_heads, dim), np.float32) for context in contexts]
    return [k for k, _ in pairs], [v for _, v in pairs]


def paged(
    ops: Any,
    contexts: Sequence[int],
    *,
    kv_heads: int = 2,
    dim: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    layout: str = "block_major",
    k_transposed: bool = False,
    seed: int = 0,
    num_layers: int = 2,
    layer: int = 1,
) -> Paged:
    """Sequences written through `ops` into one layer of a poisoned cache, their blocks scattered and out of order."""
    counts = [-(-context // block_size) for context in contexts]
    num_blocks = sum(counts) + 3
    cache = PagedKVCache(
        num_blocks, block_size, kv_heads, dim, num_layers, dtype, NumpyDevice(ops), layout, k_transposed
    )
    poison(cache.view.pools[0])
    frames = np.random.default_rng(seed + 1).permutation(num_blocks)
    tables = np.full((len(contexts), max([*counts, 1])), -1, np.int32)
    taken = 0
    keys, values = contents(contexts, kv_heads, dim, seed)
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        tables[row, :count] = frames[taken : taken + count]
        taken += count
        at = np.arange(context)
        slots = tables[row, at // block_size].astype(np.int64) * block_size + at % block_size
        ops.write_kv(keys[row], values[row], cache.view, layer, slots)
    wide_keys, wide_values = ([rounded(x, dtype) for x in part] for part in (keys, values))
    return Paged(ops, cache, layer, tables, list(contexts), wide_keys, wide_values)


@contextlib.contextmanager
def guarded(rows: int, cols: int) -> Iterator[np.ndarray]:
    """A contiguous float32 output [rows, cols] full of NaN; what lies before and behind it must be left alone."""
    around = np.full(rows * cols + 128, 777, np.float32)
    out = split(around[64:-64], rows, cols)
    out[...] = np.nan
    yield out
    assert (around[:64] == 777).all() and (around[-64:] == 777).all()


def queries_for(counts: Sequence[int], heads: int, dim: int, seed: int = 99) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((count, heads, dim), np.float32) for count in counts]
