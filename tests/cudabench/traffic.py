"""What the emulator counted: sectors of global memory and bank conflicts of shared memory, line by line."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudabench.emulator import Library

KINDS = ("global read", "global write", "shared read", "shared write")


@dataclass(frozen=True, slots=True)
class LineTraffic:
    """One load or store of the source, over the whole launch. A request is one execution by one warp."""

    place: str  # file:line
    kind: str  # one of KINDS
    requests: int
    lanes: int  # accesses of single threads
    bytes: int  # distinct bytes of each request, summed
    moved: int  # 32-byte sectors, or passes over the 32 banks
    ideal: int  # the least `moved` that these bytes need

    @property
    def efficiency(self) -> float:
        """Bytes asked for, of those moved: 1 is best. For shared memory: least passes by passes."""
        return self.bytes / (32 * self.moved) if self.kind.startswith("global") else self.ideal / self.moved

    @property
    def conflicts(self) -> int:
        """Passes over the banks beyond the least; 0 for global memory."""
        return self.moved - self.ideal if self.kind.startswith("shared") else 0


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """All lines of a launch, and the most bytes of cp.async that one block had under way at once."""

    lines: tuple[LineTraffic, ...]
    async_bytes: int

    def of(self, kind: str, place: str = "") -> list[LineTraffic]:
        """Lines of a kind ("global", "shared read", ...) whose place contains `place`."""
        return [line for line in self.lines if line.kind.startswith(kind) and place in line.place]

    def efficiency(self, kind: str, place: str = "") -> float:
        """Bytes asked for by bytes moved over all lines of a kind of global access."""
        lines = self.of(kind, place)
        return sum(line.bytes for line in lines) / max(1, 32 * sum(line.moved for line in lines))

    def conflicts(self, place: str = "") -> int:
        """Bank conflicts of all lines of shared memory whose place contains `place`."""
        return sum(line.conflicts for line in self.of("shared", place))

    def __str__(self) -> str:
        head = f"{'access':13} {'requests':>8} {'bytes':>10} {'moved':>7} {'least':>7}  place"
        rows = [
            f"{line.kind:13} {line.requests:8} {line.bytes:10} {line.moved:7} {line.ideal:7}  {line.place}"
            for line in self.lines
        ]
        return "\n".join([head, *rows, f"cp.async under way: at most {self.async_bytes} bytes a block"])


class _Row(ctypes.Structure):
    _fields_ = [("place", ctypes.c_uint32), ("kind", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64) for name in ("requests", "lanes", "bytes", "moved", "ideal")
    ]


def read_traffic(library: Library) -> TrafficReport:
    """The report of the launch that has just ended."""
    rows, peak = ctypes.POINTER(_Row)(), ctypes.c_int64()
    function = library.lib.cudabench_traffic
    function.restype = ctypes.c_size_t
    count = function(ctypes.byref(rows), ctypes.byref(peak))
    listed = [rows[i] for i in range(count)]
    places = library.places([row.place for row in listed if not row.place >> 31])
    sums: dict[tuple[str, str], list[int]] = {}  # a line that was compiled several times is one line
    for row in listed:
        place = places.get(row.place) or _text(library, row.place & 0x7FFFFFFF)
        numbers = (row.requests, row.lanes, row.bytes, row.moved, row.ideal)
        before = sums.get((KINDS[row.kind], place), [0] * 5)
        sums[KINDS[row.kind], place] = [a + b for a, b in zip(before, numbers, strict=True)]
    return TrafficReport(
        tuple(LineTraffic(place, kind, *sums[kind, place]) for kind, place in sorted(sums)), peak.value
    )


def _text(library: Library, offset: int) -> str:
    return ctypes.string_at(library.lib.cudabench_base() + offset).decode()
