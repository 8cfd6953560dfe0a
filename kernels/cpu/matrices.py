"""Weight matrices as the CPU kernels read them, and how they are packed from their sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.cpu.arrays import Arena, address
from cupaged.kernels.cpu.exact_layout import EXACT_LAYOUT_OF, OWN_PACKERS
from cupaged.kernels.cpu.executor import Records, Team
from cupaged.kernels.cpu.quant_layout import LAYOUT_OF, LAYOUTS
from cupaged.kernels.cpu.quant_layout import PANEL as QUANT_PANEL
from cupaged.kernels.interface import (
    QUANT_BLOCK,
    STORAGE_BYTES,
    Array,
    Matrix,
    WeightSource,
    WeightType,
    exact_type,
    kept_type,
    packed_bytes,
)

PANEL = 64
STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights in panels of `dtype`: a storage type, [ceil(rows/64)][cols][64] (gemm.py; bfloat16 as uint16), or a
    quantised format, in the records of quant_layout.py. exact: products are those of the float32 values."""

    rows: int
    cols: int
    dtype: str
    panels: Array
    address: int
    exact: bool = False

    @property
    def nbytes(self) -> int:
        return int(self.panels.nbytes)

    @property
    def layout(self) -> str | None:
        """A key of `quant_layout.LAYOUTS`; None of a storage type."""
        return (EXACT_LAYOUT_OF if self.exact else LAYOUT_OF).get(self.dtype)

    @property
    def quantises(self) -> bool:
        """Products are of integers: their input is quantised first."""
        return not self.exact and self.dtype in LAYOUT_OF

    def outputs(self, begin: int, end: int) -> PackedMatrix:
        """Some of the rows; `begin` is that of a panel of a quantised format."""
        if (begin, end) == (0, self.rows):
            return self
        bytes_a_panel = LAYOUTS[LAYOUT_OF[self.dtype]].panel_bytes(self.cols // QUANT_BLOCK)
        return replace(self, rows=end - begin, address=self.address + begin // QUANT_PANEL * bytes_a_panel)


@dataclass(frozen=True, slots=True)
class JoinedMatrix:
    """Parts with equal columns, rows in order, each packed in its own type."""

    parts: tuple[PackedMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def dtype(self) -> str:
        return "+".join(part.dtype for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def plain_outputs(rows: int, precise: bool, precise_from: int) -> int:
    """How many of a part's outputs, the first ones, are not precise: whole panels of those before `precise_from`."""
    if not precise or precise_from >= rows:
        return rows
    return max(0, precise_from) // QUANT_PANEL * QUANT_PANEL


def parts_of(name: str, weight: Matrix) -> tuple[PackedMatrix, ...]:
    """What a matrix consists of; KernelError, naming the argument, if it was packed for another set of kernels."""
    if isinstance(weight, PackedMatrix):
        return (weight,)
    if isinstance(weight, JoinedMatrix):
        return weight.parts
    raise KernelError(f"{name}: a {type(weight).__name__} was packed for another set of kernels")


def pack(team: Team, arena: Arena, source: WeightSource, dtype: WeightType) -> PackedMatrix | JoinedMatrix:
    """`Operations.matrix` on the CPU; the panels are taken from `arena`."""
    if len(source.shape) != 2:
        raise KernelError(f"matrix: expected two dimensions, got shape {tuple(source.shape)}")
    exact = dtype == "float32"
    if exact:
        kinds = [exact_type(part.dtype, source.shape[1]) for part in source.parts]
    elif dtype == "quantised":
        kinds = [kept_type(part.dtype, source.shape[1]) for part in source.parts]
    elif dtype in STORAGE:
        kinds = [str(dtype)]
    else:
        raise KernelError(f"dtype: {dtype!r} is not one of {', '.join(STORAGE)}, quantised")
    if len(set(kinds)) == 1 and kinds[0] in STORAGE:
        return _pack_floats(team, arena, source, kinds[0])
    runs: list[tuple[str, list[WeightSource]]] = []  # neighbours of one type make one part
    for part, kind in zip(source.parts, kinds, strict=True):
        if not runs or runs[-1][0] != kind or kind in STORAGE:
            runs.append((kind, []))
        runs[-1][1].append(part)
    parts = [
        _pack_floats(team, arena, members[0], kind)
        if kind in STORAGE
        else _pack_blocks(team, arena, members, kind, exact)
        for kind, members in runs
    ]
    return parts[0] if len(parts) == 1 else JoinedMatrix(tuple(parts))


def _pack_floats(team: Team, arena: Arena, source: WeightSource, dtype: str) -> PackedMatrix:
    rows, cols = source.shape
    store = arena.take(packed_bytes(dtype, rows, cols) // STORAGE_BYTES[dtype], STORAGE[dtype])
    base, panel_bytes = address(store), cols * PANEL * STORAGE_BYTES[dtype]
    kernel = team.library.addresses[f"pack_{dtype}"]
    step = max(1, (1 << 18) // max(1, cols * PANEL)) * PANEL  # about 1 MiB of float32 at a time

    def pack_rows(start: int) -> None:
        stop = min(rows, start + step)
        block = np.ascontiguousarray(source.float32(start, stop), np.float32)
        records = Records(-(-(stop - start) // PANEL))
        for row in range(start, stop, PANEL):
            arguments = (address(block) + (row - start) * cols * 4, base + row // PANEL * panel_bytes)
            records.append(kernel, 1, (*arguments, min(PANEL, stop - row), cols))
            team.library.call("run_alone", records.address + (records.count - 1) * 256)

    from concurrent.futures import ThreadPoolExecutor  # not at the top: quantised weights have no use for it

    with ThreadPoolExecutor(team.threads) as pool:
        list(pool.map(pack_rows, range(0, rows, step)))
    return PackedMatrix(rows, cols, dtype, store, base)


def _pack_blocks(team: Team, arena: Arena, sources: Sequence[WeightSource], kind: str, exact: bool) -> PackedMatrix:
    """Sources of one format, rows in order, straight from where they are stored into the order of the kernels."""
    rows, cols = sum(source.shape[0] for source in sources), sources[0].shape[1]
    store = arena.take(packed_bytes(kind, rows, cols, exact), np.uint8)
    panel_bytes = LAYOUTS[(EXACT_LAYOUT_OF if exact else LAYOUT_OF)[kind]].panel_bytes(cols // QUANT_BLOCK)
    if rows % QUANT_PANEL:  # what fills the last panel up: zero scales
        store[rows // QUANT_PANEL * panel_bytes :] = 0
    packer = f"quant_pack_exact_{kind}" if exact and kind in OWN_PACKERS else f"quant_pack_{kind}"
    first = 0
    for source in sources:
        count = source.shape[0]
        blocks = source.blocks(0, count)
        if blocks is None or blocks.dtype != np.uint8 or (count and blocks.strides[1] != 1):
            raise KernelError(f"matrix: a source of {kind} gives no rows of blocks")
        panels = -(-(first + count) // QUANT_PANEL) - first // QUANT_PANEL
        arguments = (address(blocks), blocks.strides[0], first, count, cols, address(store))
        team.launch(packer, panels if count else 0, *arguments)
        first += count
    return PackedMatrix(rows, cols, kind, store, address(store), exact)
