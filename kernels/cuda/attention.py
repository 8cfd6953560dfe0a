"""Variants of the paged attention kernels: rows of a work item, depth of the ring, and shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.errors import KernelError
from cupaged.kernels.interface import PART, STORAGE_BYTES, TILE

STORAGE = {"float32": 0, "float16": 1, "bfloat16": 2}  # -DSTORAGE of common.cuh
SLICES = 4
MAX_HEAD_DIM = 256
ROW_VARIANTS = (1, 4, 8)  # of the kernel without tensor cores: a decoding head, a small group, prefill
TENSOR_ROWS = (16, 32)  # of the kernel on tensor cores: decode, and prefill
TENSOR_GROUP = 4  # query heads of a KV head from which on tensor cores are worth it: below, decode is bound by memory
UNDER_WAY = 40 * 1024  # bytes on their way that a block aims at
WORKERS = 4  # work items that are under way on a multiprocessor, at most; more only wait


@dataclass(frozen=True, slots=True)
class Ring:
    """Stages of K and V in shared memory. `pieces`: stages that K or V of a tile comes in, each with so many of its
    columns, so that all warps have work in each."""

    pieces: int
    buffers: int
    stage_bytes: int

    @property
    def in_flight(self) -> int:
        return (self.buffers - 1) * self.stage_bytes


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form of an attention kernel. `rows`: query rows of a work item. `in_flight`: bytes of K and V that
    one block has on their way while it computes."""

    source: str
    kernel: str
    rows: int
    threads: int
    ring: Ring
    shared_bytes: int

    @property
    def in_flight(self) -> int:
        return self.ring.in_flight

    @property
    def defines(self) -> dict[str, int]:
        rows = {"ROWS": self.rows} if self.kernel == "paged_attention" else {"ROW_TILES": self.rows // 16}
        pieces = {"PIECES": self.ring.pieces} if self.ring.pieces > 1 else {}
        return {**rows, "BUFFERS": self.ring.buffers, **pieces}


def row_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of a row of K or V in shared memory: padded to 16 elements, then to an odd number of 16-byte chunks."""
    return padded(head_dim) * STORAGE_BYTES[dtype] + 16


def padded(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def _stages(head_dim: int, dtype: str) -> list[tuple[int, int]]:
    """(pieces, bytes of a stage) that there are: long rows come in pieces of whole pairs of columns for each lane."""
    long = row_bytes(head_dim, dtype) >= 512
    pieces = [n for n in (1, 2, 4) if n == 1 or (long and head_dim % (64 * n) == 0)]
    return [(n, TILE * row_bytes(head_dim // n, dtype)) for n in pieces]


def _ring(head_dim: int, dtype: str, room: int) -> Ring | None:
    """As deep a ring as makes `UNDER_WAY` bytes travel, in as few pieces as that takes; else the one in which most do.
    None: not even two stages of the smallest pieces find room."""
    best = None
    for pieces, stage in _stages(head_dim, dtype):
        buffers = min(max(2, min(6, 1 + -(-UNDER_WAY // stage))), room // stage)
        ring = Ring(pieces, buffers, stage)
        if buffers >= 2 and (best is None or ring.in_flight > best.in_flight):
            best = ring
        if best is not None and best.in_flight >= UNDER_WAY:
            break
    return best


def _variant_of(
    kernel: str, rows: int, threads: int, head_dim: int, dtype: str, merged: int, fixed: int, static: int, limit: int
) -> Variant:
    """merged: bytes that lie over the ring at an item's end. fixed, static: shared memory besides."""
    ring = _ring(head_dim, dtype, limit - fixed - static)
    if ring is None or merged + fixed + static > limit:
        least = max(2 * _stages(head_dim, dtype)[-1][1], merged) + fixed + static
        raise KernelError(
            f"head_dim: {head_dim} of {dtype} needs {least:,} bytes of shared memory, "
            f"this device gives a block {limit:,}"
        )
    shared = max(ring.buffers * ring.stage_bytes, merged) + fixed
    return Variant(f"{kernel}.cu", kernel, rows, threads, ring, shared)


def plain_variant(head_dim: int, dtype: str, block_size: int, rows: int, shared_limit: int) -> Variant:
    """The kernel without tensor cores. KernelError where the device's blocks have too little shared memory."""
    blocks = 8 * (PART // block_size + 2)
    fixed = rows * padded(head_dim) * 4 + SLICES * rows * 16 * 4 + blocks
    static, merged = rows * (8 + 2 * SLICES * 4), SLICES * rows * padded(head_dim) * 4
    return _variant_of("paged_attention", rows, 32 * SLICES, head_dim, dtype, merged, fixed, static, shared_limit)


def tensor_variant(head_dim: int, dtype: str, block_size: int, rows: int, shared_limit: int) -> Variant:
    """The kernel on tensor cores; `rows` 16 or 32. As `plain_variant` otherwise."""
    fixed = 2 * rows * (padded(head_dim) * 2 + 16) + 8 * (PART // block_size + 2)
    static, merged = rows * (8 + 4 + 2 * SLICES * 4), rows * padded(head_dim) * 4
    return _variant_of("paged_attention_tensor", rows, 8 * rows, head_dim, dtype, merged, fixed, static, shared_limit)


def uses_tensor_cores(architecture: int, dtype: str, group: int, wanted: bool | None) -> bool:
    """By the device, the cache and the group: never by the call, since the two kernels differ in the last bits."""
    if architecture < 80 or dtype == "float32" or wanted is False:
        return False
    return wanted is True or group >= TENSOR_GROUP
