"""How quantised weights lie in memory on the CPU, in the order in which the kernels stream them. Plain data, no Numba.

A matrix [N, K] is cut into panels of 32 outputs, [ceil(N/32)][K/32] records, zero-padded. A record holds the 32 x 32
weights of a panel and a block:

    scale     [32]        float16, or float32 where the format's scale is a product; two sets for groups of 16
    minimum   [32]        of formats that have one: value = scale * q + minimum
    pairs     [32][2]     in `nibble_pair`, instead of both: int16 scale and minimum, value = unit * (scale * (q - 8) +
                          minimum). The units, [32] float32, follow the last record of a segment, which has up to 24
    integers  q + offset, unsigned: bytes [8 steps][32 outputs][4], of which step s holds inputs 4s .. 4s+3;
              or nibbles [4 steps][32 outputs][4]: low half step s, high half step s + 4 (GGUF pairs them the same way)

So a vector of 16 lanes takes four inputs of 16 outputs at a time, and one step serves them with 4 bytes of the input,
the same in all lanes.

Inputs are quantised by rows and blocks of 32 (quant_rows.py) to records of 80 bytes, X_* below.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.kernels.interface import (
    PACKED_BLOCK_BYTES,
    QUANT_BLOCK,
    QUANT_PANEL,
    SEGMENT_BLOCKS,
    UNIT_FORMATS,
    segments,
)

BLOCK, PANEL = QUANT_BLOCK, QUANT_PANEL

# A quantised block of an input row: 32 int8 q, float32 scale d, float32 d * sum(q), and four int32 that take a weight's
# offset away when a sum starts from them: -8 sum(q), -128 sum(q), and -32 times the sums of either half; then sum(q) as
# the upper 16 bits of an int32. For quant_pairs.py: the start of its sums, an int32, and q + 128 of the first 16.
# Of a precise product a block is two records, of p and of r where x = d * (p + r / 2^X_FINE). The first holds d and sum
# of 2^X_FINE * p + r instead.
X_TOP = 120  # the most that |q| is: 127 - 7, so that a 4-bit weight can be added to it (quant_pairs.py)
X_FINE = 7  # bits of a precise input below those of q; |r| is 64 at most
X_RECORD = 80
X_SCALE, X_SUM, X_MINUS_8, X_MINUS_128, X_MINUS_32, X_UPPER_SUM = 32, 36, 40, 44, 48, 56
X_PAIRED_START, X_BIASED = 60, 64

MB = 120  # rows that a piece of a panel serves before the next is taken; their records stay in L2
SPREAD = 4 * PANEL * (2 + BLOCK // 4)  # bytes of a block of a panel taken apart (quant_pairs.py)
OUTPUTS = 2 * MB * PANEL * 4  # bytes of outputs of two panels of a gated product, or of a last one
SCRATCH = OUTPUTS + SEGMENT_BLOCKS * SPREAD  # bytes a thread needs


@dataclass(frozen=True, slots=True)
class Layout:
    """bits of the unsigned integers; offset: what they exceed q by; start: where in an input record the int32 is that
    takes the offset away (0: nothing to take away); scales: sets of 32 a record; units: whether scale and minimum are
    int16 multiples of a unit."""

    bits: int
    offset: int
    start: int
    nibbles: bool
    scale_bytes: int
    scales: int
    minimum: bool
    units: bool = False

    @property
    def head(self) -> int:
        """Bytes before the integers."""
        return PANEL * self.scale_bytes * (self.scales + self.minimum)

    @property
    def unit_bytes(self) -> int:
        """Bytes after the records of a segment: the units of 32 outputs."""
        return 4 * PANEL if self.units else 0

    @property
    def record(self) -> int:
        return self.head + PANEL * BLOCK // (2 if self.nibbles else 1)

    @property
    def piece(self) -> int:
        """The most blocks of a panel that serve many rows in turn: with 6 rows of input they stay in L1 (32 KiB)."""
        return SEGMENT_BLOCKS if self.nibbles else 18

    def panel_bytes(self, blocks: int) -> int:
        """A panel's records, and units."""
        return blocks * self.record + segments(blocks) * self.unit_bytes

    @property
    def scale_type(self) -> str:
        return "float16" if self.scale_bytes == 2 else "float32"


LAYOUTS: dict[str, Layout] = {
    "nibble": Layout(4, 8, X_MINUS_8, True, 2, 1, False),
    "nibble_pair": Layout(4, 8, X_MINUS_8, True, 2, 1, True, True),
    "nibble_min": Layout(4, 0, 0, True, 2, 1, True),
    "nibble_min32": Layout(4, 0, 0, True, 4, 1, True),
    "byte": Layout(8, 128, X_MINUS_128, False, 2, 1, False),
    "byte_min32": Layout(5, 0, 0, False, 4, 1, True),
    "byte_half32": Layout(6, 32, X_MINUS_32, False, 4, 2, False),
}
# For integer products.
LAYOUT_OF: dict[str, str] = {
    "Q4_0": "nibble",
    "Q4_1": "nibble_pair",
    "Q4_K": "nibble_pair",
    "Q8_0": "byte",
    "Q5_0": "byte",
    "IQ4_NL": "byte",
    "Q5_1": "byte_min32",
    "Q5_K": "byte_min32",
    "Q6_K": "byte_half32",
}
assert {name: LAYOUTS[kind].record // PANEL for name, kind in LAYOUT_OF.items()} == PACKED_BLOCK_BYTES
assert {name for name, kind in LAYOUT_OF.items() if LAYOUTS[kind].units} == set(UNIT_FORMATS)
# Where a record must hold the file's own scales and minima.
EXACT_LAYOUT_OF: dict[str, str] = LAYOUT_OF | {"Q4_1": "nibble_min", "Q4_K": "nibble_min32"}
