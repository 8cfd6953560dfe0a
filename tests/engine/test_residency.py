"""Which way blocks leave and come back: plain functions of counts and speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupaged.residency import Parked, Speeds, Victim, Way, way_back, way_out

MIB = 1 << 20
GPU = Speeds(to_host=10_000 * MIB, to_device=10_000 * MIB, prefill=20_000.0)
CPU = replace(GPU, unified=True)
VICTIM = Victim(size=4 * MIB, blocks=40, old_blocks=39, tokens=640, steps=100)
PARKED = Parked(size=4 * MIB, tokens=640, steps=100, fits=True, fits_in_place=True)


def test_a_copy_out_and_back_beats_computing_many_tokens_anew() -> None:
    assert way_out(VICTIM, 4, host_free=40, speeds=GPU, in_place=True) is Way.SWAP  # 0.8 ms against 32 ms


def test_few_tokens_are_computed_anew_where_the_link_is_slow() -> None:
    slow = replace(GPU, to_host=10 * MIB, to_device=10 * MIB)
    assert way_out(VICTIM, 4, host_free=40, speeds=slow, in_place=True) is Way.RECOMPUTE  # 800 ms against 32 ms
    many = replace(VICTIM, tokens=100_000)
    assert way_out(many, 4, host_free=40, speeds=slow, in_place=True) is Way.SWAP


def test_in_place_wins_for_the_last_steps_over_a_link_and_always_where_memory_is_one() -> None:
    last = replace(VICTIM, steps=1)  # read once instead of fetched once: the same, and it need not stop
    assert way_out(last, 4, host_free=40, speeds=GPU, in_place=True) is Way.IN_PLACE
    assert way_out(replace(VICTIM, steps=2), 4, host_free=40, speeds=GPU, in_place=True) is Way.SWAP
    assert way_out(VICTIM, 4, host_free=40, speeds=CPU, in_place=True) is Way.IN_PLACE
    assert way_out(VICTIM, 4, host_free=40, speeds=CPU, in_place=False) is Way.SWAP


def test_in_place_leaves_the_blocks_that_are_written_to() -> None:
    assert way_out(VICTIM, 39, host_free=40, speeds=CPU, in_place=True) is Way.IN_PLACE
    assert way_out(VICTIM, 40, host_free=40, speeds=CPU, in_place=True) is Way.SWAP


@pytest.mark.parametrize("host_free", [0, 39])
def test_A14_a_host_pool_too_small_for_the_victim_means_recompute_and_never_a_partial_swap(host_free: int) -> None:
    assert way_out(VICTIM, 4, host_free, GPU, in_place=False) is Way.RECOMPUTE
    assert way_out(VICTIM, 4, 40, GPU, in_place=False) is Way.SWAP


def test_before_anything_is_measured_blocks_are_copied() -> None:
    assert way_out(VICTIM, 4, 40, Speeds(), in_place=False) is Way.SWAP
    assert way_out(VICTIM, 4, 40, Speeds(prefill=20_000.0), in_place=False) is Way.RECOMPUTE
    assert way_out(VICTIM, 4, 0, Speeds(), in_place=False) is Way.RECOMPUTE
    assert way_back(PARKED, Speeds(), in_place=False) is Way.SWAP


def test_a_request_is_fetched_when_all_of_it_fits_and_waits_until_then() -> None:
    assert way_back(PARKED, GPU, in_place=True) is Way.SWAP
    assert way_back(replace(PARKED, fits=False), GPU, in_place=True) is Way.WAIT
    assert way_back(replace(PARKED, fits=False, fits_in_place=False), GPU, in_place=True) is Way.WAIT


def test_a_request_comes_back_in_place_where_that_beats_fetching() -> None:
    assert way_back(replace(PARKED, steps=1), GPU, in_place=True) is Way.IN_PLACE
    assert way_back(PARKED, CPU, in_place=True) is Way.IN_PLACE
    assert way_back(replace(PARKED, fits=False), CPU, in_place=True) is Way.IN_PLACE
    assert way_back(replace(PARKED, fits=False), CPU, in_place=False) is Way.WAIT


def test_what_is_longer_than_the_device_pool_is_read_in_place_whatever_it_costs() -> None:
    assert way_back(replace(PARKED, fits=False, fits_ever=False), GPU, in_place=True) is Way.IN_PLACE


def test_a_copy_that_takes_longer_than_the_prefill_is_not_fetched() -> None:
    assert way_back(PARKED, replace(GPU, to_device=MIB), in_place=True) is Way.RECOMPUTE
