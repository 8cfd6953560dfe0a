"""PagedKVCache: the arrays behind the blocks, on a device.

One flat array holds K and V of all layers of a KV group; kernels find a block in it by the strides of `view`. Two
layouts, both with K beside V so that a block of a layer is contiguous:

    block_major  [block, layer, k|v, kv_head, ...]   a block is one contiguous unit: to swap or copy it is one copy
    layer_major  [layer, block, k|v, kv_head, ...]   a layer's blocks lie together: fewer pages touched per layer

A host pool, if there is one, is always block-major. Beside a block-major device pool it has the same strides, and
kernels read its blocks in place; a layer-major cache can only swap.

The cache owns bytes only. Which block belongs to whom is the block pool's business.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, Literal, Protocol, get_args

import numpy as np

from cupaged.errors import KernelError, OptionError
from cupaged.kernels.interface import (
    FRAME_BITS,
    FRAME_MASK,
    POOL_MASK,
    POOL_SHIFT,
    STORAGE_BYTES,
    Array,
    KVView,
    Operations,
    StorageType,
)

Layout = Literal["block_major", "layer_major"]

MAX_BLOCKS = 1 << FRAME_BITS
MAX_BLOCK_SIZE = 256

_NUMPY_TYPES: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class CacheDevice(Protocol):
    """What a cache asks of a device (`cupaged.device.Device` is one). `k_transposed`: the order of K it likes best."""

    @property
    def ops(self) -> Operations: ...
    @property
    def k_transposed(self) -> bool: ...
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array: ...
    def empty_host(self, shape: tuple[int, ...], dtype: Any) -> Array: ...


class PagedKVCache:
    """K and V of `num_blocks` blocks of `block_size` tokens in `num_layers` layers.

    dtype: "float32", "float16" or "bfloat16" (kept as uint16). device: None is the CPU. layout: see the module.
    k_transposed: K of a block as [head_dim][slot] instead of [slot][head_dim]; None leaves it to the device.
    host_blocks: blocks of a second pool in the host's memory, to which blocks are swapped; 0 for none.
    block_size 1..256, num_blocks up to 2^28 (the frame bits of a reference). The array is allocated, aligned as the
    device aligns, but neither cleared nor touched: unused slots hold anything, NaN included.

    OptionError names an argument outside its range, or the bytes that could not be had.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        num_kv_heads: int = 1,
        head_dim: int = 64,
        num_layers: int = 1,
        dtype: StorageType = "float32",
        device: CacheDevice | None = None,
        layout: Layout = "block_major",
        k_transposed: bool | None = None,
        host_blocks: int = 0,
    ) -> None:
        self.num_blocks = _whole("num_blocks", num_blocks, MAX_BLOCKS)
        self.block_size = _whole("block_size", block_size, MAX_BLOCK_SIZE)
        self.num_kv_heads = _whole("num_kv_heads", num_kv_heads, 1 << 16)
        self.head_dim = _whole("head_dim", head_dim, 1 << 16)
        self.num_layers = _whole("num_layers", num_layers, 1 << 16)
        self.dtype: StorageType = _choice("dtype", _dtype_name(dtype), tuple(STORAGE_BYTES))
        self.layout: Layout = _choice("layout", layout, get_args(Layout))
        self.device: CacheDevice = _cpu_device() if device is None else device
        if k_transposed is None:
            k_transposed = self.device.k_transposed

        head_stride = self.block_size * self.head_dim
        kv_stride = self.num_kv_heads * head_stride
        if self.layout == "block_major":
            layer_stride = 2 * kv_stride
            block_stride = self.num_layers * layer_stride
        else:
            block_stride = 2 * kv_stride
            layer_stride = self.num_blocks * block_stride
        self.host_blocks = _whole("host_blocks", host_blocks, MAX_BLOCKS, low=0)
        self.array = self._allocate("num_blocks", self.num_blocks, self.device.empty)
        self.host_array = None
        if self.host_blocks:
            self.host_array = self._allocate("host_blocks", self.host_blocks, self.device.empty_host)
        self.view = KVView(
            pools=(self.array, self.host_array) if self.reads_in_place else (self.array,),
            dtype=self.dtype,
            num_layers=self.num_layers,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_stride=block_stride,
            layer_stride=layer_stride,
            kv_stride=kv_stride,
            head_stride=head_stride,
            k_transposed=k_transposed,
        )

    def _allocate(self, name: str, blocks: int, empty: Callable[[tuple[int, ...], Any], Array]) -> Array:
        dtype = np.dtype(_NUMPY_TYPES[self.dtype])
        size = blocks * self.bytes_per_block
        try:
            return empty((size // dtype.itemsize,), dtype)
        except (MemoryError, ValueError) as error:
            raise OptionError(f"{name}: {size:,} bytes of KV cache cannot be allocated ({error})") from error

    @property
    def reads_in_place(self) -> bool:
        """Whether kernels can read blocks of the host pool where they lie."""
        return self.host_blocks > 0 and self.layout == "block_major"

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: K and V of block_size tokens in all layers."""
        elements = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return elements * STORAGE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks on the device."""
        return self.num_blocks * self.bytes_per_block

    def write(self, layer: int, slots: Array, key: Array, value: Array) -> None:
        """Store K and V of T tokens of a layer: `cupaged.write_kv` with the cache first."""
        from cupaged.attention import write_kv

        write_kv(key, value, self, layer, slots)

    def gather(self, layer: int, refs: Sequence[int], num_tokens: int) -> tuple[Array, Array]:
        """K and V of the first num_tokens positions of a block table, both float32 [num_tokens, KVH, D].

        For tests and debugging: NumPy, token order whatever the layout, exact (widening loses nothing). KernelError for
        a layer or a block that this cache does not have, or more tokens than the blocks hold.
        """
        from cupaged.kernels.reference.blocks import gather

        if not 0 <= num_tokens <= len(refs) * self.block_size:
            raise KernelError(f"num_tokens: {num_tokens} is not in 0..{len(refs) * self.block_size}, the slots of refs")
        self.check_layer(layer)
        keys, values = gather(self.view, layer, refs, 0, num_tokens)
        with np.errstate(invalid="ignore"):  # a NaN is no reason to warn: unused slots are full of them
            return keys.astype(np.float32), values.astype(np.float32)

    def block_bytes(self, frame: int) -> Array:
        """The bytes of a block as uint8 [bytes_per_block], a copy: layer by layer, K then V, as stored."""
        if not 0 <= frame < self.num_blocks:
            raise KernelError(f"frame: {frame} is not in 0..{self.num_blocks - 1}")
        starts = [frame * self.view.block_stride + layer * self.view.layer_stride for layer in range(self.num_layers)]
        return np.concatenate([self.array[start : start + 2 * self.view.kv_stride] for start in starts]).view(np.uint8)

    def pieces(self, ref: int) -> list[Array]:
        """A block of either pool as flat arrays that are contiguous: itself, or of a layer-major cache one a layer.

        KernelError for a frame that this cache does not have.
        """
        pool, frame = ref >> POOL_SHIFT & POOL_MASK, ref & FRAME_MASK
        array, blocks = {0: (self.array, self.num_blocks), 1: (self.host_array, self.host_blocks)}.get(pool, (None, 0))
        if array is None or ref < 0 or ref >> FRAME_BITS >= 4 or frame >= blocks:
            raise KernelError(f"block reference {ref:#x} is not of this cache")
        per_layer = 2 * self.view.kv_stride
        if self.layout == "block_major":
            size = per_layer * self.num_layers
            return [array[frame * size : (frame + 1) * size]]
        block, layer = (
            (self.view.block_stride, self.view.layer_stride) if pool == 0 else (self.num_layers * per_layer, per_layer)
        )
        starts = [frame * block + index * layer for index in range(self.num_layers)]
        return [array[start : start + per_layer] for start in starts]

    def copy_blocks(self, copies: Iterable[Any]) -> None:
        """Copy whole blocks inside pool 0, all layers, bit for bit.

        copies: (source, destination) pairs, or plan items with attributes of those names. They have no order among
        themselves: destinations are distinct and none is a source. KernelError otherwise, or for a frame that this
        cache does not have.
        """
        pairs = [copy if isinstance(copy, tuple) else (copy.source, copy.destination) for copy in copies]
        sources = [int(source) for source, _ in pairs]
        destinations = [int(destination) for _, destination in pairs]
        for name, frames in (("source", sources), ("destination", destinations)):
            for frame in frames:
                if not 0 <= frame < self.num_blocks:
                    raise KernelError(f"copies: {name} {frame} is not in 0..{self.num_blocks - 1}")
        if len(set(destinations)) != len(destinations) or set(sources) & set(destinations):
            raise KernelError("copies: a destination appears twice or is also a source")
        self.device.ops.copy_blocks(self.view, sources, destinations)

    def check_layer(self, layer: int) -> None:
        """KernelError if this cache has no such layer."""
        if isinstance(layer, bool) or not isinstance(layer, Integral) or not 0 <= layer < self.num_layers:
            raise KernelError(f"layer: {layer!r:.40} is not in 0..{self.num_layers - 1}")

    def __repr__(self) -> str:
        blocks = f"{self.num_blocks} blocks" + f" and {self.host_blocks} on the host" * bool(self.host_blocks)
        shape = f"{blocks} of {self.block_size}, {self.num_layers} layers"
        return f"PagedKVCache({shape}, {self.num_kv_heads} KV heads of {self.head_dim}, {self.dtype}, {self.layout})"


def _whole(name: str, value: Any, high: int, low: int = 1) -> int:
    try:
        whole = operator.index(value)
    except TypeError:
        raise OptionError(f"{name}: {value!r} is not a whole number") from None
    if isinstance(value, bool) or not low <= whole <= high:
        raise OptionError(f"{name}: {value!r} is not in {low}..{high}")
    return whole


def _dtype_name(dtype: Any) -> Any:
    """The name of a type given as NumPy's object for it (np.float16, np.dtype("float32")); anything else as it is."""
    is_numpy = isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic))
    return np.dtype(dtype).name if is_numpy else dtype


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise OptionError(f"{name}: {value!r} is not one of {', '.join(allowed)}")
    return value


def _cpu_device() -> CacheDevice:
    from cupaged.device import get_device

    return get_device("cpu")
