"""Paged attention on a GPU: a call cut into work on the host, and launched. Variants of the kernels: attention.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.arguments import check_attention
from cupaged.kernels.cuda.arrays import row_stride
from cupaged.kernels.cuda.attention import (
    MAX_HEAD_DIM,
    ROW_VARIANTS,
    STORAGE,
    TENSOR_ROWS,
    WORKERS,
    Variant,
    plain_variant,
    tensor_variant,
    uses_tensor_cores,
)
from cupaged.kernels.cuda.capacity import Capacity, pack
from cupaged.kernels.cuda.launch import Backend, Launcher
from cupaged.kernels.cuda.plan import NO_WINDOW, WorkPlan, make_plan, parts_seen
from cupaged.kernels.cuda.scratch import Scratch
from cupaged.kernels.interface import STORAGE_BYTES, Array, AttentionPlan, KVView

LOG2E = 1.4426950408889634
STATE_BYTES = 32 << 20  # partial results of one pass, at most (those of one token at least)


@dataclass(frozen=True, slots=True)
class Pass:
    """The queries first..stop-1 of a call, computed before the next ones, so that partial results take little room."""

    first: int
    stop: int
    work: WorkPlan
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Placed:
    """A plan on the device: the arrays of each pass."""

    words: Array
    views: tuple[dict[str, Array], ...]


@dataclass(slots=True)
class CudaAttentionPlan:
    """A work plan of a call, with the variant that it was cut for. It goes to the device when it is first used."""

    num_tokens: int
    num_heads: int
    head_dim: int
    group: int
    variant: Variant
    window: int
    tables: Array
    passes: tuple[Pass, ...]
    placed: Placed | None = field(default=None, repr=False)

    def fresh(self, like: CudaAttentionPlan | None = None) -> CudaAttentionPlan:
        """The same plan, to lie in a place of its own, where there is room for whatever `like` has room for, too: what
        two kinds of steps replay in turn fits both."""
        passes = self.passes
        if like is not None and len(like.passes) == len(passes):
            pairs = zip(passes, like.passes, strict=True)
            passes = tuple(replace(own, capacity=own.capacity.with_room_of(other.capacity)) for own, other in pairs)
        return replace(self, passes=passes, placed=None)

    def words(self, capacities: Sequence[Capacity]) -> Array:
        """The words of all passes, one after another, laid out for these capacities."""
        parts = [pack(one.work, self.tables, room) for one, room in zip(self.passes, capacities, strict=True)]
        return np.concatenate([_whole_lines(part) for part in parts])

    @property
    def capacities(self) -> list[Capacity]:
        return [one.capacity for one in self.passes]


def _whole_lines(words: Array) -> Array:
    """Padded to 16 bytes, so that the next pass's items are aligned."""
    return np.pad(words, (0, -len(words) % 4))


class Attention:
    """`plan_attention` and `paged_attention` of `interface.Operations` on a backend.

    fixed_block_size: compile the block size in (divisions become shifts), at one variant for each; the emulator, whose
    compiler is slower than its divisions, leaves it an argument.
    """

    def __init__(self, backend: Backend, launcher: Launcher, fixed_block_size: bool, tensor_cores: bool | None) -> None:
        self._backend = backend
        self._launch = launcher
        self._fixed_block_size = fixed_block_size
        self._tensor_cores = tensor_cores
        self._scratch = Scratch(backend)

    def plan(
        self,
        cache: KVView,
        tables: Array,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        num_heads: int,
        window: int | None = None,
    ) -> CudaAttentionPlan:
        """See `interface.Operations.plan_attention`. Nothing is queued before the plan is used."""
        table, starts, contexts = check_attention(cache, tables, query_starts, context_lens, num_heads, window)
        if cache.head_dim > MAX_HEAD_DIM:
            raise KernelError(f"head_dim: {cache.head_dim} is more than {MAX_HEAD_DIM}, the most these kernels take")
        group = num_heads // cache.num_kv_heads
        variant = self._variant(cache, group, int(np.diff(starts).max(initial=0)))
        passes = []
        for first, stop in _cut(starts, contexts, window, num_heads * (cache.head_dim + 2) * 4):
            ends = np.minimum(starts[1:], stop)
            own, reached = np.clip(starts, first, stop) - first, contexts - (starts[1:] - ends)
            work = make_plan(table, own, reached, group, variant.rows, cache.block_size, window)
            passes.append(Pass(first, stop, work, Capacity.of(work, table)))
        reach = NO_WINDOW if window is None else min(window, NO_WINDOW)
        return CudaAttentionPlan(
            int(starts[-1]), num_heads, cache.head_dim, group, variant, reach, table, tuple(passes)
        )  # fmt: skip

    def refill(self, plan: CudaAttentionPlan, other: CudaAttentionPlan) -> bool:
        """Put another plan's work where this one's lies on the device, for launches that were recorded with this one.

        False, and nothing done, where that does not fit them.
        """
        same = (plan.num_tokens, plan.num_heads, plan.head_dim, plan.variant, plan.window) == (
            other.num_tokens, other.num_heads, other.head_dim, other.variant, other.window,
        )  # fmt: skip
        if plan.placed is None or not same or len(plan.passes) != len(other.passes):
            return False
        for mine, theirs in zip(plan.passes, other.passes, strict=True):
            if (mine.first, mine.stop) != (theirs.first, theirs.stop) or not mine.capacity.holds(theirs.capacity):
                return False
        self._backend.upload(other.words(plan.capacities), plan.placed.words)
        return True

    def _place(self, plan: CudaAttentionPlan) -> Placed:
        words = self._backend.upload(plan.words(plan.capacities))
        views, start = [], 0
        for capacity in plan.capacities:
            views.append(capacity.views(words[start : start + capacity.words]))
            start += capacity.words + -capacity.words % 4
        return Placed(words, tuple(views))

    def _variant(self, cache: KVView, group: int, most_queries: int) -> Variant:
        backend, wanted = self._backend, group * most_queries
        if uses_tensor_cores(backend.architecture, cache.dtype, group, self._tensor_cores):
            rows = TENSOR_ROWS[0] if wanted <= TENSOR_ROWS[0] else TENSOR_ROWS[1]
            return tensor_variant(cache.head_dim, cache.dtype, cache.block_size, rows, backend.shared_limit)
        rows = next((rows for rows in ROW_VARIANTS if rows >= wanted), ROW_VARIANTS[-1])
        return plain_variant(cache.head_dim, cache.dtype, cache.block_size, rows, backend.shared_limit)

    def run(
        self,
        query: Array,
        cache: KVView,
        layer: int,
        plan: AttentionPlan,
        out: Array,
        scale: float,
        soft_cap: float | None = None,
        sinks: Array | None = None,
    ) -> None:
        """See `interface.Operations.paged_attention`. Two launches: the parts, and the merge of rows with several."""
        if not isinstance(plan, CudaAttentionPlan):
            raise KernelError(f"plan: a {type(plan).__name__} was made by another set of kernels")
        expected = (plan.num_tokens, plan.num_heads, cache.head_dim)
        strides = row_stride("query", query, expected), row_stride("out", out, expected)
        if not 0 <= layer < cache.num_layers:
            raise KernelError(f"layer: {layer} is not in 0..{cache.num_layers - 1}")
        if not plan.num_tokens:
            return
        if plan.placed is None:
            plan.placed = self._place(plan)
        scaling = {
            "scale": scale / soft_cap if soft_cap else scale * LOG2E,
            "cap": (soft_cap or 0.0) * LOG2E,
        }
        for one, views in zip(plan.passes, plan.placed.views, strict=True):
            rows = slice(one.first, one.stop)
            self._run_pass(plan, one.capacity, views, query[rows], cache, layer, out[rows], strides, scaling, sinks)

    def _run_pass(
        self, plan: CudaAttentionPlan, capacity: Capacity, views: dict[str, Array], query: Array, cache: KVView,
        layer: int, out: Array, strides: tuple[int, int], scaling: dict[str, float], sinks: Array | None,
    ) -> None:  # fmt: skip
        variant = plan.variant
        pools = [cache.pools[i] if i < len(cache.pools) else None for i in range(4)]
        states = max(1, capacity.states) * plan.num_heads
        common = {
            "state_starts": views["state_starts"],
            "state_counts": views["state_counts"],
            "state_values": self._scratch.get("values", states * cache.head_dim, np.float32),
            "state_scalars": self._scratch.get("scalars", states * 2, np.float32),
            "out": out,
            "out_stride": strides[1],
            "sinks": sinks,
        }
        defines = {"HEAD_DIM": cache.head_dim, "STORAGE": STORAGE[cache.dtype]}
        if capacity.items:
            most = self._backend.multiprocessors * WORKERS
            self._launch(
                variant.source, variant.kernel, (min(capacity.items, most), cache.num_kv_heads), variant.threads,
                defines | self._layout(cache, pools) | variant.defines,
                variant.shared_bytes,
                items=views["items"], num_items=views["num_items"], tokens=views["tokens"],
                positions=views["positions"], tables=views["tables"], table_width=capacity.width,
                query=query, query_stride=strides[0],
                pool0=pools[0], pool1=pools[1], pool2=pools[2], pool3=pools[3], block_stride=cache.block_stride,
                layer_offset=layer * cache.layer_stride, kv_stride=cache.kv_stride, head_stride=cache.head_stride,
                block_size=cache.block_size, group=plan.group, window=plan.window, **scaling, **common,
            )  # fmt: skip
        if capacity.merges:
            self._launch(
                "merge_parts.cu", "merge_parts", (min(capacity.merges, self._backend.multiprocessors * 8),), 128,
                {"HEAD_DIM": cache.head_dim},
                merges=views["merges"], num_merges=views["num_merges"], heads=plan.num_heads, **common,
            )  # fmt: skip

    def _layout(self, cache: KVView, pools: Sequence[Array | None]) -> dict[str, int]:
        """How blocks are read: whole chunks of 16 bytes where rows are made of such, else element by element."""
        wide = not cache.k_transposed and cache.head_dim * STORAGE_BYTES[cache.dtype] % 16 == 0
        wide = wide and all(pool is None or self._backend.address(pool) % 16 == 0 for pool in pools)
        return {
            "WIDE_LOADS": int(wide),
            "K_TRANSPOSED": int(cache.k_transposed),
            "BLOCK_SIZE": cache.block_size if self._fixed_block_size else 0,
        }


def _cut(starts: Array, contexts: Array, window: int | None, state_bytes: int) -> list[tuple[int, int]]:
    """Runs of queries whose partial results take at most `STATE_BYTES`; a state takes `state_bytes`."""
    count = int(starts[-1])
    seen = parts_seen(starts, contexts, window)[2]
    rooms = np.cumsum(np.where(seen > 1, seen, 0)) * state_bytes
    bounds = [0]
    while bounds[-1] < count:
        before = int(rooms[bounds[-1] - 1]) if bounds[-1] else 0
        stop = int(np.searchsorted(rooms, before + STATE_BYTES, "right"))
        bounds.append(max(stop, bounds[-1] + 1))
    return list(pairwise(bounds))
