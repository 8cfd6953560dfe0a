"""Launches of everything but attention and sampling, on NumPy; `launches.FUNCTIONS` says how they are called."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cupaged.errors import DeviceError
from cupaged.kernels import bfloat16
from cupaged.kernels.reference import dense
from streamdouble.heap import Pointer

Array = np.ndarray
Grid = tuple[int, int, int]
Defines = dict[str, int]

STORED = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 2: np.dtype(np.uint16)}  # -DSTORAGE
NAMES = {0: "float32", 1: "float16", 2: "bfloat16"}
ACTIVATIONS = {0: "silu", 1: "gelu", 2: "gelu_tanh", 3: "relu"}
OUTPUTS = 16  # of a block of matmul.cu


def widened(stored: Array, storage: int) -> Array:
    return bfloat16.to_float32(stored) if storage == 2 else stored.astype(np.float32, copy=False)


def narrowed(values: Array, storage: int) -> Array:
    return dense.narrow(values, NAMES[storage])


# -- weights


def weight_rows(
    form: int, cols: int, rows: Any, first: int, count: int, quants: Pointer, high: Any, scales: Any, deltas: Any
) -> Array:
    """Rows `rows` (an index into first..first+count-1) of a packed weight as float32 [n, cols]; see weights.cuh."""
    padded = -(-cols // 32) * 32
    if form <= 2:
        stored = quants.view((count, padded), STORED[form], offset=first * padded)
        return widened(stored[rows], form)[:, :cols]
    units = padded // 32
    if form == 3:
        q = quants.view((count, units, 32), np.int8, offset=first * padded)[rows].astype(np.float32)
        d = scales.view((count, units, 1), np.float16, offset=first * units)[rows].astype(np.float32)
        return (q * d).reshape(len(q), padded)[:, :cols]
    packed = quants.view((count, units, 16), np.uint8, offset=first * units * 16)[rows]
    q = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32)
    if form == 4:
        d = scales.view((count, units, 1), np.float16, offset=first * units)[rows].astype(np.float32)
        values = (q - 8) * d
    elif form == 5:
        both = scales.view((count, units, 2), np.float16, offset=first * units * 2)[rows].astype(np.float32)
        values = q * both[..., :1] + both[..., 1:]
    elif form == 6:
        heads = scales.view((count, units // 8, 16), np.uint8, offset=first * units * 2)[rows]
        d, m = _k_scales(heads)
        values = q * d - m
    else:
        two = high.view((count, units, 8), np.uint8, offset=first * units * 8)[rows]
        upper = np.concatenate([two >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).astype(np.float32)
        s = scales.view((count, units, 2), np.int8, offset=first * units * 2)[rows].astype(np.float32)
        super_ = deltas.view((count, units // 8, 1), np.float16, offset=first * units // 8)[rows].astype(np.float32)
        d = np.repeat(super_, 8, axis=1) * s
        values = (q + 16 * upper - 32) * np.repeat(d, 16, axis=-1)
    return values.reshape(len(values), padded)[:, :cols]


def _k_scales(heads: Array) -> tuple[Array, Array]:
    """Scale and minimum of each unit of Q4_K, both [n, units, 1]."""
    halves = np.ascontiguousarray(heads[..., :4]).view(np.float16).astype(np.float32)  # d, m
    a, b, c = heads[..., 4:8], heads[..., 8:12], heads[..., 12:16]
    s = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1).astype(np.float32)
    t = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1).astype(np.float32)
    shape = (len(heads), -1, 1)
    return (halves[..., :1] * s).reshape(shape), (halves[..., 1:] * t).reshape(shape)


def matmul(
    grid: Grid, defines: Defines, x: Pointer, quants: Pointer, high: Any, scales: Any, deltas: Any, bias: Any,
    out: Pointer, out_stride: int, count: int, rows: int, cols: int,
) -> None:  # fmt: skip
    made, taken = min(rows, grid[0] * OUTPUTS), min(count, grid[1] * defines["TOKENS"])
    weight = weight_rows(defines["FORMAT"], cols, slice(None), 0, made, quants, high, scales, deltas)
    # Row by row, as a stack of products: the sums of a row then have one order, however many rows there are.
    product = np.matmul(x.view((taken, 1, cols), np.float32), weight.T)[:, 0]
    out.view((taken, made), np.float32, (out_stride, 1))[...] = (
        product if bias is None else product + bias.view((made,), np.float32)
    )


def embed(
    grid: Grid, defines: Defines, ids: Pointer, quants: Pointer, high: Any, scales: Any, deltas: Any, out: Pointer,
    rows: int, cols: int, scale: float,
) -> None:  # fmt: skip
    wanted = ids.view((grid[0],), np.int32)
    known = (wanted >= 0) & (wanted < rows)
    index = np.where(known, wanted, 0)
    values = weight_rows(defines["FORMAT"], cols, index, 0, rows, quants, high, scales, deltas)
    values = values * np.float32(scale)
    out.view((grid[0], cols), np.float32)[...] = np.where(known[:, None], values, np.float32(np.nan))


def dequantise(
    grid: Grid, defines: Defines, quants: Pointer, high: Any, scales: Any, deltas: Any, out: Pointer, first_row: int,
    cols: int,
) -> None:  # fmt: skip
    values = weight_rows(defines["FORMAT"], cols, slice(None), first_row, grid[0], quants, high, scales, deltas)
    storage = defines["STORAGE"]
    out.view((grid[0], cols), STORED[storage])[...] = narrowed(values, storage)


# -- norms, elements


def rms_norm(
    grid: Grid, defines: Defines, x: Pointer, weight: Pointer, out: Pointer, residual: Any, cols: int, eps: float
) -> None:
    shape = (grid[0], cols)
    added = None if residual is None else residual.view(shape, np.float32)
    dense.rms_norm(x.view(shape, np.float32), weight.view((cols,), np.float32), eps, out.view(shape, np.float32), added)


def layer_norm(
    grid: Grid, defines: Defines, x: Pointer, weight: Pointer, bias: Any, out: Pointer, residual: Any, cols: int,
    eps: float,
) -> None:  # fmt: skip
    shape = (grid[0], cols)
    source = x.view(shape, np.float32)
    if residual is not None:
        stream = residual.view(shape, np.float32)
        stream += source
        source = stream
    wide = source.astype(np.float64)
    wide -= wide.mean(axis=1, keepdims=True)
    normed = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + eps) * weight.view((cols,), np.float32)
    out.view(shape, np.float32)[...] = normed if bias is None else normed + bias.view((cols,), np.float32)


def head_norm(
    grid: Grid, defines: Defines, x: Pointer, weight: Pointer, row_stride: int, count: int, heads: int, dim: int,
    eps: float,
) -> None:  # fmt: skip
    done = min(count, grid[0] * 8)
    if done % heads:
        raise DeviceError(f"head_norm: a grid of {grid[0]} leaves a row of heads half done")
    values = x.view((done // heads, heads, dim), np.float32, (row_stride, dim, 1))
    dense.head_norm(values, weight.view((dim,), np.float32), eps)


def rope(
    grid: Grid, defines: Defines, x: Pointer, row_stride: int, positions: Pointer, angles: Pointer, num_positions: int,
    heads: int, dim: int, rotary: int,
) -> None:  # fmt: skip
    values = x.view((grid[0], heads, dim), np.float32, (row_stride, dim, 1))
    where = positions.view((grid[0],), np.int32)
    table = angles.view((num_positions, rotary), np.float32)
    known = (where >= 0) & (where < num_positions)
    dense.rope(values, np.where(known, where, 0), table)
    values[~known, :, :rotary] = np.nan


def gated_activation(grid: Grid, defines: Defines, gate_up: Pointer, out: Pointer, cols: int) -> None:
    _covers("gated_activation", grid[1] * 256, cols)
    gates = gate_up.view((grid[0], 2 * cols), np.float32)
    dense.gated_activation(gates, ACTIVATIONS[defines["ACTIVATION"]], out.view((grid[0], cols), np.float32))  # type: ignore[arg-type]


def add(grid: Grid, defines: Defines, x: Pointer, y: Pointer, count: int) -> None:
    total = x.view((count,), np.float32)
    total += y.view((count,), np.float32)


def take_rows(grid: Grid, defines: Defines, x: Pointer, rows: Pointer, out: Pointer, cols: int) -> None:
    wanted = rows.view((grid[0],), np.int32)
    source = x.view((int(wanted.max()) + 1, cols), np.float32)
    if wanted.min() < 0:
        raise DeviceError(f"take_rows: row {wanted.min()}")
    out.view((grid[0], cols), np.float32)[...] = source[wanted]


def narrow_rows(
    grid: Grid, defines: Defines, x: Pointer, out: Pointer, factors: Pointer, cols: int, padded: int
) -> None:
    storage = defines["STORAGE"]
    values = x.view((grid[0], cols), np.float32)
    exponent = (np.abs(values).max(axis=1).view(np.int32) >> 23) & 255 if storage == 1 else np.zeros(grid[0], int)
    scaled = (exponent > 0) & (exponent < 255) & ((exponent >= 127 + 15) | (exponent < 127 - 4))
    factor = np.where(scaled, np.ldexp(1.0, np.minimum(exponent, 253) - 127), 1.0).astype(np.float32)
    stored = np.zeros((grid[0], padded), np.float32)
    stored[:, :cols] = values / factor[:, None]
    out.view((grid[0], padded), STORED[storage])[...] = narrowed(stored, storage)
    factors.view((grid[0],), np.float32)[...] = factor


def finish_rows(
    grid: Grid, defines: Defines, out: Pointer, out_stride: int, factors: Pointer, bias: Any, cols: int
) -> None:
    rows = out.view((grid[0], cols), np.float32, (out_stride, 1))
    rows *= factors.view((grid[0], 1), np.float32)
    if bias is not None:
        rows += bias.view((cols,), np.float32)


def _covers(kernel: str, threads: int, needed: int) -> None:
    if threads < needed:
        raise DeviceError(f"{kernel}: a grid of {threads} threads for {needed}")


# -- blocks


def write_kv(
    grid: Grid, defines: Defines, key: Pointer, key_stride: int, value: Pointer, value_stride: int, pool: Pointer,
    slots: Pointer, num_kv_heads: int, head_dim: int, block_size: int, block_stride: int, layer_offset: int,
    kv_stride: int, head_stride: int, k_transposed: int, positions: Any, angles: Any, rotary: int,
) -> None:  # fmt: skip
    storage, shape = defines["STORAGE"], (grid[0], num_kv_heads, head_dim)
    where = slots.view((grid[0],), np.int64)
    used = where >= 0
    keys = key.view(shape, np.float32, (key_stride, head_dim, 1))[used]
    values = value.view(shape, np.float32, (value_stride, head_dim, 1))[used]
    if angles is not None:
        places = positions.view((grid[0],), np.int32)[used]
        keys = keys.copy()
        dense.rope(keys, places, angles.view((int(places.max(initial=0)) + 1, rotary), np.float32))
    frame, offset = np.divmod(where[used], block_size)
    block = frame * block_stride + layer_offset
    heads, dims = np.arange(num_kv_heads) * head_stride, np.arange(head_dim)
    inside = (block[:, None, None] + heads[:, None]) + np.zeros((1, 1, head_dim), np.int64)
    slot, inner = offset[:, None, None], dims
    flat = pool.rest(STORED[storage])
    flat[inside + (inner * block_size + slot if k_transposed else slot * head_dim + inner)] = narrowed(keys, storage)
    flat[inside + kv_stride + slot * head_dim + inner] = narrowed(values, storage)


def copy_blocks(
    grid: Grid, defines: Defines, pool: Pointer, pairs: Pointer, block_stride: int, layer_stride: int, units: int
) -> None:
    unit = defines["UNIT_BYTES"]
    for source, target in pairs.view((grid[0], 2), np.int64).tolist():
        for layer in range(grid[1]):
            ends = [(frame * block_stride + layer * layer_stride) * unit for frame in (target, source)]
            to, of = (pool.view((units * unit,), np.uint8, offset=end) for end in ends)
            ctypes.memmove(to.ctypes.data, of.ctypes.data, units * unit)
