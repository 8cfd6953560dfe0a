"""Copies between the pools: real threads, real order. And the swap engine on them."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cupaged.cache import PagedKVCache
from cupaged.device import host_stream
from cupaged.device.cpu import CpuDevice
from cupaged.errors import DeviceError, KernelError, OptionError
from cupaged.memory import BlockManager, GroupSpec, PlanItem, Pool, SequenceTables, SwapIn, make_ref
from cupaged.swap import SwapEngine


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1)
    yield device
    device.close()


class Gate:
    """Holds the copies of the streams back until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.begun = 0
        copy = host_stream.copy_array

        def waiting(source: Any, destination: Any) -> None:
            self.begun += 1
            assert self.open.wait(30)
            copy(source, destination)

        patch.setattr(host_stream, "copy_array", waiting)

    def wait_for(self, begun: int) -> None:
        """Until so many copies have begun."""
        deadline = time.monotonic() + 30
        while self.begun < begun and time.monotonic() < deadline:
            time.sleep(0.001)
        assert self.begun == begun


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_a_copy_runs_beside_its_caller_and_events_tell_when(device: CpuDevice, gate: Gate) -> None:
    source, target = np.arange(1000, dtype=np.uint8) % 251, np.zeros(1000, np.uint8)
    transfer = device.copy("to_host", [(source.astype(np.uint8), target)])
    behind = device.record("to_host")
    assert device.record("compute").done()
    assert not transfer.done() and not behind.done()
    assert transfer.seconds is None and not target.any()
    gate.open.set()
    behind.wait()
    assert transfer.done() and transfer.error is None and transfer.seconds is not None
    assert np.array_equal(target, source)


def test_streams_run_beside_each_other_and_wait_for_events_only(device: CpuDevice, gate: Gate) -> None:
    a, b, c = (np.full(10, value, np.uint8) for value in (1, 2, 3))
    out = device.copy("to_host", [(a, b)])
    device.wait("to_device", out)
    back = device.copy("to_device", [(b, c)])  # must see what the first one writes
    gate.wait_for(1)
    time.sleep(0.01)
    assert gate.begun == 1  # the second has not begun: it waits for the event
    gate.open.set()
    device.synchronize()
    assert back.done() and c.tolist() == [1] * 10


def test_two_directions_overlap(device: CpuDevice, gate: Gate) -> None:
    arrays = [np.zeros(4, np.uint8) for _ in range(4)]
    device.copy("to_host", [(arrays[0], arrays[1])])
    device.copy("to_device", [(arrays[2], arrays[3])])
    gate.wait_for(2)
    gate.open.set()


def test_a_failing_copy_says_so_and_the_next_one_runs(device: CpuDevice) -> None:
    small, large = np.zeros(3, np.uint8), np.ones(4, np.uint8)
    bad, good = device.copy("to_host", [(small, large)]), device.copy("to_host", [(large, large.copy())])
    good.wait()
    assert isinstance(bad.error, ValueError) and bad.done()
    assert good.error is None


def test_a_closed_device_ends_what_has_not_begun(gate: Gate) -> None:
    device = CpuDevice(1)
    arrays = np.zeros(4, np.uint8), np.ones(4, np.uint8)
    first, second = device.copy("to_host", [arrays]), device.copy("to_host", [arrays])
    gate.wait_for(1)
    closing = threading.Thread(target=device.close)
    closing.start()
    second.wait()
    assert isinstance(second.error, DeviceError)
    gate.open.set()
    closing.join(30)
    assert not closing.is_alive() and first.done()
    with pytest.raises(DeviceError, match="closed"):
        device.copy("to_host", [arrays])
    device.synchronize()


def test_closing_a_device_before_its_thread_has_begun_ends_every_copy() -> None:
    for _ in range(50):
        device = CpuDevice(1)
        transfers = [device.copy("to_host", [(np.zeros(4, np.uint8), np.ones(4, np.uint8))]) for _ in range(3)]
        device.close()
        assert all(transfer.done() for transfer in transfers)


def test_a_dropped_device_leaves_no_thread() -> None:
    before = threading.active_count()
    stream = host_stream.HostStream("dropped")
    stream.copy([]).wait()
    assert threading.active_count() == before + 1
    del stream
    gc.collect()
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() == before


def in_a_child(action: Callable[[], bool]) -> bool:
    pid = os.fork()
    if not pid:
        good = False
        try:
            good = action()
        finally:
            os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_copies_on_and_finishes_what_was_under_way(device: CpuDevice, gate: Gate) -> None:
    source, target = np.ones(4, np.uint8), np.zeros(4, np.uint8)
    transfer = device.copy("to_host", [(source, target)])

    def child() -> bool:
        gate.open = threading.Event()
        gate.open.set()
        device.copy("to_host", []).wait()
        return bool(transfer.done() and target.all())

    assert in_a_child(child)
    assert not target.any()  # the parent's own is still held back
    gate.open.set()
    transfer.wait()
    assert target.all()


# The caches' side


def cache_of(device: CpuDevice, layout: Any, **options: Any) -> PagedKVCache:
    cache = PagedKVCache(6, 4, 2, 8, 3, "float32", device, layout, host_blocks=5, **options)
    for number, array in enumerate((cache.array, cache.host_array)):
        array[:] = np.arange(array.size) + number * 1e6
    return cache


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
def test_pieces_of_a_block_are_all_of_it_in_the_same_order_in_both_pools(device: CpuDevice, layout: Any) -> None:
    cache = cache_of(device, layout)
    for frame in range(6):
        piece = np.concatenate(cache.pieces(make_ref(frame))).view(np.uint8)
        assert np.array_equal(piece, cache.block_bytes(frame))
    host = [np.concatenate(cache.pieces(make_ref(frame, Pool.PINNED_HOST))) for frame in range(5)]
    assert np.array_equal(np.concatenate(host), cache.host_array)
    assert len(cache.pieces(make_ref(0))) == (1 if layout == "block_major" else 3)
    assert [p.shape for p in cache.pieces(make_ref(1))] == [
        p.shape for p in cache.pieces(make_ref(1, Pool.PINNED_HOST))
    ]
    for wrong in (-1, make_ref(6), make_ref(5, Pool.PINNED_HOST), 2 << 28, 1 << 30):
        with pytest.raises(KernelError, match="not of this cache"):
            cache.pieces(wrong)


def test_only_a_block_major_cache_is_read_in_place(device: CpuDevice) -> None:
    assert cache_of(device, "block_major").reads_in_place
    assert len(cache_of(device, "block_major").view.pools) == 2
    assert not cache_of(device, "layer_major").reads_in_place
    assert len(cache_of(device, "layer_major").view.pools) == 1
    assert not PagedKVCache(3, device=device).reads_in_place
    with pytest.raises(OptionError, match=r"host_blocks: -1 is not in 0\.\."):
        PagedKVCache(3, device=device, host_blocks=-1)


# The swap engine


class Swapped:
    """A sequence of 16 tokens in blocks of 4, whose K/V tell their block, and an engine to move them."""

    def __init__(self, device: CpuDevice, layout: Any = "block_major", limit: int = 1 << 30) -> None:
        self.cache = cache_of(device, layout)
        self.manager = BlockManager([GroupSpec(6, 4, host_blocks=5)], in_place=True)
        self.engine = SwapEngine(device, [self.cache], limit)
        self.tables: SequenceTables = self.manager.create()
        self.manager.prepare_append(self.tables, 16)
        self.manager.commit_append(self.tables, 16)
        for number, ref in enumerate(self.refs):
            for piece in self.cache.pieces(ref):
                piece[:] = number

    @property
    def refs(self) -> list[int]:
        return self.tables.tables[0].refs

    def contents(self) -> list[float]:
        found = [np.concatenate(self.cache.pieces(ref)) for ref in self.refs]
        assert all((block == block[0]).all() for block in found)
        return [float(block[0]) for block in found]

    def settle(self) -> list[tuple[PlanItem, BaseException | None]]:
        ended = []
        while self.engine.busy:
            self.engine.wait()
            for item, error in self.engine.finished():
                self.manager.complete(item.ticket)
                ended.append((item, error))
        return ended


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
def test_blocks_go_out_and_come_back_as_they_were(device: CpuDevice, layout: Any) -> None:
    swapped = Swapped(device, layout)
    swapped.engine.start(swapped.manager.swap_out(0, swapped.refs[1:3]))
    assert len(swapped.settle()) == 2
    assert swapped.manager.pools[0].num_used == 2
    assert swapped.contents() == [0, 1, 2, 3]
    for frame in range(6):  # whatever happens to the frames that they left
        if make_ref(frame) not in swapped.refs:
            for piece in swapped.cache.pieces(make_ref(frame)):
                piece[:] = np.nan
    swapped.engine.start(swapped.manager.swap_in(0, swapped.refs[1:3]))
    swapped.settle()
    assert swapped.contents() == [0, 1, 2, 3]
    assert set(swapped.engine.speed) == {"to_host", "to_device"}
    assert min(swapped.engine.speed.values()) > 0
    swapped.manager.audit()


def test_A19_out_in_and_out_again_before_anything_is_done(device: CpuDevice, gate: Gate) -> None:
    """Nothing is reused early and each copy waits for the one that fills its source, however late they run."""
    swapped = Swapped(device)
    for _ in range(3):
        for move in (swapped.manager.swap_out, swapped.manager.swap_in):
            if move == swapped.manager.swap_in and swapped.manager.pools[0].num_free < 1:
                continue
            swapped.engine.start(move(0, swapped.refs[:1]))
            if swapped.manager.pools[0].num_free == 0 or swapped.manager.host_pools[0].num_free == 0:  # type: ignore[union-attr]
                break
    assert not swapped.engine.finished()
    assert len(swapped.manager.unfinished()) >= 4
    gate.open.set()
    swapped.settle()
    assert swapped.contents() == [0, 1, 2, 3]
    swapped.manager.audit()


def test_tickets_stay_open_until_the_copy_is_done(device: CpuDevice, gate: Gate) -> None:
    swapped = Swapped(device)
    swapped.engine.start(swapped.manager.swap_out(0, swapped.refs[:4]))
    assert swapped.engine.busy and not swapped.engine.finished()
    assert swapped.manager.pools[0].num_free == 2  # the other four drain
    assert not swapped.manager.settled(swapped.tables)
    gate.open.set()
    swapped.settle()
    assert swapped.manager.settled(swapped.tables)
    assert swapped.manager.pools[0].num_free == 6


def test_copies_under_way_are_bounded(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = Swapped(device)
    swapped.engine.limit = 2 * swapped.cache.bytes_per_block
    most = 0
    copy = device.copy

    def counting(*arguments: Any) -> Any:
        nonlocal most
        transfer = copy(*arguments)
        most = max(most, sum(not other.done() for _, other in swapped.engine._under_way) + (not transfer.done()))
        return transfer

    monkeypatch.setattr(device, "copy", counting)
    monkeypatch.setattr(host_stream, "copy_array", lambda source, target: time.sleep(0.005))
    swapped.engine.start(swapped.manager.swap_out(0, swapped.refs))
    assert most <= 2
    assert len(swapped.settle()) == 4
    swapped.engine.limit = 1  # less than a block: one at a time
    swapped.engine.start(swapped.manager.swap_in(0, swapped.refs))
    assert len(swapped.settle()) == 4


def test_a_failing_copy_is_told_with_its_item(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = Swapped(device)
    copy = host_stream.copy_array
    number = 0

    def failing(source: Any, target: Any) -> None:
        nonlocal number
        number += 1
        if number == 2:
            raise OSError("the link is down")
        copy(source, target)

    monkeypatch.setattr(host_stream, "copy_array", failing)
    items = swapped.manager.swap_out(0, swapped.refs[:3])
    swapped.engine.start(items)
    ended = dict(swapped.settle())
    assert [str(ended[item]) for item in items] == ["None", "the link is down", "None"]
    assert not any(isinstance(item, SwapIn) for item in items)


def test_what_reads_a_block_that_never_came_fails_with_it(
    device: CpuDevice, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out, in and out again before anything is done, and the first copy fails: all three bring nothing."""
    swapped = Swapped(device)
    copy = host_stream.copy_array  # the gate's
    number = 0

    def failing(source: Any, target: Any) -> None:
        nonlocal number
        number += 1
        copy(source, target)
        if number == 1:
            raise OSError("the link is down")

    monkeypatch.setattr(host_stream, "copy_array", failing)
    for move in (swapped.manager.swap_out, swapped.manager.swap_in, swapped.manager.swap_out):
        swapped.engine.start(move(0, swapped.refs[:1]))
    other = swapped.manager.swap_out(0, swapped.refs[1:2])
    swapped.engine.start(other)
    gate.open.set()
    ended = swapped.settle()
    assert {item.ticket: str(error) for item, error in ended} == {
        0: "the link is down", 1: "the link is down", 2: "the link is down", 3: "None",
    }  # fmt: skip
    swapped.manager.audit()


def test_a_swap_that_the_device_refuses_is_told_as_a_failed_one(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = Swapped(device)
    copy, refused = device.copy, []

    def refusing(stream: Any, pairs: Any) -> Any:
        if not refused:
            refused.append(stream)
            raise DeviceError("no memory is left for the copy")
        return copy(stream, pairs)

    monkeypatch.setattr(device, "copy", refusing)
    swapped.engine.start(swapped.manager.swap_out(0, swapped.refs[:2]))
    swapped.engine.start(swapped.manager.swap_in(0, swapped.refs[:1]))  # what was refused
    errors = {item.ticket: error for item, error in swapped.settle()}
    assert [str(errors[ticket]) for ticket in range(3)] == [
        "no memory is left for the copy", "None", "no memory is left for the copy",
    ]  # fmt: skip
    monkeypatch.setattr(device, "record", lambda stream="compute": (_ for _ in ()).throw(DeviceError("lost")))
    swapped.engine.start(swapped.manager.swap_in(0, swapped.refs[1:2]))
    assert [str(error) for _, error in swapped.settle()] == ["lost"]
    swapped.manager.audit()
