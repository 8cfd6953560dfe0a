"""What runs behind a launch: a NumPy function for each kernel, or the CUDA C itself on the bench's emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupaged.errors import DeviceError
from cupaged.kernels.cuda import sources
from streamdouble.heap import Pointer
from streamdouble.launch_attention import merge_parts, paged_attention
from streamdouble.launch_dense import (
    add,
    copy_blocks,
    dequantise,
    embed,
    finish_rows,
    gated_activation,
    head_norm,
    layer_norm,
    matmul,
    narrow_rows,
    rms_norm,
    rope,
    take_rows,
    write_kv,
)
from streamdouble.launch_sampling import sample_broken, sample_max, sample_select, sample_weights

Size = tuple[int, int, int]
Bind = Callable[[Size, Size, Sequence[Any], int], Callable[[], None]]
"""``bind(grid, block, arguments, shared_bytes)`` gives what a launch does when its turn comes."""

# One function for each kernel: ``f(grid, defines, **arguments)`` does what the launch does, through the addresses and
# numbers that the kernel gets and nothing else. Pointers are `heap.Pointer`s, absent ones None.
FUNCTIONS: dict[str, Callable[..., None]] = {
    "paged_attention": paged_attention,
    "paged_attention_tensor": paged_attention,
    "merge_parts": merge_parts,
    "write_kv": write_kv,
    "copy_blocks": copy_blocks,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "head_norm": head_norm,
    "rope": rope,
    "gated_activation": gated_activation,
    "add": add,
    "take_rows": take_rows,
    "narrow_rows": narrow_rows,
    "finish_rows": finish_rows,
    "matmul": matmul,
    "embed": embed,
    "dequantise": dequantise,
    "sample_max": sample_max,
    "sample_broken": sample_broken,
    "sample_weights": sample_weights,
    "sample_select": sample_select,
}


def reference(source: str, name: str, defines: dict[str, int], architecture: int) -> Bind:
    """The NumPy function of a kernel."""
    if name not in FUNCTIONS:
        raise DeviceError(f"{source}: {name} has no function in streamdouble/launches.py")
    function = FUNCTIONS[name]
    names = [parameter.name for parameter in sources.kernels(source)[name]]

    def bind(grid: Size, block: Size, arguments: Sequence[Any], shared_bytes: int) -> Callable[[], None]:
        given = {k: a.item() if isinstance(a, np.generic) else a for k, a in zip(names, arguments, strict=True)}

        def run() -> None:
            with np.errstate(all="ignore"):
                function(grid, defines, **given)

        return run

    return bind


def emulated(source: str, name: str, defines: dict[str, int], architecture: int) -> Bind:
    """The kernel compiled by g++; an array is passed as the memory from its first byte to the allocation's end."""
    from cudabench import emulate

    kernel = emulate(sources.FOLDER / source, name, defines=defines, include=[sources.FOLDER], arch=architecture)

    def bind(grid: Size, block: Size, arguments: Sequence[Any], shared_bytes: int) -> Callable[[], None]:
        def run() -> None:
            flat = [np.uint64(0) if a is None else a.rest(np.uint8) if isinstance(a, Pointer) else a for a in arguments]
            kernel(grid, block, flat, shared_mem=shared_bytes)

        return run

    return bind


KERNELS = {"reference": reference, "emulated": emulated}
