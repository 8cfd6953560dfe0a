"""PTX text -> kernels as lists of instructions. Syntax: PTX ISA, "Syntax" and "State Spaces, Types, and Variables"."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from cudabench.errors import BenchError

BYTES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4,
         "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip
DTYPES = {name: np.dtype({"s": "i", "f": "f"}.get(name[0], "u") + str(size)) for name, size in BYTES.items()}
DTYPES |= {"pred": np.dtype(bool), "bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4")}


@dataclass(frozen=True, slots=True)
class Instruction:
    """`ops`: the mnemonic split at dots. `args`: operands, lists in braces as tuples. `guard`: (predicate, negated)."""

    ops: tuple[str, ...]
    args: tuple[str | tuple[str, ...], ...]
    guard: tuple[str, bool] | None
    text: str


@dataclass(slots=True)
class Entry:
    """A kernel. Offsets of its variables are from the start of the block's shared memory or the thread's local one."""

    name: str
    params: list[tuple[str, str, int]]  # name, type, bytes
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Module:
    """A PTX module: its kernels, and its constant arrays by name."""

    entries: dict[str, Entry]
    constants: dict[str, np.ndarray]


_VARIABLE = re.compile(r"\.(shared|local)\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?$")


def parse(text: str) -> Module:
    """BenchError for functions that are called, and for anything else that is not understood."""
    text = re.sub(r"//[^\n]*", "", text)
    if re.search(r"^\s*(?:\.\w+\s+)*\.func\b", text, re.M):
        raise BenchError("PTX with functions that are not inlined is not interpreted")
    entries = {}
    outside, last = [], 0
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", text):
        start = text.index("{", match.end())
        depth, end = 1, start + 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        outside.append(text[last : match.start()])
        last = end
        entries[match[1]] = _entry(match[1], match[2], text[start + 1 : end - 1])
    rest = "".join([*outside, text[last:]])
    for align, kind, name, count in re.findall(
        r"^\s*\.shared\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)\[(\d+)\];", rest, re.M
    ):
        for entry in entries.values():  # variables that several kernels use
            entry.shared_bytes = -(-entry.shared_bytes // int(align)) * int(align)
            entry.shared[name] = entry.shared_bytes
            entry.shared_bytes += int(count) * BYTES[kind]
    dynamic = re.findall(r"\.extern\s+\.shared\s+\.align\s+\d+\s+\.\w+\s+([\w$]+)\[\]", rest)
    for entry in entries.values():
        entry.shared_bytes = -(-entry.shared_bytes // 128) * 128
        entry.shared.update(dict.fromkeys(dynamic, entry.shared_bytes))
    return Module(entries, _constants(rest))


def _constants(text: str) -> dict[str, np.ndarray]:
    found = {}
    pattern = (
        r"\.(?:global|const)\s+\.align\s+\d+\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*(?:=\s*(?:\{([^}]*)\}|([^;]+)))?;"
    )
    for kind, name, count, values, single in re.findall(pattern, text):
        numbers = [_number(part.strip(), kind) for part in (values or single).split(",") if part.strip()]
        size = max(int(count or 1), len(numbers))
        array = np.zeros(size, DTYPES[kind])
        array[: len(numbers)] = np.array(numbers, DTYPES[kind])
        found[name] = array
    return found


def _number(text: str, kind: str) -> float | int:
    if text[:2] in ("0f", "0F", "0d", "0D"):
        width = "4" if text[1] in "fF" else "8"
        return float(np.array(int(text[2:], 16), f"u{width}").view(f"f{width}"))
    return int(text, 0) % (1 << 8 * BYTES[kind]) if kind[0] in "bu" else int(text, 0)


def _entry(name: str, params: str, body: str) -> Entry:
    entry = Entry(name, [])
    for declaration in (part.strip() for part in params.split(",") if part.strip()):
        match = re.match(
            r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr[\w.\s]*?\s)?([\w$]+)(?:\[(\d+)\])?$", declaration
        )
        if match is None:
            raise BenchError(f"{name}: parameter not understood: {declaration}")
        entry.params.append((match[2], match[1], BYTES[match[1]] * int(match[3] or 1)))
    # Braces of operand lists become <>; those of scopes go. Names of different scopes must not differ in type.
    body = re.sub(r"\{([^{};]*)\}", lambda found: "<" + found[1] + ">", body)
    for statement in body.replace("{", " ").replace("}", " ").split(";"):
        _statement(entry, " ".join(statement.split()))
    return entry


def _statement(entry: Entry, text: str) -> None:
    while (label := re.match(r"([\w$]+):\s*", text)) is not None:
        entry.labels[label[1]] = len(entry.instructions)
        text = text[label.end() :]
    if not text:
        return
    if text.startswith(".reg"):
        _, kind, names = text.split(" ", 2)
        for declared in names.split(","):
            many = re.match(r"(.*)<(\d+)>$", declared.strip())
            for name in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [declared.strip()]:
                if entry.registers.setdefault(name, kind[1:]) != kind[1:]:
                    raise BenchError(f"{entry.name}: register {name} is declared twice, with different types")
        return
    variable = _VARIABLE.match(text)
    if variable is not None:
        space, align, kind, name, count = variable.groups()
        table, size = (entry.shared, "shared_bytes") if space == "shared" else (entry.local, "local_bytes")
        start = -(-getattr(entry, size) // int(align)) * int(align)
        table[name] = start
        setattr(entry, size, start + int(count or 1) * BYTES[kind])
        return
    if text.startswith("."):
        if not text.startswith((".pragma", ".loc")):
            raise BenchError(f"{entry.name}: directive not understood: {text}")
        return
    guard = None
    if text[0] == "@":
        condition, text = text.split(" ", 1)
        guard = (condition.lstrip("@!"), condition[1] == "!")
    mnemonic, _, rest = text.partition(" ")
    args = tuple(
        tuple(part.strip() for part in token[1:-1].split(",")) if token[0] == "<" else token.strip()
        for token in re.findall(r"<[^>]*>|\[[^\]]*\]|[^,\s][^,]*", rest)
    )
    entry.instructions.append(Instruction(tuple(mnemonic.split(".")), args, guard, text))
