"""Blocks of quantised files that are kept for exact float32 products, and how. Plain data, no Numba.

They lie in the records of quant_layout.py, 32 outputs by 32 inputs, and are worth what the format says to the last bit.
"""

from __future__ import annotations

from cupaged.kernels.cpu.quant_layout import EXACT_LAYOUT_OF as EXACT_LAYOUT_OF
from cupaged.kernels.cpu.quant_layout import LAYOUT_OF, LAYOUTS
from cupaged.kernels.interface import EXACT_BLOCK_BYTES, QUANT_PANEL

FEW = 12  # rows for which weights are taken apart in registers, by tiles of up to four
EXACT_LAYOUTS = tuple(dict.fromkeys(EXACT_LAYOUT_OF.values()))
# Formats that are packed otherwise here than for integer products.
OWN_PACKERS = tuple(kind for kind, layout in EXACT_LAYOUT_OF.items() if layout != LAYOUT_OF[kind])
assert {name: LAYOUTS[kind].record // QUANT_PANEL for name, kind in EXACT_LAYOUT_OF.items()} == EXACT_BLOCK_BYTES
