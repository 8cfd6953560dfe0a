"""The bench is tested too: every planted fault is caught, and the same kernel without it passes, in all orders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_support import ORDERS, need_emulator
from cudabench import BenchError, Kernel, KernelFault, Undefined, emulate

pytestmark = need_emulator
PLANTED = Path(__file__).resolve().parents[2] / "cudabench" / "kernels" / "planted.cu"
BLOCK_ELEMENTS = 16384  # block 131,072 starts at element 2^31
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((4, 64)).astype(np.float32)
A, B = RANDOM.standard_normal((16, 16)).astype(np.float16), RANDOM.standard_normal((16, 8)).astype(np.float16)
Run = Callable[..., tuple[np.ndarray, np.ndarray]]  # (kernel, order=, check=) -> (result, what is right)


def kernel_of(name: str, *faults: str) -> Kernel:
    return emulate(PLANTED, name, defines={"BLOCK_ELEMENTS": BLOCK_ELEMENTS, **dict.fromkeys(faults, "")})


def run_tiles(kernel: Kernel, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    y = np.full(64, np.nan, np.float32)
    kernel((1,), (64,), (X, y, np.int32(256)), **how)
    return y, X[:, ::-1].sum(0)


def run_neighbours(kernel: Kernel, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    y = np.full(32, np.nan, np.float32)
    kernel((1,), (32,), (y,), **how)
    return y, np.arange(32) ^ 1


def run_pipeline(kernel: Kernel, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    y = np.full((4, 64), np.nan, np.float32)
    kernel((1,), (16,), (X, y, np.int32(4)), **how)
    return y, X[:, ::-1]


def run_slots(*slots: int) -> Run:
    def run(kernel: Kernel, **how: Any) -> tuple[np.ndarray, np.ndarray]:
        cache = np.zeros((8, 16), np.float16)
        right = cache.copy()
        x = X.reshape(16, 16)
        kernel((len(slots),), (16,), (x, cache, np.array(slots, np.int64)), **how)
        for token, slot in enumerate(slots):
            if slot >= 0:
                right[slot] = x[token]
        return cache, right

    return run


def run_vectors(first: int) -> Run:
    def run(kernel: Kernel, **how: Any) -> tuple[np.ndarray, np.ndarray]:
        y = np.full(8, np.nan, np.float32)
        kernel((1,), (8,), (np.ones(128, np.float16), y, np.int32(first)), **how)
        return y, np.full(8, 8)

    return run


def run_block_131072(kernel: Kernel, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    cache = np.zeros((131073, BLOCK_ELEMENTS), np.float16)  # 4 GiB, of which two pages are touched
    cache[-1, :32] = np.arange(32)
    y = np.full(32, np.nan, np.float32)
    kernel((1,), (32,), (cache, y, np.int32(131072)), **how)
    return y, np.arange(32)


def run_product(kernel: Kernel, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    c = np.full((16, 8), np.nan, np.float32)
    kernel((1,), (32,), (A, B, c), **how)
    return c, A.astype(np.float64) @ B.astype(np.float64)


GOOD: list[tuple[str, Run]] = [
    ("tiles", run_tiles),
    ("neighbours", run_neighbours),
    ("pipeline", run_pipeline),
    ("write_slots", run_slots(3, 1, -1, 0)),
    ("vectors", run_vectors(8)),
    ("read_block", run_block_131072),
    ("product", run_product),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("check", [None, "race"])
@pytest.mark.parametrize(("name", "run"), GOOD, ids=[name for name, _ in GOOD])
def test_without_a_fault_all_is_well(name: str, run: Run, check: str | None, order: str) -> None:
    result, right = run(kernel_of(name), order=order, check=check)
    np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-5)


# kernel, what is planted (a -D, or arguments that make it wrong), run, words and line of the fault
FAULTS: list[tuple[str, str | None, Run, str]] = [
    ("tiles", "NO_BARRIER_BEFORE_READ", run_tiles, r"planted.cu:14: .* uninitialised read of static shared byte"),
    ("tiles", "NO_BARRIER_BEFORE_WRITE", run_tiles, r"planted.cu:14: .* race: read .* write by thread \d+ at .*cu:10"),
    ("neighbours", "NO_WARP_SYNC", run_neighbours, r"planted.cu:29: .* uninitialised read"),
    ("pipeline", "NO_ASYNC_WAIT", run_pipeline, r"planted.cu:\d+: .* cp.async of thread \d+ at .*planted.cuh:5"),
    ("write_slots", None, run_slots(3, 8), r"planted.cu:60: .* write of 2 bytes out of bounds .*array 1"),
    ("write_slots", "NO_PADDING", run_slots(3, -1), r"planted.cu:60: .* out of bounds \(offset -\d+ of array 1"),
    ("write_slots", None, run_slots(3, 3), r"planted.cu:60: .* race: write .* write by thread \d+ of another block"),
    ("vectors", None, run_vectors(4), r"planted.cu:65: .* misaligned access of 16 bytes"),
    ("read_block", "OFFSET_IN_INT32", run_block_131072, r"planted.cu:80: .* out of bounds \(offset -42949\d+ of"),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "fault", "run", "words"), FAULTS, ids=[f"{f[0]}-{f[1] or 'args'}" for f in FAULTS])
def test_a_planted_fault_is_named_with_its_line(name: str, fault: str | None, run: Run, words: str, order: str) -> None:
    kernel = kernel_of(name, *([fault] if fault else []))
    with pytest.raises(KernelFault, match=words):
        run(kernel, order=order, check="race")


@pytest.mark.parametrize(
    ("name", "fault", "run"),
    [
        ("tiles", "NO_BARRIER_BEFORE_READ", run_tiles),
        ("tiles", "NO_BARRIER_BEFORE_WRITE", run_tiles),
        ("neighbours", "NO_WARP_SYNC", run_neighbours),
    ],
)
def test_a_missing_barrier_shows_in_the_numbers_of_the_fast_mode_too(name: str, fault: str, run: Run) -> None:
    assert [order for order in ORDERS if not np.allclose(*run(kernel_of(name, fault), order=order))]


def test_swapped_operands_of_mma_show_in_the_numbers() -> None:
    result, right = run_product(kernel_of("product", "SWAPPED_OPERANDS"))
    assert np.abs(result - right).max() > 1


def test_a_crash_of_the_fast_mode_is_a_fault_not_the_end_of_the_process() -> None:
    with pytest.raises(KernelFault, match="misaligned"):
        run_vectors(4)(kernel_of("vectors"))
    test_without_a_fault_all_is_well("vectors", run_vectors(8), None, "forward")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((X, X.copy(), 256), r"argument 2 \(int\): int is neither"),
        ((X, X.copy(), np.int64(256)), r"argument 2 \(int\): got int64, 8 bytes"),
        ((X, X.copy(), np.float32(256)), r"argument 2 \(int\): got float32"),
        ((X, None, np.int32(256)), r"argument 1 \(float\*\): NoneType"),
        ((X, X.copy(), X), r"argument 2 \(int\): got an array"),
        ((X, X.copy()), "takes 3 arguments, not 2"),
    ],
)
def test_K15_arguments_of_the_wrong_size_or_kind_are_refused(args: tuple[Any, ...], words: str) -> None:
    with pytest.raises(BenchError, match=words):
        kernel_of("tiles")((1,), (64,), args)


@pytest.mark.parametrize("check", [None, "race"])
def test_views_of_one_array_stay_views_of_one_array(check: str | None) -> None:
    both = np.zeros((2, 256), np.float32)
    both[0] = X.reshape(-1)
    x = np.lib.stride_tricks.as_strided(both, (256,), (4,))
    kernel_of("tiles")((1,), (64,), (x, both[1, 64:], np.int32(256)), check=check)
    np.testing.assert_allclose(both[1, 64:128], X[:, ::-1].sum(0), rtol=1e-5)
    assert not both[1, :64].any() and not both[1, 128:].any()


def test_the_bounds_are_those_of_the_view() -> None:
    with pytest.raises(KernelFault, match=r"planted.cu:19: .* write of 4 bytes out of bounds \(offset 128 of array 1"):
        kernel_of("tiles")((1,), (64,), (X, np.zeros(256, np.float32)[:32], np.int32(256)), check="race")


def test_an_undefined_array_may_not_be_read() -> None:
    with pytest.raises(KernelFault, match=r"planted.cu:10: .* uninitialised read of global memory, byte 0 of array 0"):
        kernel_of("tiles")((1,), (64,), (Undefined(X), np.zeros(64, np.float32), np.int32(256)), check="race")
    y = np.zeros(64, np.float32)
    kernel_of("tiles")((1,), (64,), (X, Undefined(y), np.int32(256)), check="race")
    assert y.any()


@pytest.mark.parametrize("order", ORDERS)
def test_a_read_before_another_blocks_write_is_a_race_whoever_read_since(order: str) -> None:
    writer = 0 if order == "reverse" else 3
    args = (np.zeros(1, np.float32), np.zeros(4, np.float32), np.int32(-1))
    kernel_of("read_and_write")((4,), (1,), args, order=order, check="race")
    with pytest.raises(KernelFault, match=r"race: (read|write) of global memory, byte 0 of array 0 and a (read|write)"):
        kernel_of("read_and_write")((4,), (1,), (*args[:2], np.int32(writer)), order=order, check="race")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "divergent __syncthreads: other threads wait at "),
        (2, r"the mask names lane \d+, which has returned|deadlock: thread \d+ in the warp operation of .*planted.cu"),
        (3, "the calling lane is not in its own mask"),
        (4, "shuffles from lane 16, which is not in the mask"),
        (5, "deadlock: thread 0 at the barrier of .*planted.cu"),
        (6, r"gave up after 10000\d fiber switches"),
    ],
)
def test_misuse_of_meetings_is_named(number: int, words: str, order: str) -> None:
    with pytest.raises(KernelFault, match=words):
        args = (np.zeros(32, np.float32), np.int32(number))
        kernel_of("misuse")((1,), (32,), args, order=order, max_switches=100_000)
