"""Where K and V lie: block references resolved to NumPy views, and the operations that only move data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupaged.errors import KernelError
from cupaged.kernels.interface import FORMAT_SHIFT, FRAME_MASK, POOL_MASK, POOL_SHIFT, Array, KVView
from cupaged.kernels.reference.dense import narrow, widen


def num_frames(cache: KVView, pool: int = 0) -> int:
    """How many blocks a pool's array holds: as many as keep the last element of the last layer inside it."""
    array = cache.pools[pool] if pool < len(cache.pools) else None
    if array is None:
        return 0
    last = (cache.num_layers - 1) * cache.layer_stride + cache.kv_stride + (cache.num_kv_heads - 1) * cache.head_stride
    last += cache.block_size * cache.head_dim
    return max(0, (array.size - last) // cache.block_stride + 1)


def block_views(cache: KVView, layer: int, pool: int = 0) -> tuple[Array, Array]:
    """Views (K, V) of one layer of a pool, both [frames, KVH, block_size, head_dim] whatever the layout.

    Writing to a view writes to the pool. NumPy keeps strides in bytes as 64-bit, so no offset can wrap.
    """
    array = cache.pools[pool]
    if array is None:
        raise KernelError(f"pools: pool {pool} has no array")
    if not 0 <= layer < cache.num_layers:
        raise KernelError(f"layer: {layer} is not in 0..{cache.num_layers - 1}")
    item = array.itemsize
    shape = (num_frames(cache, pool), cache.num_kv_heads, cache.block_size, cache.head_dim)
    row_major = (cache.head_dim * item, item)
    outer = (cache.block_stride * item, cache.head_stride * item)
    start = layer * cache.layer_stride
    keys = as_strided(
        array[start:], shape, outer + ((item, cache.block_size * item) if cache.k_transposed else row_major)
    )
    values = as_strided(array[start + cache.kv_stride :], shape, outer + row_major)
    return keys, values


def resolve(cache: KVView, reference: int, where: str) -> tuple[int, int]:
    """(pool, frame) of a reference. KernelError, beginning with `where`, if it is no plain block of this cache."""
    if reference < 0:
        raise KernelError(f"{where}: {reference} is no block")
    if reference >> FORMAT_SHIFT:
        raise KernelError(f"{where}: {reference:#x} is a packed block, which these kernels cannot read")
    pool, frame = (reference >> POOL_SHIFT) & POOL_MASK, reference & FRAME_MASK
    frames = num_frames(cache, pool)
    if frame >= frames:
        raise KernelError(f"{where}: {reference:#x} is frame {frame} of pool {pool}, which has {frames}")
    return pool, frame


def gather(cache: KVView, layer: int, references: Sequence[int], start: int, stop: int) -> tuple[Array, Array]:
    """K and V of positions start..stop-1 of a sequence, both float64 [stop - start, KVH, D]; no other slot is read.

    references: the sequence's block table; entry i holds positions i*block_size and up.
    """
    shape = (max(0, stop - start), cache.num_kv_heads, cache.head_dim)
    keys, values = np.empty(shape), np.empty(shape)
    position = start
    while position < stop:
        index, offset = divmod(position, cache.block_size)
        count = min(stop - position, cache.block_size - offset)
        pool, frame = resolve(cache, int(references[index]), f"tables entry {index}")
        for stored, wide in zip(block_views(cache, layer, pool), (keys, values), strict=True):
            slots = stored[frame, :, offset : offset + count].swapaxes(0, 1)
            wide[position - start : position - start + count] = widen(slots, cache.dtype)
        position += count
    return keys, values


def write_kv(key: Array, value: Array, cache: KVView, layer: int, slots: Array) -> None:
    """Store K and V of T tokens in pool 0.

    key, value [T, KVH, D] float32, rows may be strided; slots [T] int64 = frame * block_size + offset; a negative slot
    is skipped (padding). Slots that are not negative are distinct. Narrowing rounds to nearest, ties to even.
    KernelError for a slot beyond the pool.
    """
    slots = np.asarray(slots, np.int64)
    limit = num_frames(cache) * cache.block_size
    if slots.size and int(slots.max()) >= limit:
        raise KernelError(f"slots: {int(slots.max())} is not below the pool's {limit} slots")
    used = slots >= 0
    frames, offsets = np.divmod(slots[used], cache.block_size)
    for new, stored in zip((key, value), block_views(cache, layer), strict=True):
        stored[frames, :, offsets] = narrow(new[used], cache.dtype)


def copy_blocks(cache: KVView, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copy whole blocks, all layers, bit for bit, frame to frame in pool 0.

    The copies of one call have no order: destinations are distinct and none is a source. KernelError otherwise, or for
    a frame beyond the pool.
    """
    check_copies(sources, destinations, num_frames(cache))
    for layer in range(cache.num_layers):
        for stored in block_views(cache, layer):
            for source, destination in zip(sources, destinations, strict=True):
                stored[destination] = stored[source]


def check_copies(sources: Sequence[int], destinations: Sequence[int], frames: int) -> None:
    """KernelError unless the pairs are copies that `copy_blocks` may do in any order."""
    if len(sources) != len(destinations):
        raise KernelError(f"destinations: {len(destinations)} for {len(sources)} sources")
    for name, values in (("sources", sources), ("destinations", destinations)):
        for value in values:
            if not 0 <= value < frames:
                raise KernelError(f"{name}: frame {value} is not in 0..{frames - 1}")
    if len(set(destinations)) != len(destinations):
        raise KernelError("destinations: a frame appears twice")
    both = set(sources) & set(destinations)
    if both:
        raise KernelError(f"destinations: frame {min(both)} is also a source")
