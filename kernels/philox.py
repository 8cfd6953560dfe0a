"""The random stream of sampling: Philox4x32-10, a function of (seed, sample, position) without state.

Being counter-based, the number that picks a token depends on the request's seed, the index of the sample (n > 1) and
the token's position alone: not on the batch, nor on what was drawn before. Salmon, Moraes, Dror & Shaw, "Parallel
random numbers: as easy as 1, 2, 3", SC 2011, section 3.3; the constants are theirs.

The layout below is the contract with the Numba and CUDA C twins:

    key      k0 = seed bits 0-31          k1 = seed bits 32-63     (the seed taken modulo 2^64)
    counter  c0 = position bits 0-31      c1 = position bits 32-63
             c2 = sample                  c3 = 0 (left for other uses of the same key)
    result   r  = (x0 << 20) | (x1 >> 12), 52 bits;   u = (r + 0.5) * 2^-52

With 52 bits r + 0.5 is exact in float64, so 2^-53 <= u <= 1 - 2^-53: never 0, never 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


def philox4x32(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Ten rounds of Philox4x32. counter: four, key: two values of 32 bits; gives four of 32 bits.

    Works on Python ints and, elementwise, on uint64 arrays alike: a product of two 32-bit values fits in 64 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0 = c0 * MULTIPLIERS[0]
        p1 = c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0 = (k0 + WEYL[0]) & MASK32
        k1 = (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def uniform(seed: int, sample: int, position: int) -> float:
    """The number in (0, 1) of one draw. seed: any int (modulo 2^64); sample < 2^32; position < 2^64; both >= 0."""
    seed &= MASK64
    x0, x1, _, _ = philox4x32((position & MASK32, position >> 32, sample, 0), (seed & MASK32, seed >> 32))
    return (((x0 << 20) | (x1 >> 12)) + 0.5) * 2.0**-52
