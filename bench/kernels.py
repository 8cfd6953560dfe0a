"""The CPU kernels against this machine's roofs, measured in the same rounds. `cupaged bench kernels`.

A kernel bound by memory is given in GB/s and as a share of the read bandwidth that the same threads reach; one bound by
arithmetic in GFLOP/s and as a share of the multiply-adds that they reach. Matrices and contexts are cycled through more
memory than the caches hold where the real use does so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cupaged.bench.roofs import Roofs
from cupaged.bench.timing import interleaved
from cupaged.cache import PagedKVCache
from cupaged.device.cpu import CpuDevice
from cupaged.kernels.interface import STORAGE_BYTES

FAR = 192 << 20  # bytes to cycle through so that nothing is found in a cache


@dataclass(frozen=True, slots=True)
class Result:
    """One row. rate in `unit` (GB/s or GFLOP/s), roof in the same unit, both medians of the same rounds."""

    kernel: str
    case: str
    rate: float
    roof: float
    unit: str

    @property
    def share(self) -> float:
        return self.rate / self.roof


@dataclass(frozen=True, slots=True)
class _Weights:
    shape: tuple[int, int]
    dtype: str = "F32"

    def float32(self, start: int, stop: int) -> Any:
        rng = np.random.default_rng(start)
        return rng.standard_normal((stop - start, self.shape[1]), dtype=np.float32)

    def blocks(self, start: int, stop: int) -> Any | None:
        return None

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self,)


def _cycle(runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
    state = {"next": 0}

    def run() -> None:
        runs[state["next"] % len(runs)]()
        state["next"] += 1

    return run


def _against(roofs: Roofs, kind: str, amount: float, run: Callable[[], None], seconds: float) -> tuple[float, float]:
    """(rate, roof) in giga-units a second."""
    if kind == "GB/s":
        nbytes = int(min(max(amount, 16 << 20), roofs.buffer_bytes))
        took, base = interleaved([run, lambda: roofs.read(nbytes)], seconds)
        return amount / took / 1e9, (nbytes >> 20 << 20) / base / 1e9
    took, base = interleaved([run, lambda: roofs.multiply_add(16)], seconds)
    return amount / took / 1e9, roofs.flops(16) / base / 1e9


def bench_matmul(device: CpuDevice, roofs: Roofs, seconds: float) -> Iterator[Result]:
    """Decode (1 row), batches and prompts, on a small model's shapes and one of a 7B model's."""
    ops = device.ops
    for dtype in ("float32", "float16", "bfloat16"):
        for rows, cols in ((3072, 576), (576, 1536), (4096, 4096)):
            size = rows * cols * STORAGE_BYTES[dtype]
            copies = max(1, FAR // size)
            weights = [ops.matrix(_Weights((rows, cols)), dtype) for _ in range(min(copies, 48))]  # type: ignore[arg-type]
            for count in (1, 4, 16, 64, 512):
                if count != 1 and dtype == "bfloat16":
                    continue
                x = np.random.default_rng(0).standard_normal((count, cols), dtype=np.float32)
                out = np.empty((count, rows), np.float32)
                runs = [partial(ops.matmul, x, w, out) for w in weights]
                amount, unit = (size, "GB/s") if count < 16 else (2.0 * count * rows * cols, "GFLOP/s")
                rate, roof = _against(roofs, unit, amount, _cycle(runs), seconds)
                yield Result("matmul", f"{dtype} {cols}x{rows}, {count} rows", rate, roof, unit)


def bench_attention(device: CpuDevice, roofs: Roofs, seconds: float) -> Iterator[Result]:
    """Decode over long contexts (bound by memory) and a prompt chunk (bound by arithmetic), scattered blocks."""
    ops = device.ops
    for dtype in ("float32", "float16", "bfloat16"):
        for kv_heads, group, dim in ((3, 3, 64), (8, 4, 128)):
            for context, queries in ((256, 1), (1024, 1), (4096, 1), (1024, 512)):
                if queries > 1 and dtype == "bfloat16":
                    continue
                per_token = 2 * kv_heads * dim * STORAGE_BYTES[dtype]
                sequences = 1 if queries > 1 else max(1, FAR // (per_token * context) // 8 * 8)
                blocks = sequences * context // 16
                cache = PagedKVCache(blocks, 16, kv_heads, dim, 1, dtype, device)  # type: ignore[arg-type]
                _fill(cache)
                order = np.random.default_rng(1).permutation(blocks).astype(np.int32).reshape(sequences, -1)
                heads = kv_heads * group
                batch = 1 if queries > 1 else max(1, sequences // 8)
                starts = [i * queries for i in range(batch + 1)]
                query = np.random.default_rng(2).standard_normal((batch * queries, heads, dim), dtype=np.float32)
                out = np.empty_like(query)
                runs = []
                for first in range(0, sequences - batch + 1, batch):
                    rows = order[first : first + batch]
                    plan = ops.plan_attention(cache.view, rows, starts, [context] * batch, heads)
                    runs.append(partial(ops.paged_attention, query, cache.view, 0, plan, out, 0.1))
                if queries == 1:
                    amount, unit = float(batch * context * per_token), "GB/s"
                else:
                    seen = queries * context - queries * (queries - 1) / 2
                    amount, unit = 4.0 * seen * heads * dim, "GFLOP/s"
                rate, roof = _against(roofs, unit, amount, _cycle(runs), seconds)
                case = f"{dtype} {heads}/{kv_heads} heads of {dim}, context {context}"
                kernel = "decode" if queries == 1 else "prefill"
                yield Result(kernel, f"{case}, {queries * batch} queries", rate, roof, unit)


def _fill(cache: PagedKVCache) -> None:
    values = np.random.default_rng(3).standard_normal(1 << 16, dtype=np.float32)
    pool = cache.view.pools[0]
    assert pool is not None
    stored = values.view(np.uint32) >> 16 if cache.dtype == "bfloat16" else values
    pool[...] = np.resize(stored.astype(pool.dtype), pool.shape)


def run_all(threads: int | None, seconds: float, only: str | None = None) -> Iterator[Result]:
    """All rows, as they are measured; `only` "matmul" or "attention". `seconds` for each row."""
    device = CpuDevice(threads)
    try:
        roofs = Roofs(device.team)
        for name, bench in (("matmul", bench_matmul), ("attention", bench_attention)):
            if only in (None, name):
                yield from bench(device, roofs, seconds)
    finally:
        device.close()
