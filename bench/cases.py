"""One matrix product or one attention call of any shape, ready to be timed, with its bytes and operations.

Weights and contexts are cycled through more memory than the caches hold, as a model's are from one use to the next; and
small calls run as a decode step runs them, several in one captured list, so that no Python stands between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from cupaged.cache import PagedKVCache
from cupaged.device.cpu import CpuDevice
from cupaged.kernels.interface import QUANT_BLOCK, STORAGE_BYTES
from cupaged.model.quants import FORMATS

FAR = 192 << 20  # bytes to cycle through so that nothing is found in a cache
MAX_COPIES = 96  # of a small matrix: packing takes time
_LIST_BYTES, _LIST_OPERATIONS = 16 << 20, 5e8  # of one list: half a millisecond and more on two cores


@dataclass(frozen=True, slots=True)
class Case:
    """`run()` makes `calls` calls, each of which reads `nbytes` of weights or K/V and does `operations` (a product and
    an addition count as two); integer: of bytes, as dot products."""

    name: str
    run: Callable[[], None]
    calls: int
    nbytes: float
    operations: float
    integer: bool = False


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A WeightSource of random numbers, or of random blocks of a quantised format. Its values are of no account."""

    shape: tuple[int, int]
    dtype: str = "F32"

    def float32(self, start: int, stop: int) -> Any:
        rng = np.random.default_rng(start)
        return rng.standard_normal((stop - start, self.shape[1]), dtype=np.float32)

    def blocks(self, start: int, stop: int) -> Any:
        if FORMATS[self.dtype].block == 1:
            return None
        rng = np.random.default_rng(start)
        raw = rng.integers(0, 256, (stop - start, FORMATS[self.dtype].row_bytes(self.shape[1])), np.uint8)
        raw &= 0x3B  # a float16 of such bytes is below 1: no infinity, no NaN, wherever a format has its scales
        return raw

    @property
    def parts(self) -> tuple[RandomWeights, ...]:
        return (self,)


def matmul_case(device: CpuDevice, dtype: str, outputs: int, inputs: int, count: int) -> Case:
    """x [count, inputs] float32 by weights [outputs, inputs].

    dtype: how weights are kept, a storage type or a format of PACKED_BLOCK_BYTES. inputs: a multiple of
    `block_columns(dtype)`.
    """
    quantised = dtype not in STORAGE_BYTES
    source = RandomWeights((outputs, inputs), dtype if quantised else "F32")
    kept: Any = "quantised" if quantised else dtype
    first = device.ops.matrix(source, kept)
    copies = min(max(1, FAR // first.nbytes), MAX_COPIES)
    weights = [first, *(device.ops.matrix(source, kept) for _ in range(copies - 1))]
    x = np.random.default_rng(0).standard_normal((count, inputs), dtype=np.float32)
    out = np.empty((count, outputs), np.float32)
    runs = [partial(device.ops.matmul, x, weight, out) for weight in weights]
    name = f"{dtype} {outputs}x{inputs}, {count} row{'s' if count > 1 else ''}"
    operations = 2.0 * count * outputs * inputs
    return Case(name, *_captured(device, runs, first.nbytes, operations), first.nbytes, operations, quantised)


def block_columns(dtype: str) -> int:
    """What the inputs of a matrix of this type must be a multiple of."""
    return 1 if dtype in STORAGE_BYTES else max(QUANT_BLOCK, FORMATS[dtype].block)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Each of `sequences` has `context` tokens, the last `queries` of which ask; the first `shared` tokens, whole
    blocks, lie in the same blocks for all."""

    heads: int
    kv_heads: int
    head_dim: int
    context: int
    queries: int = 1
    sequences: int = 1
    shared: int = 0
    block_size: int = 16

    @property
    def name(self) -> str:
        text = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}, context {self.context}"
        if self.shared:
            text += f" ({self.shared} shared)"
        each = f"{self.queries} {'query' if self.queries == 1 else 'queries'}"
        return f"{text}, {each}" if self.sequences == 1 else f"{text}, {self.sequences} x {each}"


def attention_case(device: CpuDevice, dtype: str, shape: AttentionShape) -> Case:
    """Paged attention over scattered blocks of K/V kept as `dtype`. Bytes: K/V of all contexts, shared ones once."""
    per_token = 2 * shape.kv_heads * shape.head_dim * STORAGE_BYTES[dtype]
    stored = shape.shared + shape.sequences * (shape.context - shape.shared)
    batches = max(1, FAR // (per_token * stored)) if shape.queries == 1 else 1
    own = -(-(shape.context - shape.shared) // shape.block_size)
    front = shape.shared // shape.block_size
    blocks = batches * (front + shape.sequences * own)
    cache = PagedKVCache(
        blocks, shape.block_size, shape.kv_heads, shape.head_dim, 1, dtype, device  # type: ignore[arg-type]
    )  # fmt: skip
    _fill(cache)
    order = np.random.default_rng(1).permutation(blocks).astype(np.int32).reshape(batches, -1)
    starts = [i * shape.queries for i in range(shape.sequences + 1)]
    rng = np.random.default_rng(2)
    query = rng.standard_normal((shape.sequences * shape.queries, shape.heads, shape.head_dim), dtype=np.float32)
    out = np.empty_like(query)
    runs = []
    for refs in order:
        fronts = np.broadcast_to(refs[:front], (shape.sequences, front))
        tables = np.concatenate([fronts, refs[front:].reshape(shape.sequences, own)], axis=1)
        plan = device.ops.plan_attention(cache.view, tables, starts, [shape.context] * shape.sequences, shape.heads)
        runs.append(partial(device.ops.paged_attention, query, cache.view, 0, plan, out, 0.1))
    seen = shape.queries * shape.context - shape.queries * (shape.queries - 1) / 2
    operations = 4.0 * seen * shape.sequences * shape.heads * shape.head_dim
    nbytes = float(stored * per_token)
    return Case(f"{dtype} {shape.name}", *_captured(device, runs, nbytes, operations), nbytes, operations)


def _captured(
    device: CpuDevice, calls: Sequence[Callable[[], None]], nbytes: float, operations: float
) -> tuple[Callable[[], None], int]:
    """(function that makes the next few of `calls` in one list, going round; how many)."""
    together = int(max(1, min(len(calls), _LIST_BYTES // nbytes, _LIST_OPERATIONS // operations)))
    lists: list[tuple[Any, Any]] = []
    for start in range(0, len(calls) - together + 1, together):
        with device.capture() as step:
            for call in calls[start : start + together]:
                call()
        lists.append((step, calls))  # a list has addresses alone: the arrays live as long as the calls do
    rest = cycle(lists)
    return lambda: next(rest)[0].replay(), together


def _fill(cache: PagedKVCache) -> None:
    values = np.random.default_rng(3).standard_normal(1 << 16, dtype=np.float32)
    pool = cache.view.pools[0]
    assert pool is not None
    stored = values.view(np.uint32) >> 16 if cache.dtype == "bfloat16" else values
    pool[...] = np.resize(stored.astype(pool.dtype), pool.shape)
