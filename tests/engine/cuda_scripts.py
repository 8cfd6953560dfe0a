"""What `CudaDevice` and `SwapEngine` promise, as short scripts on the stream double: each is right under every seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from streamdouble import BIASES, StreamDouble

from cupaged.cache import PagedKVCache
from cupaged.device.cuda import CudaDevice
from cupaged.memory import Pool, SwapIn, SwapOut, make_ref
from cupaged.swap import SwapEngine

SIZE = 3000


def device_of(seed: int, **options: Any) -> CudaDevice:
    gpu = StreamDouble(seed, [None, *BIASES][seed % (1 + len(BIASES))], gemm=options.pop("gemm", False))
    return CudaDevice(gpu, **options)


def equal(*pairs: tuple[np.ndarray, Any]) -> None:
    for ours, right in pairs:
        assert np.array_equal(ours, np.broadcast_to(np.asarray(right, ours.dtype), ours.shape)), (ours, right)


def pinned(device: CudaDevice, value: float, size: int = SIZE) -> np.ndarray:
    array = device.empty_host((size,), np.float32)
    array[:] = value
    return array


def up(device: CudaDevice, value: float, size: int = SIZE) -> np.ndarray:
    return device.upload(np.full(size, value, np.float32))


def A19_uploads_may_be_changed_at_once(seed: int) -> None:
    """Staging is reused only after the copy that runs from it; what is larger than a staging buffer comes in pieces."""
    device, rng = device_of(seed), random.Random(seed)
    host = np.empty(40_000, np.float32)
    arrays = []
    for value in range(8):
        size = rng.choice([1, 100, 9000, 20_000, 40_000])
        host[:size] = value
        arrays.append(device.upload(host[:size]))
        host[:size] = -1
    out = device.empty((2, 50), np.float32)
    pairs = [(np.full(50, row, np.float32), out[row]) for row in range(2)]
    device.upload_many(pairs)
    for source, _ in pairs:
        source[:] = -1
    for value, array in enumerate(arrays):
        equal((device.download(array), value))
    equal((device.download(out)[0], 0), (device.download(out)[1], 1))


def downloads_are_of_all_work_before(seed: int) -> None:
    device = device_of(seed)
    total, one = up(device, 0), up(device, 1)
    first, results = device.download(total), []
    for _ in range(4):
        device.ops.add(total.reshape(1, -1), one.reshape(1, -1))
        results.append(device.download(total))
    equal((first, 0), *((result, number + 1) for number, result in enumerate(results)))


def copies_wait_for_events_and_events_for_copies(seed: int) -> None:
    """Device to host and back, each behind the other by events alone."""
    device = device_of(seed)
    source, middle, target = up(device, 1), pinned(device, 0), device.empty((SIZE,), np.float32)
    device.wait("to_host", device.record())
    out = device.copy("to_host", [(source, middle)])
    device.wait("to_device", out)
    device.wait("to_device", device.record())
    back = device.copy("to_device", [(middle, target)])
    device.wait("compute", back)
    device.ops.add(target.reshape(1, -1), target.reshape(1, -1))
    equal((device.download(target), 2))


def a_transfer_is_waited_for(seed: int) -> None:
    device = device_of(seed)
    source, target = up(device, 3), pinned(device, 0)
    device.wait("to_host", device.record())
    transfer = device.copy("to_host", [(source, target)])
    assert transfer.error is None
    transfer.wait()
    equal((target, 3))
    assert transfer.done() and transfer.error is None and transfer.seconds is not None


def an_event_is_waited_for(seed: int) -> None:
    device = device_of(seed)
    source, target = up(device, 4), pinned(device, 0)
    device.wait("to_host", device.record())
    device.copy("to_host", [(source, target)])
    event = device.record("to_host")
    event.wait()
    equal((target, 4))


def what_is_done_is_done(seed: int) -> None:
    device = device_of(seed)
    source, target = up(device, 5), pinned(device, 0)
    device.wait("to_host", device.record())
    transfer = device.copy("to_host", [(source, target)])
    event = device.record("to_host")
    asked: list[Callable[[], bool]] = [transfer.done, event.done]
    if seed % 2:
        asked.reverse()
    for _ in range(100):
        if asked[0]():
            equal((target, 5))
            return
    device.synchronize()
    assert asked[0]() and asked[1]()


def all_is_done_when_a_device_is_synchronised(seed: int) -> None:
    device = device_of(seed)
    target, source = device.empty((SIZE,), np.float32), pinned(device, 6)
    landing = pinned(device, 0)
    device.wait("to_device", device.record())
    device.copy("to_device", [(source, target)])
    device.wait("to_host", device.record("to_device"))
    device.copy("to_host", [(target, landing)])
    device.synchronize()
    equal((landing, 6))


def copies_hold_both_ends(seed: int) -> None:
    """The caller lets go of what it copies from at once, and others take the memory."""
    device = device_of(seed)
    landings = [pinned(device, 0) for _ in range(4)]
    for number, landing in enumerate(landings):
        source = up(device, number)
        device.wait("to_host", device.record())
        device.copy("to_host", [(source, landing)])
        del source
    others = [up(device, 77) for _ in range(4)]
    targets = [device.empty((SIZE,), np.float32) for _ in range(4)]
    device.wait("to_device", device.record())
    for number, target in enumerate(targets):
        source = pinned(device, 10 + number)
        device.copy("to_device", [(source, target)])
        del source
    more = [pinned(device, 88) for _ in range(4)]
    device.synchronize()
    for number in range(4):
        equal((landings[number], number), (others[number], 77), (more[number], 88))
        equal((device.download(targets[number]), 10 + number))


def another_devices_event_is_waited_for(seed: int) -> None:
    class Foreign:
        reached = False

        def done(self) -> bool:
            return self.reached

        def wait(self) -> None:
            self.reached = True

    device, event = device_of(seed), Foreign()
    device.wait("compute", event)
    assert event.reached


class Source:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape, self.dtype = array.shape, "F32"

    def float32(self, start: int, stop: int) -> np.ndarray:
        return self.array[start:stop]

    def blocks(self, start: int, stop: int) -> None:
        return None

    @property
    def parts(self) -> tuple[Source]:
        return (self,)


def graphs_hold_what_they_use(seed: int) -> None:
    """Products in a graph use scratch, which a larger product replaces."""
    device = device_of(seed, gemm=True)
    rng = np.random.default_rng(seed)
    weight = rng.integers(-3, 4, (64, 64)).astype(np.float32)
    matrix = device.ops.matrix(Source(weight), "float16")
    x = rng.integers(-3, 4, (9, 64)).astype(np.float32)
    many = rng.integers(-3, 4, (200, 64)).astype(np.float32)
    inputs, outputs = device.upload(x), device.empty((9, 64), np.float32)
    large, results = device.upload(many), device.empty((200, 64), np.float32)
    with device.capture() as step:
        device.ops.matmul(inputs, matrix, outputs)
        device.ops.add(outputs, inputs)
    for number in range(5):
        device.upload(x + number, inputs)
        step.replay()
        if number == 2:
            device.ops.matmul(large, matrix, results)
            others = [up(device, 7, size) for size in (300, 64, 300, 64)]  # as large as what is free again now
        equal((device.download(outputs), (x + number) @ weight.T + x + number))
    equal((device.download(results), many @ weight.T), *((device.download(other), 7) for other in others))
    assert device.graphs.made == 1 and device.graphs.launched == 4 and device.graphs.failure is None


def swaps_keep_their_order(seed: int) -> None:
    """Blocks are written, swapped out and in again while compute goes on with their frames as soon as it may."""
    device, rng = device_of(seed), random.Random(seed)
    cache = PagedKVCache(6, 8, 1, 8, 2, "float32", device, host_blocks=6)
    limit = rng.choice([1, 100, 100]) * cache.bytes_per_block
    swaps = SwapEngine(device, [cache], limit)
    elements = cache.bytes_per_block // 4

    def write(frame: int, value: float) -> None:
        device.upload(np.full(elements, value, np.float32), cache.pieces(make_ref(frame))[0])

    def settled() -> list[int]:
        ended = swaps.finished()
        assert all(error is None for _, error in ended)
        return [item.ticket for item, _ in ended]

    def until(ticket: int) -> None:
        while ticket not in tickets:
            swaps.wait()
            tickets.extend(settled())

    def out(ticket: int, frame: int, host: int) -> Any:
        return SwapOut(ticket, 0, make_ref(frame), make_ref(host, Pool.PINNED_HOST))

    def back(ticket: int, host: int, frame: int) -> Any:
        return SwapIn(ticket, 0, make_ref(host, Pool.PINNED_HOST), make_ref(frame))

    tickets: list[int] = []
    for frame in range(3):
        write(frame, frame + 1)
    swaps.start([out(frame, frame, frame) for frame in range(3)])
    swaps.start([back(10 + host, host, 3 + host) for host in range(3)])  # behind the copies that fill their sources
    for ticket in (*range(3), *range(10, 13)):
        until(ticket)
        if ticket < 3:
            write(ticket, 50 + ticket)  # the frame is free again
    for frame in range(3):
        (block,) = cache.pieces(make_ref(3 + frame))
        (mine,) = cache.pieces(make_ref(frame))
        (host,) = cache.pieces(make_ref(frame, Pool.PINNED_HOST))
        equal((device.download(block), frame + 1), (device.download(mine), 50 + frame), (host, frame + 1))
    assert not swaps.busy and set(swaps.speed) == {"to_host", "to_device"}


def few_bytes_are_under_way(seed: int) -> None:
    """A swap waits until so few others are on their way that it fits."""
    device = device_of(seed)
    gpu: Any = device.runtime
    cache = PagedKVCache(8, 8, 1, 8, 1, "float32", device, host_blocks=8)
    swaps = SwapEngine(device, [cache], 2 * cache.bytes_per_block)
    for frame in range(8):
        item = SwapOut(frame, 0, make_ref(frame), make_ref(frame, Pool.PINNED_HOST))
        swaps.start([item])
        assert gpu.copying <= 2 * cache.bytes_per_block
    while swaps.busy:
        swaps.wait()
        swaps.finished()


Script = Callable[[int], None]
SCRIPTS: tuple[Script, ...] = (
    A19_uploads_may_be_changed_at_once,
    downloads_are_of_all_work_before,
    copies_wait_for_events_and_events_for_copies,
    a_transfer_is_waited_for,
    an_event_is_waited_for,
    what_is_done_is_done,
    all_is_done_when_a_device_is_synchronised,
    copies_hold_both_ends,
    another_devices_event_is_waited_for,
    graphs_hold_what_they_use,
    swaps_keep_their_order,
    few_bytes_are_under_way,
)
