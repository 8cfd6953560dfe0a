"""The kernels with inline asm (mma, ldmatrix, cp.async) as NVRTC compiled them: their PTX gives the right numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from bench_support import need_emulator, need_nvrtc
from cudabench.nvrtc import compile_cuda
from emulated import emulated_operations
from interpreted import interpreted_operations
from kernel_support import paged, queries_for

from cupaged.kernels.cuda import sources
from cupaged.kernels.cuda.variants import builds

pytestmark = [need_nvrtc, need_emulator]

# group, head_dim, dtype, contexts, queries of each, options, largest error
CASES: list[tuple[int, int, str, list[int], list[int], dict[str, Any], float]] = [
    (1, 64, "float16", [200, 17], [1, 1], {}, 1e-5),
    (2, 80, "bfloat16", [70], [3], {"window": 20}, 1e-5),
    (1, 64, "float32", [90], [5], {"soft_cap": 3.0}, 1e-5),
    (4, 64, "float16", [200, 17], [1, 1], {}, 1e-4),
    (4, 128, "bfloat16", [150, 40], [1, 9], {"window": 33}, 1e-4),
    (8, 80, "float16", [130], [6], {"soft_cap": 2.0}, 1e-4),
]


def options_of(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return {**options, "sinks": np.linspace(-1, 1, heads, dtype=np.float32)}


@pytest.mark.parametrize(
    ("group", "dim", "dtype", "contexts", "counts", "options", "error"),
    CASES,
    ids=[f"group{case[0]}-{case[1]}-{case[2]}" for case in CASES],
)
def test_attention_as_compiled(
    group: int, dim: int, dtype: str, contexts: list[int], counts: list[int], options: dict[str, Any], error: float
) -> None:
    queries = queries_for(counts, group, dim)
    problem = paged(interpreted_operations(), contexts, kv_heads=1, dim=dim, dtype=dtype, num_layers=1, layer=0)
    result = problem.run(queries, **options_of(options, group))
    assert np.abs(result - problem.expected(queries, **options_of(options, group))).max() < error
    kernels = {name for name, _ in problem.ops.backend.launches}
    assert ("paged_attention_tensor" if group >= 4 else "paged_attention") in kernels


HEADERS = sorted(path.name for path in sources.FOLDER.glob("*.cuh"))
EDGES = [15, 16, 17, 63, 64, 65, 511, 512, 513]  # contexts around blocks, tiles and parts
CHUNKS = [1, 2, 9, 1, 3, 1, 1, 1, 2]  # queries of each: decode and chunks that start anywhere, in one call
OPTIONS: list[dict[str, Any]] = [{}, {"window": 60}, {"soft_cap": 5.0}, {"window": 500}]


def edges() -> Iterator[tuple[int, int, str, int, int, dict[str, Any]]]:
    """head_dim, group, dtype, KV heads (1: multi-query), block size, options: each kernel at every head_dim, the rest
    in turns."""
    dims = (64, 80, 96, 128, 192, 256)
    storage = (("float16", (1, 2, 3)), ("float16", (4, 7, 8)), ("bfloat16", (7, 8, 4)))
    for turn, (dtype, groups) in enumerate(storage):
        for at, dim in enumerate(dims):
            group = groups[(at + at // 3) % 3]
            yield (
                dim,
                group,
                dtype,
                1 + (at + turn) % 2,
                (8, 16, 32, 64)[(at + turn) % 4],
                OPTIONS[(at + turn // 2) % 4],
            )


@pytest.mark.slow
def test_no_other_kernel_has_inline_asm_of_ours() -> None:
    """What the headers' asm() say, searched in the PTX of every source: another kernel with some wants tests here."""
    ours = {found for name in HEADERS for found in re.findall(r'asm volatile\("([\w.]+)', sources.text(name))}
    assert {instruction.split(".")[0] for instruction in ours} == {"cp", "mma", "ldmatrix"}
    found = set()
    for build in {build.source: build for build in builds(80, 163 << 10)}.values():
        path = sources.FOLDER / build.source
        compiled = compile_cuda(path, arch=80, defines=build.defines, options=sources.NVRTC_OPTIONS)
        if any(instruction in compiled.ptx for instruction in ours):
            found.add(build.source)
    assert found <= {"paged_attention.cu", "paged_attention_tensor.cu"} and len(found) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "group", "dtype", "kv_heads", "block_size", "options"), list(edges()), ids=lambda value: str(value)
)
def test_K02_edges_as_compiled(
    dim: int, group: int, dtype: str, kv_heads: int, block_size: int, options: dict[str, Any]
) -> None:
    """Against float64, with NaN in every slot that no context reaches: within the 2e-5 of the conformance suite."""
    heads = group * kv_heads
    queries = queries_for(CHUNKS, heads, dim)
    problem = paged(interpreted_operations(), EDGES, kv_heads=kv_heads, dim=dim, dtype=dtype, block_size=block_size)
    result = problem.run(queries, **options_of(options, heads))
    np.testing.assert_allclose(result, problem.expected(queries, **options_of(options, heads)), rtol=2e-5, atol=2e-5)
    kernels = {name for name, _ in problem.ops.backend.launches}
    assert ("paged_attention_tensor" in kernels) == (group >= 4)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "group"), [(64, 2), (128, 4)])
def test_K02_long_contexts_as_compiled(dim: int, group: int) -> None:
    """Up to 5,000 tokens, ten parts of attention, with a chunk that crosses a part's edge."""
    chunks = [1, 3, 1]
    queries = queries_for(chunks, group, dim)
    problem = paged(interpreted_operations(), [5000, 4098, 4999], kv_heads=1, dim=dim, dtype="float16", block_size=16)
    np.testing.assert_allclose(problem.run(queries), problem.expected(queries), rtol=2e-5, atol=2e-5)
    kernels = {name for name, _ in problem.ops.backend.launches}
    assert ("paged_attention_tensor" in kernels) == (group >= 4)


def test_both_instruments_store_the_same_keys_and_values() -> None:
    """write_kv has no approximate function, so that the two must agree in every bit."""
    pools = []
    for make in (interpreted_operations, emulated_operations):
        problem = paged(make(), [40], kv_heads=2, dim=64, dtype="bfloat16")
        pools.append(np.asarray(problem.cache.view.pools[0]))
    np.testing.assert_array_equal(*pools)


@pytest.mark.parametrize("arch", [75, 90])
def test_other_architectures_compute_the_same(arch: int) -> None:
    """Below sm_80 there is no cp.async and no mma; from sm_90 on the compiler may choose other instructions."""
    queries = queries_for([1], 4, 64)
    problem = paged(interpreted_operations(arch), [100], kv_heads=1, dim=64, dtype="float16", num_layers=1, layer=0)
    assert np.abs(problem.run(queries) - problem.expected(queries)).max() < 1e-4
