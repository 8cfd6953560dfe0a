"""AddressSanitizer and UBSan on the emulated kernels, in a child process."""

from __future__ import annotations

import numpy as np
import pytest
from bench_support import need_sanitizers
from cudabench import KernelFault
from test_bench_faults import kernel_of, run_pipeline, run_slots, run_vectors

pytestmark = need_sanitizers


def test_a_right_kernel_gives_its_numbers() -> None:
    np.testing.assert_array_equal(*run_pipeline(kernel_of("pipeline"), order="random:7", check="asan"))


def test_a_slot_beyond_the_cache_is_an_overflow() -> None:
    with pytest.raises(KernelFault, match=r"planted.cu:60: heap-buffer-overflow: WRITE of size 2"):
        run_slots(3, 8)(kernel_of("write_slots"), check="asan")


def test_a_misaligned_vector_load_is_undefined() -> None:
    with pytest.raises(KernelFault, match=r"planted.cu:65.*misaligned"):
        run_vectors(4)(kernel_of("vectors"), check="asan")


@pytest.mark.parametrize(("dynamic", "words"), [(0, "global-buffer-overflow"), (1, "use-after-poison")])
def test_shared_memory_out_of_bounds(dynamic: int, words: str) -> None:
    y = np.zeros(64, np.float32)
    args = (y, np.int32(0), np.int32(dynamic))
    kernel_of("beyond")((1,), (64,), args, shared_mem=256, check="asan")
    np.testing.assert_array_equal(y, np.arange(64))
    with pytest.raises(KernelFault, match=rf"planted.cu:\d+: {words}: WRITE of size 4"):
        kernel_of("beyond")((1,), (64,), (y, np.int32(1), np.int32(dynamic)), shared_mem=256, check="asan")


def test_overflow_of_a_signed_integer_is_undefined() -> None:
    with pytest.raises(KernelFault, match=r"planted.cu:\d+:\d+: signed integer overflow"):
        kernel_of("overflow")((1,), (1,), (np.zeros(1, np.int32), np.int32(1)), check="asan")
