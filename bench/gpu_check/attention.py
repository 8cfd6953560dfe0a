"""Paged attention alone: decoding over long and short contexts beside a copy on the device, and both layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupaged.bench.gpu_check.clock import Clock, Work, filled
from cupaged.bench.gpu_check.report import Row
from cupaged.bench.gpu_check.sizes import Sizes
from cupaged.cache import Layout, PagedKVCache
from cupaged.device.cuda import CudaDevice

MAX_LAYERS = 16


@dataclass(frozen=True, slots=True)
class Decode:
    """run() attends once in each of `layers` layers, reading nbytes of K and V in all."""

    run: Work
    layers: int
    nbytes: int


def decode_rows(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    """GB/s of K and V read by decode attention, beside a copy on the device (bytes read and written)."""
    clock = Clock(device, sizes.seconds)
    source = filled(device, sizes.far // 2, np.float16)
    target = device.empty(source.shape, source.dtype)
    copied = clock.copied(source, target) / 1e9
    del source, target
    yield Row("copy on the device", copied, "GB/s")
    for sequences, context in sizes.decode:
        case = decode_case(device, sizes, sequences, context, "block_major")
        seconds = clock.median(clock.captured(case.run))
        yield Row(f"decode, {sequences} x {context} tokens", case.nbytes / seconds / 1e9, "GB/s", "copy", copied)


def layout_rows(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    """The same read block-major and layer-major, in turn."""
    clock = Clock(device, sizes.seconds)
    for sequences, context in sizes.decode:
        cases = [decode_case(device, sizes, sequences, context, layout) for layout in ("block_major", "layer_major")]
        block, layer = (
            case.nbytes / seconds / 1e9
            for case, seconds in zip(cases, clock.medians([clock.captured(case.run) for case in cases]), strict=True)
        )
        yield Row(f"block-major, {sequences} x {context} tokens", block, "GB/s", "layer-major", layer)


def prefill_rows(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    """Operations of a chunk's own attention: the masked half is not counted."""
    clock = Clock(device, sizes.seconds)
    heads, count = sizes.heads, sizes.prefill
    cache = PagedKVCache(
        -(-count // sizes.block_size), sizes.block_size, heads.kv, heads.dim, 1, "float16", device
    )  # fmt: skip
    device.runtime.copy(cache.array, filled(device, cache.array.size, np.float16), device.backend.stream)
    tables = np.arange(cache.num_blocks, dtype=np.int32)[None]
    plan = device.ops.plan_attention(cache.view, tables, [0, count], [count], heads.query)
    query = filled(device, count * heads.query * heads.dim, np.float32).reshape(count, heads.query, heads.dim)
    out = device.empty(query.shape, np.float32)
    seconds = clock.median(
        lambda: device.ops.paged_attention(query, cache.view, 0, plan, out, heads.dim**-0.5)
    )  # fmt: skip
    operations = 4 * heads.query * heads.dim * count * (count + 1) / 2
    yield Row(f"attention, a chunk of {count} tokens", operations / seconds / 1e12, "TFLOP/s")


def decode_case(device: CudaDevice, sizes: Sizes, sequences: int, context: int, layout: Layout) -> Decode:
    """One query a sequence, blocks scattered, as many layers as it takes to read more than the caches hold."""
    heads, block = sizes.heads, sizes.block_size
    per_layer = 2 * 2 * heads.kv * heads.dim * sequences * context
    layers = max(1, min(MAX_LAYERS, -(-sizes.far // per_layer)))
    columns = -(-context // block)
    cache = PagedKVCache(sequences * columns, block, heads.kv, heads.dim, layers, "float16", device, layout)
    device.runtime.copy(cache.array, filled(device, cache.array.size, np.float16), device.backend.stream)
    frames = np.random.default_rng(1).permutation(sequences * columns).astype(np.int32)
    starts, contexts = list(range(sequences + 1)), [context] * sequences
    plan = device.ops.plan_attention(cache.view, frames.reshape(sequences, columns), starts, contexts, heads.query)
    query = filled(device, sequences * heads.query * heads.dim, np.float32).reshape(sequences, heads.query, heads.dim)
    out = device.empty(query.shape, np.float32)

    def run() -> None:
        for layer in range(layers):
            device.ops.paged_attention(query, cache.view, layer, plan, out, heads.dim**-0.5)

    return Decode(run, layers, layers * per_layer)
