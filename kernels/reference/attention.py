"""Causal attention over paged K/V (Kwon et al. 2023), one query at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.arguments import check_attention
from cupaged.kernels.interface import Array, AttentionPlan, KVView
from cupaged.kernels.reference.blocks import gather


@dataclass(slots=True)
class ReferencePlan:
    """The checked arguments themselves: this implementation splits no work."""

    num_tokens: int
    num_heads: int
    tables: Array
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    window: int | None


def visible_range(position: int, context_len: int, window: int | None) -> tuple[int, int]:
    """Keys first..stop-1 that the query at `position` sees: i-W < j <= i, W keys with its own. Empty: (0, 0)."""
    stop = min(position + 1, context_len)
    first = 0 if window is None else max(0, position - window + 1)
    return (first, stop) if first < stop else (0, 0)


def plan_attention(
    cache: KVView,
    tables: Array,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    num_heads: int,
    window: int | None = None,
) -> ReferencePlan:
    """Check the arguments of an attention call and keep them; valid for all layers of the cache.

    tables [S, W] int32 block references; query_starts: S + 1 ascending ints from 0; context_lens: S ints >= 0.
    Sequence s has the queries query_starts[s]..query_starts[s+1]-1, the last ones of its context_lens[s] positions;
    with more queries than positions the first of them see nothing (so a context of 0 serves as padding). KernelError
    and which entries may be anything: see `check_attention`.
    """
    table, starts, contexts = check_attention(cache, tables, query_starts, context_lens, num_heads, window)
    return ReferencePlan(
        int(starts[-1]), num_heads, table.copy(), tuple(starts.tolist()), tuple(contexts.tolist()), window
    )


def _keys_needed(context: int, queries: int, window: int | None) -> tuple[int, int]:
    """Keys first..stop-1 that any of the last `queries` positions of a context sees; empty: (0, 0)."""
    if queries == 0:
        return 0, 0
    first, _ = visible_range(max(0, context - queries), context, window)
    return first, context


def paged_attention(
    query: Array,
    cache: KVView,
    layer: int,
    plan: AttentionPlan,
    out: Array,
    scale: float,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> None:
    """softmax(scale * q.k) v for each query and head over its visible keys.

    query, out [T, H, D] float32, rows may be strided, T = plan.num_tokens; `out` does not overlap `query`. Head h reads
    KV head h // (H / KVH). s = scale * q.k; then cap * tanh(s / cap) if `soft_cap` (Gemma 2, 2024, section 2); then the
    mask; then the softmax with its maximum subtracted. `sinks` [H] float32: a logit per head that enters the
    denominator once and carries no value (Xiao et al. 2023; gpt-oss). A row without a visible key, or with none above
    -inf, gives zeros. A NaN in a visible key or value makes that row NaN; slots that are not visible are never read.
    A row's arithmetic depends on its position, its window and its own keys: shapes below are functions of those.
    """
    if not isinstance(plan, ReferencePlan):
        raise KernelError(f"plan: a {type(plan).__name__} was made by another set of kernels")
    expected = (plan.num_tokens, plan.num_heads, cache.head_dim)
    for name, array in (("query", query), ("out", out)):
        if tuple(array.shape) != expected:
            raise KernelError(f"{name}: expected shape {expected}, got {tuple(array.shape)}")
    for sequence, context in enumerate(plan.context_lens):
        start, end = plan.query_starts[sequence], plan.query_starts[sequence + 1]
        base, stop = _keys_needed(context, end - start, plan.window)
        keys, values = gather(cache, layer, plan.tables[sequence], base, stop)
        for row in range(start, end):
            first, last = visible_range(context - (end - row), context, plan.window)
            visible = slice(first - base, last - base) if first < last else slice(0, 0)
            with np.errstate(invalid="ignore"):  # infinities in K or V give NaN rows, which the engine reports
                out[row] = _attend(query[row], keys[visible], values[visible], scale, soft_cap, sinks)


def _attend(
    query: Array, keys: Array, values: Array, scale: float, soft_cap: float | None, sinks: Array | None
) -> Array:
    """One query [H, D] over its visible keys and values [n, KVH, D] in float64; gives [H, D].

    einsum without `optimize` is NumPy's own loop, whose order of additions follows from the shapes alone.
    """
    count, kv_heads, _ = keys.shape
    group = query.shape[0] // kv_heads
    result = np.zeros(query.shape)
    if count == 0:
        return result
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        scores = np.einsum("gd,nd->gn", query[heads].astype(np.float64), keys[:, kv_head]) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        highest = scores.max(axis=1, keepdims=True)
        sink = None if sinks is None else np.asarray(sinks[heads], np.float64)[:, None]
        if sink is not None:
            highest = np.maximum(highest, sink)
        # Without a score above -inf there is nothing to weigh: zeros, where exp(-inf - -inf) would be NaN.
        highest = np.where(highest == -np.inf, 0.0, highest)
        weights = np.exp(scores - highest)
        total = weights.sum(axis=1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink - highest)
        weighted = np.einsum("gn,nd->gd", weights, values[:, kv_head])
        result[heads] = np.where(total == 0.0, 0.0, weighted / np.where(total == 0.0, 1.0, total))
    return result
