"""A case beside the roofs of the same threads: read bandwidth, and arithmetic of its kind, in the same rounds."""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.bench.cases import Case
from cupaged.bench.roofs import Roofs
from cupaged.bench.timing import interleaved

_ROOF_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians of the same rounds. gb_s: bytes of weights or K/V a second, each counted once; gop_s: operations a
    second; both in giga-units, beside what these threads reach. `arithmetic`: what the operations' roof consists of.
    """

    case: str
    microseconds: float
    gb_s: float
    read_roof: float
    gop_s: float
    arithmetic_roof: float
    arithmetic: str

    @property
    def share(self) -> float:
        """Of the nearer roof."""
        return max(self.gb_s / self.read_roof, self.gop_s / self.arithmetic_roof)

    @property
    def bound(self) -> str:
        """The nearer roof: "memory" or "arithmetic"."""
        return "memory" if self.gb_s / self.read_roof >= self.gop_s / self.arithmetic_roof else "arithmetic"


def measure(case: Case, roofs: Roofs, seconds: float) -> Measurement:
    """`seconds` in all, 5 rounds at least."""
    nbytes = int(min(max(case.nbytes * case.calls, 16 << 20), roofs.buffer_bytes // 2))
    arithmetic = roofs.dot if case.integer else roofs.multiply_add
    took, read, computed = interleaved(
        [case.run, lambda: roofs.read(nbytes), lambda: arithmetic(_ROOF_CHUNKS)], seconds
    )
    took /= case.calls
    operations = roofs.dots(_ROOF_CHUNKS) if case.integer else roofs.flops(_ROOF_CHUNKS)
    return Measurement(
        case.name, took * 1e6, case.nbytes / took / 1e9, (nbytes >> 20 << 20) / read / 1e9,
        case.operations / took / 1e9, operations / computed / 1e9,
        "byte dot products" if case.integer else "float multiply-adds",
    )  # fmt: skip
