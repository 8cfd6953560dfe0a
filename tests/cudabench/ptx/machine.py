"""Runs the threads of several blocks together: those at one place of the program execute as one NumPy operation."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudabench.errors import BenchError, KernelFault
from cudabench.ptx.instructions import execute
from cudabench.ptx.memory import Memory
from cudabench.ptx.parse import BYTES, DTYPES, Entry, Instruction
from cudabench.ptx.warps import Copy

WARP_OPERATIONS = {"shfl", "vote", "mma", "ldmatrix", "match", "redux", "activemask"}


class Machine:
    """The threads of some blocks of one launch; `run` runs them to their end."""

    def __init__(
        self, entry: Entry, memory: Memory, params: dict[str, bytes], constants: dict[str, int],
        grid: list[int], block: list[int], blocks: np.ndarray, dynamic: int,
    ) -> None:  # fmt: skip
        self.entry, self.memory, self.params = entry, memory, params
        threads = int(np.prod(block))
        self.threads, self.count = threads, threads * len(blocks)
        memory.new_blocks(len(blocks), threads, entry.shared_bytes + dynamic, entry.local_bytes)
        thread = np.tile(np.arange(threads, dtype=np.uint32), len(blocks))
        number = np.repeat(blocks.astype(np.int64), threads)
        self.special = {"%laneid": thread & 31, "%warpid": thread >> 5}
        for axis, (tid, bid) in zip("xyz", zip(_split(thread, block), _split(number, grid), strict=True), strict=True):
            self.special[f"%tid.{axis}"], self.special[f"%ctaid.{axis}"] = tid, bid
        for sizes, name in ((block, "%ntid"), (grid, "%nctaid")):
            for axis, size in zip("xyz", sizes, strict=True):
                self.special[f"{name}.{axis}"] = np.full(self.count, size, np.uint32)
        self.registers = {name: np.zeros(self.count, DTYPES[kind]) for name, kind in entry.registers.items()}
        self.variables = {**constants, **entry.shared, **entry.local}
        self._immediates: dict[tuple[str, str], np.generic] = {}
        self.lane = thread & 31
        self.async_groups = np.zeros(self.count, np.int64)  # groups of cp.async that each thread has closed
        self.async_copies: list[Copy] = []  # those that have not landed
        self.executed = 0

    # --- operands
    def get(self, name: str, kind: str, lanes: np.ndarray) -> np.ndarray:
        """Value of an operand for the lanes, as `kind`; an immediate as a scalar."""
        register = self.registers.get(name)
        dtype = DTYPES[kind]
        if register is None:
            if name in self.special:
                return self.special[name][lanes].astype(dtype)
            if (name, kind) not in self._immediates:
                self._immediates[name, kind] = self._immediate(name, kind)
            return np.broadcast_to(self._immediates[name, kind], len(lanes))
        value = register[lanes]
        if value.dtype == dtype:
            return value
        return value.view(dtype) if value.dtype.itemsize == dtype.itemsize else value.astype(dtype)

    def put(self, name: str, value: Any, lanes: np.ndarray) -> None:
        if name == "_":
            return
        register = self.registers[name]
        value = np.asarray(value)
        if value.dtype != register.dtype:
            same = value.dtype.itemsize == register.dtype.itemsize and register.dtype != bool
            value = value.view(register.dtype) if same else value.astype(register.dtype)
        register[lanes] = value

    def _immediate(self, name: str, kind: str) -> np.generic:
        dtype = DTYPES[kind]
        if name in self.variables:
            return dtype.type(self.variables[name])
        if name[:2] in ("0f", "0F"):
            return np.uint32(int(name[2:], 16)).view(np.float32).astype(dtype)
        if name[:2] in ("0d", "0D"):
            return np.uint64(int(name[2:], 16)).view(np.float64).astype(dtype)
        if kind == "pred":
            return np.bool_(int(name, 0))
        if dtype.kind == "f":
            return dtype.type(int(name, 0))
        return np.array(int(name.rstrip("U"), 0) % (1 << 8 * BYTES[kind]), f"u{BYTES[kind]}").view(dtype)[()]

    def address(self, operand: str, lanes: np.ndarray) -> np.ndarray:
        """Address in brackets: register or variable, and an offset."""
        base, _, offset = operand.strip("[] ").partition("+")
        value = self.get(base.strip(), "u64", lanes).astype(np.int64)
        return value + int(offset, 0) if offset else value

    # --- control
    def run(self) -> None:
        """BenchError for an instruction that is not interpreted, KernelFault for what the kernel does wrong."""
        end = len(self.entry.instructions)
        ready: dict[int, np.ndarray] = {0: np.arange(self.count)}
        waiting: dict[int, np.ndarray] = {}  # at a barrier
        meeting: dict[int, np.ndarray] = {}  # at a warp operation some lanes of which are still on their way
        while ready or waiting or meeting:
            if not ready:
                if meeting:
                    raise KernelFault(f"{self.entry.name}: {self._stuck(meeting)}: lanes of its mask never come")
                ready, waiting = self._release(waiting), {}
            pc = min(ready)
            lanes = ready.pop(pc)
            if pc == end:
                continue
            instruction = self.entry.instructions[pc]
            operation = instruction.ops[0]
            self.executed += 1
            if pc in meeting:
                lanes = np.union1d(lanes, meeting.pop(pc))
            act = lanes
            if instruction.guard is not None:
                name, negated = instruction.guard
                condition = self.registers[name][lanes] ^ negated
                if not condition.all():
                    _join(ready, pc + 1, lanes[~condition])
                    act = lanes[condition]
            if not len(act):
                continue
            if operation == "bra":
                _join(ready, self.entry.labels[str(instruction.args[0])], act)
            elif operation in ("ret", "exit"):
                pass
            elif operation in ("bar", "barrier") and instruction.ops[1] != "warp":
                self._check_barrier(instruction)
                _join(waiting, pc, act)
            else:
                if operation in WARP_OPERATIONS or operation == "bar":
                    here, apart = self._whole_warps(instruction, act)
                    if len(apart):
                        meeting[pc] = apart
                    act = here
                if len(act):
                    try:
                        execute(self, instruction, act)
                    except (KeyError, IndexError, StopIteration) as error:
                        raise BenchError(f"PTX instruction not interpreted: {instruction.text} ({error!r})") from error
                    _join(ready, pc + 1, act)

    def _whole_warps(self, instruction: Instruction, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(lanes whose whole mask is here, the others)."""
        if instruction.ops[0] == "activemask":
            return lanes, lanes[:0]
        if instruction.ops[0] in ("mma", "ldmatrix"):
            mask = np.full(len(lanes), 0xFFFFFFFF, np.uint32)
        else:
            mask = self.get(str(instruction.args[-1]), "u32", lanes)
        warp = lanes // self.threads * 64 + lanes % self.threads // 32
        bit = np.left_shift(np.uint32(1), self.lane[lanes])
        if not (mask & bit).all():
            raise KernelFault(f"{self.entry.name}: {instruction.text}: a lane is not in its own mask")
        _, group = np.unique(warp, return_inverse=True)
        present = np.zeros(group.max() + 1, np.uint32)
        np.bitwise_or.at(present, group, bit)
        whole = (present[group] & mask) == mask
        return lanes[whole], lanes[~whole]

    def _release(self, waiting: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """All waiting threads, past their barriers: nobody else can run, so they are all that their blocks have."""
        seen: dict[int, int] = {}
        for pc, lanes in waiting.items():
            for block in np.unique(lanes // self.threads):
                if seen.setdefault(int(block), pc) != pc:
                    raise KernelFault(f"{self.entry.name}: divergent barrier")
        for pc, lanes in waiting.items():
            if "red" in self.entry.instructions[pc].ops:
                self._vote(self.entry.instructions[pc], lanes)
        return {pc + 1: lanes for pc, lanes in waiting.items()}

    def _check_barrier(self, instruction: Instruction) -> None:
        numbers = instruction.args[1:2] if "red" in instruction.ops else instruction.args
        if numbers != ("0",):
            raise BenchError(f"{self.entry.name}: {instruction.text}: only barrier 0 of all threads is interpreted")

    def _vote(self, instruction: Instruction, lanes: np.ndarray) -> None:
        """bar.red: a predicate of all threads of a block counted, or combined."""
        name = str(instruction.args[-1])
        value = self.registers[name.lstrip("!")][lanes] ^ name.startswith("!")
        block = lanes // self.threads
        count = np.bincount(block, value)
        total = np.bincount(block)
        result = {"popc": count, "and": count == total, "or": count > 0}
        chosen = next(result[op] for op in instruction.ops if op in result)[block]
        self.put(str(instruction.args[0]), chosen.astype(np.uint32 if "popc" in instruction.ops else bool), lanes)

    def _stuck(self, places: dict[int, np.ndarray]) -> str:
        return "; ".join(self.entry.instructions[pc].text for pc in places)


def _join(groups: dict[int, np.ndarray], pc: int, lanes: np.ndarray) -> None:
    groups[pc] = np.union1d(groups[pc], lanes) if pc in groups else lanes


def _split(number: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    x, y = sizes[0], sizes[1]
    return [(part).astype(np.uint32) for part in (number % x, number // x % y, number // (x * y))]
