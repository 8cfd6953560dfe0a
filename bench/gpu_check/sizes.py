"""Shapes and amounts of the check: of a GPU, and of tests, where only the code is looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A random Llama: as many layers of this width, float16."""

    layers: int
    hidden: int
    inner: int
    heads: Heads
    vocab: int
    positions: int = 4096


SMOLLM2 = RandomModel(30, 576, 1536, Heads(9, 3, 64), 49152)
WIDE = RandomModel(2, 4096, 14336, Heads(32, 8, 128), 8192)  # two layers of an 8B model


@dataclass(frozen=True, slots=True)
class Sizes:
    """decode: (sequences, context). far: bytes of K/V or weights that a timing cycles through, so that no cache holds
    them. seconds: of one timing, 2 calls at least. prefill: tokens of a chunk. streams: of decode steps. pieces: blocks
    that are swapped at once."""

    decode: tuple[tuple[int, int], ...]
    heads: Heads
    far: int
    seconds: float
    prefill: int
    product: tuple[int, int]
    small: RandomModel
    wide: RandomModel
    streams: tuple[int, ...]
    new: int
    pieces: int
    layers: int  # of the cache that is swapped
    block_size: int = 16


FULL = Sizes(
    decode=((64, 4096), (1, 32768), (64, 512)), heads=WIDE.heads, far=512 << 20, seconds=0.5, prefill=2048,
    product=(4096, 4096), small=SMOLLM2, wide=WIDE, streams=(1, 8, 64), new=64, pieces=128, layers=32,
)  # fmt: skip
QUICK = Sizes(
    decode=FULL.decode, heads=WIDE.heads, far=256 << 20, seconds=0.1, prefill=1024, product=(4096, 4096),
    small=SMOLLM2, wide=WIDE, streams=(1, 64), new=24, pieces=32, layers=32,
)  # fmt: skip
_TINY_MODEL = RandomModel(2, 64, 96, Heads(4, 2, 16), 128, 256)
TINY = Sizes(
    decode=((2, 40), (1, 70)), heads=Heads(4, 1, 32), far=1 << 14, seconds=0.0, prefill=20, product=(48, 64),
    small=_TINY_MODEL, wide=_TINY_MODEL, streams=(1, 2), new=4, pieces=2, layers=2,
)  # fmt: skip
