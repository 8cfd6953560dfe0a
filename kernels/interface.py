"""What the decoder and the engine ask of a set of kernels, and the plain data they pass.

`Operations` is implemented by `reference` (NumPy, obvious), `cpu` (Numba) and, on a GPU, `cuda` (CUDA C). Arrays live
on the device of the implementation. Outputs are preallocated by the caller, so that a step can be captured. Row counts
may be anything, 0 included.

The rule that every implementation keeps: **the arithmetic of a row depends on that row and its position alone**, never
on how many rows are computed together, how they are split, or where the K/V lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Array = Any  # numpy.ndarray, or cupy.ndarray on a GPU

StorageType = Literal["float32", "float16", "bfloat16"]
WeightType = Literal["float32", "float16", "bfloat16", "quantised"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

STORAGE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

# What a matrix asked for as "quantised" keeps: formats of a file (GGUF's names) that have a kernel of integer dot
# products -> bytes that 32 weights take once packed. 4-bit formats keep their bits; those of 5 and 6 bits are kept as
# bytes. Scales that are products (the K formats) are float32, because float16 cannot hold them exactly; but those of 4
# bits with a minimum are multiples of a unit that up to 24 blocks share, 16 bits each (`reference.quantised.in_units`).
QUANT_BLOCK = 32
PACKED_BLOCK_BYTES: dict[str, int] = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q8_0": 34,
    "Q5_0": 34,
    "IQ4_NL": 34,
    "Q4_K": 20,
    "Q5_1": 40,
    "Q5_K": 40,
    "Q6_K": 40,
}
UNIT_FORMATS = ("Q4_1", "Q4_K")
SEGMENT_BLOCKS = 24
# What a matrix asked for as "float32" may be kept as, where kernels make exactly its float32 values of the stored ones:
# the same formats -> bytes that 32 weights take then.
EXACT_BLOCK_BYTES: dict[str, int] = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q8_0": 34,
    "Q5_0": 34,
    "IQ4_NL": 34,
    "Q4_K": 24,
    "Q5_1": 40,
    "Q5_K": 40,
    "Q6_K": 40,
}
QUANT_PANEL = 32  # outputs that are packed together; the last panel is filled up with zeros


def kept_type(dtype: str, columns: int) -> str:
    """How a part of a weight asked for as "quantised" is kept: its own format, or else a storage type.

    dtype: the part's format by its name in the file. A float part keeps its precision; a quantised one without a
    kernel, or whose rows are not whole blocks of 32, becomes float16.
    """
    if dtype in PACKED_BLOCK_BYTES and columns > 0 and columns % QUANT_BLOCK == 0:
        return dtype
    return {"F32": "float32", "BF16": "bfloat16"}.get(dtype, "float16")


def exact_type(dtype: str, columns: int) -> str:
    """How a part of a weight asked for as "float32" is kept by kernels that compute with the float32 values of what is
    stored: as it is stored, else as float32.

    dtype: the part's format by its name in the file.
    """
    if dtype in EXACT_BLOCK_BYTES and columns > 0 and columns % QUANT_BLOCK == 0:
        return dtype
    return {"F16": "float16", "BF16": "bfloat16"}.get(dtype, "float32")


def packed_bytes(kind: str, rows: int, columns: int, exact: bool = False) -> int:
    """Bytes of a packed matrix, or part of one; `kind`: a storage type or a format of PACKED_BLOCK_BYTES; exact: kept
    for float32 products, with blocks of EXACT_BLOCK_BYTES."""
    if kind in STORAGE_BYTES:
        return -(-rows // 64) * 64 * columns * STORAGE_BYTES[kind]
    blocks = columns // QUANT_BLOCK
    if exact:
        an_output = blocks * EXACT_BLOCK_BYTES[kind]
    else:
        an_output = blocks * PACKED_BLOCK_BYTES[kind] + (4 * segments(blocks) if kind in UNIT_FORMATS else 0)
    return -(-rows // QUANT_PANEL) * QUANT_PANEL * an_output


def segments(blocks: int) -> int:
    """In how many runs of nearly equal length, of SEGMENT_BLOCKS blocks or less, the blocks of a row share units: each
    has ceil(blocks / segments), the last what is left."""
    return -(-blocks // SEGMENT_BLOCKS)


# A block reference is a page-table entry in an int32: bit 31 clear (else: no block), bit 30 the format (0 plain,
# 1 packed), bits 28-29 the pool, bits 0-27 the frame. `cupaged.memory.blockref` has the same numbers in pure Python
# (memory imports nothing); a test holds the two together.
FRAME_BITS = 28
FRAME_MASK = (1 << FRAME_BITS) - 1
POOL_SHIFT = FRAME_BITS
POOL_MASK = 3
FORMAT_SHIFT = 30
NO_BLOCK = -1

# Attention walks the context in tiles aligned at position 0, and merges parts of so many tokens, also aligned at 0.
TILE = 64
PART = 512


@dataclass(frozen=True, slots=True)
class KVView:
    """The K/V arrays of one KV group as kernels see them. Strides are in elements and 64-bit.

    `pools[p]` is the flat array behind pool p of a block reference (0 device, 1 pinned host, ...), None if absent.
    Element (frame, layer, kv, head) of a pool starts at
    ``frame*block_stride + layer*layer_stride + kv*kv_stride + head*head_stride``; there follow block_size * head_dim
    elements: V as [slot][head_dim]; K as [head_dim][slot] if `k_transposed`, else [slot][head_dim].
    bfloat16 arrays are stored as uint16.
    """

    pools: tuple[Array | None, ...]
    dtype: StorageType
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    block_stride: int
    layer_stride: int
    kv_stride: int
    head_stride: int
    k_transposed: bool


class WeightSource(Protocol):
    """A weight as stored in a file: rows are outputs. `dtype` is the file's name for it (F32, BF16, Q4_1, ...)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def float32(self, start: int, stop: int) -> Array:
        """Rows start..stop as float32 NumPy [stop-start, ...]: exact widening, or the format's dequantisation."""
        ...

    def blocks(self, start: int, stop: int) -> Array | None:
        """Rows start..stop as stored: uint8 NumPy [stop-start, row bytes] in the format `dtype`, rows contiguous.

        A view of the file where that is possible. None if the source is not rows of one block format (a float, a join
        of different formats).
        """
        ...

    @property
    def parts(self) -> tuple[WeightSource, ...]:
        """The sources whose rows, in order, are this one's: itself alone if it is no join."""
        ...


class Matrix(Protocol):
    """A weight matrix packed for one implementation: `rows` outputs by `cols` inputs.

    `dtype`: a storage type, the name of the format that was kept (Q4_1), or several joined by "+", parts in order.
    """

    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class AttentionPlan(Protocol):
    """Host-made work list of one attention call; valid for all layers of a KV group in one step."""

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Per-row sampling settings as plain sequences, one entry per row of logits.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. The random number of a row is Philox keyed by
    (seed, sample, position): see `philox.uniform`.
    """

    temperature: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]
    seed: Sequence[int]
    sample: Sequence[int]
    position: Sequence[int]


class Operations(Protocol):
    """The operations of a forward pass. float32 activations; shapes in brackets; T tokens of a step."""

    def matrix(self, source: WeightSource, dtype: WeightType) -> Matrix:
        """Pack a weight matrix [N, K], stored as `dtype` (rounded to nearest even when narrowing).

        "float32": products of the float32 values; an implementation may keep a part as it is stored (`exact_type`).
        "quantised": each part of the source keeps its own blocks (`kept_type`), and `matmul` with it quantises its
        input to int8 by rows and blocks of 32: `reference.quantised` is the contract.
        """
        ...

    def vector(self, source: WeightSource) -> Array:
        """A norm weight or bias as a float32 array on the device."""
        ...

    def embed(self, ids: Array, table: Matrix, out: Array, scale: float = 1.0) -> None:
        """out[t] = table[ids[t]] * scale. ids [T] int32, out [T, K] float32."""
        ...

    def take_rows(self, x: Array, rows: Array, out: Array) -> None:
        """out[r] = x[rows[r]]. x [T, K] float32, rows [R] int32, out [R, K]; `out` does not overlap `x`."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, residual: Array | None = None) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight by row (Zhang & Sennrich 2019, eq. 4). x, out [T, K].

        With `residual` [T, K]: first residual += x, then out = norm(residual). `out` may be `x`.
        """
        ...

    def head_norm(self, x: Array, weight: Array, eps: float) -> None:
        """rms_norm of each head in place (Qwen3's qk-norm). x [T, heads, D], rows may be strided; weight [D]."""
        ...

    def matmul(
        self, x: Array, weight: Matrix, out: Array, bias: Array | None = None, precise: bool = False,
        precise_from: int = 0, x_spent: bool = False,
    ) -> None:  # fmt: skip
        """out = x @ weight.T + bias. x [T, K], out [T, N] float32, rows contiguous; one order of sums for any T.

        With a quantised weight x is quantised to 8 bits a value; `precise`: to 16, but for those outputs before
        `precise_from` that are whole panels of 32 of their part. Without effect on other weights.

        x_spent: x is not read any more before it is written anew. What made it may then be put together with the
        product in a capture, and x be left as it was.
        """
        ...

    def rope(self, x: Array, positions: Array, table: Array) -> None:
        """Rotate in place, half-split pairs (i, i + R/2) (Su et al. 2021, eq. 34; pairing as in Hugging Face).

        x [T, heads, D], rows may be strided; positions [T] int32; table [P, R] float32 holds cos in columns 0..R/2-1
        and sin in R/2..R-1 for each position. R <= D; the rest of a head is left alone.
        """
        ...

    def gated_activation(self, gate_up: Array, activation: Activation, out: Array, spent: bool = False) -> None:
        """out = act(gate) * up. gate_up [T, 2I]: gate in the first I columns. out [T, I].

        spent: gate_up is not read any more, as `x_spent` of `matmul`.
        """
        ...

    def add(self, x: Array, y: Array) -> None:
        """x += y. Both [T, K]."""
        ...

    def write_kv(self, key: Array, value: Array, cache: KVView, layer: int, slots: Array) -> None:
        """Store K/V of T tokens. key, value [T, KVH, D] float32, rows may be strided; slots [T] int64.

        A slot is frame * block_size + offset in pool 0; negative: skipped (padding). Narrowing rounds to nearest even.
        """
        ...

    def plan_attention(
        self,
        cache: KVView,
        tables: Array,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        num_heads: int,
        window: int | None = None,
    ) -> AttentionPlan:
        """Work list for S sequences; valid for all layers of the cache.

        Sequence s has queries query_starts[s]..query_starts[s+1] and context_lens[s] keys, its queries being the last
        of them. tables [S, W] int32 block references. `window` W: a query sees W keys, its own included.
        """
        ...

    def paged_attention(
        self,
        query: Array,
        cache: KVView,
        layer: int,
        plan: AttentionPlan,
        out: Array,
        scale: float,
        soft_cap: float | None = None,
        sinks: Array | None = None,
    ) -> None:
        """Causal attention over paged K/V (Kwon et al. 2023). query, out [T, H, D] float32, rows may be strided.

        s = scale * q.k; then cap * tanh(s / cap) if soft_cap; then the mask; softmax, a sink logit per head [H] counted
        once. A row without a visible key gives zeros. Unused slots may hold NaN. Beside bfloat16 K/V an implementation
        may round the scaled query and the softmax's weights to bfloat16 as well.
        """
        ...

    def copy_blocks(self, cache: KVView, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks, all layers, frame to frame in pool 0. Destinations are distinct and no source is one."""
        ...

    def sample(self, logits: Array, rows: SampleRows, checked: bool = False) -> Sequence[int]:
        """A token id per row of logits [R, V] float32: `reference/sampling.py` is the contract, step by step.

        checked: a row that holds NaN or infinity gives -1. Otherwise there must be no NaN and a finite maximum.
        """
        ...

    def broken_rows(self, logits: Array) -> Array | None:
        """bool [R] on the host: the rows of logits [R, V] float32 that hold NaN or infinity; None if there are none."""
        ...
