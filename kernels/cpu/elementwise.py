"""Norms, rotary embedding, gated activation, additions, K/V writes and block copies.

Each is bound by memory: its bytes are its operands once, its roof the bandwidth of the cache they lie in. In a decode
step they are a few KiB a layer and cost less than the barrier that ends them.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from cupaged.kernels.cpu import emit
from cupaged.kernels.cpu.emit import SIZE, STORE, Emitter, as_float, load32, load64, load_float, primitive, store_float
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.cpu.vector_math import LOG2E, exp2_float, fma_float, sqrt_float, sum_of_squares, tanh_float

f32 = types.float32


@njit(types.void(*[types.int64] * 4, f32), **OPTIONS)
def _norm_row(x, weight, out, n, eps):  # type: ignore[no-untyped-def]
    scale = f32(1.0) / sqrt_float(sum_of_squares(x, n) / f32(n) + eps)
    for i in range(n):
        store_float(out + 4 * i, load_float(x + 4 * i) * scale * load_float(weight + 4 * i))


@njit(KERNEL, **OPTIONS)
def rms_norm(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, weight, out, K, eps bits, residual (0: none), x stride, out stride (bytes). Chunk: a row."""
    x, weight, out = load64(op + 16), load64(op + 24), load64(op + 32)
    n, eps, residual = load64(op + 40), as_float(load64(op + 48)), load64(op + 56)
    x += chunk * load64(op + 64)
    out += chunk * load64(op + 72)
    if residual != 0:
        r = residual + chunk * n * 4
        for i in range(n):
            store_float(r + 4 * i, load_float(r + 4 * i) + load_float(x + 4 * i))
        x = r
    _norm_row(x, weight, out, n, eps)


@njit(KERNEL, **OPTIONS)
def head_norm(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, weight, heads, D, eps bits, token stride (bytes). Chunk: a token."""
    x, weight, heads, dim = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
    eps = as_float(load64(op + 48))
    x += chunk * load64(op + 56)
    for h in range(heads):
        _norm_row(x + h * dim * 4, weight, x + h * dim * 4, dim, eps)


@njit(KERNEL, **OPTIONS)
def rope(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, positions (int32), table, heads, D, R, token stride (bytes). Chunk: a token. Pairs (i, i + R/2)."""
    x, positions, table = load64(op + 16), load64(op + 24), load64(op + 32)
    heads, dim, rotary = load64(op + 40), load64(op + 48), load64(op + 56)
    x += chunk * load64(op + 64)
    row = table + load32(positions + 4 * chunk) * rotary * 4
    half = rotary // 2
    for h in range(heads):
        a = x + h * dim * 4
        b = a + half * 4
        for i in range(half):
            c, s = load_float(row + i * 4), load_float(row + (half + i) * 4)
            u, v = load_float(a + i * 4), load_float(b + i * 4)
            store_float(a + i * 4, u * c - v * s)
            store_float(b + i * 4, v * c + u * s)


@primitive(1, f32, [f32])
def _erf(e: Emitter, x: Any) -> Any:
    return e.call("erff", emit.F32, x)


@njit(f32(f32, types.int64), **OPTIONS)
def _activate(x, kind):  # type: ignore[no-untyped-def]
    """silu 0, gelu 1, gelu_tanh 2, relu 3 (Hendrycks & Gimpel 2016; Elfwing et al. 2017)."""
    if kind == 0:
        return x / (f32(1.0) + exp2_float(-x * f32(LOG2E)))
    if kind == 1:
        return f32(0.5) * x * (f32(1.0) + _erf(x * f32(0.7071067811865476)))
    if kind == 2:
        inner = f32(0.7978845608028654) * fma_float(f32(0.044715) * x * x, x, x)
        return f32(0.5) * x * (f32(1.0) + tanh_float(inner))
    return x if x > f32(0.0) or x != x else f32(0.0)


@njit(KERNEL, **OPTIONS)
def gated_activation(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: gate_up, out, I, kind. Chunk: a row. The kind is tested outside the loop, so that each vectorises."""
    gate, out, n, kind = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
    gate += chunk * n * 8
    out += chunk * n * 4
    up = gate + n * 4
    if kind == 0:
        for i in range(n):
            store_float(out + 4 * i, _activate(load_float(gate + 4 * i), 0) * load_float(up + 4 * i))
    elif kind == 1:
        for i in range(n):
            store_float(out + 4 * i, _activate(load_float(gate + 4 * i), 1) * load_float(up + 4 * i))
    elif kind == 2:
        for i in range(n):
            store_float(out + 4 * i, _activate(load_float(gate + 4 * i), 2) * load_float(up + 4 * i))
    else:
        for i in range(n):
            store_float(out + 4 * i, _activate(load_float(gate + 4 * i), 3) * load_float(up + 4 * i))


@njit(KERNEL, **OPTIONS)
def take_rows(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, rows (int32), out, K. Chunk: a row of `out`."""
    x, rows, out, n = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
    x += load32(rows + 4 * chunk) * n * 4
    out += chunk * n * 4
    for i in range(n):
        store_float(out + 4 * i, load_float(x + 4 * i))


@njit(KERNEL, **OPTIONS)
def add(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, y, elements a chunk, elements. x += y."""
    x, y, size, total = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
    for i in range(chunk * size, min(total, (chunk + 1) * size)):
        store_float(x + 4 * i, load_float(x + 4 * i) + load_float(y + 4 * i))


def write_kv(kind: str) -> Any:
    """K/V of a token into its slot. Record: key, value, token strides (bytes), slots (int64), pool, KV heads, D,
    block size, block stride, layer offset, kv stride, head stride, k_row, k_column (elements). Chunk: a token."""
    store = STORE[kind]
    size = SIZE[kind]

    @njit(KERNEL, **OPTIONS)
    def write_kernel(op, chunk, _thread):  # type: ignore[no-untyped-def]
        slot = load64(load64(op + 48) + 8 * chunk)
        if slot < 0:  # a padding row
            return
        key = load64(op + 16) + chunk * load64(op + 32)
        value = load64(op + 24) + chunk * load64(op + 40)
        heads, dim, block_size = load64(op + 64), load64(op + 72), load64(op + 80)
        block, offset = slot // block_size, slot % block_size
        base = load64(op + 56) + (block * load64(op + 88) + load64(op + 96)) * size
        kv, head_stride, k_row, k_column = load64(op + 104), load64(op + 112), load64(op + 120), load64(op + 128)
        for h in range(heads):
            k = base + (h * head_stride + offset * k_column) * size
            v = base + (h * head_stride + kv + offset * dim) * size
            source = h * dim * 4
            for d in range(dim):
                store(k + d * k_row * size, load_float(key + source + d * 4))
            for d in range(dim):
                store(v + d * size, load_float(value + source + d * 4))

    return write_kernel


@njit(KERNEL, **OPTIONS)
def copy_blocks(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: pool, pairs (int64 source, destination frame), runs a block, bytes a run, block and run stride (bytes).

    Block-major blocks are one run; layer-major ones a run per layer.
    Chunk: a pair by a run.
    """
    pool, pairs, runs, size = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
    block, run = load64(op + 48), load64(op + 56)
    pair = pairs + (chunk // runs) * 16
    offset = (chunk % runs) * run
    source = pool + load64(pair) * block + offset
    target = pool + load64(pair + 8) * block + offset
    words = size // 4  # every element type and block shape is a multiple of 2 bytes; the last 2 are copied apart
    for i in range(words):
        store_float(target + 4 * i, load_float(source + 4 * i))
    if size % 4 != 0:
        emit.store_raw16(target + 4 * words, emit.load_raw16(source + 4 * words))
