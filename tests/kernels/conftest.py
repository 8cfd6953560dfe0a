"""The implementations that the conformance suite is run on.

"cuda" and "cuda-tensor" are the CUDA C kernels on the test bench's emulator: as the launch layer chooses for the case,
and with tensor cores for any number of heads. "cuda-ptx" and "cuda-tensor-ptx" are the same two as NVRTC compiled them,
interpreted: attention alone, whose kernels are those with inline asm. "cuda-device" are the same on a GPU, where there
is one (gpu_device.py).
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import gpu_device
import pytest

from cupaged.kernels.cuda.attention import TENSOR_GROUP

IMPLEMENTATIONS = ["reference", "cpu", "cuda", "cuda-tensor", "cuda-ptx", "cuda-tensor-ptx"]
if gpu_device.is_real() or gpu_device.ASKED == "double":
    IMPLEMENTATIONS.append("cuda-device")
# Tests of attention that "cuda" runs without tensor cores, having fewer than four heads a KV head.
TENSOR_TESTS = (
    "test_prefill_chunks_and_decode_give_the_same_bits",
    "test_company_does_not_change_bits",
    "test_block_size_layout_and_key_order_do_not_change_bits",
    "test_K02_K08_P10_attention_equals_float64",
    "test_K03_prefill_equals_decode_in_a_window",
    "test_K05_soft_cap_comes_before_the_mask",
    "test_K07_K21_row_without_a_visible_key_is_zero",
    "test_K08_contents_of_unused_slots_do_not_matter",
    "test_nan_reaches_the_rows_that_see_it_and_no_other",
    "test_blocks_of_several_pools_give_the_same_bits",
)
# Of test_kernel_invariance.py, where a call takes hundreds of queries: with one set of options, which has them all.
ONCE_WHEN_INTERPRETED = (
    "test_prefill_chunks_and_decode_give_the_same_bits",
    "test_company_does_not_change_bits",
    "test_block_size_layout_and_key_order_do_not_change_bits",
)
QUICK_WHEN_INTERPRETED = (  # of the interpreter's tests, those of the default run
    "test_K07_K21_row_without_a_visible_key_is_zero",
    "test_K08_contents_of_unused_slots_do_not_matter[cuda-ptx-float32-nan",
    "test_K08_contents_of_unused_slots_do_not_matter[cuda-tensor-ptx-bfloat16-nan",
    "test_P10_table_order_is_followed",
)
# Left to the slow run where the emulator takes long and a cheaper case shows the same.
SLOW_WHEN_EMULATED = (
    "test_tokens_are_distributed_as_asked",
    "test_K02_K08_P10_attention_equals_float64[cuda-tensor",
    "test_nan_reaches_the_rows_that_see_it_and_no_other[cuda-40",
    "test_nan_reaches_the_rows_that_see_it_and_no_other[cuda-64",
    "test_nan_reaches_the_rows_that_see_it_and_no_other[cuda-tensor-40",
    "test_nan_reaches_the_rows_that_see_it_and_no_other[cuda-tensor-63",
    "test_prefill_chunks_and_decode_give_the_same_bits[cuda-80-float32",
    "test_prefill_chunks_and_decode_give_the_same_bits[cuda-tensor-33",
    "test_company_does_not_change_bits[cuda-tensor",
    "test_matmul_rows_do_not_depend_on_their_number[cuda-300-33-bfloat16",
    "test_matmul_rows_do_not_depend_on_their_number[cuda-300-33-float16",
)


def need_library() -> None:
    """Skips without NVRTC, unless it must be there."""
    from cudabench import BenchMissing
    from cudabench.nvrtc import library

    try:
        library()
    except BenchMissing as error:
        if os.environ.get("CUDABENCH") == "required":
            raise
        pytest.skip(f"CUDA C compiled by NVRTC: {error}")


def make_operations(name: str) -> Any:
    if name == "cuda-device":
        from on_device import OnDevice

        return OnDevice(gpu_device.make(deterministic=True))
    if name == "reference":
        from cupaged.kernels.reference import ReferenceOperations

        return ReferenceOperations()
    if name.startswith("cuda"):
        if shutil.which("g++") is None and os.environ.get("CUDABENCH") != "required":
            pytest.skip("no g++, which runs the CUDA C kernels on the CPU")
        from emulated import emulated_operations
        from interpreted import interpreted_operations

        if name.endswith("-ptx"):
            need_library()
        make = interpreted_operations if name.endswith("-ptx") else emulated_operations
        operations = make(tensor_cores=True if name.startswith("cuda-tensor") else None)
        operations.forced_tensor_cores = name.startswith("cuda-tensor")
        return operations
    from cupaged.device import get_device

    return get_device("cpu").ops


@pytest.fixture(scope="session", params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Any:
    """A set of kernels; each test that asks for it holds for all of them."""
    return make_operations(request.param)


@pytest.fixture(scope="session")
def storage(ops: Any) -> str:
    """The type of K and V where a test has no other wish: float32, but for tensor cores, which do not take it."""
    return "float16" if getattr(ops, "forced_tensor_cores", False) else "float32"


@pytest.fixture(scope="session")
def is_interpreted(ops: Any) -> bool:
    """The kernels are interpreted PTX: a test may be content with less."""
    return type(getattr(ops, "backend", None)).__name__ == "InterpretedBackend"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tensor cores are for attention with 16-bit K and V. What the bench takes long for is left to `-m slow`."""
    kept = []
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        name = str(parameters.get("ops", ""))
        case = parameters.get("case", parameters)
        on_tensor_cores = item.name.startswith(TENSOR_TESTS) and case.get("dtype") != "float32"
        if name == "cuda-device":  # nothing is slow there, but 8 GB are not taken to the device and back: see tests/gpu
            kept += [] if item.name.startswith("test_K01_offsets_beyond_31_bits") else [item]
            continue
        if name.startswith("cuda-tensor") and not on_tensor_cores:
            continue
        if name.endswith("-ptx"):
            same = name == "cuda-tensor-ptx" and case.get("group", 1) >= TENSOR_GROUP  # as "cuda-ptx" runs it
            once = item.name.startswith(ONCE_WHEN_INTERPRETED) and "capped-with-sinks" in item.name
            refused = "refused" in item.name  # nothing is launched
            if same or refused or not (once or item.path.name == "test_kernel_attention.py"):
                continue
            if not item.name.startswith(QUICK_WHEN_INTERPRETED):
                item.add_marker(pytest.mark.slow)
        elif name.startswith("cuda") and any(item.name.startswith(slow) for slow in SLOW_WHEN_EMULATED):
            item.add_marker(pytest.mark.slow)
        kept.append(item)
    items[:] = kept
