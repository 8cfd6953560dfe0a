"""PTX that NVRTC made, interpreted: planted faults show, and it agrees with the emulator function by function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_support import ORDERS, need_emulator, need_nvrtc
from cudabench import BenchError, KernelFault, emulate
from cudabench.ptx import PtxKernel, Schedule, interpret
from test_bench_faults import (
    BLOCK_ELEMENTS,
    GOOD,
    PLANTED,
    Run,
    run_pipeline,
    run_product,
    run_slots,
    run_tiles,
    run_vectors,
)

pytestmark = need_nvrtc
ARITHMETIC = Path(PLANTED).with_name("arithmetic.cu")
RANDOM = np.random.default_rng(1)


def ptx_of(name: str, *faults: str) -> PtxKernel:
    return interpret(PLANTED, name, defines={"BLOCK_ELEMENTS": BLOCK_ELEMENTS, **dict.fromkeys(faults, "")})


@pytest.mark.parametrize("order", [*ORDERS, "random:8"])
@pytest.mark.parametrize(
    ("name", "run"), [row for row in GOOD if row[0] != "read_block"], ids=lambda value: str(value)[:12]
)
def test_without_a_fault_all_is_well(name: str, run: Run, order: str) -> None:
    result, right = run(ptx_of(name), order=order)
    np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", ["NO_BARRIER_BEFORE_READ", "NO_BARRIER_BEFORE_WRITE"])
def test_a_missing_barrier_shows_in_the_numbers_of_some_order(fault: str) -> None:
    """Warps side by side meet at every instruction, as if there were a barrier; one ahead of the other shows it."""
    wrong = [order for order in ORDERS if not np.allclose(*run_tiles(ptx_of("tiles", fault), order=order))]
    assert "reverse" in wrong


def test_blocks_come_in_the_order_that_was_asked_for() -> None:
    """Blocks read what block 3, or block 0, writes: whoever runs after it sees it."""
    seen = {}
    for order in ("forward", "reverse"):
        for writer in (0, 3):
            x, y = np.zeros(1, np.float32), np.full(4, np.nan, np.float32)
            ptx_of("read_and_write")((4,), (1,), (x, y, np.int32(writer)), order=order)
            seen[order, writer] = np.nan_to_num(y).tolist()
    assert seen["reverse", 3] != seen["reverse", 0] and seen["reverse", 3] != seen["forward", 3]


def test_orders_deal_every_warp_and_every_block_once() -> None:
    warp, block = np.arange(8 * 32) // 32 % 4, np.arange(8 * 32) // 128
    for order in (*ORDERS, "random:8"):
        schedule = Schedule(order)
        assert sorted(np.concatenate(schedule.goes(11, 4)).tolist()) == list(range(11))
        team, count = schedule.team_of(warp, block)
        assert team.min() == 0 and team.max() == count - 1
        for number in range(count):  # of a block, a team has one warp, or all of them
            assert len({*warp[(team == number) & (block == 0)]}) == (4 if order == "forward" else 1)
    assert not np.array_equal(*(Schedule(f"random:{seed}").goes(100, 50)[0] for seed in (7, 8)))


@pytest.mark.parametrize("order", ["backward", "random", "random:x", "reverse:1"])
def test_an_unknown_order_is_refused(order: str) -> None:
    with pytest.raises(BenchError, match="is not forward, reverse or random:SEED"):
        Schedule(order)


def test_swapped_operands_of_mma_show_in_the_numbers() -> None:
    result, right = run_product(ptx_of("product", "SWAPPED_OPERANDS"))
    assert np.abs(result - right).max() > 1


def test_a_cp_async_that_is_not_waited_for_shows_in_the_numbers() -> None:
    result, _ = run_pipeline(ptx_of("pipeline", "NO_ASYNC_WAIT"))
    assert np.isnan(result).any()


@pytest.mark.parametrize(
    ("name", "run", "words"),
    [
        ("write_slots", run_slots(3, 8), r"st.global.u16 .* out of bounds \(offset 286 of array 1\)"),
        ("vectors", run_vectors(4), r"ld.global.*v4.u32 .* misaligned access of 16 bytes"),
    ],
)
def test_a_planted_fault_is_named_with_its_instruction(name: str, run: Run, words: str) -> None:
    with pytest.raises(KernelFault, match=words):
        run(ptx_of(name))


def test_a_pointer_of_32_bits_hits_nothing(tmp_path: Path) -> None:
    source = tmp_path / "cut.cu"
    source.write_text('extern "C" __global__ void cut(float *y) { *(float *)(size_t)(unsigned)(size_t)y = 1.f; }')
    with pytest.raises(KernelFault, match="out of bounds"):
        interpret(source)((1,), (1,), (np.zeros(1, np.float32),))


def both(name: str, grid: int, block: int, args: list[Any], out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the emulator and the interpreter write into `out`, the last array but the scalars."""
    results = []
    for kernel in (emulate(ARITHMETIC, name), interpret(ARITHMETIC, name)):
        out[...] = -7
        kernel((grid,), (block,), args)
        results.append(out.copy())
    return results[0], results[1]


@need_emulator
def test_integer_functions_agree_in_both_instruments() -> None:
    edges = np.array([0, 1, -1, 2**31 - 1, -(2**31) + 1, 255, -256], np.int32)
    a = np.concatenate([np.repeat(edges, 7), RANDOM.integers(-(2**31), 2**31, 150, np.int32)])
    b = np.concatenate([np.tile(edges, 7), RANDOM.integers(-(2**15), 2**15, 150, np.int32)])
    out = np.zeros((17, len(a)), np.int32)
    emulated, interpreted = both("integers", 4, 64, [a, b, out, np.int32(len(a))], out)
    np.testing.assert_array_equal(emulated, interpreted)
    wide = a.astype(np.int64) * b
    np.testing.assert_array_equal(emulated[3], wide >> 32)
    np.testing.assert_array_equal(emulated[5], (wide >> 7).astype(np.int32))
    np.testing.assert_array_equal(emulated[0], np.where(b == 0, 0, np.trunc(a / np.where(b == 0, 1, b))))
    low, high = a.astype(np.int64) & 0xFFFFFFFF, b.astype(np.int64) & 0xFFFFFFFF
    np.testing.assert_array_equal(emulated[8].view(np.uint32), ((high << 32 | low) >> 11) & 0xFFFFFFFF)


@need_emulator
def test_float_functions_agree_in_both_instruments() -> None:
    edges = np.array([0, -0.0, 1, -2.5, 65519, 65520, 6e-8, np.inf, -np.inf, np.nan, 3e9, 1e-40], np.float32)
    a = np.concatenate([np.repeat(edges, 12), RANDOM.standard_normal(150).astype(np.float32) * 1000])
    b = np.concatenate([np.tile(edges, 12), RANDOM.standard_normal(150).astype(np.float32)])
    out = np.zeros((12, len(a)), np.float32)
    emulated, interpreted = both("floats", 5, 64, [a, b, out, np.int32(len(a))], out)
    np.testing.assert_array_equal(np.isnan(emulated), np.isnan(interpreted))
    different = (emulated.view(np.uint32) != interpreted.view(np.uint32)) & ~np.isnan(emulated)
    different[3:5] &= (emulated != interpreted)[3:5]  # min and max of zeros of either sign: PTX leaves it open
    assert not different.any(), np.argwhere(different)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(emulated[7], a.astype(np.float16).astype(np.float32))
        exact = (a.astype(np.longdouble) * b + np.longdouble(np.float32(0.3))).astype(np.float32)
    np.testing.assert_array_equal(emulated[0], exact)


@need_emulator
def test_what_lanes_tell_each_other_agrees_in_both_instruments() -> None:
    a = RANDOM.integers(0, 10, 96, np.int32)
    out = np.zeros((14, 96), np.int32)
    counter = np.zeros(1, np.int32)
    emulated, interpreted = both("lanes", 1, 96, [a, out, counter], out)
    np.testing.assert_array_equal(emulated, interpreted)
    assert counter[0] == 2 * a.sum()  # of both launches
    warps = a.reshape(3, 32)
    np.testing.assert_array_equal(emulated[2].reshape(3, 32), warps[:, np.arange(32) ^ 12])
    np.testing.assert_array_equal(emulated[4].reshape(3, 32)[:, :29], warps[:, 3:])
    np.testing.assert_array_equal(emulated[12].reshape(3, 32), np.repeat(warps.sum(1, keepdims=True), 32, 1))
    assert emulated[9, 0] == (a & 2).astype(bool).sum()
