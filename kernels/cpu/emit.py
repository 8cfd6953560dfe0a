"""A small kit for kernels written as LLVM IR inside Numba.

Kernels take raw addresses and sizes as int64: one signature for all of them, no array structs, no reference counts. So
the same function runs from a flat operation list (team.py) and from an object file loaded without Numba (library.py).

`@primitive(n)` turns a Python function ``emit(e, *values)`` into a Numba intrinsic of n int64 arguments; `e` (Emitter)
wraps llvmlite's builder. Vectors are 16 float32 lanes on every processor: LLVM splits them where registers are
narrower, so that the order of additions, and with it every bit, is the same on all of them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cupaged.kernels.cpu.processor import target
from cupaged.kernels.interface import STORAGE_BYTES

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
LANES = 16
VF, VI, VH, VS = (ir.VectorType(t, LANES) for t in (F32, I32, F16, I16))

X86 = platform.machine().lower() in ("x86_64", "amd64")
# Without these instructions LLVM would call a compiler-runtime function that no process has at hand: convert by hand.
HALF_NATIVE = target().half
WIDE = target().wide  # 32 registers of 16 lanes: tiles of 6 rows fit


def like(ty: Any, value: float | int) -> Any:
    """A constant of type `ty`, in every lane if it is a vector."""
    return ir.Constant(ty, [value] * ty.count if isinstance(ty, ir.VectorType) else value)


def retype(ty: Any, element: Any) -> Any:
    """`element`, as a vector if `ty` is one."""
    return ir.VectorType(element, ty.count) if isinstance(ty, ir.VectorType) else element


class Emitter:
    """Builder, loads and stores at addresses, and the few vector operations that the kernels use."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def const(self, n: int) -> Any:
        return ir.Constant(I64, n)

    def _int(self, n: Any) -> Any:
        return self.const(n) if isinstance(n, int) else n

    def add(self, x: Any, y: Any) -> Any:
        return self.b.add(x, self._int(y))

    def mul(self, x: Any, y: Any) -> Any:
        return self.b.mul(x, self._int(y))

    def ptr(self, address: Any, ty: Any = I8) -> Any:
        return self.b.inttoptr(address, ty.as_pointer())

    def load(self, address: Any, ty: Any, align: int) -> Any:
        value = self.b.load(self.ptr(address, ty))
        value.align = align
        return value

    def store(self, value: Any, address: Any, align: int) -> None:
        self.b.store(value, self.ptr(address, value.type)).align = align

    def call(self, name: str, result: Any, *args: Any) -> Any:
        module = self.b.module
        function = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(result, [a.type for a in args]), name
        )
        return self.b.call(function, args)

    def _suffix(self, ty: Any) -> str:
        return f"v{ty.count}f32" if isinstance(ty, ir.VectorType) else "f32"

    def splat(self, x: Any) -> Any:
        """x in all 16 lanes."""
        ty = ir.VectorType(x.type, LANES)
        v = self.b.insert_element(ir.Constant(ty, ir.Undefined), x, ir.Constant(I32, 0))
        return self.b.shuffle_vector(v, v, ir.Constant(VI, [0] * LANES))

    def zero(self, ty: Any = VF) -> Any:
        return ir.Constant(ty, None)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, rounded once."""
        return self.call(f"llvm.fma.{self._suffix(x.type)}", x.type, x, y, z)

    def floor(self, x: Any) -> Any:
        return self.call(f"llvm.floor.{self._suffix(x.type)}", x.type, x)

    def sqrt(self, x: Any) -> Any:
        return self.call(f"llvm.sqrt.{self._suffix(x.type)}", x.type, x)

    def maximum(self, x: Any, y: Any) -> Any:
        """The greater; y where either is NaN (one instruction on x86)."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def rotate(self, v: Any, n: int) -> Any:
        return self.b.shuffle_vector(v, v, ir.Constant(VI, [(i + n) % LANES for i in range(LANES)]))

    def reduce(self, v: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All 16 lanes combined in one fixed tree; the result stands in every lane."""
        for shift in (8, 4, 2, 1):
            v = combine(v, self.rotate(v, shift))
        return v

    def first(self, v: Any) -> Any:
        return self.b.extract_element(v, ir.Constant(I32, 0))

    def prefetch(self, address: Any, near: bool = False) -> None:
        """Into the L2 cache: 1.4 times as fast here as into L1, whose few miss buffers the loads themselves need.

        near: into L1 all the same.
        """
        name = "llvm.prefetch.p0"
        hint = [ir.Constant(I32, n) for n in (0, 3 if near else 2, 1)]  # read, locality, data
        self.call(name, ir.VoidType(), self.ptr(address), *hint)

    def loop(self, n: Any, state: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """``for i in range(n): state = body(i, state)``; `state` is a list of values held in registers. n may be 0."""
        b = self.b
        before = b.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        values = [b.phi(s.type) for s in state]
        i.add_incoming(self.const(0), before)
        for phi, initial in zip(values, state, strict=True):
            phi.add_incoming(initial, before)
        b.cbranch(b.icmp_signed("<", i, self._int(n)), inside, after)
        b.position_at_end(inside)
        new = body(i, values)
        i.add_incoming(b.add(i, self.const(1)), b.block)
        for phi, value in zip(values, new, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return values

    def each(self, n: Any, body: Callable[[Any, int | None], None]) -> None:
        """body(byte offset, lanes) over n float32 elements: 16 lanes at a time, then the rest one by one (None).

        Elementwise arithmetic gives the same bits either way.
        """
        whole = self.b.ashr(n, self.const(4))

        def wide(i: Any, _: list[Any]) -> list[Any]:
            body(self.mul(i, 4 * LANES), LANES)
            return []

        def single(i: Any, _: list[Any]) -> list[Any]:
            body(self.mul(self.add(self.mul(whole, LANES), i), 4), None)
            return []

        self.loop(whole, [], wide)
        self.loop(self.b.sub(n, self.mul(whole, LANES)), [], single)

    def floats(self, address: Any, lanes: int | None) -> Any:
        return self.load_as_float(address, "float32", lanes)

    # -- storage types: float32, float16, bfloat16 <-> float32, scalar or vector

    def load_as_float(self, address: Any, kind: str, lanes: int | None = LANES) -> Any:
        """Load `lanes` elements (None: one) stored as `kind`, widened to float32 exactly."""
        shape = (lambda t: ir.VectorType(t, lanes)) if lanes else (lambda t: t)
        if kind == "float32":
            return self.load(address, shape(F32), 4)
        if kind == "float16":
            if HALF_NATIVE:
                return self.b.fpext(self.load(address, shape(F16), 2), shape(F32))
            return self._widen_half(self.load(address, shape(I16), 2), shape)
        bits = self.b.zext(self.load(address, shape(I16), 2), shape(I32))
        return self.b.bitcast(self.b.shl(bits, like(shape(I32), 16)), shape(F32))

    def store_float(self, value: Any, address: Any, kind: str) -> None:
        """Store float32 `value` as `kind`, rounded to nearest even; NaN stays NaN."""
        self.store(self.narrowed(value, kind), address, STORAGE_BYTES[kind])

    def narrowed(self, value: Any, kind: str) -> Any:
        """What `store_float` stores; bfloat16 as int16, float16 too where there is no conversion to it."""
        if kind == "float32":
            return value
        if kind == "bfloat16":
            return self.narrow_bfloat(value)
        return self.b.fptrunc(value, retype(value.type, F16)) if HALF_NATIVE else self._narrow_half(value)

    def narrow_bfloat(self, value: Any) -> Any:
        """The bits of float32 as bfloat16, rounded to nearest even; NaN stays NaN."""
        b = self.b
        ti = retype(value.type, I32)
        bits = b.bitcast(value, ti)
        odd = b.and_(b.lshr(bits, like(ti, 16)), like(ti, 1))
        rounded = b.lshr(b.add(bits, b.add(odd, like(ti, 0x7FFF))), like(ti, 16))
        quiet = b.or_(b.lshr(bits, like(ti, 16)), like(ti, 0x40))
        return b.trunc(b.select(b.fcmp_unordered("uno", value, value), quiet, rounded), retype(value.type, I16))

    def _widen_half(self, half: Any, shape: Callable[[Any], Any]) -> Any:
        """IEEE half to float by integers: shift into place and scale by 2^112; infinity and NaN keep their exponent."""
        b, ti, tf = self.b, shape(I32), shape(F32)
        bits = b.zext(half, ti)
        magnitude = b.and_(bits, like(ti, 0x7FFF))
        scaled = b.fmul(b.bitcast(b.shl(magnitude, like(ti, 13)), tf), like(tf, 2.0**112))
        special = b.or_(b.shl(magnitude, like(ti, 13)), like(ti, 0x7F800000))
        finite = b.icmp_unsigned("<", magnitude, like(ti, 0x7C00))
        value = b.select(finite, b.bitcast(scaled, ti), special)
        sign = b.shl(b.and_(bits, like(ti, 0x8000)), like(ti, 16))
        return b.bitcast(b.or_(value, sign), tf)

    def _narrow_half(self, value: Any) -> Any:
        """float to IEEE half by integers, nearest even. Small results are rounded by adding 0.5 (its ulp: 2^-24)."""
        b, tf = self.b, value.type
        ti = retype(tf, I32)
        bits = b.bitcast(value, ti)
        sign = b.and_(b.lshr(bits, like(ti, 16)), like(ti, 0x8000))
        magnitude = b.and_(bits, like(ti, 0x7FFFFFFF))
        tiny = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, tf), like(tf, 0.5)), ti), like(ti, 0x3F000000))
        odd = b.and_(b.lshr(magnitude, like(ti, 13)), like(ti, 1))
        normal = b.lshr(b.add(magnitude, b.add(odd, like(ti, 0xFFF - (112 << 23)))), like(ti, 13))
        out = b.select(b.icmp_unsigned("<", magnitude, like(ti, 113 << 23)), tiny, normal)
        out = b.select(b.icmp_unsigned(">=", magnitude, like(ti, 0x477FF000)), like(ti, 0x7C00), out)
        nan = b.or_(like(ti, 0x7E00), b.and_(b.lshr(magnitude, like(ti, 13)), like(ti, 0x3FF)))
        out = b.select(b.icmp_unsigned(">", magnitude, like(ti, 0x7F800000)), nan, out)
        return b.trunc(b.or_(out, sign), retype(tf, I16))


def primitive(count: int, result: Any = None, arguments: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: ``emit(e, a0 .. a(n-1))`` -> Numba intrinsic of n int64 arguments, returning nothing or `result`."""
    kinds = arguments or [types.int64] * count

    def decorate(emit: Callable[..., Any]) -> Any:
        def typing(*_: Any) -> Any:
            def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                value = emit(Emitter(builder), *args)
                return context.get_dummy_value() if result is None else value

            return (types.void if result is None else result)(*kinds), codegen

        # numba reads the arity from the Python signature, so one must be written out
        names = "".join(f", a{i}" for i in range(count))
        scope: dict[str, Any] = {"typing": typing}
        exec(f"def {emit.__name__}(typingctx{names}): return typing()", scope)
        return intrinsic(scope[emit.__name__])

    return decorate


@primitive(1, types.int64)
def load64(e: Emitter, address: Any) -> Any:
    return e.load(address, I64, 8)


@primitive(2)
def store64(e: Emitter, address: Any, value: Any) -> None:
    e.store(value, address, 8)


@primitive(1, types.int64)
def load32(e: Emitter, address: Any) -> Any:
    return e.b.sext(e.load(address, I32, 4), I64)


@primitive(1, types.float32)
def load_float(e: Emitter, address: Any) -> Any:
    return e.load(address, F32, 4)


@primitive(2, None, [types.int64, types.float32])
def store_float(e: Emitter, address: Any, value: Any) -> None:
    e.store(value, address, 4)


@primitive(1, types.float32)
def load_half(e: Emitter, address: Any) -> Any:
    return e.load_as_float(address, "float16", None)


@primitive(1, types.float32)
def load_bfloat(e: Emitter, address: Any) -> Any:
    return e.load_as_float(address, "bfloat16", None)


@primitive(2, None, [types.int64, types.float32])
def store_half(e: Emitter, address: Any, value: Any) -> None:
    e.store_float(value, address, "float16")


@primitive(2, None, [types.int64, types.float32])
def store_bfloat(e: Emitter, address: Any, value: Any) -> None:
    e.store_float(value, address, "bfloat16")


@primitive(1, types.float32)
def as_float(e: Emitter, bits: Any) -> Any:
    """The float32 whose bits are the low 32 of an int64: how scalars travel in an operation record."""
    return e.b.bitcast(e.b.trunc(bits, I32), F32)


@primitive(1, types.int64)
def load_raw16(e: Emitter, address: Any) -> Any:
    return e.b.zext(e.load(address, I16, 2), I64)


@primitive(2)
def store_raw16(e: Emitter, address: Any, bits: Any) -> None:
    e.store(e.b.trunc(bits, I16), address, 2)


# A storage type's element: one float32 from or to an address, and its bytes.
LOAD = {"float32": load_float, "float16": load_half, "bfloat16": load_bfloat}
STORE = {"float32": store_float, "float16": store_half, "bfloat16": store_bfloat}
SIZE = STORAGE_BYTES
