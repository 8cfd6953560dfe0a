"""The weights of a decoder, packed for the kernels that will read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cupaged.kernels.interface import (
    STORAGE_BYTES,
    Array,
    Matrix,
    Operations,
    WeightSource,
    WeightType,
    exact_type,
    kept_type,
    packed_bytes,
)
from cupaged.model.config import ModelConfig
from cupaged.model.quants import FORMATS
from cupaged.model.weights import concat_rows, release

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One layer. q, k and v are one matrix, and so are gate and up: fewer, larger products with the same sums."""

    attention_norm: Array
    qkv: Matrix
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    output: Matrix
    output_bias: Array | None
    mlp_norm: Array
    gate_up: Matrix
    gate_up_bias: Array | None
    down: Matrix
    down_bias: Array | None


@dataclass(frozen=True, slots=True)
class Parameters:
    """All layers. `head` is `embed` itself where the two are tied."""

    embed: Matrix
    layers: tuple[LayerParameters, ...]
    final_norm: Array
    head: Matrix

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices (norms and biases are negligible)."""
        matrices = [self.embed] + ([] if self.head is self.embed else [self.head])
        for layer in self.layers:
            matrices += [layer.qkv, layer.output, layer.gate_up, layer.down]
        return sum(matrix.nbytes for matrix in matrices)


def weight_type(tensors: Mapping[str, WeightSource], stored_dtype: str) -> WeightType:
    """What dtype "auto" stands for: quantised if a matrix is stored so, else the precision that most weights have."""
    if any(len(source.shape) == 2 and FORMATS[source.dtype].block > 1 for source in tensors.values()):
        return "quantised"
    stored: dict[str, WeightType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return stored[stored_dtype]


def kept_bytes(tensors: Mapping[str, WeightSource], dtype: WeightType, as_stored: bool = False) -> dict[str, int]:
    """Bytes that the weights take in memory as `dtype`, by what they are kept as: {"Q4_1": 81000000, ...}.

    as_stored: of a device that keeps float32 weights as they are stored where it can (`Device.as_stored`). Norms and
    biases, which are always float32, are left out.
    """
    exact = as_stored and dtype == "float32"
    kept: Counter[str] = Counter()
    for source in tensors.values():
        if len(source.shape) == 2:
            rows, columns = source.shape
            if exact:
                kind = exact_type(source.dtype, columns)
            else:
                kind = dtype if dtype in STORAGE_BYTES else kept_type(source.dtype, columns)
            kept[kind] += packed_bytes(kind, rows, columns, exact)
    return dict(kept.most_common())


def load_parameters(
    config: ModelConfig,
    tensors: Mapping[str, WeightSource],
    ops: Operations,
    dtype: WeightType,
    progress: Progress | None = None,
) -> Parameters:
    """Read, convert and pack every weight. `tensors` has the canonical names of `checkpoint.expected_parameters`.

    Matrices are kept as `dtype`, norms and biases as float32. A matrix's pages of the file are let go as soon as it is
    packed. `progress(done, total)` counts layers and the two ends.
    """
    total = config.num_layers + 2

    def vector(name: str) -> Array | None:
        return ops.vector(tensors[name]) if name in tensors else None

    def needed(name: str) -> Array:
        return ops.vector(tensors[name])

    def joined(prefix: str, parts: tuple[str, ...], kind: str) -> WeightSource | None:
        names = [f"{prefix}{part}.{kind}" for part in parts]
        return concat_rows([tensors[name] for name in names]) if names[0] in tensors else None

    def matrix(prefix: str, *parts: str) -> Matrix:
        source = joined(prefix, parts, "weight")
        assert source is not None  # the checkpoint was matched to expected_parameters when it was opened
        return pack(source)

    def pack(source: WeightSource) -> Matrix:
        packed = ops.matrix(source, dtype)
        release(source)
        return packed

    def bias(prefix: str, *parts: str) -> Array | None:
        source = joined(prefix, parts, "bias")
        return None if source is None else ops.vector(source)

    def report(done: int) -> None:
        if progress is not None:
            progress(done, total)

    report(0)
    embed = pack(tensors["embed.weight"])
    layers = []
    for index in range(config.num_layers):
        report(1 + index)
        prefix = f"layers.{index}."
        layers.append(
            LayerParameters(
                attention_norm=needed(f"{prefix}attention_norm.weight"),
                qkv=matrix(prefix, "q", "k", "v"),
                qkv_bias=bias(prefix, "q", "k", "v"),
                q_norm=vector(f"{prefix}q_norm.weight"),
                k_norm=vector(f"{prefix}k_norm.weight"),
                output=matrix(prefix, "o"),
                output_bias=bias(prefix, "o"),
                mlp_norm=needed(f"{prefix}mlp_norm.weight"),
                gate_up=matrix(prefix, "gate", "up"),
                gate_up_bias=bias(prefix, "gate", "up"),
                down=matrix(prefix, "down"),
                down_bias=bias(prefix, "down"),
            )
        )
    report(1 + config.num_layers)
    head = embed if config.tied_head else pack(tensors["head.weight"])
    parameters = Parameters(embed, tuple(layers), needed("final_norm.weight"), head)
    report(total)
    return parameters
