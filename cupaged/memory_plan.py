"""How much memory goes to K/V: from options and the device's memory to a number of blocks. Plain functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cupaged.errors import CapacityError, OptionError, shown
from cupaged.kernels.interface import STORAGE_BYTES, StorageType
from cupaged.memory import MAX_FRAMES, blocks_for
from cupaged.model.config import ModelConfig

DEFAULT_CONTEXTS = 4  # without an option: room for so many sequences of full length ...
DEFAULT_SHARE = 4  # ... but at most one part in so many of the memory that is available

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The K/V pools. block_bytes: one block of each KV group together; each group has num_blocks blocks on the device
    and host_blocks to swap to."""

    block_size: int
    num_blocks: int
    block_bytes: int
    bytes_per_token: int
    kv_dtype: StorageType
    max_model_len: int
    host_blocks: int = 0

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that fit on the device, of all sequences together."""
        return self.num_blocks * self.block_size

    @property
    def host_bytes(self) -> int:
        return self.host_blocks * self.block_bytes


def parse_bytes(name: str, value: int | float | str, available: int) -> int:
    """Bytes from an int, "64MiB", "1.5GB", or a share of what is available: "25%". OptionError otherwise."""
    allowed = "bytes as an integer, a size such as 64MiB or 1.5GB, or a share such as 25%"
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise OptionError(f"{name}: {shown(value)} is not {allowed}")
    size: int | float = 0
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*|%)\s*", value)
        unit = match.group(2).upper() if match else "?"
        if match is None or (unit != "%" and unit not in _UNITS):
            raise OptionError(f"{name}: {shown(value)} is not {allowed}")
        number = float(match.group(1))
        if unit == "%" and not number <= 100:
            raise OptionError(f"{name}: {shown(value)} is more than all of the memory")
        size = number / 100 * available if unit == "%" else number * _UNITS[unit]
    if not 1 <= size < 2**63:
        raise OptionError(f"{name}: {shown(value)} is not in 1 .. 2**63 - 1 bytes")
    return int(size)


def plan_memory(
    config: ModelConfig,
    kv_dtype: StorageType,
    block_size: int,
    kv_memory: int | str | None,
    max_model_len: int | None,
    available: int,
    weight_bytes: int,
    swap_memory: int | str | None = None,
    host_available: int | None = None,
) -> MemoryPlan:
    """Blocks for the K/V pools.

    `available`: bytes left on the device beside the weights, which take `weight_bytes`. Without `kv_memory`: room for
    four sequences of full length, at most a quarter of what is available. `swap_memory`: of the host pool, none by
    default; `host_available`: bytes of the host, None if they are the device's own. A sequence may lie in both pools.
    OptionError for a size that holds not one block or is more than there is; CapacityError if `max_model_len` is asked
    for and does not fit.
    """
    length = config.max_position if max_model_len is None else max_model_len
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= config.max_position:
        raise OptionError(
            f"max_model_len: {shown(max_model_len)} is not in 1..{config.max_position}, the model's positions"
        )
    bytes_per_token = config.kv_bytes_per_token(STORAGE_BYTES[kv_dtype])
    block_bytes = bytes_per_token * block_size
    wanted = blocks_for(length, block_size)
    parts = _block_parts(config, block_size, kv_dtype)
    room = (
        f"one KV block takes {block_bytes:,} bytes ({parts}), {max(0, available):,} are available "
        f"beside the {weight_bytes:,} of the weights"
    )
    if available < block_bytes:
        raise OptionError(f"kv_memory: no room for K/V: {room}")
    if kv_memory is None:
        budget = min(DEFAULT_CONTEXTS * wanted * block_bytes, available // DEFAULT_SHARE)
    else:
        budget = parse_bytes("kv_memory", kv_memory, available)
    if not block_bytes <= budget <= available:
        wrong = "too little" if budget < block_bytes else "too much"
        raise OptionError(f"kv_memory: {budget:,} bytes are {wrong}: {room}")
    num_blocks = min(budget // block_bytes, MAX_FRAMES)
    left = available - num_blocks * block_bytes if host_available is None else host_available
    host_blocks = _host_blocks(swap_memory, block_bytes, left)
    if max_model_len is not None and num_blocks + host_blocks < wanted:
        raise CapacityError(
            f"max_model_len: {length} positions need {wanted} KV blocks of {block_bytes:,} bytes ({parts}), "
            f"{budget:,} bytes hold {num_blocks}" + f", the host pool {host_blocks}" * bool(host_blocks)
        )
    fits = min(length, (num_blocks + host_blocks) * block_size)
    return MemoryPlan(block_size, num_blocks, block_bytes, bytes_per_token, kv_dtype, fits, host_blocks)


def _host_blocks(swap_memory: int | str | None, block_bytes: int, available: int) -> int:
    """Blocks of the host pool: 0 unless asked for."""
    if swap_memory is None:
        return 0
    size = parse_bytes("swap_memory", swap_memory, max(0, available))
    if not block_bytes <= size <= available:
        wrong = "too little" if size < block_bytes else "too much"
        raise OptionError(
            f"swap_memory: {size:,} bytes are {wrong}: one KV block takes {block_bytes:,}, {max(0, available):,} are "
            "available beside weights and K/V"
        )
    return min(size // block_bytes, MAX_FRAMES)


def _block_parts(config: ModelConfig, block_size: int, kv_dtype: StorageType) -> str:
    """The product behind the bytes of a block, for messages."""
    layers: Sequence[int] = [len(group.layers) for group in config.kv_groups]
    factors = [2, sum(layers), block_size, config.num_kv_heads, config.head_dim, STORAGE_BYTES[kv_dtype]]
    return "2*layers*block_size*kv_heads*head_dim*bytes = " + "*".join(map(str, factors))
