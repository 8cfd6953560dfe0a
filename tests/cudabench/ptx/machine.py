"""Runs the threads of several blocks together: those at one place of the program execute as one NumPy operation."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudabench.errors import BenchError, KernelFault
from cudabench.ptx.instructions import execute
from cudabench.ptx.memory import Memory
from cudabench.ptx.parse import BYTES, DTYPES, Entry, Instruction
from cudabench.ptx.schedule import Schedule, Team
from cudabench.ptx.warps import Copy

WARP_OPERATIONS = {"shfl", "vote", "mma", "ldmatrix", "match", "redux", "activemask"}


class Machine:
    """The threads of some blocks of one launch; `run` runs them to their end."""

    def __init__(
        self, entry: Entry, memory: Memory, params: dict[str, bytes], constants: dict[str, int],
        grid: list[int], block: list[int], blocks: np.ndarray, dynamic: int, schedule: Schedule,
    ) -> None:  # fmt: skip
        self.entry, self.memory, self.params, self.schedule = entry, memory, params, schedule
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
        self.lane = (thread & 31).astype(np.int64)
        self.block_of = np.repeat(np.arange(len(blocks)), threads)
        in_block = -(-threads // 32)
        self.warp = self.block_of * in_block + thread // 32  # of each thread, counted through all blocks
        self.warps = len(blocks) * in_block
        self.everyone = np.arange(self.count)
        self.team_of, self.num_teams = schedule.team_of(thread // 32, self.block_of)
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
        value = register if lanes is self.everyone else register[lanes]  # nobody changes what `get` gives
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
        register[slice(None) if lanes is self.everyone else lanes] = value

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
        teams = [Team() for _ in range(self.num_teams)]
        self._deal(teams, 0, self.everyone)
        waiting: dict[int, np.ndarray] = {}  # at a barrier
        while True:
            turn = self.schedule.turn(teams)
            if turn is not None:
                team, steps = turn
                while team.ready and steps:
                    self._step(team, waiting)
                    steps -= 1
                continue
            if stuck := [pc for team in teams for pc in team.meeting]:
                where = "; ".join(self.entry.instructions[pc].text for pc in stuck)
                raise KernelFault(f"{self.entry.name}: {where}: lanes of its mask never come")
            if not waiting:
                return
            for pc, lanes in self._release(waiting).items():
                self._deal(teams, pc, lanes)
            waiting.clear()

    def _deal(self, teams: list[Team], pc: int, lanes: np.ndarray) -> None:
        """Threads at one instruction, to their teams."""
        for number, team in enumerate(teams):
            mine = lanes if len(teams) == 1 else lanes[self.team_of[lanes] == number]
            if len(mine):
                self._join(team.ready, pc, mine)

    def _step(self, team: Team, waiting: dict[int, np.ndarray]) -> None:
        """The team's threads that are furthest behind execute one instruction."""
        pc = min(team.ready)
        lanes = team.ready.pop(pc)
        if pc == len(self.entry.instructions):
            return
        instruction = self.entry.instructions[pc]
        operation = instruction.ops[0]
        self.executed += 1
        if pc in team.meeting:
            lanes = self._union(lanes, team.meeting.pop(pc))
        act = lanes
        if instruction.guard is not None:
            name, negated = instruction.guard
            condition = self.registers[name][lanes] ^ negated
            if not condition.all():
                self._join(team.ready, pc + 1, lanes[~condition])
                act = lanes[condition]
        if not len(act) or operation in ("ret", "exit"):
            return
        if operation == "bra":
            self._join(team.ready, self.entry.labels[str(instruction.args[0])], act)
        elif operation in ("bar", "barrier") and instruction.ops[1] != "warp":
            self._check_barrier(instruction)
            self._join(waiting, pc, act)
        else:
            if operation in WARP_OPERATIONS or operation == "bar":
                act, apart = self._whole_warps(instruction, act)
                if len(apart):
                    team.meeting[pc] = apart
            if len(act):
                try:
                    execute(self, instruction, act)
                except (KeyError, IndexError, StopIteration) as error:
                    raise BenchError(f"PTX instruction not interpreted: {instruction.text} ({error!r})") from error
                self._join(team.ready, pc + 1, act)

    def _union(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Threads of either, in order."""
        if len(a) + len(b) == self.count:
            return self.everyone  # no thread is at two places
        chosen = np.zeros(self.count, bool)
        chosen[a] = chosen[b] = True
        return np.flatnonzero(chosen)

    def _join(self, places: dict[int, np.ndarray], pc: int, lanes: np.ndarray) -> None:
        places[pc] = self._union(places[pc], lanes) if pc in places else lanes

    def present(self, lanes: np.ndarray) -> np.ndarray:
        """Which lanes of each warp are among the threads: bits of uint32 [warps]."""
        here = np.zeros((self.warps, 32), bool)
        here[self.warp[lanes], self.lane[lanes]] = True
        return np.packbits(here, axis=1, bitorder="little").view("<u4")[:, 0]

    def _whole_warps(self, instruction: Instruction, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(lanes whose whole mask is here, the others)."""
        if instruction.ops[0] == "activemask":
            return lanes, lanes[:0]
        if instruction.ops[0] in ("mma", "ldmatrix"):
            mask = np.full(len(lanes), 0xFFFFFFFF, np.uint32)
        else:
            mask = self.get(str(instruction.args[-1]), "u32", lanes)
        if lanes is self.everyone and not self.threads % 32 and (mask == 0xFFFFFFFF).all():
            return lanes, lanes[:0]
        if not (mask >> self.lane[lanes].astype(np.uint32) & 1).all():
            raise KernelFault(f"{self.entry.name}: {instruction.text}: a lane is not in its own mask")
        whole = (self.present(lanes)[self.warp[lanes]] & mask) == mask
        return (lanes, lanes[:0]) if whole.all() else (lanes[whole], lanes[~whole])

    def _release(self, waiting: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """All waiting threads, past their barriers: nobody else can run, so they are all that their blocks have."""
        seen: dict[int, int] = {}
        for pc, lanes in waiting.items():
            for block in np.unique(self.block_of[lanes]):
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
        block = self.block_of[lanes]
        count = np.bincount(block, value)
        total = np.bincount(block)
        result = {"popc": count, "and": count == total, "or": count > 0}
        chosen = next(result[op] for op in instruction.ops if op in result)[block]
        self.put(str(instruction.args[0]), chosen.astype(np.uint32 if "popc" in instruction.ops else bool), lanes)


def _split(number: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    x, y = sizes[0], sizes[1]
    return [(part).astype(np.uint32) for part in (number % x, number // x % y, number // (x * y))]
