"""The NumPy functions behind launches do what the CUDA C does: the same operations through both, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cudabench import BenchMissing
from cudabench.build import compiler

from cupaged.cache import PagedKVCache
from cupaged.kernels.cuda import sources
from cupaged.kernels.cuda.backend import RuntimeBackend
from cupaged.kernels.cuda.operations import CudaOperations
from cupaged.kernels.interface import SampleRows
from cupaged.model.quants import FORMATS
from streamdouble import StreamDouble
from streamdouble.launches import FUNCTIONS

try:
    compiler()
except BenchMissing as missing:
    pytest.skip(f"CUDA C on the CPU: {missing}", allow_module_level=True)

QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
SCALES_AT = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}


class Rows:
    """A weight as a file has it: float32 rows, or rows of blocks of random bits with scales of ordinary size."""

    def __init__(self, kind: str, rows: int, cols: int) -> None:
        rng = np.random.default_rng(rows)
        self.shape, self.dtype, self.parts = (rows, cols), kind, (self,)
        if kind == "F32":
            self.wide, self.raw = rng.standard_normal((rows, cols), np.float32), None
            return
        from cupaged.model.quants import dequantise

        size = FORMATS[kind]
        raw = rng.integers(0, 256, (rows, cols // size.block, size.block_bytes), np.uint8)
        for at in SCALES_AT.get(kind, (0,)):
            scales = rng.uniform(-0.02, 0.02, raw.shape[:2]).astype(np.float16)
            raw[..., at : at + 2] = scales[..., None].view(np.uint8)
        self.raw = raw.reshape(rows, -1)
        self.wide = dequantise(kind, self.raw)

    def float32(self, start: int, stop: int) -> np.ndarray:
        return self.wide[start:stop]

    def blocks(self, start: int, stop: int) -> np.ndarray | None:
        return None if self.raw is None else self.raw[start:stop]


class Bench:
    """Operations on a double, and what they gave."""

    def __init__(self, kernels: str) -> None:
        self.gpu = StreamDouble(1, "at once", kernels, gemm=True)
        self.backend = RuntimeBackend(self.gpu)
        self.ops: Any = CudaOperations(self.backend, fixed_block_size=False)
        self.results: list[np.ndarray] = []
        self.unified, self.k_transposed = False, False

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Zeros: what a kernel must leave alone is compared, too."""
        return self.up(np.zeros(shape, dtype))

    empty_host = empty

    def up(self, array: Any, dtype: Any = None) -> Any:
        return self.backend.upload(np.ascontiguousarray(array, dtype))

    def note(self, *arrays: Any) -> None:
        self.results += [self.backend.download(array) for array in arrays]


RNG = np.random.default_rng(0)
X = RNG.standard_normal((11, 96), np.float32)
WIDE = RNG.standard_normal((11, 256), np.float32)


def norms(bench: Bench) -> None:
    weight, bias = bench.up(RNG_WEIGHT), bench.up(RNG_WEIGHT[::-1])
    for residual in (None, bench.up(X[::-1])):
        for name, more in (("rms_norm", ()), ("layer_norm", (bias,)), ("layer_norm", (None,))):
            out = bench.empty(X.shape, np.float32)
            getattr(bench.ops, name)(bench.up(X), weight, *more, 1e-5, out, residual)
            bench.note(out, *([] if residual is None else [residual]))
    heads = bench.up(X)
    bench.ops.head_norm(heads.reshape(11, 3, 32)[:, 1:], weight[:32], 1e-5)
    bench.note(heads)


RNG_WEIGHT = RNG.standard_normal(96, np.float32)


def elements(bench: Bench) -> None:
    x, y = bench.up(X), bench.up(X[::-1])
    bench.ops.add(x, y)
    taken = bench.empty((4, 96), np.float32)
    bench.ops.take_rows(x, bench.up([10, 0, 3, 3], np.int32), taken)
    bench.note(x, taken)
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        out = bench.empty((11, 48), np.float32)
        bench.ops.gated_activation(bench.up(X), activation, out)
        bench.note(out)
    table = np.concatenate([np.cos(X[:, :12]), np.sin(X[:, :12])], axis=1)
    heads = bench.up(X)
    positions = bench.up([0, 5, -1, 11, *range(7)], np.int32)
    bench.ops.rope(heads.reshape(11, 3, 32)[:, :2], positions, bench.up(table))
    bench.note(heads)


def products(kind: str) -> Callable[[Bench], None]:
    """One row, a few, and many rows (through the library) by a matrix of a kind."""

    def run(bench: Bench) -> None:
        source = Rows(kind if kind in QUANTISED else "F32", 37, 256)
        matrix = bench.ops.matrix(source, "quantised" if kind in QUANTISED else kind)
        bias = bench.up(np.linspace(-1, 1, 37, dtype=np.float32))
        for count in (1, 5, 11):
            for given in (None, bias):
                out = bench.empty((count, 37), np.float32)
                scales = 10.0 ** np.arange(-6, 5)[:count, None]
                bench.ops.matmul(bench.up(WIDE[:count] * scales, np.float32), matrix, out, given)
                bench.note(out)
        out = bench.empty((4, 256), np.float32)
        bench.ops.embed(bench.up([36, 0, -1, 37], np.int32), matrix, out, 0.5)
        bench.note(out)
        for dtype, stored in (("float32", np.float32), ("float16", np.float16), ("bfloat16", np.uint16)):
            rows = bench.empty((5, 256), stored)
            bench.ops.dequantise(matrix, 3, rows, dtype)
            bench.note(rows)

    return run


def attention(dtype: str, layout: Any, **options: Any) -> Callable[[Bench], None]:
    """Writing, copying and reading of two pools by prompts and decodes, in one part and in several, 16 heads of 32."""

    def run(bench: Bench) -> None:
        rng = np.random.default_rng(5)
        heads = options.get("heads", 4)
        cache = PagedKVCache(90, 16, 2, 32, 2, dtype, bench, layout, host_blocks=90 * (layout == "block_major"))
        contexts, counts = [600, 37, 0, 12, 530], [1, 20, 1, 12, 3]
        tables, frame = np.full((5, 38), -1, np.int32), 0
        for row, context in enumerate(contexts):
            blocks = -(-context // 16)
            tables[row, :blocks] = range(frame, frame + blocks)
            frame += blocks
            slots = np.array([tables[row, at // 16] * 16 + at % 16 for at in range(context)] + [-1], np.int64)
            both = rng.standard_normal((2, context + 1, 2, 32), np.float32)
            for layer in range(2):
                bench.ops.write_kv(bench.up(both[0]), bench.up(both[1]), cache.view, layer, bench.up(slots))
        bench.ops.copy_blocks(cache.view, [0, 5], [88, 89])
        tables[0, 0], tables[0, 5] = 88, 89
        if cache.reads_in_place:
            host, device = bench.gpu.stream("to_host"), cache.pieces(3)[0]
            bench.gpu.wait(host, bench.gpu.record(bench.backend.stream))
            bench.gpu.copy(cache.pieces(3 | 1 << 28)[0], device, host)
            bench.gpu.synchronize()
            tables[0, 3] |= 1 << 28
        query = bench.up(rng.standard_normal((sum(counts), heads + 1, 32), np.float32))[:, :heads]
        starts = np.cumsum([0, *counts]).tolist()
        plan = bench.ops.plan_attention(cache.view, tables, starts, contexts, heads, options.get("window"))
        out = bench.empty((sum(counts), heads, 32), np.float32)
        sinks = bench.up(np.linspace(-2, 2, heads), np.float32) if options.get("sinks") else None
        bench.ops.paged_attention(query, cache.view, 1, plan, out, 0.2, options.get("soft_cap"), sinks)
        bench.note(cache.array, out)

    return run


def rotated_writes(bench: Bench) -> None:
    cache = PagedKVCache(4, 8, 3, 32, 1, "float16", bench)
    heads = bench.up(X.reshape(11, 3, 32))
    table = np.concatenate([np.cos(X[:, :12]), np.sin(X[:, :12])], axis=1)
    slots, positions = bench.up(range(3, 14), np.int64), bench.up(range(11), np.int32)
    bench.ops.write_kv(heads, heads, cache.view, 0, slots, positions, bench.up(table))
    bench.note(cache.array)


def samples(bench: Bench) -> None:
    logits = np.random.default_rng(3).standard_normal((8, 300), np.float32) * 3
    logits[3, [7, 9]] = 20
    settings = SampleRows(
        temperature=[0.0, 1.0, 0.7, 0.0, 2.0, 1.0, 1.0, 0.5], top_k=[0, 0, 5, 0, 40, 1, 0, 0],
        top_p=[1.0, 1.0, 1.0, 1.0, 0.8, 1.0, 0.0, 0.9], min_p=[0.0, 0.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.2],
        seed=[0, 1, -2, 3, 4, 5, 6, 7], sample=list(range(8)), position=[5] * 8,
    )  # fmt: skip
    bench.results.append(np.array(bench.ops.sample(bench.up(logits), settings)))
    logits[[1, 5], [0, 299]] = np.nan, np.inf
    bench.results.append(bench.ops.broken_rows(bench.up(logits)))


CASES: dict[str, Callable[[Bench], None]] = {
    "norms": norms,
    "elements": elements,
    "samples": samples,
    "rotated writes": rotated_writes,
    **{f"products {kind}": products(kind) for kind in ("float32", "float16", "bfloat16", *QUANTISED)},
    "attention": attention("float32", "block_major"),
    "attention, window": attention("float32", "block_major", window=100, sinks=True),
    "attention, layers": attention("float16", "layer_major", soft_cap=5.0),
    "attention, tensor cores": attention("bfloat16", "block_major", heads=8, sinks=True),
}


@pytest.mark.parametrize("case", CASES)
def test_numpy_and_cuda_c_do_the_same_behind_launches(case: str) -> None:
    benches = [Bench("reference"), Bench("emulated")]
    for bench in benches:
        CASES[case](bench)
        bench.gpu.synchronize()
    mine, theirs = (bench.results for bench in benches)
    assert len(mine) == len(theirs) > 0
    for a, b in zip(mine, theirs, strict=True):
        if a.dtype.kind == "f":
            close = 1e-2 if "tensor" in case else 1e-3 if a.dtype == np.float16 else 2e-5
            np.testing.assert_allclose(a, b, rtol=close, atol=close * max(1e-3, float(np.nanmax(np.abs(b), initial=0))))
        elif a.dtype == np.uint16:  # bfloat16 of values that differ in float32's last bits: an ulp at most
            assert np.abs(a.astype(int) - b.astype(int)).max() <= 1
        else:
            assert np.array_equal(a, b)
    assert benches[0].gpu.launched == benches[1].gpu.launched


def test_every_kernel_has_a_function_and_is_launched_by_a_case() -> None:
    kernels = {kernel for source in sources.source_names() for kernel in sources.kernels(source)}
    assert set(FUNCTIONS) == kernels
    bench = Bench("reference")
    for case in CASES.values():
        case(bench)
    assert set(bench.gpu.launched) == kernels
