"""Paged attention on a GPU: which variant of which kernel, how much shared memory, and the launches of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.arguments import check_attention
from cupaged.kernels.cuda.arrays import row_stride
from cupaged.kernels.cuda.launch import Backend, Launcher
from cupaged.kernels.cuda.plan import WorkPlan, make_plan
from cupaged.kernels.interface import PART, STORAGE_BYTES, TILE, Array, AttentionPlan, KVView

STORAGE = {"float32": 0, "float16": 1, "bfloat16": 2}  # -DSTORAGE of common.cuh
LOG2E = 1.4426950408889634
SLICES = 4
MAX_HEAD_DIM = 256
ROW_VARIANTS = (1, 4, 8)  # of the kernel without tensor cores: a decoding head, a small group, prefill
TENSOR_ROWS = (16, 32)  # of the kernel on tensor cores: decode, and prefill
TENSOR_GROUP = 4  # query heads of a KV head from which on tensor cores are worth it: below, decode is bound by memory
UNDER_WAY = 40 * 1024  # bytes on their way that a block aims at
WORKERS = 4  # work items that are under way on a multiprocessor, at most; more only wait


@dataclass(frozen=True, slots=True)
class Ring:
    """Stages of K and V in shared memory. `pieces`: stages that K or V of a tile comes in, each with so many of its
    columns, so that all warps have work in each."""

    pieces: int
    buffers: int
    stage_bytes: int

    @property
    def in_flight(self) -> int:
        return (self.buffers - 1) * self.stage_bytes


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form of an attention kernel. `rows`: query rows of a work item. `in_flight`: bytes of K and V that
    one block has on their way while it computes."""

    source: str
    kernel: str
    rows: int
    threads: int
    ring: Ring
    shared_bytes: int

    @property
    def in_flight(self) -> int:
        return self.ring.in_flight

    @property
    def defines(self) -> dict[str, int]:
        rows = {"ROWS": self.rows} if self.kernel == "paged_attention" else {"ROW_TILES": self.rows // 16}
        pieces = {"PIECES": self.ring.pieces} if self.ring.pieces > 1 else {}
        return {**rows, "BUFFERS": self.ring.buffers, **pieces}


def row_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of a row of K or V in shared memory: padded to 16 elements, then to an odd number of 16-byte chunks."""
    return padded(head_dim) * STORAGE_BYTES[dtype] + 16


def padded(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def _stages(head_dim: int, dtype: str) -> list[tuple[int, int]]:
    """(pieces, bytes of a stage) that there are: long rows come in pieces of whole pairs of columns for each lane."""
    long = row_bytes(head_dim, dtype) >= 512
    pieces = [n for n in (1, 2, 4) if n == 1 or (long and head_dim % (64 * n) == 0)]
    return [(n, TILE * row_bytes(head_dim // n, dtype)) for n in pieces]


def _ring(head_dim: int, dtype: str, room: int) -> Ring | None:
    """As deep a ring as makes `UNDER_WAY` bytes travel, in as few pieces as that takes; else the one in which most do.
    None: not even two stages of the smallest pieces find room."""
    best = None
    for pieces, stage in _stages(head_dim, dtype):
        buffers = min(max(2, min(6, 1 + -(-UNDER_WAY // stage))), room // stage)
        ring = Ring(pieces, buffers, stage)
        if buffers >= 2 and (best is None or ring.in_flight > best.in_flight):
            best = ring
        if best is not None and best.in_flight >= UNDER_WAY:
            break
    return best


def _variant_of(
    kernel: str, rows: int, threads: int, head_dim: int, dtype: str, merged: int, fixed: int, static: int, limit: int
) -> Variant:
    """merged: bytes that lie over the ring at an item's end. fixed, static: shared memory besides."""
    ring = _ring(head_dim, dtype, limit - fixed - static)
    if ring is None or merged + fixed + static > limit:
        least = max(2 * _stages(head_dim, dtype)[-1][1], merged) + fixed + static
        raise KernelError(
            f"head_dim: {head_dim} of {dtype} needs {least:,} bytes of shared memory, "
            f"this device gives a block {limit:,}"
        )
    shared = max(ring.buffers * ring.stage_bytes, merged) + fixed
    return Variant(f"{kernel}.cu", kernel, rows, threads, ring, shared)


def plain_variant(head_dim: int, dtype: str, block_size: int, rows: int, shared_limit: int) -> Variant:
    """The kernel without tensor cores. KernelError where the device's blocks have too little shared memory."""
    blocks = 8 * (PART // block_size + 2)
    fixed = rows * padded(head_dim) * 4 + SLICES * rows * 16 * 4 + blocks
    static, merged = rows * (8 + 2 * SLICES * 4), SLICES * rows * padded(head_dim) * 4
    return _variant_of("paged_attention", rows, 32 * SLICES, head_dim, dtype, merged, fixed, static, shared_limit)


def tensor_variant(head_dim: int, dtype: str, block_size: int, rows: int, shared_limit: int) -> Variant:
    """The kernel on tensor cores; `rows` 16 or 32. As `plain_variant` otherwise."""
    fixed = 2 * rows * (padded(head_dim) * 2 + 16) + 8 * (PART // block_size + 2)
    static, merged = rows * (8 + 4 + 2 * SLICES * 4), rows * padded(head_dim) * 4
    return _variant_of("paged_attention_tensor", rows, 8 * rows, head_dim, dtype, merged, fixed, static, shared_limit)


@dataclass(frozen=True, slots=True)
class CudaAttentionPlan:
    """A work plan on the device, with the variant that it was cut for. `words` holds the plan's arrays one after
    another; `views` are parts of it."""

    num_tokens: int
    num_heads: int
    group: int
    table_width: int
    variant: Variant
    work: WorkPlan
    views: dict[str, Array]
    state_values: Array
    state_scalars: Array


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

    def plan(
        self,
        cache: KVView,
        tables: Array,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        num_heads: int,
        window: int | None = None,
    ) -> CudaAttentionPlan:
        """See `interface.Operations.plan_attention`. Everything goes up in one copy."""
        table, starts, contexts = check_attention(cache, tables, query_starts, context_lens, num_heads, window)
        if cache.head_dim > MAX_HEAD_DIM:
            raise KernelError(f"head_dim: {cache.head_dim} is more than {MAX_HEAD_DIM}, the most these kernels take")
        group = num_heads // cache.num_kv_heads
        variant = self._variant(cache, group, int(np.diff(starts).max(initial=0)))
        work = make_plan(table, starts, contexts, group, variant.rows, cache.block_size, window)
        counts = np.array([len(work.items), len(work.merges)], np.int32)
        parts = {
            "items": work.items,  # first: 16-byte aligned like the allocation
            "num_items": counts[:1],
            "num_merges": counts[1:],
            "tokens": work.tokens,
            "positions": work.positions,
            "state_starts": work.state_starts,
            "state_counts": work.state_counts,
            "merges": work.merges,
            "tables": table,
        }
        words = self._backend.upload(np.concatenate([np.ravel(part) for part in parts.values()]))
        ends = np.cumsum([part.size for part in parts.values()])
        views = {
            name: words[end - part.size : end] for (name, part), end in zip(parts.items(), ends.tolist(), strict=True)
        }
        states = max(1, work.num_states) * num_heads
        values = self._backend.empty((states * cache.head_dim,), np.float32)
        scalars = self._backend.empty((states * 2,), np.float32)
        return CudaAttentionPlan(
            int(starts[-1]), num_heads, group, table.shape[1], variant, work, views, values, scalars
        )

    def _variant(self, cache: KVView, group: int, most_queries: int) -> Variant:
        wanted = group * most_queries
        if self._uses_tensor_cores(cache, group):
            rows = TENSOR_ROWS[0] if wanted <= TENSOR_ROWS[0] else TENSOR_ROWS[1]
            return tensor_variant(cache.head_dim, cache.dtype, cache.block_size, rows, self._backend.shared_limit)
        rows = next((rows for rows in ROW_VARIANTS if rows >= wanted), ROW_VARIANTS[-1])
        return plain_variant(cache.head_dim, cache.dtype, cache.block_size, rows, self._backend.shared_limit)

    def _uses_tensor_cores(self, cache: KVView, group: int) -> bool:
        """By the device, the cache and the group: never by the call, since the two kernels differ in the last bits."""
        if self._backend.architecture < 80 or cache.dtype == "float32" or self._tensor_cores is False:
            return False
        return self._tensor_cores is True or group >= TENSOR_GROUP

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
        query_stride, out_stride = row_stride("query", query, expected), row_stride("out", out, expected)
        if not plan.num_tokens:
            return
        variant = plan.variant
        pools = [cache.pools[i] if i < len(cache.pools) else None for i in range(4)]
        if not 0 <= layer < cache.num_layers:
            raise KernelError(f"layer: {layer} is not in 0..{cache.num_layers - 1}")
        states = {
            "state_starts": plan.views["state_starts"],
            "state_counts": plan.views["state_counts"],
            "state_values": plan.state_values,
            "state_scalars": plan.state_scalars,
        }
        common = {"out": out, "out_stride": out_stride, "sinks": sinks}
        defines = {"HEAD_DIM": cache.head_dim, "STORAGE": STORAGE[cache.dtype]}
        if len(plan.work.items):
            most = self._backend.multiprocessors * WORKERS
            self._launch(
                variant.source, variant.kernel, (min(len(plan.work.items), most), cache.num_kv_heads), variant.threads,
                defines | self._layout(cache, pools) | variant.defines,
                variant.shared_bytes,
                items=plan.views["items"], num_items=plan.views["num_items"], tokens=plan.views["tokens"],
                positions=plan.views["positions"], tables=plan.views["tables"],
                table_width=plan.table_width,
                query=query, query_stride=query_stride,
                pool0=pools[0], pool1=pools[1], pool2=pools[2], pool3=pools[3], block_stride=cache.block_stride,
                layer_offset=layer * cache.layer_stride, kv_stride=cache.kv_stride, head_stride=cache.head_stride,
                block_size=cache.block_size, group=plan.group, window=plan.work.window,
                scale=scale / soft_cap if soft_cap else scale * LOG2E, cap=(soft_cap or 0.0) * LOG2E,
                **states, **common,
            )  # fmt: skip
        if len(plan.work.merges):
            self._launch(
                "merge_parts.cu", "merge_parts", (min(len(plan.work.merges), self._backend.multiprocessors * 8),), 128,
                {"HEAD_DIM": cache.head_dim},
                merges=plan.views["merges"], num_merges=plan.views["num_merges"], heads=plan.num_heads,
                **states, **common,
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
