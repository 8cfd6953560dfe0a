"""What the kernels take, as committed in resources.tsv, is what NVRTC makes of the sources: a diff shows changes."""

from __future__ import annotations

import pytest
from bench_support import need_nvrtc
from cudabench import BenchError, resources
from cudabench.nvrtc import ARCHITECTURES, compile_cuda, library, resources_of
from cudabench.occupancy import occupancy
from cudabench.resources import Row

VERSION, TABLE = resources.read_table()
REGENERATE = "; `PYTHONPATH=.:tests python -m cudabench resources` writes the table anew"
# Compiled by default: each kernel once, and attention of the most usual heads. The slow test compiles everything.
USUAL = ("128 float16, 1 rows", "128 bfloat16, 16 rows", "64 float16, 8 rows")


def chosen(arch: int) -> list[resources.Build]:
    first: dict[str, resources.Build] = {}
    for build in resources.builds(arch):
        if build.label in USUAL:
            first[build.kernel + build.label] = build
        elif not build.kernel.startswith("paged_attention"):
            first.setdefault(build.kernel, build)
    return list(first.values())


@need_nvrtc
@pytest.mark.parametrize("arch", [80, 90])
def test_usual_builds_take_what_the_table_says(arch: int) -> None:
    assert library()[1] == VERSION, "NVRTC has another version" + REGENERATE
    rows = [resources.row_of(build, arch) for build in chosen(arch)]
    assert len(rows) > 15
    assert rows == [TABLE.get(row.key) for row in rows], REGENERATE


@need_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_builds_take_what_the_table_says(arch: int) -> None:
    rows = list(resources.all_rows([arch]))
    assert rows == [row for row in TABLE.values() if row.arch == arch], REGENERATE


def test_the_table_has_every_build_of_every_architecture() -> None:
    expected = {(arch, build.kernel, build.label) for arch in ARCHITECTURES for build in resources.builds(arch)}
    assert set(TABLE) == expected, REGENERATE


def test_no_kernel_spills_registers() -> None:
    """Left to itself ptxas spills a few bytes to fit more blocks: the kernels' launch bounds say how many to aim at."""
    assert {row.key: row.spilled for row in TABLE.values() if row.spilled} == {}


def test_a_multiprocessor_holds_every_kernel() -> None:
    assert [row for row in TABLE.values() if row.blocks < 1] == []


def test_decode_keeps_40_KiB_on_their_way() -> None:
    """Prefill too, and head_dims to 256, on devices that give a block 99 KiB as on those that give it more."""
    rows = [row for row in TABLE.values() if row.kernel.startswith("paged_attention") and row.arch >= 80]
    assert len(rows) > 50
    assert {row.arch for row in rows if row.variant.startswith("256 ")} == {80, 86, 89, 90, 100, 120}
    assert [row for row in rows if row.in_flight < 40 << 10] == []


def test_the_page_shows_the_table() -> None:
    assert resources.PAGE.read_text(encoding="utf-8") == resources.to_page(TABLE.values(), VERSION), REGENERATE


def test_the_log_of_ptxas_is_read() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 512 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 364 bytes cmem[0]
"""
    found = resources_of(log)
    assert (found["one"].registers, found["one"].spill_loads, found["one"].static_shared) == (32, 12, 512)
    assert (found["two"].registers, found["two"].stack, found["two"].static_shared) == (10, 0, 0)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "bound"),
    [
        (80, 128, 24, 0, 16, "threads"),  # 2048 threads
        (80, 32, 16, 0, 32, "blocks"),
        (80, 128, 128, 0, 4, "registers"),  # 4 warps of 4,096 registers: 16,384 of 65,536
        (80, 128, 32, 40 << 10, 4, "shared memory"),  # 41 KiB of 164
        (90, 128, 32, 40 << 10, 5, "shared memory"),  # 41 KiB of 228
        (86, 256, 32, 0, 6, "threads"),
        (75, 256, 32, 0, 4, "threads"),
        (120, 128, 32, 100 << 10, 0, "shared memory"),  # more than a block may have
    ],
)
def test_occupancy_follows_the_limits(
    arch: int, threads: int, registers: int, shared: int, blocks: int, bound: str
) -> None:
    found = occupancy(arch, threads, registers, shared)
    assert (found.blocks, found.bound) == (blocks, bound)


@need_nvrtc
def test_an_error_of_the_compiler_is_told_with_its_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    source = tmp_path_factory.mktemp("cuda") / "wrong.cu"
    source.write_text('extern "C" __global__ void wrong(float *y) {\n    y[0] = missing;\n}\n')
    with pytest.raises(BenchError, match=r"wrong.cu\(2\): error: identifier .missing. is undefined"):
        compile_cuda(source)


def test_rows_of_the_table_are_read_as_they_were_written() -> None:
    rows = list(TABLE.values())[:3]
    assert all(isinstance(row, Row) for row in rows)
    text = resources.to_tsv(TABLE.values(), VERSION)
    assert text == resources.TABLE.read_text(encoding="utf-8")
