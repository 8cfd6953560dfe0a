"""Native side of the thread team: a step is a flat list of operation records, run by all threads with barriers between.

A record is 32 int64: address of the kernel, number of chunks, 30 arguments. Chunks of an operation are taken from an
atomic counter, so that a thread that the system has taken off its core delays only the chunk it holds; which thread
runs a chunk changes no bit. A barrier ends every operation of several chunks; the last thread to reach it runs the
operations of one chunk that follow (in a decode step two of three: norms, rotation, K/V writes) before the others go
on, which saves a barrier each. Waiting spins for a while (an operation of a decode step takes microseconds), then
sleeps in a futex, so that idle threads cost nothing between steps.

Control block, int64 words on 64-byte lines: 0 arrived, 1 generation, 2 sleepers, 3 records address, 4 record count,
5 stop, 6 spins, 7 threads, 8 and 9 next chunk, in turn.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import njit, types

from cupaged.kernels.cpu.emit import I8, I32, I64, X86, Emitter, load64, primitive
from cupaged.kernels.cpu.gemm import OPTIONS

LINE = 64
RECORD = 256
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None


@primitive(2, types.int64)
def fetch_add(e: Emitter, address: Any, n: Any) -> Any:
    return e.b.atomic_rmw("add", e.ptr(address, I64), n, "seq_cst")


@primitive(1, types.int64)
def peek(e: Emitter, address: Any) -> Any:
    return e.b.load_atomic(e.ptr(address, I64), "seq_cst", 8)


@primitive(2)
def poke(e: Emitter, address: Any, value: Any) -> None:
    e.b.store_atomic(value, e.ptr(address, I64), "seq_cst", 8)


@primitive(0)
def pause(e: Emitter) -> None:
    if X86:
        e.call("llvm.x86.sse2.pause", ir.VoidType())


@primitive(3)
def futex(e: Emitter, address: Any, operation: Any, value: Any) -> None:
    """Linux futex, private: 128 wait while *address == value, 129 wake `value` waiters. Elsewhere: yield the core."""
    module = e.b.module
    if _FUTEX is None:
        e.call("sched_yield", I32)
        return
    variadic = ir.FunctionType(I64, [I64], var_arg=True)
    function = module.globals.get("syscall") or ir.Function(module, variadic, "syscall")
    zero = e.const(0)
    e.b.call(function, [e.const(_FUTEX), address, operation, value, zero, zero, zero])


@primitive(3)
def call_kernel(e: Emitter, record: Any, chunk: Any, thread: Any) -> None:
    """Call the kernel whose address heads the record, in Numba's native form: (result*, error*, arguments)."""
    b = e.b
    pointer = I8.as_pointer()
    with b.goto_entry_block():
        result, error = b.alloca(pointer), b.alloca(pointer)
    kind = ir.FunctionType(I32, [pointer.as_pointer(), pointer.as_pointer(), I64, I64, I64])
    address = e.load(record, I64, 8)
    b.call(b.inttoptr(address, kind.as_pointer()), [result, error, record, chunk, thread])


@njit(types.int64(types.int64, types.int64, types.int64), **OPTIONS)
def _run_small(control, first, thread):  # type: ignore[no-untyped-def]
    """Run the records from `first` on that have one chunk each, in this thread; returns the next with several."""
    records, count = load64(control + 3 * LINE), load64(control + 4 * LINE)
    i = first
    while i < count and load64(records + RECORD * i + 8) == 1:
        call_kernel(records + RECORD * i, 0, thread)
        i += 1
    return i


@njit(types.void(types.int64, types.int64, types.int64), **OPTIONS)
def _barrier(control, following, thread):  # type: ignore[no-untyped-def]
    """Wait for all threads. The last to come runs the small records from `following` on (-1: none) before all go on."""
    threads = load64(control + 7 * LINE)
    generation = peek(control + LINE)
    if fetch_add(control, 1) == threads - 1:
        if following >= 0:
            _run_small(control, following, thread)
        poke(control, 0)
        fetch_add(control + LINE, 1)
        if peek(control + 2 * LINE) > 0:
            futex(control + LINE, 129, 1 << 30)
        return
    spins = load64(control + 6 * LINE)
    i = 0
    while peek(control + LINE) == generation:
        i += 1
        if i < spins:
            pause()
        else:
            fetch_add(control + 2 * LINE, 1)
            futex(control + LINE, 128, generation & 0x7FFFFFFF)
            fetch_add(control + 2 * LINE, -1)


@njit(types.int64(types.int64, types.int64, types.int64), **OPTIONS)
def _next_large(records, count, first):  # type: ignore[no-untyped-def]
    """The next record from `first` on with several chunks."""
    i = first
    while i < count and load64(records + RECORD * i + 8) == 1:
        i += 1
    return i


@njit(types.void(types.int64, types.int64), **OPTIONS)
def _execute(control, thread):  # type: ignore[no-untyped-def]
    """A thread's part of the list. Leading small records were run before; others run at the barrier before them.

    Behind the last barrier the list is not looked at any more: its owner may be changing it by then.
    """
    records, count = load64(control + 3 * LINE), load64(control + 4 * LINE)
    turn = 0
    i = _next_large(records, count, 0)
    while i < count:
        record = records + RECORD * i
        chunks = load64(record + 8)
        counter = control + (8 + turn) * LINE
        turn = 1 - turn
        chunk = fetch_add(counter, 1)
        while chunk < chunks:
            call_kernel(record, chunk, thread)
            chunk = fetch_add(counter, 1)
        if thread == 0:  # the other counter was last used before the previous barrier: nobody reads it now
            poke(control + (8 + turn) * LINE, 0)
        following = i + 1
        i = _next_large(records, count, following)
        _barrier(control, following, thread)


@njit(types.void(types.int64, types.int64, types.int64), **OPTIONS)
def team_worker(control, thread, _unused):  # type: ignore[no-untyped-def]
    """Life of a helper thread: wait for a list, run it, again; returns when told to stop."""
    while True:
        _barrier(control, -1, thread)
        if peek(control + 5 * LINE) != 0:
            return
        _execute(control, thread)


@njit(types.void(types.int64, types.int64, types.int64), **OPTIONS)
def team_submit(control, _a, _b):  # type: ignore[no-untyped-def]
    """Run the list in the control block with the whole team; returns when it is done."""
    if load64(control + 7 * LINE) == 1:
        records = load64(control + 3 * LINE)
        for i in range(load64(control + 4 * LINE)):
            record = records + RECORD * i
            for chunk in range(load64(record + 8)):
                call_kernel(record, chunk, 0)
        return
    if _run_small(control, 0, 0) == load64(control + 4 * LINE) and peek(control + 5 * LINE) == 0:
        return  # nothing for several threads: the others sleep on
    poke(control + 8 * LINE, 0)
    poke(control + 9 * LINE, 0)
    _barrier(control, -1, 0)
    _execute(control, 0)


@njit(types.void(types.int64, types.int64, types.int64), **OPTIONS)
def run_alone(record, _a, _b):  # type: ignore[no-untyped-def]
    """All chunks of one record in the calling thread, as thread 0: for loading, where Python threads are the team."""
    for chunk in range(load64(record + 8)):
        call_kernel(record, chunk, 0)
