"""Everything of a forward pass but attention and sampling: weights, norms, products, rotation, activations.

Rows are independent, and their arithmetic must not depend on how many there are. NumPy's elementwise functions and its
sums along the last axis of a contiguous array keep that by themselves; a matrix product does not (see `matmul`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels import bfloat16
from cupaged.kernels.interface import PACKED_BLOCK_BYTES, Activation, Array, Matrix, WeightSource, WeightType, kept_type
from cupaged.kernels.reference import quantised
from cupaged.kernels.reference.quantised import QuantisedMatrix


@dataclass(slots=True)
class ReferenceMatrix:
    """A weight matrix [rows, cols] as an array of its storage type (bfloat16 as uint16)."""

    rows: int
    cols: int
    dtype: str
    nbytes: int
    data: Array


def narrow(values: Array, dtype: str) -> Array:
    """float32 of any shape as an array of a storage type: nearest, ties to even; what is too large becomes infinite."""
    if dtype == "float32":
        return np.array(values, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):  # invalid: a signalling NaN becomes a quiet one
            return np.asarray(values, np.float32).astype(np.float16)
    if dtype == "bfloat16":
        return bfloat16.from_float32(values)
    raise KernelError(f"dtype: {dtype!r} is not a storage type (float32, float16, bfloat16)")


def widen(stored: Array, dtype: str) -> Array:
    """The float64 values of an array of a storage type, exactly."""
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return (bfloat16.to_float32(stored) if dtype == "bfloat16" else stored).astype(np.float64)


@dataclass(slots=True)
class JoinedMatrix:
    """Parts with equal columns, rows in order, each in its own type."""

    rows: int
    cols: int
    dtype: str
    nbytes: int
    parts: list[ReferenceMatrix | QuantisedMatrix]


def matrix(source: WeightSource, dtype: WeightType) -> ReferenceMatrix | QuantisedMatrix | JoinedMatrix:
    """Keep a weight matrix [N, K], rounded to `dtype`, or its own blocks if that is "quantised".

    KernelError if it has not two dimensions or dtype is unknown.
    """
    if len(source.shape) != 2:
        raise KernelError(f"matrix: expected two dimensions, got shape {tuple(source.shape)}")
    rows, cols = source.shape
    if dtype == "quantised":
        kept = [(part, kept_type(part.dtype, cols)) for part in source.parts]
        parts = [quantised.matrix(part) if kind in PACKED_BLOCK_BYTES else _floats(part, kind) for part, kind in kept]
        names = "+".join(name for name, _ in groupby(part.dtype for part in parts))
        return parts[0] if len(parts) == 1 else JoinedMatrix(rows, cols, names, sum(p.nbytes for p in parts), parts)
    return _floats(source, dtype)


def _floats(source: WeightSource, dtype: str) -> ReferenceMatrix:
    rows, cols = source.shape
    data = narrow(source.float32(0, rows), dtype)
    return ReferenceMatrix(rows, cols, dtype, data.nbytes, data)


def vector(source: WeightSource) -> Array:
    """A norm weight or bias [N] as a float32 array of its own."""
    return np.array(source.float32(0, source.shape[0]), np.float32)


def _parts(weight: Matrix, name: str) -> list[ReferenceMatrix | QuantisedMatrix]:
    if isinstance(weight, JoinedMatrix):
        return weight.parts
    if not isinstance(weight, ReferenceMatrix | QuantisedMatrix):
        raise KernelError(f"{name}: a {type(weight).__name__} was packed for another set of kernels")
    return [weight]


def embed(ids: Array, table: Matrix, out: Array, scale: float = 1.0) -> None:
    """out[t] = table[ids[t]] * scale.

    ids [T] integer, table [V, K], out [T, K] float32. KernelError for an id outside 0..V-1 (NumPy would take -1 as the
    last row).
    """
    parts = _parts(table, "table")
    if len(parts) != 1:
        raise KernelError("table: its rows are of several types")
    ids = np.asarray(ids)
    if ids.size and not (ids.min() >= 0 and ids.max() < table.rows):
        raise KernelError(f"ids: {int(ids.min())}..{int(ids.max())} leave the table's rows 0..{table.rows - 1}")
    kept = parts[0]
    if isinstance(kept, QuantisedMatrix):
        out[...] = kept.values()[ids].astype(np.float64) * scale
    else:
        out[...] = widen(kept.data[ids], kept.dtype) * scale


def _normed(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(np.float64)
    mean_square = (wide * wide).sum(axis=-1, keepdims=True) / x.shape[-1]
    return wide / np.sqrt(mean_square + eps) * weight.astype(np.float64)


def take_rows(x: Array, rows: Array, out: Array) -> None:
    """out[r] = x[rows[r]]. x [T, K], rows [R] integer, out [R, K]; `out` does not overlap `x`."""
    out[...] = x[rows]


def rms_norm(x: Array, weight: Array, eps: float, out: Array, residual: Array | None = None) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight by row (Zhang & Sennrich 2019, eq. 4).

    x, out [T, K] float32, weight [K] float32. With `residual` [T, K] float32: first residual += x, in float32 because
    it is stored so, then out = norm(residual). `out` may be `x`; neither may be `residual`.
    """
    if residual is not None:
        residual += x
        x = residual
    out[...] = _normed(x, weight, eps)


def head_norm(x: Array, weight: Array, eps: float) -> None:
    """rms_norm of each head, in place. x [T, heads, D] float32, rows may be strided; weight [D] float32."""
    x[...] = _normed(x, weight, eps)


def matmul(
    x: Array, weight: Matrix, out: Array, bias: Array | None = None, precise: bool = False, precise_from: int = 0,
    x_spent: bool = False,
) -> None:  # fmt: skip
    """out = x @ weight.T + bias. x_spent: here without effect.

    x [T, K], weight [N, K], out [T, N], bias [N]; x, out and bias float32; out may not overlap x. One matrix-vector
    product a row: BLAS sums in another order for another number of rows, so `x @ weight.T` would give a token other
    bits in company than alone. A matrix-vector product's order depends on [N, K] only. With quantised weights: see
    quantised.py.
    """
    first = 0
    for part in _parts(weight, "weight"):
        places = slice(first, first + part.rows)
        added = None if bias is None else bias[places]
        if isinstance(part, QuantisedMatrix):
            plain = quantised.plain_outputs(part.rows, precise, precise_from - first)
            for rows, fine in ((slice(0, plain), False), (slice(plain, part.rows), True)):
                some = None if added is None else added[rows]
                quantised.matmul(x, part.select(rows), out[:, places][:, rows], some, fine)
        else:
            wide = widen(part.data, part.dtype)
            for row in range(x.shape[0]):
                products = np.dot(wide, x[row].astype(np.float64))
                out[row, places] = products if added is None else products + added
        first += part.rows


def rope(x: Array, positions: Array, table: Array) -> None:
    """Rotate in place, half-split pairs (i, i + R/2): Su et al. 2021, eq. 34, paired as in Hugging Face.

    x [T, heads, D] float32, rows may be strided; positions [T] integer; table [P, R] float32, cos in columns
    0..R/2-1 and sin in R/2..R-1. Columns R..D-1 of a head are left alone. KernelError for a position outside 0..P-1.
    """
    rotary = table.shape[1]
    half = rotary // 2
    positions = np.asarray(positions)
    if positions.size and not (positions.min() >= 0 and positions.max() < table.shape[0]):
        span = f"{int(positions.min())}..{int(positions.max())}"
        raise KernelError(f"positions: {span} leave the rope table's 0..{table.shape[0] - 1}")
    angles = table[positions].astype(np.float64)[:, None, :]
    cos, sin = angles[..., :half], angles[..., half:]
    first = x[..., :half].astype(np.float64)
    second = x[..., half:rotary].astype(np.float64)
    x[..., :half] = first * cos - second * sin
    x[..., half:rotary] = second * cos + first * sin


def _activate(gate: Array, activation: Activation) -> Array:
    """silu: Elfwing et al. 2017; gelu: Hendrycks & Gimpel 2016, exact and their tanh form. gate: float64."""
    if activation == "silu":
        with np.errstate(over="ignore"):  # exp of a large number is inf, and gate / inf the right 0
            return gate / (1.0 + np.exp(-gate))
    if activation == "gelu":
        erf = np.frompyfunc(math.erf, 1, 1)(gate * math.sqrt(0.5)).astype(np.float64)
        return 0.5 * gate * (1.0 + erf)
    if activation == "gelu_tanh":
        return 0.5 * gate * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)))
    if activation == "relu":
        return np.maximum(gate, 0.0)
    raise KernelError(f"activation: {activation!r} is not one of silu, gelu, gelu_tanh, relu")


def gated_activation(gate_up: Array, activation: Activation, out: Array, spent: bool = False) -> None:
    """out = act(gate) * up (Shazeer 2020). gate_up [T, 2I] float32: gate in the first I columns; out [T, I] float32."""
    columns = gate_up.shape[1] // 2
    gate = gate_up[:, :columns].astype(np.float64)
    out[...] = _activate(gate, activation) * gate_up[:, columns:]


def add(x: Array, y: Array) -> None:
    """x += y in float32. Both [T, K]."""
    x += y
