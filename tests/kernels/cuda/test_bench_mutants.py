"""Faults planted into the real kernels, by a change of their text, are caught too, each by the instrument named here.

A missing __syncwarp is not among them: the barriers of both attention kernels order all that their warps share.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_support import ORDERS, need_emulator, need_nvrtc
from cudabench import KernelFault
from emulated import emulated_operations
from interpreted import InterpretedBackend
from kernel_support import NumpyDevice, Paged, paged, queries_for
from test_conformance_attention import shared_front

from cupaged.cache import PagedKVCache
from cupaged.kernels.cuda import launch, sources

pytestmark = need_emulator
CONTEXTS = [200, 70]


@pytest.fixture
def mutate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`mutate(file, old, new)`: from here on the kernels are a copy with that text, which must occur, replaced."""
    folder = tmp_path / "cuda"
    shutil.copytree(sources.FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "FOLDER", folder)

    def change(file: str, old: str, new: str) -> None:
        text = (folder / file).read_text()
        assert text.count(old) >= 1, f"{file} no longer has {old!r}: plant this fault elsewhere"
        (folder / file).write_text(text.replace(old, new))

    return change


def decode(group: int, check: str | None = None, backend: Any = None, contexts: list[int] = CONTEXTS) -> float:
    """One decoding step over a cache of float16; the largest error."""
    ops = emulated_operations(**({} if backend is None else {"backend": backend}))
    problem = paged(ops, contexts, kv_heads=1, dim=64, dtype="float16")
    ops.backend.check = check
    queries = queries_for([1] * len(contexts), group, 64)
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.abs(problem.run(queries) - problem.expected(queries)), nan=np.inf).max())


def test_unchanged_kernels_pass() -> None:
    assert decode(1, "race") < 1e-5
    assert decode(4, "race") < 1e-4


BARRIER = "__syncthreads(); // everybody's copies of this stage are there, and the stage before is done with"


@pytest.mark.parametrize(("file", "group"), [("paged_attention.cu", 1), ("paged_attention_tensor.cu", 4)])
def test_a_missing_barrier(mutate: Any, file: str, group: int) -> None:
    mutate(file, BARRIER, "")
    with pytest.raises(KernelFault, match=r"uninitialised read|race: |has not been waited for"):
        decode(group, "race")


@pytest.mark.parametrize("group", [1, 4])
def test_a_missing_cp_async_wait(mutate: Any, group: int) -> None:
    mutate("common.cuh", 'asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");', "")
    with pytest.raises(KernelFault, match=r"cp.async of thread \d+ at .*common.cuh:\d+ has not been waited for"):
        decode(group, "race")
    assert not decode(group) < 1e-3  # and in the numbers, since copies land late


def test_a_misaligned_vector_load(mutate: Any) -> None:
    mutate("paged_attention.cu", "unsigned char *ring = shared;", "unsigned char *ring = shared + 8;")
    with pytest.raises(KernelFault, match="misaligned"):
        decode(1, "race")


@need_nvrtc
def test_swapped_operands_of_mma(mutate: Any) -> None:
    """Both instruments that execute the asm see it."""
    assert decode(4, backend=InterpretedBackend()) < 1e-4
    mutate("tensor.cuh", "{%4, %5, %6, %7}", "{%4, %6, %5, %7}")
    assert not decode(4) < 1e-2
    assert not decode(4, backend=InterpretedBackend()) < 1e-2


@need_nvrtc
@pytest.mark.parametrize(("file", "group"), [("paged_attention.cu", 1), ("paged_attention_tensor.cu", 4)])
def test_a_missing_barrier_shows_in_the_numbers_of_the_ptx(mutate: Any, file: str, group: int) -> None:
    """One warp ahead of the others computes with what they have not copied yet."""
    assert interpreted_in(group, ORDERS) < 1e-4
    mutate(file, BARRIER, "")
    assert not interpreted_in(group, ["reverse"]) < 1e-2


def interpreted_in(group: int, orders: list[str]) -> float:
    errors = []
    for order in orders:
        backend = InterpretedBackend()
        backend.order = order
        errors.append(decode(group, backend=backend))
    return max(errors)


def shared(group: int) -> float:
    """A decoding step of three sequences that share their first part, interpreted; the largest error."""
    ops = emulated_operations(backend=InterpretedBackend())
    problem = shared_front(ops, 512, [5, 17, 40], dtype="float16", kv_heads=1)
    queries = queries_for([1, 1, 1], group, 64)
    plan = ops.plan_attention(problem.view, problem.tables, [0, 1, 2, 3], problem.contexts, group)
    assert np.count_nonzero(plan.passes[0].work.items[:, 3] == 0) < 3, "sequences share an item of part 0"
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.abs(problem.run(queries) - problem.expected(queries)), nan=np.inf).max())


@need_nvrtc
@pytest.mark.parametrize(
    ("group", "file", "old", "new"),
    [
        # a state of the shared part is written for the first sequence alone: others merge what nobody wrote
        (2, "attention.cuh", "token = tokens[row / group], head =", "token = tokens[item.first_row / group], head ="),
        (4, "attention.cuh", "token = tokens[row / group], head =", "token = tokens[item.first_row / group], head ="),
        # the first sequence's query stands for all of the item
        (2, "paged_attention.cu", "query + tokens[row / group]", "query + tokens[item.first_row / group]"),
        (4, "paged_attention_tensor.cu", "query + tokens[row / group]", "query + tokens[item.first_row / group]"),
        # rows of a fragment swapped: of a decoding step alone rows g + 8 are empty, of a shared item they are not
        (4, "tensor.cuh", "{%4, %5, %6, %7}", "{%5, %4, %7, %6}"),
        # a part's state goes to the place of the next, or the merge takes it from there
        (2, "attention.cuh", "state_starts[token] + item.part", "state_starts[token] + item.part + 1"),
        (2, "merge_parts.cu", "first = state_starts[token]", "first = state_starts[token] + 1"),
    ],
)  # fmt: skip
def test_a_fault_in_the_shared_path_shows_in_the_numbers_of_the_ptx(
    mutate: Any, group: int, file: str, old: str, new: str
) -> None:
    assert shared(group) < 1e-4
    mutate(file, old, new)
    assert not shared(group) < 1e-2


@need_nvrtc
@pytest.mark.parametrize("group", [2, 4])
def test_a_merge_before_the_parts_are_written_shows(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """The launches of a call exchanged: the merge reads states that nobody has written, which are NaN."""
    held: list[Any] = []
    run = launch.Launcher.__call__

    def exchanged(self: Any, source: str, name: str, *rest: Any, **arguments: Any) -> None:
        if name.startswith("paged_attention"):
            held.append((source, name, rest, arguments))
            return
        run(self, source, name, *rest, **arguments)
        while held:
            source, name, rest, arguments = held.pop()
            run(self, source, name, *rest, **arguments)

    assert shared(group) < 1e-4
    monkeypatch.setattr(launch.Launcher, "__call__", exchanged)
    assert shared(group) == np.inf


def slots_of(problem: Paged, slots: list[int]) -> None:
    rows = np.ones((len(slots), 1, 64), np.float32)
    problem.ops.backend.check = "race"
    problem.ops.write_kv(rows, rows, problem.cache.view, 0, np.array(slots, np.int64))


def test_a_slot_beyond_the_cache() -> None:
    problem = paged(emulated_operations(), [20], kv_heads=1, dim=64, dtype="float16")
    beyond = len(problem.cache.view.pools[0]) // problem.cache.view.block_stride * 16
    slots_of(problem, [0, -1, beyond - 1])
    with pytest.raises(KernelFault, match=r"common.cuh:\d+: block \(1,0,0\) .* write of 2 bytes out of bounds"):
        slots_of(problem, [0, beyond])


def test_two_blocks_writing_one_slot() -> None:
    problem = paged(emulated_operations(), [20], kv_heads=1, dim=64, dtype="float16")
    with pytest.raises(KernelFault, match=r"race: write of global memory.* by thread .* of another block"):
        slots_of(problem, [5, 7, 5])


def read_block_131072(ops: Any) -> float:
    """K01: attention over block 131,072 of a pool whose elements from 2^31 on lie there; the error."""
    blocks, dim, kv_heads = 131073, 128, 8  # 16,384 elements of K and V of a block: 2^31 of all before the last
    pool = np.zeros(
        blocks * 2 * 16 * kv_heads * dim // 2, np.float16
    )  # K and V of 8 slots: 4 GiB, almost all untouched
    cache = PagedKVCache(2, 8, kv_heads, dim, 1, "float16", NumpyDevice(ops), "block_major", False)
    assert cache.view.block_stride * (blocks - 1) == 2**31
    view = type(cache.view)(
        (pool, None, None, None), *(getattr(cache.view, name) for name in type(cache.view).__slots__[1:])
    )
    rng = np.random.default_rng(3)
    keys, values = rng.standard_normal((2, 8, kv_heads, dim), np.float32)
    ops.write_kv(keys, values, view, 0, np.arange(8, dtype=np.int64) + (blocks - 1) * 8)
    tables = np.array([[blocks - 1]], np.int32)
    problem = Paged(ops, cache, 0, tables, [8], [keys.astype(np.float16).astype(float)],
                    [values.astype(np.float16).astype(float)], view=view)  # fmt: skip
    queries = queries_for([1], kv_heads, dim)
    return float(np.abs(problem.run(queries) - problem.expected(queries)).max())


def test_K01_a_block_from_element_2_to_the_31_on(mutate: Any) -> None:
    assert read_block_131072(emulated_operations()) < 1e-5


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("attention.cuh", "(long long)(reference & FRAME_MASK) * cache.block_stride",
         "(reference & FRAME_MASK) * (int)cache.block_stride"),
        ("write_kv.cu", "pool + frame * block_stride", "pool + (int)frame * (int)block_stride"),
    ],
)  # fmt: skip
def test_K01_an_offset_in_int32_is_caught_there(mutate: Any, file: str, old: str, new: str) -> None:
    mutate(file, old, new)
    ops = emulated_operations()
    ops.backend.check = "race"
    with pytest.raises(KernelFault, match=r"out of bounds \(offset -\d+ of array \d+, which has 42950"):
        read_block_131072(ops)
