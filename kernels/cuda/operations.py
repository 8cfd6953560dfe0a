"""`CudaOperations`: the CUDA C kernels behind the names of `interface.Operations`, on any backend.

This side only checks shapes, types and strides, chooses variants and grids, and queues launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.cuda.arrays import contiguous, row_stride
from cupaged.kernels.cuda.attention import STORAGE
from cupaged.kernels.cuda.attention_run import Attention
from cupaged.kernels.cuda.dense import Dense
from cupaged.kernels.cuda.launch import Backend, Launcher
from cupaged.kernels.cuda.sampling import Sampling
from cupaged.kernels.interface import Array, KVView
from cupaged.kernels.reference.blocks import check_copies, num_frames

if TYPE_CHECKING:
    from cupaged.kernels.interface import Operations


class CudaOperations:
    """`interface.Operations` on the arrays of a backend. What each computes is documented where it is implemented.

    fixed_block_size: see `attention_run.Attention`. tensor_cores: None uses them where the device has them, K and V are
    of 16 bits and a KV head serves 4 query heads or more; True for any number of heads, False never. The choice is one
    for all calls, because the two kernels differ in the last bits.
    """

    def __init__(self, backend: Backend, fixed_block_size: bool = True, tensor_cores: bool | None = None) -> None:
        self.backend = backend
        self._launch = Launcher(backend)
        attention = Attention(backend, self._launch, fixed_block_size, tensor_cores)
        self.plan_attention = attention.plan
        self.paged_attention, self.refill_plan = attention.run, attention.refill
        dense = Dense(backend, self._launch)
        self.matrix, self.vector = dense.matrix, dense.vector
        self.matmul, self.embed, self.dequantise = dense.matmul, dense.embed, dense.dequantise
        self.take_rows, self.rms_norm, self.layer_norm = dense.take_rows, dense.rms_norm, dense.layer_norm
        self.head_norm, self.rope = dense.head_norm, dense.rope
        self.gated_activation, self.add = dense.gated_activation, dense.add
        sampling = Sampling(backend, self._launch)
        self.sample, self.broken_rows = sampling.sample, sampling.broken_rows

    def write_kv(
        self,
        key: Array,
        value: Array,
        cache: KVView,
        layer: int,
        slots: Array,
        positions: Array | None = None,
        rope_table: Array | None = None,
    ) -> None:
        """See `interface.Operations.write_kv`; slots are on the device and not looked at here.

        With positions [T] int32 and rope_table [P, R] float32 (both or neither), K is rotated on its way, as `rope`
        would have rotated it; `key` itself stays.
        """
        count = int(slots.shape[0])
        shape = (count, cache.num_kv_heads, cache.head_dim)
        strides = row_stride("key", key, shape), row_stride("value", value, shape)
        contiguous("slots", slots, (count,), "int64")
        if not 0 <= layer < cache.num_layers:
            raise KernelError(f"layer: {layer} is not in 0..{cache.num_layers - 1}")
        if (positions is None) != (rope_table is None):
            raise KernelError("positions, rope_table: one without the other")
        if positions is not None and rope_table is not None:
            contiguous("positions", positions, (count,), "int32")
            contiguous("rope_table", rope_table, rope_table.shape)
            if rope_table.shape[1] > cache.head_dim or rope_table.shape[1] % 2:
                raise KernelError(f"rope_table: {rope_table.shape[1]} columns do not fit heads of {cache.head_dim}")
        if not count:
            return
        self._launch(
            "write_kv.cu", "write_kv", (count,), 256, {"STORAGE": STORAGE[cache.dtype]},
            key=key, key_stride=strides[0], value=value, value_stride=strides[1], pool=cache.pools[0], slots=slots,
            num_kv_heads=cache.num_kv_heads, head_dim=cache.head_dim, block_size=cache.block_size,
            block_stride=cache.block_stride, layer_offset=layer * cache.layer_stride, kv_stride=cache.kv_stride,
            head_stride=cache.head_stride, k_transposed=int(cache.k_transposed), positions=positions,
            angles=rope_table, rotary=0 if rope_table is None else rope_table.shape[1],
        )  # fmt: skip

    def copy_blocks(self, cache: KVView, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks, all layers, frame to frame in pool 0; KernelError unless any order of copies will do."""
        check_copies(sources, destinations, num_frames(cache))
        if not len(sources):
            return
        pool = cache.pools[0]
        assert pool is not None  # num_frames found frames in it
        item = int(pool.dtype.itemsize)
        sizes = [item * n for n in (cache.block_stride, cache.layer_stride, 2 * cache.kv_stride)]
        unit = 16 if all(n % 16 == 0 for n in (*sizes, self.backend.address(pool))) else 1
        pairs = np.stack([np.asarray(sources, np.int64), np.asarray(destinations, np.int64)], axis=1)
        slices = max(1, min(8, sizes[2] // unit // 1024))
        self._launch(
            "copy_blocks.cu", "copy_blocks", (len(pairs), cache.num_layers, slices), 256, {"UNIT_BYTES": unit},
            pool=pool, pairs=self.backend.upload(pairs.reshape(-1)), block_stride=sizes[0] // unit,
            layer_stride=sizes[1] // unit, units=sizes[2] // unit,
        )  # fmt: skip


if TYPE_CHECKING:

    def _(operations: CudaOperations) -> Operations:
        return operations  # mypy compares every signature with the interface
