"""Matrix products on a GPU: our kernel, which reads stored weights and sums in one order, or a library's for many rows.

By default a few rows (decode of a small batch) go through `matmul.cu`, many through the library, which is made for
tensor cores and sums in an order that may depend on how many rows there are. Without a library, and under
`deterministic`, everything goes through `matmul.cu`.
"""

from __future__ import annotations

import numpy as np

from cupaged.kernels.cuda.arrays import contiguous
from cupaged.kernels.cuda.launch import Backend, Gemm, Launcher
from cupaged.kernels.cuda.packing import FORMATS, CudaMatrix, Part, unit_blocks
from cupaged.kernels.cuda.scratch import Scratch
from cupaged.kernels.interface import Array

STORAGE = {"float32": 0, "float16": 1, "bfloat16": 2}  # -DSTORAGE
OUTPUTS = 16  # of a block of matmul.cu
TOKENS = (1, 8)  # rows of x that a block takes: decode of one sequence, and more
FEW_ROWS = 8  # weights are read once for as many
TILE_BYTES = 32 << 20  # of a weight that is widened to 16 bits, at a time
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class Products:
    """`matmul` on a backend."""

    def __init__(self, backend: Backend, launcher: Launcher) -> None:
        self._backend = backend
        self._launch = launcher
        self._scratch = Scratch(backend)

    def matmul(self, x: Array, matrix: CudaMatrix, out: Array, bias: Array | None) -> None:
        """out = x @ matrix.T + bias. x [T, K], out [T, N] float32, rows adjacent."""
        count = int(x.shape[0])
        contiguous("x", x, (count, matrix.cols))
        contiguous("out", out, (count, matrix.rows))
        if bias is not None:
            contiguous("bias", bias, (matrix.rows,))
        if count == 0:
            return
        gemm = self._backend.gemm if count > FEW_ROWS else None
        narrowed: dict[str, tuple[Array, Array]] = {}
        first = 0
        for part in matrix.parts:
            columns = slice(first, first + part.rows)
            own_bias = None if bias is None else bias[columns]
            if gemm is None:
                self._stored(x, part, out, columns, own_bias)
            else:
                dtype = part.format if part.format in STORAGE else "float16"
                if dtype not in narrowed:
                    narrowed[dtype] = self._narrow(x, dtype)
                rows, factors = narrowed[dtype]
                self._multiply(gemm, rows, part, out[:, columns], dtype)
                if dtype == "float16" or own_bias is not None:
                    self._launch(
                        "elementwise.cu", "finish_rows", (count,), 256, {}, out=out.reshape(-1)[first:],
                        out_stride=matrix.rows, factors=factors, bias=own_bias, cols=part.rows,
                    )  # fmt: skip
            first += part.rows

    def _stored(self, x: Array, part: Part, out: Array, columns: slice, bias: Array | None) -> None:
        """One order of sums for any number of rows."""
        count, cols = x.shape
        tokens = next((n for n in TOKENS if n >= count), TOKENS[-1])
        self._launch(
            "matmul.cu", "matmul", (-(-part.rows // OUTPUTS), -(-count // tokens)), 128,
            {"FORMAT": FORMATS[part.format], "TOKENS": tokens},
            x=x, bias=bias, out=out.reshape(-1)[columns.start :], out_stride=out.shape[1], count=count,
            rows=part.rows, cols=cols, **part.planes,
        )  # fmt: skip

    def _narrow(self, x: Array, dtype: str) -> tuple[Array, Array]:
        """(rows of x as `dtype`, padded with zeros to whole blocks of 32; what each was divided by)."""
        count, cols = int(x.shape[0]), int(x.shape[1])
        padded = -(-cols // 32) * 32
        rows = self._scratch.get(dtype, count * padded, _NUMPY[dtype]).reshape(count, padded)
        factors = self._scratch.get(f"{dtype} factors", count, np.float32)
        self._launch(
            "elementwise.cu", "narrow_rows", (count,), 256, {"STORAGE": STORAGE[dtype]},
            x=x, out=rows, factors=factors, cols=cols, padded=padded,
        )  # fmt: skip
        return rows, factors

    def _multiply(self, gemm: Gemm, rows: Array, part: Part, out: Array, dtype: str) -> None:
        padded = int(rows.shape[1])
        if part.format in STORAGE:
            plane = part.planes["quants"]
            assert plane is not None
            gemm(rows, plane.view(_NUMPY[dtype]).reshape(part.rows, padded), out, dtype)
            return
        # The cut is the matrix's own, whatever the number of rows: the library sums the same products each time.
        tile_rows = min(part.rows, max(128, TILE_BYTES // (2 * padded) // 128 * 128))
        tile = self._scratch.get("tile", tile_rows * padded, np.float16).reshape(tile_rows, padded)
        for first in range(0, part.rows, tile_rows):
            stop = min(part.rows, first + tile_rows)
            self.dequantise(part, padded, first, tile[: stop - first], "float16")
            gemm(rows, tile[: stop - first], out[:, first:stop], "float16")

    def dequantise(self, part: Part, cols: int, first: int, out: Array, dtype: str) -> None:
        """Rows first..first+len(out)-1 of a part as `dtype` (bfloat16 as uint16): out [n, cols]."""
        self._launch(
            "dequantise.cu", "dequantise", (len(out), unit_blocks(part.format, cols)), 128,
            {"FORMAT": FORMATS[part.format], "STORAGE": STORAGE[dtype]},
            out=out, first_row=first, cols=cols, **part.planes,
        )  # fmt: skip
