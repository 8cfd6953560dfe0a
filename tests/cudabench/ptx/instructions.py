"""What each PTX instruction does, on the lanes that execute it. PTX ISA, "Instruction Set".

float32 fma rounds once. Approximate functions (ex2, lg2, rcp, ...) are computed in float64 and rounded: what a GPU
makes of them is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabench.ptx import warps
from cudabench.ptx.memory import LOCAL, SHARED
from cudabench.ptx.parse import BYTES, DTYPES, Instruction

if TYPE_CHECKING:
    from cudabench.ptx.machine import Machine

_SPACES = ("shared", "global", "param", "local", "const")


class Step:
    """One instruction being executed: short names for the operands."""

    def __init__(self, machine: Machine, instruction: Instruction, lanes: np.ndarray) -> None:
        self.machine, self.ops, self.args, self.lanes = machine, instruction.ops, instruction.args, lanes
        self._instruction = instruction
        self.kind = instruction.ops[-1]

    @property
    def text(self) -> str:
        """The instruction, for messages."""
        return f"{self.machine.entry.name}: {self._instruction.text}"

    def get(self, number: int, kind: str | None = None) -> np.ndarray:
        return self.machine.get(str(self.args[number]), kind or self.kind, self.lanes)

    def put(self, value: Any, number: int = 0) -> None:
        self.machine.put(str(self.args[number]), value, self.lanes)

    def list(self, number: int) -> tuple[str, ...]:
        operand = self.args[number]
        return operand if isinstance(operand, tuple) else (operand,)

    def has(self, *names: str) -> bool:
        return any(name in self.ops for name in names)


def execute(machine: Machine, instruction: Instruction, lanes: np.ndarray) -> None:
    """KeyError for an instruction that is not known."""
    HANDLERS[instruction.ops[0]](Step(machine, instruction, lanes))


# --- data movement
def _space(step: Step) -> str:
    return next((op.partition("::")[0] for op in step.ops if op.partition("::")[0] in _SPACES), "generic")


def load(step: Step) -> None:
    names, size, space = step.list(0), BYTES[step.kind], _space(step)
    if space == "param":
        name, _, offset = str(step.args[1]).strip("[]").partition("+")
        start = int(offset or 0)
        raw = np.frombuffer(step.machine.params[name], np.uint8)[start : start + size * len(names)]
        values = np.broadcast_to(raw, (len(step.lanes), len(raw)))
    else:
        address = step.machine.address(str(step.args[1]), step.lanes)
        where = "global" if space == "const" else space
        values = step.machine.memory.load(where, address, size * len(names), step.lanes, step.text)
    for i, name in enumerate(names):
        value = np.ascontiguousarray(values[:, i * size : (i + 1) * size]).view(DTYPES[step.kind])[:, 0]
        step.machine.put(name, value, step.lanes)


def store(step: Step) -> None:
    parts = []
    for name in step.list(1):
        # an 8-bit store takes the low byte of a wider register
        value = step.machine.get(name, step.kind if BYTES[step.kind] > 1 else "u16", step.lanes)
        value = np.ascontiguousarray(value.astype(DTYPES[step.kind]))
        parts.append(value[:, None].view(np.uint8))
    address = step.machine.address(str(step.args[0]), step.lanes)
    step.machine.memory.store(_space(step), address, np.concatenate(parts, 1), step.lanes, step.text)


def move(step: Step) -> None:
    target, source = step.args
    if isinstance(target, tuple):  # unpacked
        part = f"b{8 * BYTES[step.kind] // len(target)}"
        values = np.ascontiguousarray(step.get(1))[:, None].view(DTYPES[part])
        for i, name in enumerate(target):
            step.machine.put(name, values[:, i], step.lanes)
    elif isinstance(source, tuple):  # packed
        part = f"b{8 * BYTES[step.kind] // len(source)}"
        parts = [step.machine.get(name, part, step.lanes)[:, None] for name in source]
        step.put(np.ascontiguousarray(np.concatenate(parts, 1)).view(DTYPES[step.kind])[:, 0])
    else:
        step.put(step.get(1))


def to_address(step: Step) -> None:
    base = {"shared": SHARED, "local": LOCAL}.get(_space(step), 0)
    step.put(step.get(1) - np.uint64(base) if step.has("to") else step.get(1) + np.uint64(base))


def atomic(step: Step) -> None:
    machine, space = step.machine, _space(step)
    has_result = step.ops[0] == "atom"
    operands = step.args[1:] if has_result else step.args
    address = machine.address(str(operands[0]), step.lanes)
    operation = next(op for op in step.ops if op in _ATOMIC or op == "cas")
    values = [machine.get(str(operand), step.kind, step.lanes) for operand in operands[1:]]
    old = np.empty(len(step.lanes), DTYPES[step.kind])
    for i in range(len(step.lanes)):  # one after another, in the order of threads
        lane = step.lanes[i : i + 1]
        before = machine.memory.load(space, address[i : i + 1], BYTES[step.kind], lane, step.text)
        old[i] = before.view(DTYPES[step.kind])[0, 0]
        if operation == "cas":
            new = values[1][i] if old[i] == values[0][i] else old[i]
        else:
            new = _ATOMIC[operation](old[i], values[0][i])
        machine.memory.store(
            space, address[i : i + 1], np.array([[new]], DTYPES[step.kind]).view(np.uint8), lane, step.text
        )
    if has_result:
        step.put(old)


_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda _, new: new,
}  # fmt: skip


# --- conversion
def bfloat16_of(value: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded)


def widened(value: np.ndarray, kind: str) -> np.ndarray:
    return (value.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else value


_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def convert(step: Step) -> None:
    kinds = [op for op in step.ops if op in BYTES]
    to, source = kinds[0], kinds[-1]
    if to in ("f16x2", "bf16x2"):  # the first operand becomes the upper half
        halves = []
        for number in (2, 1):
            value = step.get(number, "f32")
            halves.append(bfloat16_of(value) if to == "bf16x2" else value.astype(np.float16).view(np.uint16))
        step.put(halves[0].astype(np.uint32) | (halves[1].astype(np.uint32) << 16))
        return
    value = widened(step.get(1, source), source)
    rounding = next((op for op in step.ops if op in _ROUNDING), None)
    if step.has("relu"):
        value = np.maximum(value, 0)
    if to == "bf16":
        step.put(bfloat16_of(value))
    elif to[0] in "fb" or (to[0] == source[0]):
        value = _ROUNDING[rounding](value) if rounding else value
        if step.has("sat") and to[0] == "f":
            value = np.clip(np.nan_to_num(value, nan=0.0), 0, 1)
        elif step.has("sat"):
            value = np.clip(value, np.iinfo(DTYPES[to]).min, np.iinfo(DTYPES[to]).max)
        step.put(value.astype(DTYPES[to]))
    elif value.dtype.kind == "f":  # to an integer: NaN is 0, beyond the range its end
        info = np.iinfo(DTYPES[to])
        value = _ROUNDING[rounding or "rzi"](value.astype(np.float64))
        with np.errstate(invalid="ignore"):
            inside = value.astype(DTYPES[to])
        inside = np.where(value >= float(info.max), info.max, np.where(value <= float(info.min), info.min, inside))
        step.put(np.where(np.isnan(value), 0, inside).astype(DTYPES[to]))
    else:
        step.put(value.astype(DTYPES[to]))


# --- arithmetic
def in_kind(step: Step, function: Callable[..., np.ndarray], *numbers: int) -> None:
    """Apply a function to operands of the instruction's type; 16-bit floats are computed in float32 and rounded."""
    kind = step.kind
    if kind in ("f16", "f16x2", "bf16", "bf16x2"):
        half = "bf16" if kind.startswith("bf16") else "f16"
        values = [np.ascontiguousarray(step.get(n)).view(DTYPES[half]) for n in numbers]
        out = function(*(widened(v, half).astype(np.float32) for v in values))
        narrow = bfloat16_of(out) if half == "bf16" else out.astype(np.float16)
        step.put(np.ascontiguousarray(narrow).view(DTYPES[kind]))
    else:
        out = function(*(step.get(n) for n in numbers))
        step.put(np.clip(np.nan_to_num(out, nan=0.0), 0, 1) if step.has("sat") and kind[0] == "f" else out)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float32, rounded once: the product is exact in float64, and its sum with c is rounded to odd there,
    which makes the second rounding harmless (Boldo & Melquiond 2008)."""
    if a.dtype != np.float32:
        return _fused64(a, b, c) if a.dtype == np.float64 else a * b + c
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    # Rounding twice is wrong only where the first result lies in the middle of two float32s, or near none of them.
    middle = (total.view(np.uint64) & np.uint64(0x1FFFFFFF)) == 0x10000000
    if not (middle | ((np.abs(total) < 2.0**-126) & (total != 0))).any():
        return total.astype(np.float32)
    part = total - product
    error = (product - (total - part)) + (addend - part)  # exact (Knuth's two-sum)
    odd = np.ascontiguousarray(total).view(np.uint64) & np.uint64(1)
    inexact = np.isfinite(total) & (error != 0) & (odd == 0)
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact, np.nextafter(total, toward), total).astype(np.float32)


def _fused64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.longdouble) * b + c).astype(np.float64)  # 64 bits of mantissa: rounds twice in rare cases


def multiply(step: Step) -> None:
    kind, size = step.kind, BYTES[step.kind]
    if step.has("wide"):
        wide = f"{kind[0]}{16 * size}"
        value = step.get(1).astype(DTYPES[wide]) * step.get(2).astype(DTYPES[wide])
        step.put(value + step.get(3, wide) if step.ops[0] == "mad" else value)
    elif step.has("hi"):
        exact = step.get(1).astype(object) * step.get(2).astype(object)
        value = np.array([int(v) >> (8 * size) for v in exact], dtype=object)
        value = np.array([int(v) % (1 << 8 * size) for v in value], f"u{size}").view(DTYPES[kind])
        step.put(value + step.get(3) if step.ops[0] == "mad" else value)
    elif step.ops[0] == "mad":
        in_kind(step, lambda a, b, c: a * b + c, 1, 2, 3)
    else:
        in_kind(step, np.multiply, 1, 2)


def divide(step: Step) -> None:
    a, b = step.get(1), step.get(2)
    if step.kind[0] == "f":
        step.put(a / b if step.ops[0] == "div" else np.fmod(a, b))
        return
    safe = np.where(b == 0, 1, b).astype(a.dtype)  # the result of a division by 0 is any number
    quotient = np.abs(a.astype(object)) // np.abs(safe.astype(object)) if a.dtype.kind == "i" else a // safe
    if a.dtype.kind == "i":
        quotient = np.where((a < 0) != (safe < 0), -quotient, quotient).astype(a.dtype)  # towards zero
    step.put(quotient if step.ops[0] == "div" else a - quotient * safe)


_IN_64: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda v: 1 / v, "sqrt": np.sqrt, "rsqrt": lambda v: 1 / np.sqrt(v),
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip


def approximate(step: Step) -> None:
    value = step.get(1)
    step.put(_IN_64[step.ops[0]](value.astype(np.float64)).astype(value.dtype))


def minimum_maximum(step: Step) -> None:
    propagate = step.has("NaN")
    functions = {"min": np.minimum if propagate else np.fmin, "max": np.maximum if propagate else np.fmax}
    in_kind(step, functions[step.ops[0]], 1, 2)


# --- bits
def shift(step: Step) -> None:
    value, bits = step.get(1), 8 * BYTES[step.kind]
    amount = step.get(2, "u32")
    signed = step.ops[0] == "shr" and step.kind[0] == "s"
    clamped = np.minimum(amount, bits - 1).astype(value.dtype)
    moved = value << clamped if step.ops[0] == "shl" else value >> clamped
    beyond = value >> value.dtype.type(bits - 1) if signed else np.zeros_like(value)
    step.put(np.where(amount >= bits, beyond, moved).astype(value.dtype))


def funnel_shift(step: Step) -> None:
    low, high = step.get(1, "u32").astype(np.uint64), step.get(2, "u32").astype(np.uint64)
    amount = step.get(3, "u32").astype(np.uint64)
    amount = np.minimum(amount, 32) if step.has("clamp") else amount & np.uint64(31)
    both = (high << np.uint64(32)) | low
    moved = both >> amount if step.has("r") else (both << amount) >> np.uint64(32)
    step.put((moved & np.uint64(0xFFFFFFFF)).astype(np.uint32))


def bit_field_extract(step: Step) -> None:
    bits = 8 * BYTES[step.kind]
    start, length = step.get(2, "u32") & 255, step.get(3, "u32") & 255
    value = np.ascontiguousarray(step.get(1)).view(f"u{BYTES[step.kind]}").astype(np.uint64)
    length = np.minimum(length, bits).astype(np.uint64)
    start = start.astype(np.uint64)
    shifted = np.where(start >= 64, 0, value >> np.minimum(start, 63))
    mask = np.where(length >= 64, ~np.uint64(0), (np.uint64(1) << np.minimum(length, 63)) - np.uint64(1))
    out = shifted & mask
    if step.kind[0] == "s":  # the sign is the field's top bit, or the value's where the field leaves it
        top = np.minimum(start + np.maximum(length, 1) - 1, bits - 1)
        sign = ((value >> top) & 1).astype(bool) & (length > 0)
        out = np.where(sign, out | ~mask, out)
    step.put(out.astype(f"u{BYTES[step.kind]}"))


def bit_field_insert(step: Step) -> None:
    field, into = step.get(1).astype(np.uint64), step.get(2).astype(np.uint64)
    start = np.minimum(step.get(3, "u32") & 255, 63).astype(np.uint64)
    length = np.minimum(step.get(4, "u32") & 255, 63).astype(np.uint64)
    mask = ((np.uint64(1) << length) - np.uint64(1)) << start
    step.put(((into & ~mask) | ((field << start) & mask)).astype(DTYPES[step.kind]))


def logic3(step: Step) -> None:
    a, b, c, table = step.get(1), step.get(2), step.get(3), int(str(step.args[4]), 0)
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    step.put(out)


def permute_bytes(step: Step) -> None:
    pool = np.stack([step.get(1, "u32"), step.get(2, "u32")], 1).view(np.uint8).reshape(-1, 8)
    selector = step.get(3, "u32")
    out = np.zeros((len(step.lanes), 4), np.uint8)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & 15
        byte = pool[np.arange(len(pool)), nibble & 7]
        out[:, i] = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
    step.put(out.view(np.uint32)[:, 0])


def count_bits(step: Step) -> None:
    bits = 8 * BYTES[step.kind]
    value = np.ascontiguousarray(step.get(1)).view(f"u{bits // 8}")
    planes = np.unpackbits(value[:, None].view(np.uint8)[:, ::-1], axis=1)  # highest bit first
    if step.ops[0] == "popc":
        step.put(planes.sum(1).astype(np.uint32))
    elif step.ops[0] == "brev":
        step.put(np.packbits(planes[:, ::-1], axis=1)[:, ::-1].copy().view(value.dtype)[:, 0])
    elif step.ops[0] == "clz":
        step.put(np.where(planes.any(1), planes.argmax(1), bits).astype(np.uint32))
    else:  # bfind: the highest set bit; of a negative number, the highest clear one
        planes = np.where((planes[:, :1] == 1) & (step.kind[0] == "s"), 1 - planes, planes)
        place = planes.argmax(1) if step.has("shiftamt") else bits - 1 - planes.argmax(1)
        step.put(np.where(planes.any(1), place, 0xFFFFFFFF).astype(np.uint32))


def dot4(step: Step) -> None:
    kinds = [np.int8 if op[0] == "s" else np.uint8 for op in step.ops[1:3]]
    a, b = (
        np.ascontiguousarray(step.get(n, "u32"))[:, None].view(k).astype(np.int64)
        for n, k in zip((1, 2), kinds, strict=True)
    )
    total = (a * b).sum(1) + step.get(3, "s32").astype(np.int64)
    step.put((total % (1 << 32)).astype(np.uint32))


# --- comparison and selection
_COMPARE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compare(step: Step) -> None:
    a, b = (widened(step.get(n), step.kind) for n in (1, 2))
    name = step.ops[1]
    floats = a.dtype.kind == "f"
    nan = np.isnan(a) | np.isnan(b) if floats else np.zeros(len(step.lanes), bool)
    if name in ("num", "nan"):
        result = ~nan if name == "num" else nan
    else:
        result = _COMPARE[name[:2]](a, b)
        if floats:  # an ordered comparison with a NaN is false, an unordered one true
            result = (result & ~nan) | (nan if name[2:] == "u" else False)
    if step.ops[2] in _COMBINE:
        result = _COMBINE[step.ops[2]](result, step.get(3, "pred"))
    first, _, second = str(step.args[0]).partition("|")
    step.machine.put(first, result, step.lanes)
    if second:
        step.machine.put(second, ~result, step.lanes)


HANDLERS: dict[str, Callable[[Step], None]] = {
    "ld": load, "st": store, "mov": move, "cvta": to_address, "atom": atomic, "red": atomic, "cvt": convert,
    "add": lambda s: in_kind(s, np.add, 1, 2), "sub": lambda s: in_kind(s, np.subtract, 1, 2),
    "mul": multiply, "mad": multiply, "fma": lambda s: in_kind(s, fused, 1, 2, 3), "div": divide, "rem": divide,
    "neg": lambda s: in_kind(s, np.negative, 1), "abs": lambda s: in_kind(s, np.abs, 1),
    "min": minimum_maximum, "max": minimum_maximum, **dict.fromkeys(_IN_64, approximate),
    "and": lambda s: s.put(s.get(1) & s.get(2)), "or": lambda s: s.put(s.get(1) | s.get(2)),
    "xor": lambda s: s.put(s.get(1) ^ s.get(2)), "not": lambda s: s.put(~s.get(1)),
    "shl": shift, "shr": shift, "shf": funnel_shift, "bfe": bit_field_extract, "bfi": bit_field_insert,
    "lop3": logic3, "prmt": permute_bytes, "dp4a": dot4, **dict.fromkeys(("popc", "clz", "brev", "bfind"), count_bits),
    "setp": compare, "selp": lambda s: s.put(np.where(s.get(3, "pred"), s.get(1), s.get(2))),
    "shfl": warps.shuffle, "vote": warps.vote, "redux": warps.reduce, "match": warps.match, "activemask": warps.active,
    "mma": warps.mma, "ldmatrix": warps.ldmatrix, "cp": warps.async_copy,
    "bar": lambda s: None, "membar": lambda s: None, "fence": lambda s: None, "prefetch": lambda s: None,
}  # fmt: skip
