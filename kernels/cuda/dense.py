"""Weights, norms, products, rotation and activations on a GPU: checks, grids, launches."""

from __future__ import annotations

import math

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.cuda.arrays import contiguous, row_stride
from cupaged.kernels.cuda.launch import Backend, Launcher
from cupaged.kernels.cuda.packing import FORMATS, CudaMatrix, Part, packed_pieces, unit_blocks
from cupaged.kernels.cuda.products import Products
from cupaged.kernels.interface import Activation, Array, Matrix, WeightSource, WeightType

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}  # -DACTIVATION


class Dense:
    """The operations of `interface.Operations` that are not attention or sampling, on a backend."""

    def __init__(self, backend: Backend, launcher: Launcher) -> None:
        self._backend = backend
        self._launch = launcher
        self._products = Products(backend, launcher)

    def matrix(self, source: WeightSource, dtype: WeightType) -> CudaMatrix:
        """See `interface.Operations.matrix`. "quantised" keeps Q8_0, Q4_0, Q4_1, Q4_K and Q6_K; other block formats
        become float16. Activations are not quantised: a product is that of the file's own weights in float32."""
        if len(source.shape) != 2:
            raise KernelError(f"matrix: expected two dimensions, got shape {tuple(source.shape)}")
        pieces = source.parts if dtype == "quantised" else (source,)
        parts = tuple(self._part(piece, dtype) for piece in pieces)
        names = "+".join(dict.fromkeys(part.format for part in parts))
        size = sum(int(plane.nbytes) for part in parts for plane in part.planes.values() if plane is not None)
        return CudaMatrix(source.shape[0], source.shape[1], names, size, parts)

    def _part(self, source: WeightSource, dtype: str) -> Part:
        """Packed and sent some rows at a time."""
        rows = source.shape[0]
        planes: dict[str, Array | None] = {}
        kind = dtype
        for first, packed in packed_pieces(source, dtype):
            kind = packed.format
            for name, plane in packed.planes.items():
                if plane is None:
                    planes[name] = None
                    continue
                row_bytes = plane.size // max(1, packed.rows)
                if name not in planes:
                    planes[name] = self._backend.empty((rows * row_bytes,), np.uint8)
                whole = planes[name]
                assert whole is not None
                self._backend.upload(plane, whole[first * row_bytes :][: plane.size])
        return Part(kind, rows, planes)

    def vector(self, source: WeightSource) -> Array:
        """A norm weight or bias as a float32 array on the device."""
        return self._backend.upload(source.float32(0, source.shape[0]).astype("float32"))

    def matmul(
        self, x: Array, weight: Matrix, out: Array, bias: Array | None = None, precise: bool = False,
        precise_from: int = 0, x_spent: bool = False,
    ) -> None:  # fmt: skip
        """out = x @ weight.T + bias; see products.py. x is never quantised here: all products are precise. It is read
        from memory, spent or not."""
        self._products.matmul(x, _cuda(weight, "weight"), out, bias)

    def embed(self, ids: Array, table: Matrix, out: Array, scale: float = 1.0) -> None:
        """out[t] = table[ids[t]] * scale. An id outside the table makes its row NaN, which the engine reports."""
        matrix = _cuda(table, "table")
        if len(matrix.parts) != 1:
            raise KernelError(f"table: {matrix.dtype}: rows of several formats cannot be looked up")
        part, count = matrix.parts[0], int(ids.shape[0])
        contiguous("ids", ids, (count,), "int32")
        contiguous("out", out, (count, matrix.cols))
        if count:
            self._launch(
                "dequantise.cu", "embed", (count, unit_blocks(part.format, matrix.cols)), 128,
                {"FORMAT": FORMATS[part.format]},
                ids=ids, out=out, rows=matrix.rows, cols=matrix.cols, scale=scale, **part.planes,
            )  # fmt: skip

    def dequantise(self, weight: Matrix, first: int, out: Array, dtype: str) -> None:
        """Rows first..first+len(out)-1 of a matrix of one part as `dtype` (bfloat16 as uint16): out [n, cols]."""
        matrix = _cuda(weight, "weight")
        if len(matrix.parts) != 1 or not 0 <= first <= matrix.rows - len(out):
            raise KernelError(f"first: rows {first}..{first + len(out) - 1} of {matrix.rows}, {matrix.dtype}")
        part = matrix.parts[0]
        contiguous("out", out, (len(out), matrix.cols), "uint16" if dtype == "bfloat16" else dtype)
        if len(out):
            self._products.dequantise(part, matrix.cols, first, out, dtype)

    def take_rows(self, x: Array, rows: Array, out: Array) -> None:
        """out[r] = x[rows[r]]."""
        count = int(rows.shape[0])
        contiguous("rows", rows, (count,), "int32")
        contiguous("x", x, x.shape)
        contiguous("out", out, (count, *x.shape[1:]))
        if count:
            self._launch("elementwise.cu", "take_rows", (count,), 256, {}, x=x, rows=rows, out=out, cols=x.shape[1])

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, residual: Array | None = None) -> None:
        """See norms.cu; `out` may be `x`."""
        self._norm("rms_norm", x, out, residual, weight=weight, eps=eps)

    def layer_norm(
        self, x: Array, weight: Array, bias: Array | None, eps: float, out: Array, residual: Array | None = None
    ) -> None:
        """(x - mean) / sqrt(variance + eps) * weight + bias by row; `out` and `residual` as for rms_norm."""
        if bias is not None:
            contiguous("bias", bias, (x.shape[1],))
        self._norm("layer_norm", x, out, residual, weight=weight, bias=bias, eps=eps)

    def _norm(self, kernel: str, x: Array, out: Array, residual: Array | None, **arguments: object) -> None:
        shape = tuple(x.shape)
        for name, array in (("x", x), ("out", out), ("residual", residual)):
            if array is not None:
                contiguous(name, array, shape)
        contiguous("weight", arguments["weight"], shape[1:])
        if shape[0]:
            self._launch(
                "norms.cu", kernel, (shape[0],), 256, {}, x=x, out=out, residual=residual, cols=shape[1], **arguments
            )

    def head_norm(self, x: Array, weight: Array, eps: float) -> None:
        """rms_norm of each head in place. x [T, heads, D], rows may be strided."""
        count, heads, dim = x.shape
        stride = row_stride("x", x, x.shape)
        contiguous("weight", weight, (dim,))
        if count * heads:
            self._launch(
                "norms.cu", "head_norm", (-(-count * heads // 8),), 256, {},
                x=x, weight=weight, row_stride=stride, count=count * heads, heads=heads, dim=dim, eps=eps,
            )  # fmt: skip

    def rope(self, x: Array, positions: Array, table: Array) -> None:
        """Rotate in place; a position outside the table makes its row's rotated part NaN."""
        count, heads, dim = x.shape
        stride = row_stride("x", x, x.shape)
        contiguous("positions", positions, (count,), "int32")
        contiguous("table", table, table.shape)
        if table.ndim != 2 or table.shape[1] > dim or table.shape[1] % 2:
            raise KernelError(f"table: shape {tuple(table.shape)} does not fit heads of {dim}")
        if count:
            self._launch(
                "elementwise.cu", "rope", (count,), 256, {},
                x=x, row_stride=stride, positions=positions, angles=table, num_positions=table.shape[0], heads=heads,
                dim=dim, rotary=table.shape[1],
            )  # fmt: skip

    def gated_activation(self, gate_up: Array, activation: Activation, out: Array, spent: bool = False) -> None:
        """out = act(gate) * up."""
        if activation not in ACTIVATIONS:
            raise KernelError(f"activation: {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        count, cols = out.shape
        contiguous("gate_up", gate_up, (count, 2 * cols))
        contiguous("out", out, (count, cols))
        if count:
            self._launch(
                "elementwise.cu", "gated_activation", (count, -(-cols // 256)), 256,
                {"ACTIVATION": ACTIVATIONS[activation]}, gate_up=gate_up, out=out, cols=cols,
            )  # fmt: skip

    def add(self, x: Array, y: Array) -> None:
        """x += y."""
        contiguous("x", x, x.shape)
        contiguous("y", y, x.shape)
        count = math.prod(x.shape)
        if count:
            grid = min(-(-count // 256), self._backend.multiprocessors * 8)
            self._launch("elementwise.cu", "add", (grid,), 256, {}, x=x, y=y, count=count)


def _cuda(weight: Matrix, name: str) -> CudaMatrix:
    if not isinstance(weight, CudaMatrix):
        raise KernelError(f"{name}: a {type(weight).__name__} was packed for another set of kernels")
    return weight
