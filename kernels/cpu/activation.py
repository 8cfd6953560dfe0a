"""Activations of a gated MLP, and their results as inputs of the product that comes next."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from cupaged.kernels.cpu import emit
from cupaged.kernels.cpu.emit import Emitter, like, primitive
from cupaged.kernels.cpu.gemm import OPTIONS
from cupaged.kernels.cpu.quant_layout import PANEL
from cupaged.kernels.cpu.quant_rows import quantise_column
from cupaged.kernels.cpu.vector_math import LOG2E, exp2_clamped, tanh

f32 = types.float32


@primitive(1, f32, [f32])
def _erf(e: Emitter, x: Any) -> Any:
    return e.call("erff", emit.F32, x)


def _activation(kind: str) -> Any:
    """Intrinsic (gate, up, out, n): out = act(gate) * up (Hendrycks & Gimpel 2016; Elfwing et al. 2017)."""

    @primitive(4)
    def activate(e: Emitter, gate: Any, up: Any, out: Any, n: Any) -> None:
        b = e.b

        def act(x: Any) -> Any:
            ty = x.type
            if kind == "silu":
                return b.fdiv(x, b.fadd(like(ty, 1.0), exp2_clamped(e, b.fmul(x, like(ty, -_LOG2E)))))
            if kind == "gelu_tanh":
                cubic = e.fma(b.fmul(b.fmul(like(ty, _single(0.044715)), x), x), x, x)
                grown = tanh(e, b.fmul(like(ty, _single(0.7978845608028654)), cubic))
                return b.fmul(b.fmul(like(ty, 0.5), x), b.fadd(like(ty, 1.0), grown))
            return b.select(b.fcmp_unordered(">", x, like(ty, 0.0)), x, like(ty, 0.0))  # relu; NaN stays

        def body(at: Any, lanes: int | None) -> None:
            value = act(e.floats(e.add(gate, at), lanes))
            e.store(b.fmul(value, e.floats(e.add(up, at), lanes)), e.add(out, at), 4)

        e.each(n, body)

    return activate


def _single(x: float) -> float:
    """x rounded to float32."""
    return float(np.float32(x))


_LOG2E = _single(LOG2E)
_silu, _gelu_tanh, _relu = map(_activation, ("silu", "gelu_tanh", "relu"))


@njit(f32(f32), **OPTIONS)
def gelu(x):  # type: ignore[no-untyped-def]
    return f32(0.5) * x * (f32(1.0) + _erf(x * f32(0.7071067811865476)))


@njit(types.void(*[types.int64] * 5), **OPTIONS)
def activate(kind, gate, up, out, n):  # type: ignore[no-untyped-def]
    """out = act(gate) * up of n floats. kind: as in `gated_activation`, but for gelu."""
    if kind == 0:
        _silu(gate, up, out, n)
    elif kind == 2:
        _gelu_tanh(gate, up, out, n)
    else:
        _relu(gate, up, out, n)


@njit(types.void(*[types.int64] * 5), **OPTIONS)
def activate_panels(kind, values, rows, records, row_blocks):  # type: ignore[no-untyped-def]
    """What a product has made of a panel of gates and its panel of ups: values [rows, 2, 32] float32 -> an input record
    of each row, which has `row_blocks`; the first at `records`."""
    for row in range(rows):
        gate = values + row * (8 * PANEL)
        activate(kind, gate, gate + 4 * PANEL, gate, PANEL)
    quantise_column(values, 8 * PANEL, rows, records, row_blocks)
