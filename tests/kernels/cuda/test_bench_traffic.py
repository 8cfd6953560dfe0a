"""Sectors of global memory and conflicts of shared banks are counted as on a GPU; those of attention too."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from bench_support import need_emulator
from cudabench import TrafficReport, emulate
from emulated import emulated_operations
from kernel_support import NumpyDevice, paged, queries_for
from test_bench_faults import PLANTED, kernel_of, run_pipeline

from cupaged.kernels.cuda import sources

pytestmark = need_emulator
SOURCE = Path(PLANTED).with_name("traffic.cu")


def line_with(words: str) -> str:
    lines = SOURCE.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if words in line]
    return f"traffic.cu:{number}"


@pytest.fixture(scope="module")
def global_report() -> TrafficReport:
    memory = np.zeros(1024 + 32 + 8, np.float32)  # numpy aligns to 16 bytes only, a GPU's allocator to 256
    start = -memory.ctypes.data // 4 % 8
    x, y = memory[start : start + 1024], memory[start + 1024 : start + 1056]
    report = emulate(SOURCE, "global_loads")((1,), (32,), (x, y), check="traffic")
    assert report is not None
    return report


@pytest.mark.parametrize(
    ("words", "requests", "sectors", "efficiency"),
    [
        ("sum = x[i];", 1, 4, 1.0),
        ("x[64 + 2 * i]", 1, 8, 0.5),
        ("x[256 + 8 * i]", 1, 32, 0.125),
        ("x[1];", 1, 1, 0.125),
        ("x + 4 * i", 1, 16, 1.0),
        ("if (i & 1)", 1, 4, 0.5),
        ("x[32 * k + i]", 3, 12, 1.0),
    ],
)
def test_sectors_of_global_loads(
    global_report: TrafficReport, words: str, requests: int, sectors: int, efficiency: float
) -> None:
    (line,) = global_report.of("global read", line_with(words))
    assert (line.requests, line.moved, line.efficiency) == (requests, sectors, efficiency)


def test_sectors_of_a_global_store(global_report: TrafficReport) -> None:
    (line,) = global_report.of("global write")
    assert (line.place.rpartition("/")[2], line.moved) == (line_with("y[i] = sum + four"), 4)


@pytest.mark.parametrize(
    ("words", "passes", "conflicts"),
    [
        ("rows[i][3]", 32, 31),
        ("padded[i][3]", 1, 0),
        ("rows[0][3]", 1, 0),
        ("rows[i / 2][i % 2]", 16, 15),
        ("&rows[i][0]", 32, 28),
        ("&wide[i][0]", 4, 0),
    ],
)
def test_bank_conflicts_of_shared_loads(words: str, passes: int, conflicts: int) -> None:
    report = emulate(SOURCE, "shared_loads")((1,), (32,), (np.zeros(32, np.float32),), check="traffic")
    assert report is not None
    (line,) = report.of("shared read", line_with(words))
    assert (line.moved, line.conflicts) == (passes, conflicts)
    assert report.conflicts(line_with("// no conflict")) == 0


def test_bank_conflicts_of_ldmatrix() -> None:
    report = emulate(SOURCE, "matrix_loads")((1,), (32,), (np.zeros(32, np.uint32),), check="traffic")
    assert report is not None
    (line,) = report.of("shared read", "planted.cuh")  # both stand in the wrapper: 32 passes and 4
    assert (line.requests, line.moved, line.ideal) == (2, 36, 8)


def test_bytes_of_cp_async_under_way() -> None:
    kernel = kernel_of("pipeline")
    x, y = np.zeros(256, np.float32), np.zeros(256, np.float32)
    report = kernel((1,), (16,), (x, y, np.int32(4)), check="traffic")
    assert report is not None
    assert report.async_bytes == 2 * 64 * 4  # two stages
    np.testing.assert_array_equal(*run_pipeline(kernel))


def lines_of(file: str, function: str) -> range:
    """Line numbers of a function of the CUDA sources, from its name to its closing brace."""
    lines = sources.text(file).splitlines()
    first = next(i for i, line in enumerate(lines, start=1) if re.match(rf"\S.* {function}\(", line))
    return range(first, next(i for i, line in enumerate(lines, start=1) if i > first and line == "}"))


@pytest.mark.parametrize(("dim", "limit"), [(128, 163), (256, 99)], ids=["whole rows", "rows in pieces"])
@pytest.mark.parametrize(
    ("dtype", "group", "kernel", "loop"),
    [
        (
            "float16",
            1,
            "paged_attention",
            {"multiply_slice": "paged_attention.cu", "weigh_slice": "paged_attention.cu"},
        ),
        (
            "bfloat16",
            4,
            "paged_attention_tensor",
            {"load_matrices": "tensor.cuh", "load_matrices_transposed": "tensor.cuh"},
        ),
    ],
)
def test_decode_reads_whole_sectors_and_its_loop_has_no_bank_conflicts(
    dtype: str, group: int, kernel: str, loop: dict[str, str], dim: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = emulated_operations(shared_limit=limit << 10)
    monkeypatch.setattr(NumpyDevice, "empty", lambda self, shape, kind: ops.backend.empty(shape, kind))  # aligned
    contexts = [300, 150]
    problem = paged(ops, contexts, kv_heads=2, dim=dim, dtype=dtype)
    ops.backend.check = "traffic"
    problem.run(queries_for([1, 1], 2 * group, dim))
    (report,) = (report for name, report in ops.backend.reports if name == kernel)
    (keys_and_values,) = report.of("global read", "common.cuh")  # copy16
    assert keys_and_values.bytes == sum(contexts) * 2 * 2 * dim * 2  # K and V of two heads, each byte once
    assert keys_and_values.efficiency >= 0.95
    for function, file in loop.items():
        numbers = lines_of(file, function)
        lines = [line for line in report.of("shared") if line.place.partition(file + ":")[2] in map(str, numbers)]
        assert sum(line.requests for line in lines) > 100
        assert [line for line in lines if line.conflicts] == []
    assert report.conflicts("common.cuh") == 0  # the copies' stores
    assert report.async_bytes >= 40 << 10
