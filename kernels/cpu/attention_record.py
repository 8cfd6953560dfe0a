"""How the host tells the attention kernels what to do: operation record, work items, query rows, a thread's scratch.

Read by the host too (plan.py, operations.py), so nothing here imports Numba.
"""

from __future__ import annotations

from cupaged.kernels.interface import PART, TILE

# A field of the operation record, 8 bytes each from offset 16; the record is written by operations.py.
FIELDS = (
    "items", "num_kv_heads", "query", "query_stride", "group", "head_dim", "states", "scratch", "scratch_bytes",
    "pool0", "pool1", "pool2", "pool3", "block_size", "block_stride", "layer_offset", "kv_stride", "head_stride",
    "scale", "soft_cap", "k_row", "k_column", "max_rows", "heads_a_chunk", "out", "out_stride", "sinks",
)  # fmt: skip
# Of the record of the merge.
MERGE_FIELDS = (
    "merges", "num_kv_heads", "group", "head_dim", "states", "scratch", "scratch_bytes", "out", "out_stride", "sinks",
)  # fmt: skip
# A work item: the address of its first token's entry, tokens, parts begin..end-1, tokens of the context that all its
# tokens read from the first one's table, and whether it holds all that its tokens see (then it writes their output).
ITEM_FIELDS = ("tokens_at", "tokens", "begin", "end", "shared", "whole")
# A token: its row of the query, its position, the first position that it sees, the address of its block table, its
# first partial result (in units of all heads), and its number of parts.
TOKEN_FIELDS = ("row", "position", "low", "table", "state", "parts")
ITEM_WORDS = TOKEN_WORDS = 8
ALL = 1 << 40  # `shared` of an item whose tokens are of one sequence: more than any context has

SCORE_BYTES = (PART + 16) * 4  # from one row's scores of a part to the next; no power of two, for the caches' sake
PLACES_BYTES = 1024  # of addresses of runs of 16 tokens: K and V of a part, and what is prefetched
LONG = 1536  # tokens of a context whose K and V no longer stay in the L2 cache from one item of it to the next
HEAD = 64  # bytes of a partial result before its accumulator: maximum, sum, the rest of a cache line


def offsets(fields: tuple[str, ...], start: int = 0) -> dict[str, int]:
    """Byte offsets of int64 fields that follow each other."""
    return {name: start + 8 * i for i, name in enumerate(fields)}


def padded(head_dim: int) -> int:
    """head_dim rounded up to whole panels of 64."""
    return -(-head_dim // TILE) * TILE


def state_bytes(head_dim: int) -> int:
    """Bytes of a partial result: maximum, sum and accumulator of a query head over a part."""
    return HEAD + padded(head_dim) * 4


def item_tokens(group: int, long: bool = False) -> int:
    """Tokens of a work item, of `group` query heads each: about 96 rows, for which a tile is gathered once; 192 of a
    `long` context."""
    return max(1, (192 if long else 96) // group)


def max_rows(group: int) -> int:
    """The most query rows that a work item has."""
    return group * item_tokens(group, True)


def heads_together(head_dim: int, group: int, kv_heads: int, element: int) -> int:
    """KV heads of a chunk, where nothing is gained from more chunks: their K of 16 tokens lie in a row, and memory is
    read a sixth faster from 6 to 8 KiB at a time than from 2 (`element`: bytes of a number)."""
    return max(1, min(kv_heads, -(-6144 // (16 * head_dim * element)), item_tokens(group)))


def scratch_bytes(head_dim: int, rows: int) -> int:
    """Of a thread: a tile of K or V and its check, block addresses, queries, scores, two partial results a row."""
    row = padded(head_dim) * 4 + SCORE_BYTES + 2 * state_bytes(head_dim)
    return TILE * padded(head_dim) * 4 + 64 + PLACES_BYTES + rows * row
