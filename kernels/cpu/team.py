"""Native side of the thread team: a step is a flat list of operation records, run by all threads with barriers between.

A record is 32 int64: address of the kernel, number of chunks, 30 arguments. Chunks of an operation are taken from an
atomic counter, so that a thread that the system has taken off its core delays only the chunk it holds; which thread
runs a chunk changes no bit. A barrier ends every operation. Waiting spins for a while (an operation of a decode step
takes microseconds), then sleeps in a futex, so that idle threads cost nothing between steps.

Control block, int64 words on 64-byte lines: 0 arrived, 1 generation, 2 sleepers, 3 records address, 4 record count,
5 stop, 6 spins, 7 threads, 8 next chunk (even records), 9 next chunk (odd records).
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


@njit(types.void(types.int64), **OPTIONS)
def _barrier(control):  # type: ignore[no-untyped-def]
    threads = load64(control + 7 * LINE)
    if threads == 1:
        return
    generation = peek(control + LINE)
    if fetch_add(control, 1) == threads - 1:
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


@njit(types.void(types.int64, types.int64), **OPTIONS)
def _execute(control, thread):  # type: ignore[no-untyped-def]
    records = load64(control + 3 * LINE)
    for i in range(load64(control + 4 * LINE)):
        record = records + RECORD * i
        chunks = load64(record + 8)
        counter = control + (8 + i % 2) * LINE
        chunk = fetch_add(counter, 1)
        while chunk < chunks:
            call_kernel(record, chunk, thread)
            chunk = fetch_add(counter, 1)
        if thread == 0:  # the other counter was last used before the previous barrier: nobody reads it now
            poke(control + (8 + (i + 1) % 2) * LINE, 0)
        _barrier(control)


@njit(types.void(types.int64, types.int64, types.int64), **OPTIONS)
def team_worker(control, thread, _unused):  # type: ignore[no-untyped-def]
    """Life of a helper thread: wait for a list, run it, again; returns when told to stop."""
    while True:
        _barrier(control)
        if peek(control + 5 * LINE) != 0:
            return
        _execute(control, thread)


@njit(types.void(types.int64, types.int64, types.int64), **OPTIONS)
def team_submit(control, _a, _b):  # type: ignore[no-untyped-def]
    """Run the list in the control block with the whole team; returns when it is done."""
    poke(control + 8 * LINE, 0)
    poke(control + 9 * LINE, 0)
    _barrier(control)
    _execute(control, 0)


@njit(types.void(types.int64, types.int64, types.int64), **OPTIONS)
def run_alone(record, _a, _b):  # type: ignore[no-untyped-def]
    """All chunks of one record in the calling thread, as thread 0: for loading, where Python threads are the team."""
    for chunk in range(load64(record + 8)):
        call_kernel(record, chunk, 0)
