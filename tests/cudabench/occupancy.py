"""How many blocks of a kernel one multiprocessor holds, from the limits of its architecture.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Registers go to warps in units of
256; from 8.0 on each block takes 1 KiB of shared memory more than it asks for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Limits of one multiprocessor. Every architecture here has 65,536 registers, at most 255 for a thread."""

    threads: int
    blocks: int
    shared: int  # bytes for all blocks together
    shared_block: int  # bytes for one block
    reserved: int  # bytes of shared memory that each block takes besides


KIB = 1024
MULTIPROCESSORS = {
    70: Multiprocessor(2048, 32, 96 * KIB, 96 * KIB, 0),
    75: Multiprocessor(1024, 16, 64 * KIB, 64 * KIB, 0),
    80: Multiprocessor(2048, 32, 164 * KIB, 163 * KIB, KIB),
    86: Multiprocessor(1536, 16, 100 * KIB, 99 * KIB, KIB),
    89: Multiprocessor(1536, 24, 100 * KIB, 99 * KIB, KIB),
    90: Multiprocessor(2048, 32, 228 * KIB, 227 * KIB, KIB),
    100: Multiprocessor(2048, 32, 228 * KIB, 227 * KIB, KIB),
    120: Multiprocessor(1536, 24, 100 * KIB, 99 * KIB, KIB),
}
REGISTERS, REGISTER_UNIT, SHARED_UNIT = 65536, 256, 128


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks that one multiprocessor holds at once, and what keeps it from holding more."""

    blocks: int
    warps: int
    bound: str  # registers, shared memory, threads, blocks


def occupancy(arch: int, threads: int, registers: int, shared: int) -> Occupancy:
    """Of blocks of `threads` threads, `registers` registers a thread and `shared` bytes, static and dynamic."""
    limits = MULTIPROCESSORS[arch]
    warps = -(-threads // 32)
    of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    of_block = -(-(shared + limits.reserved) // SHARED_UNIT) * SHARED_UNIT
    by = {
        "registers": REGISTERS // of_warp // 4 * 4 // warps,  # warps are spread evenly over four partitions
        "shared memory": limits.shared // of_block if of_block else limits.blocks,
        "threads": limits.threads // (warps * 32),
        "blocks": limits.blocks,
    }
    if shared > limits.shared_block:
        by["shared memory"] = 0
    bound = min(by, key=lambda name: by[name])
    return Occupancy(by[bound], by[bound] * warps, bound)
