"""Norms, rotary embedding, gated activation, additions, K/V writes and block copies.

Each is bound by memory: its bytes are its operands once, its roof the bandwidth of the cache they lie in. In a decode
step they are a few KiB a layer and cost less than the barrier that ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types

from cupaged.kernels.cpu import emit
from cupaged.kernels.cpu.activation import activate, gelu
from cupaged.kernels.cpu.emit import (
    I32,
    LANES,
    SIZE,
    Emitter,
    as_float,
    load32,
    load64,
    load_float,
    primitive,
    store_float,
)
from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
from cupaged.kernels.cpu.quant_rows import quantise
from cupaged.kernels.cpu.vector_math import sqrt_float, sum_of_squares

f32 = types.float32


@primitive(5, None, [types.int64] * 4 + [f32])
def _scale_row(e: Emitter, x: Any, weight: Any, out: Any, n: Any, scale: Any) -> None:
    """out = x * scale * weight."""

    def body(at: Any, lanes: int | None) -> None:
        factor = e.splat(scale) if lanes else scale
        scaled = e.b.fmul(e.floats(e.add(x, at), lanes), factor)
        e.store(e.b.fmul(scaled, e.floats(e.add(weight, at), lanes)), e.add(out, at), 4)

    e.each(n, body)


@primitive(3)
def _add_row(e: Emitter, x: Any, y: Any, n: Any) -> None:
    """x += y."""

    def body(at: Any, lanes: int | None) -> None:
        target = e.add(x, at)
        e.store(e.b.fadd(e.floats(target, lanes), e.floats(e.add(y, at), lanes)), target, 4)

    e.each(n, body)


@primitive(3, f32)
def _add_and_square(e: Emitter, x: Any, y: Any, n: Any) -> Any:
    """x += y; the sum of the new x's squares, in the order of `sum_of_squares`."""

    def some(lanes: int | None, first: Any) -> Callable[[Any, list[Any]], list[Any]]:
        def body(i: Any, state: list[Any]) -> list[Any]:
            at = e.mul(e.add(first, i), 4) if lanes is None else e.mul(i, 4 * lanes)
            target = e.add(x, at)
            v = e.b.fadd(e.floats(target, lanes), e.floats(e.add(y, at), lanes))
            e.store(v, target, 4)
            return [e.fma(v, v, state[0])]

        return body

    whole = e.b.ashr(n, e.const(4))
    (lanes,) = e.loop(whole, [e.zero()], some(LANES, 0))
    done = e.mul(whole, LANES)
    return e.loop(e.b.sub(n, done), [e.first(e.reduce(lanes, e.b.fadd))], some(None, done))[0]


@primitive(3)
def _copy_row(e: Emitter, source: Any, target: Any, n: Any) -> None:
    e.each(n, lambda at, lanes: e.store(e.floats(e.add(source, at), lanes), e.add(target, at), 4))


@primitive(4)
def _rotate_row(e: Emitter, x: Any, cosines: Any, sines: Any, n: Any) -> None:
    """n pairs (x[i], x[i + n]) turned."""
    b = e.b

    def body(at: Any, lanes: int | None) -> None:
        first, second = e.add(x, at), e.add(e.add(x, e.mul(n, 4)), at)
        u, v = e.floats(first, lanes), e.floats(second, lanes)
        c, s = e.floats(e.add(cosines, at), lanes), e.floats(e.add(sines, at), lanes)
        e.store(b.fsub(b.fmul(u, c), b.fmul(v, s)), first, 4)
        e.store(b.fadd(b.fmul(v, c), b.fmul(u, s)), second, 4)

    e.each(n, body)


@njit(f32(f32, types.int64, f32), **OPTIONS)
def _norm_scale(squares, n, eps):  # type: ignore[no-untyped-def]
    return f32(1.0) / sqrt_float(squares / f32(n) + eps)


@njit(KERNEL, **OPTIONS)
def rms_norm(op, chunk, thread):  # type: ignore[no-untyped-def]
    """Record: x, weight, out, K, eps bits, residual (0: none), x stride, out stride (bytes), input records of the
    quantised product that comes next, and precise ones (0: none), thread stride of out (bytes), rows, rows a chunk.
    Chunk: some rows.

    Nobody may want the floats but this product: out is then a row for each thread (out stride 0), which stays in L1.
    """
    x, weight = load64(op + 16), load64(op + 24)
    n, eps, residual, records = load64(op + 40), as_float(load64(op + 48)), load64(op + 56), load64(op + 80)
    precise, rows, step = load64(op + 88), load64(op + 104), load64(op + 112)
    out = load64(op + 32) + thread * load64(op + 96)
    for row in range(chunk * step, min(rows, (chunk + 1) * step)):
        source, target = x + row * load64(op + 64), out + row * load64(op + 72)
        if residual != 0:
            stream = residual + row * n * 4
            squares = _add_and_square(stream, source, n)
            source = stream
        else:
            squares = sum_of_squares(source, n)
        _scale_row(source, weight, target, n, _norm_scale(squares, n, eps))
        if records != 0 or precise != 0:
            quantise(target, n, row, records, precise)


@njit(KERNEL, **OPTIONS)
def head_norm(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, weight, heads, D, eps bits, token stride (bytes), tokens, tokens a chunk. Chunk: some tokens."""
    x, weight, heads, dim = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
    eps, tokens, step = as_float(load64(op + 48)), load64(op + 64), load64(op + 72)
    for token in range(chunk * step, min(tokens, (chunk + 1) * step)):
        row = x + token * load64(op + 56)
        for h in range(heads):
            head = row + h * dim * 4
            _scale_row(head, weight, head, dim, _norm_scale(sum_of_squares(head, dim), dim, eps))


@njit(KERNEL, **OPTIONS)
def rope(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, positions (int32), table, heads, D, R, token stride (bytes), tokens, tokens a chunk. Chunk: some
    tokens. Pairs (i, i + R/2)."""
    x, positions, table = load64(op + 16), load64(op + 24), load64(op + 32)
    heads, dim, rotary = load64(op + 40), load64(op + 48), load64(op + 56)
    tokens, step, half = load64(op + 72), load64(op + 80), load64(op + 56) // 2
    for token in range(chunk * step, min(tokens, (chunk + 1) * step)):
        row, angles = x + token * load64(op + 64), table + load32(positions + 4 * token) * rotary * 4
        for h in range(heads):
            _rotate_row(row + h * dim * 4, angles, angles + half * 4, half)


@njit(KERNEL, **OPTIONS)
def gated_activation(op, chunk, thread):  # type: ignore[no-untyped-def]
    """Record: gate_up, out, I, kind (silu 0, gelu 1, gelu_tanh 2, relu 3), out stride (bytes), input records of the
    quantised product that comes next, and precise ones (0: none), thread stride of out (bytes; see `rms_norm`), rows,
    rows a chunk. Chunk: some rows."""
    n, kind, records, precise = load64(op + 32), load64(op + 40), load64(op + 56), load64(op + 64)
    first, rows, step = load64(op + 24) + thread * load64(op + 72), load64(op + 80), load64(op + 88)
    for row in range(chunk * step, min(rows, (chunk + 1) * step)):
        gate, out = load64(op + 16) + row * n * 8, first + row * load64(op + 48)
        up = gate + n * 4
        if kind == 1:
            for i in range(n):
                store_float(out + 4 * i, gelu(load_float(gate + 4 * i)) * load_float(up + 4 * i))
        else:
            activate(kind, gate, up, out, n)
        if records != 0 or precise != 0:
            quantise(out, n, row, records, precise)


@njit(KERNEL, **OPTIONS)
def take_rows(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, rows (int32), out, K. Chunk: a row of `out`."""
    x, rows, out, n = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
    x += load32(rows + 4 * chunk) * n * 4
    _copy_row(x, out + chunk * n * 4, n)


@njit(KERNEL, **OPTIONS)
def add(op, chunk, _thread):  # type: ignore[no-untyped-def]
    """Record: x, y, elements a chunk, elements. x += y."""
    x, y, size, total = load64(op + 16), load64(op + 24), load64(op + 32), load64(op + 40)
    first = chunk * size
    _add_row(x + 4 * first, y + 4 * first, min(total - first, size))


def _put(kind: str, together: bool) -> Any:
    """Intrinsic (source, target, step, n): n floats stored as `kind`, `step` bytes apart (`together`: side by side)."""

    @primitive(4)
    def put(e: Emitter, source: Any, target: Any, step: Any, n: Any) -> None:
        def body(at: Any, lanes: int | None) -> None:
            value = e.narrowed(e.floats(e.add(source, at), lanes), kind)
            place = e.add(target, e.mul(e.b.lshr(at, e.const(2)), step))
            if together or lanes is None:
                e.store(value, place, SIZE[kind])
                return
            for lane in range(lanes):
                one = e.b.extract_element(value, ir.Constant(I32, lane))
                e.store(one, e.add(place, e.mul(step, lane)), SIZE[kind])

        e.each(n, body)

    return put


def write_kv(kind: str) -> Any:
    """K/V of a token into its slot. Record: key, value, token strides (bytes), slots (int64), pool, KV heads, D,
    block size, block stride, layer offset, kv stride, head stride, k_row, k_column (elements), tokens, tokens a chunk.
    Chunk: some tokens."""
    size = SIZE[kind]
    run, column = _put(kind, True), _put(kind, False)

    @njit(types.void(types.int64, types.int64), **OPTIONS)
    def write_token(op, token):  # type: ignore[no-untyped-def]
        slot = load64(load64(op + 48) + 8 * token)
        if slot < 0:  # a padding row
            return
        key = load64(op + 16) + token * load64(op + 32)
        value = load64(op + 24) + token * load64(op + 40)
        heads, dim, block_size = load64(op + 64), load64(op + 72), load64(op + 80)
        block, offset = slot // block_size, slot % block_size
        base = load64(op + 56) + (block * load64(op + 88) + load64(op + 96)) * size
        kv, head_stride, k_row, k_column = load64(op + 104), load64(op + 112), load64(op + 120), load64(op + 128)
        for h in range(heads):
            k = base + (h * head_stride + offset * k_column) * size
            v = base + (h * head_stride + kv + offset * dim) * size
            source = h * dim * 4
            if k_row == 1:
                run(key + source, k, size, dim)
            else:
                column(key + source, k, k_row * size, dim)
            run(value + source, v, size, dim)

    @njit(KERNEL, **OPTIONS)
    def write_kernel(op, chunk, _thread):  # type: ignore[no-untyped-def]
        tokens, step = load64(op + 136), load64(op + 144)
        for token in range(chunk * step, min(tokens, (chunk + 1) * step)):
            write_token(op, token)

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
