"""Instructions in which the lanes of a warp take part together, and cp.async."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cudabench.errors import BenchError, KernelFault

if TYPE_CHECKING:
    from cudabench.ptx.instructions import Step


def _grid(step: Step, value: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(value as [warps, 32], row, column) of the lanes; lanes that take no part hold 0."""
    row, column = step.machine.warp[step.lanes], step.machine.lane[step.lanes]
    table = np.zeros((step.machine.warps, 32), value.dtype)
    table[row, column] = value
    return table, row, column


def shuffle(step: Step) -> None:
    target, _, predicate = str(step.args[0]).partition("|")
    table, row, lane = _grid(step, step.get(1, "b32"))
    operand = step.get(2, "u32").astype(np.int64)
    control = step.get(3, "u32").astype(np.int64)
    segment, clamp = control >> 8 & 31, control & 31
    most = (lane & segment) | (clamp & ~segment)
    mode = next(op for op in step.ops if op in ("up", "down", "bfly", "idx"))
    source = {
        "up": lane - operand,
        "down": lane + operand,
        "bfly": lane ^ operand,
        "idx": (lane & segment) | (operand & ~segment & 31),
    }[mode]
    inside = source >= most if mode == "up" else source <= most
    source = np.where(inside, source, lane)
    if not (step.machine.present(step.lanes)[row] >> source.astype(np.uint32) & 1).all():
        raise KernelFault(f"{step.text}: reads a lane that is not in the mask")
    step.machine.put(target, table[row, source], step.lanes)
    if predicate:
        step.machine.put(predicate, inside, step.lanes)


def vote(step: Step) -> None:
    name, negated = str(step.args[1]).lstrip("!"), str(step.args[1]).startswith("!")
    value = step.machine.get(name, "pred", step.lanes) ^ negated
    table, row, _ = _grid(step, value)
    present, _, _ = _grid(step, np.ones(len(value), bool))
    mode = next(op for op in step.ops if op in ("ballot", "any", "all", "uni"))
    if mode == "ballot":
        bits = (table.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
        step.put(bits[row])
    elif mode == "any":
        step.put(table.any(1)[row])
    else:
        every = (table | ~present).all(1)
        step.put((every if mode == "all" else every | ~table.any(1))[row])


def reduce(step: Step) -> None:
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                 "xor": np.bitwise_xor}  # fmt: skip
    function = next(functions[op] for op in step.ops if op in functions)
    value, row = step.get(1), step.machine.warp[step.lanes]
    out = np.empty(step.machine.warps, value.dtype)
    for warp in np.unique(row):
        out[warp] = function.reduce(value[row == warp])
    step.put(out[row])


def match(step: Step) -> None:
    value = step.get(1)
    row, lane = step.machine.warp[step.lanes], step.machine.lane[step.lanes]
    same = (row[:, None] == row) & (value[:, None] == value)
    step.put(np.where(same, 1 << lane, 0).sum(1).astype(np.uint32))


def active(step: Step) -> None:
    step.put(step.machine.present(step.lanes)[step.machine.warp[step.lanes]])


def ldmatrix(step: Step) -> None:
    """Lane 8m + r gives the address of row r of matrix m; lane l gets elements 2 (l % 4) and the next of row l / 4."""
    address, lanes = step.machine.address(str(step.args[1]), step.lanes).reshape(-1, 32), step.lanes.reshape(-1, 32)
    for number, name in enumerate(step.list(0)):
        rows = slice(8 * number, 8 * number + 8)
        raw = step.machine.memory.load("shared", address[:, rows].ravel(), 16, lanes[:, rows].ravel(), step.text)
        matrices = raw.view(np.uint16).reshape(-1, 8, 8)
        matrices = np.ascontiguousarray(matrices.swapaxes(1, 2)) if "trans" in step.ops else matrices
        step.machine.put(name, matrices.reshape(-1, 2).view(np.uint32)[:, 0], step.lanes)


def mma(step: Step) -> None:
    """m16n8k16 and m16n8k8 with float32 sums. Fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16"."""
    shape, types = step.ops[3], step.ops[6:]
    if shape not in ("m16n8k16", "m16n8k8") or types[0] != "f32" or step.ops[4:6] != ("row", "col"):
        raise BenchError(f"PTX instruction not interpreted: {step.text}")
    depth = int(shape[6:])
    group, pair = np.arange(32) >> 2, (np.arange(32) & 3) * 2
    two, warps = np.arange(2), len(step.lanes) // 32

    def halves(name: str) -> np.ndarray:
        bits = np.ascontiguousarray(step.machine.get(name, "b32", step.lanes))[:, None].view(np.uint16)
        wide = (bits.astype(np.uint32) << 16).view(np.float32) if types[1] == "bf16" else bits.view(np.float16)
        return wide.astype(np.float64).reshape(warps, 32, 2)

    a, b, c = np.zeros((warps, 16, depth)), np.zeros((warps, depth, 8)), np.zeros((warps, 16, 8))
    for i, name in enumerate(step.list(1)):
        a[:, (group + 8 * (i & 1))[:, None], (pair + 8 * (i >> 1))[:, None] + two] = halves(name)
    for i, name in enumerate(step.list(2)):
        b[:, (pair + 8 * i)[:, None] + two, group[:, None]] = halves(name)
    for i, name in enumerate(step.list(3)):
        c[:, group + 8 * (i >> 1), pair + (i & 1)] = step.machine.get(name, "f32", step.lanes).reshape(warps, 32)
    d = (a @ b + c).astype(np.float32)
    for i, name in enumerate(step.list(0)):
        step.machine.put(name, d[:, group + 8 * (i >> 1), pair + (i & 1)].ravel(), step.lanes)


@dataclass(frozen=True, slots=True)
class Copy:
    """A cp.async under way: of each thread its address in shared memory, its bytes, and the number of its group."""

    lanes: np.ndarray
    group: np.ndarray
    address: np.ndarray
    data: np.ndarray

    def part(self, which: np.ndarray) -> Copy:
        return Copy(self.lanes[which], self.group[which], self.address[which], self.data[which])


def async_copy(step: Step) -> None:
    """cp.async: the data land at the wait, as late as they may, or at once: as the order says."""
    machine, lanes = step.machine, step.lanes
    if "commit_group" in step.ops:
        machine.async_groups[lanes] += 1
    elif "wait_all" in step.ops:
        machine.async_groups[lanes] += 1
        _land(step, 0)
    elif "wait_group" in step.ops:
        _land(step, int(str(step.args[0])))
    else:
        size = int(str(step.args[2]))
        to = machine.address(str(step.args[0]), lanes)
        source = machine.address(str(step.args[1]), lanes)
        count = step.get(3, "u32") if len(step.args) > 3 else np.full(len(lanes), size)
        data = np.zeros((len(lanes), size), np.uint8)
        whole = count == size
        if whole.any():
            data[whole] = machine.memory.load("global", source[whole], size, lanes[whole], step.text)
        for i in np.nonzero(~whole & (count > 0))[0]:
            for k in range(int(count[i])):
                data[i, k] = machine.memory.load("global", source[i : i + 1] + k, 1, lanes[i : i + 1], step.text)[0, 0]
        machine.memory.load("shared", to, size, lanes, step.text)  # its bounds and alignment
        copy, now = Copy(lanes, machine.async_groups[lanes], to, data), machine.schedule.lands_at_once(len(lanes))
        if now.any():
            machine.memory.store("shared", to[now], data[now], lanes[now], step.text)
            copy = copy.part(~now)
        machine.async_copies.append(copy)


def _land(step: Step, allowed: int) -> None:
    """The copies of the waiting threads' groups but the last `allowed` arrive, in the order they were issued."""
    machine = step.machine
    before = np.zeros(machine.count, np.int64)  # of each thread, the first group that may stay under way
    before[step.lanes] = machine.async_groups[step.lanes] - allowed
    under_way = []
    for copy in machine.async_copies:
        lands = copy.group < before[copy.lanes]
        if lands.any():
            now = copy.part(lands)
            machine.memory.store("shared", now.address, now.data, now.lanes, step.text)
            copy = copy.part(~lands)
        if len(copy.lanes):
            under_way.append(copy)
    machine.async_copies = under_way
