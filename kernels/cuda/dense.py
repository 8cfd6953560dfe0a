"""Weights, norms, products, rotation and activations on a GPU: checks, grids, launches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupaged.errors import KernelError
from cupaged.kernels.cuda.arrays import contiguous, row_stride
from cupaged.kernels.cuda.launch import Backend, Launcher
from cupaged.kernels.cuda.packing import FORMATS, UNITS, pack_part
from cupaged.kernels.interface import Activation, Array, Matrix, WeightSource, WeightType

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}  # -DACTIVATION
_STORAGE = {"float32": 0, "float16": 1, "bfloat16": 2}
_OUTPUTS = 16  # of a block of matmul.cu
_TOKENS = (1, 8)  # rows of x that a block takes: decode of one sequence, and more


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a matrix in one format, on the device."""

    format: str
    rows: int
    planes: dict[str, Array | None]


@dataclass(frozen=True, slots=True)
class CudaMatrix:
    """A weight matrix [rows, cols]; a join of files' tensors in different formats has several parts."""

    rows: int
    cols: int
    dtype: str
    nbytes: int
    parts: tuple[Part, ...]


class Dense:
    """The operations of `interface.Operations` that are not attention or sampling, on a backend."""

    def __init__(self, backend: Backend, launcher: Launcher) -> None:
        self._backend = backend
        self._launch = launcher

    def matrix(self, source: WeightSource, dtype: WeightType) -> CudaMatrix:
        """See `interface.Operations.matrix`. "quantised" keeps Q8_0, Q4_0, Q4_1, Q4_K and Q6_K; other block formats
        become float16. Activations are not quantised: a product is that of the file's own weights in float32."""
        if len(source.shape) != 2:
            raise KernelError(f"matrix: expected two dimensions, got shape {tuple(source.shape)}")
        pieces = source.parts if dtype == "quantised" else (source,)
        packed = [pack_part(piece, dtype) for piece in pieces]
        parts = tuple(
            Part(
                part.format,
                part.rows,
                {name: None if plane is None else self._backend.upload(plane) for name, plane in part.planes.items()},
            )
            for part in packed
        )
        names = "+".join(dict.fromkeys(part.format for part in parts))
        size = sum(int(plane.nbytes) for part in packed for plane in part.planes.values() if plane is not None)
        return CudaMatrix(source.shape[0], source.shape[1], names, size, parts)

    def vector(self, source: WeightSource) -> Array:
        """A norm weight or bias as a float32 array on the device."""
        return self._backend.upload(source.float32(0, source.shape[0]).astype("float32"))

    def matmul(
        self, x: Array, weight: Matrix, out: Array, bias: Array | None = None, precise: bool = False
    ) -> None:  # fmt: skip
        """out = x @ weight.T + bias; see matmul.cu. x is never quantised here: all products are precise."""
        matrix = _cuda(weight, "weight")
        count = int(x.shape[0])
        contiguous("x", x, (count, matrix.cols))
        contiguous("out", out, (count, matrix.rows))
        if bias is not None:
            contiguous("bias", bias, (matrix.rows,))
        if count == 0:
            return
        tokens = next((n for n in _TOKENS if n >= count), _TOKENS[-1])
        first = 0
        for part in matrix.parts:
            self._launch(
                "matmul.cu", "matmul", (-(-part.rows // _OUTPUTS), -(-count // tokens)), 128,
                {"FORMAT": FORMATS[part.format], "TOKENS": tokens},
                x=x, bias=None if bias is None else bias[first:], out=out.reshape(-1)[first:],
                out_stride=matrix.rows, count=count, rows=part.rows, cols=matrix.cols, **part.planes,
            )  # fmt: skip
            first += part.rows

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
                "dequantise.cu", "embed", (count, _unit_blocks(part, matrix.cols)), 128,
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
            self._launch(
                "dequantise.cu", "dequantise", (len(out), _unit_blocks(part, matrix.cols)), 128,
                {"FORMAT": FORMATS[part.format], "STORAGE": _STORAGE[dtype]},
                out=out, first_row=first, cols=matrix.cols, **part.planes,
            )  # fmt: skip

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

    def gated_activation(self, gate_up: Array, activation: Activation, out: Array) -> None:
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


def _unit_blocks(part: Part, cols: int) -> int:
    return -(-cols // (UNITS[part.format] * 128))


def _cuda(weight: Matrix, name: str) -> CudaMatrix:
    if not isinstance(weight, CudaMatrix):
        raise KernelError(f"{name}: a {type(weight).__name__} was packed for another set of kernels")
    return weight
