"""Blocks to pinned memory of the host and back, as the swap engine moves them, beside one plain copy."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from cupaged.bench.gpu_check.report import Row
from cupaged.bench.gpu_check.sizes import Sizes
from cupaged.cache import Layout, PagedKVCache
from cupaged.device.base import CopyStream
from cupaged.device.cuda import CudaDevice
from cupaged.kernels.interface import POOL_SHIFT, Array

_ROUNDS = 5
_HOST = 1 << POOL_SHIFT  # in a block reference: of the host's pool
_STREAMS: tuple[CopyStream, CopyStream] = ("to_host", "to_device")


def swap_rows(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    """GB/s of a batch of scattered blocks; both layouts; and both directions at once."""
    blocks = sizes.pieces
    caches = {layout: _cache(device, sizes, layout) for layout in ("block_major", "layer_major")}
    nbytes = blocks * caches["block_major"].bytes_per_block
    plain = _plain(device, nbytes)
    out_refs = np.random.default_rng(2).permutation(blocks).tolist()
    in_refs = [blocks + ref for ref in out_refs]
    for layout, cache in caches.items():
        pairs: dict[CopyStream, list[tuple[Array, Array]]] = {
            "to_host": _pairs(cache, out_refs, [_HOST | ref for ref in range(blocks)]),
            "to_device": _pairs(cache, [_HOST | blocks + ref for ref in range(blocks)], in_refs),
        }
        for stream in _STREAMS:
            seconds = statistics.median(_seconds(device, {stream: pairs[stream]}) for _ in range(_ROUNDS))
            case = f"swap {'out' if stream == 'to_host' else 'in'}, {layout.replace('_', '-')}"
            yield Row(case, nbytes / seconds / 1e9, "GB/s", "one plain copy", plain[stream] / 1e9)
        if layout == "block_major":
            both = statistics.median(_seconds(device, pairs) for _ in range(_ROUNDS))
            alone = min(plain.values())
            yield Row("both ways at once", 2 * nbytes / both / 1e9, "GB/s", "one plain copy", alone / 1e9)


def _cache(device: CudaDevice, sizes: Sizes, layout: Layout) -> PagedKVCache:
    heads, count = sizes.heads, 2 * sizes.pieces
    return PagedKVCache(
        count, sizes.block_size, heads.kv, heads.dim, sizes.layers, "float16", device, layout, host_blocks=count
    )


def _pairs(cache: PagedKVCache, sources: Sequence[int], targets: Sequence[int]) -> list[tuple[Array, Array]]:
    return [
        pair
        for source, target in zip(sources, targets, strict=True)
        for pair in zip(cache.pieces(source), cache.pieces(target), strict=True)
    ]


def _seconds(device: CudaDevice, work: dict[CopyStream, list[tuple[Array, Array]]]) -> float:
    """From the first copy to the end of the last: the longest of the streams, which begin together."""
    device.synchronize()
    transfers = [device.copy(stream, pairs) for stream, pairs in work.items()]
    for transfer in transfers:
        transfer.wait()
        if transfer.error is not None:
            raise transfer.error
    return max(transfer.seconds or 0.0 for transfer in transfers)


def _plain(device: CudaDevice, nbytes: int) -> dict[CopyStream, float]:
    """Bytes a second of one contiguous copy between pinned and device memory, by direction."""
    there, here = device.empty((nbytes,), np.uint8), device.empty_host((nbytes,), np.uint8)
    found: dict[CopyStream, float] = {}
    for stream, pair in zip(_STREAMS, ((there, here), (here, there)), strict=True):
        _seconds(device, {stream: [pair]})
        found[stream] = nbytes / statistics.median(_seconds(device, {stream: [pair]}) for _ in range(_ROUNDS))
    return found
