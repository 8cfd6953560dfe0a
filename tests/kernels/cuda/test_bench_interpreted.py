"""The kernels with inline asm (mma, ldmatrix, cp.async) as NVRTC compiled them: their PTX gives the right numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench_support import need_emulator, need_nvrtc
from emulated import emulated_operations
from interpreted import interpreted_operations
from kernel_support import paged, queries_for

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
