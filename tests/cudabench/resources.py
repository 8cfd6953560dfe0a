"""The resource table of the kernels: registers, spills, shared memory, blocks and bytes in flight per multiprocessor.

`PYTHONPATH=.:tests python -m cudabench resources` compiles every build of `cupaged.kernels.cuda.variants` for every
architecture and writes tests/kernels/cuda/resources.tsv and docs/cuda-resources.md. Tests compare them with sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from cudabench.nvrtc import ARCHITECTURES, compile_cuda, library
from cudabench.occupancy import MULTIPROCESSORS, occupancy

if TYPE_CHECKING:
    from cupaged.kernels.cuda.variants import Build

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "kernels" / "cuda" / "resources.tsv"
PAGE = ROOT / "docs" / "cuda-resources.md"
PAGE_ARCHITECTURES = (80, 90)


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel as compiled for one architecture. Bytes; `stack`, `spilled` are of a thread, `shared` of a block."""

    arch: int
    kernel: str
    variant: str
    threads: int
    registers: int
    stack: int
    spilled: int  # stores and loads
    shared: int
    blocks: int  # that a multiprocessor holds
    bound: str  # what keeps it from holding more
    in_flight: int  # on their way from global memory, all blocks of a multiprocessor together

    @property
    def key(self) -> tuple[int, str, str]:
        return self.arch, self.kernel, self.variant


def builds(arch: int) -> list[Build]:
    """What is launched on a device of this architecture."""
    from cupaged.kernels.cuda import variants

    return list(variants.builds(arch, MULTIPROCESSORS[arch].shared_block))


def row_of(build: Build, arch: int) -> Row:
    """Compile and tabulate. BenchError, BenchMissing: see `compile_cuda`."""
    from cupaged.kernels.cuda import sources

    path = sources.FOLDER / build.source
    compiled = compile_cuda(path, arch=arch, defines=build.defines, options=sources.NVRTC_OPTIONS)
    found = compiled.resources[build.kernel]
    shared = found.static_shared + build.shared_bytes
    held = occupancy(arch, build.threads, found.registers, shared)
    return Row(
        arch, build.kernel, build.label, build.threads, found.registers, found.stack,
        found.spill_stores + found.spill_loads, shared, held.blocks, held.bound, held.blocks * build.in_flight,
    )  # fmt: skip


def all_rows(architectures: Iterable[int] = ARCHITECTURES) -> Iterator[Row]:
    for arch in architectures:
        seen = set()
        for build in builds(arch):
            row = row_of(build, arch)
            if row.key not in seen:  # a build of two data types may be one to the compiler's eye
                yield row
            seen.add(row.key)


def to_tsv(rows: Iterable[Row], version: str) -> str:
    head = "\t".join(field.name for field in fields(Row))
    body = "".join("\t".join(str(value) for value in astuple(row)) + "\n" for row in rows)
    return f"# NVRTC {version}\n{head}\n{body}"


def read_table() -> tuple[str, dict[tuple[int, str, str], Row]]:
    """(NVRTC's version, rows by key) of the committed table."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = {}
    for line in lines[2:]:
        values = line.split("\t")
        numbers = [
            value if field.type == "str" else int(value) for value, field in zip(values, fields(Row), strict=True)
        ]
        row = Row(*numbers)  # type: ignore[arg-type]
        rows[row.key] = row
    return lines[0].removeprefix("# NVRTC "), rows


def to_page(rows: Iterable[Row], version: str) -> str:
    """docs/cuda-resources.md from the table's rows."""
    table = list(rows)
    parts = [
        "# What the CUDA kernels take",
        "",
        f"Compiled by NVRTC {version}, as `python -m cudabench resources` wrote it down (docs/cuda-bench.md); a test",
        "compares. Blocks: what one multiprocessor holds, and what keeps it from holding more. In flight: bytes of K",
        "and V on their way from memory, all blocks of a multiprocessor together. Other architectures are in",
        "`tests/kernels/cuda/resources.tsv`. No figure here was measured on a GPU.",
    ]
    for arch in PAGE_ARCHITECTURES:
        parts += ["", f"## sm_{arch}", ""]
        parts += ["| kernel | variant | threads | registers | spilled | shared, bytes | blocks | in flight, KiB |"]
        parts += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
        for row in (row for row in table if row.arch == arch):
            flight = f"{row.in_flight / 1024:.0f}" if row.in_flight else ""
            cells = (row.kernel, row.variant, row.threads, row.registers, row.spilled, f"{row.shared:,}",
                     f"{row.blocks} ({row.bound})", flight)  # fmt: skip
            parts.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(parts) + "\n"


def write() -> None:
    """Both files, from the sources."""
    rows = list(all_rows())
    TABLE.write_text(to_tsv(rows, library()[1]), encoding="utf-8")
    PAGE.write_text(to_page(rows, library()[1]), encoding="utf-8")
