"""Integer dot products on every kind of processor: exact where they run here, the right instructions where not."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from cupaged.errors import OptionError
from cupaged.kernels.cpu import processor
from cupaged.kernels.cpu.emit import I1, I64, VI, Emitter
from cupaged.kernels.cpu.quant_dot import BYTES, WAYS, Sum
from cupaged.kernels.cpu.quant_layout import LAYOUTS
from cupaged.kernels.cpu.quant_tile import emit_tile

X86 = platform.machine() == "x86_64"
X86_TRIPLE, ARM_TRIPLE = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
# What a way needs of this very processor to be run. (vnni256 is then encoded as AVX512-VL, not as AVX-VNNI.)
NEEDS = {
    "vnni512": {"avx512vnni", "avx512f", "avx512bw"},
    "vnni256": {"avx512vnni", "avx512vl"},
    "madd512": {"avx512f", "avx512bw"},
    "madd256": {"avx2"},
    "sdot": {"dotprod"},
    "plain": set(),
}


def flags(level: str) -> str:
    return ",".join(f"+{feature}" for feature in sorted(processor.LEVELS[level]))


def tile_module(way: str, layout: str, rows: int, terms: int) -> str:
    """A function of 8 int64 that runs one tile."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 8), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    e = Emitter(builder)
    records, count, x, x_stride, out, out_stride, fresh, ahead = function.args
    emit_tile(
        e, WAYS[way], LAYOUTS[layout], rows, terms, records, count, x, x_stride, out, out_stride,
        builder.trunc(fresh, I1), (ahead, ahead), e.const(0),
    )  # fmt: skip
    builder.ret_void()
    return str(module)


def assembly(text: str, triple: str, name: str, features: str) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip(f"this llvmlite has no {triple}")
    module = llvm.parse_assembly(text)
    module.triple = triple
    return str(target.create_target_machine(cpu=name, features=features, opt=3).emit_assembly(module))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("way", "triple", "name", "features", "has", "lacks"),
    [
        ("vnni512", X86_TRIPLE, "x86-64-v4", flags("avx512vnni"), ["vpdpbusd", "zmm"], []),
        ("vnni256", X86_TRIPLE, "haswell", flags("avxvnni"), ["{vex}\tvpdpbusd", "ymm"], ["zmm"]),
        ("madd512", X86_TRIPLE, "x86-64-v4", flags("avx512"), ["vpmaddubsw", "zmm"], ["vpdpbusd"]),
        ("madd256", X86_TRIPLE, "haswell", flags("avx2"), ["vpmaddubsw", "ymm"], ["vpdpbusd", "zmm"]),
        ("plain", X86_TRIPLE, "x86-64", flags("plain"), ["xmm"], ["ymm", "zmm", "pmaddubsw"]),
        ("sdot", ARM_TRIPLE, "generic", "+neon,+fp-armv8,+dotprod", ["\tsdot\t"], []),
        ("plain", ARM_TRIPLE, "generic", "+neon,+fp-armv8", ["\tmul\t"], ["\tsdot\t"]),
    ],
)
def test_tiles_compile_to_the_instructions_meant(
    layout: str, way: str, triple: str, name: str, features: str, has: list[str], lacks: list[str]
) -> None:
    """For processors that are not at hand too: LLVM would end this process if it could not."""
    for rows, terms in ((2, 1), (1, 2)):
        code = assembly(tile_module(way, layout, rows, terms), triple, name, features)
        assert all(word in code for word in has), code
        assert not any(word in code for word in lacks), code


def runnable() -> Iterator[str]:
    present = processor.target().features
    return (way for way, needed in NEEDS.items() if needed <= present)


def compiled(way: str, bits: int, steps: int) -> tuple[Any, Any]:
    """(owner, function): out[16] int32 = start[16] + sum over steps of u[step, 64] . x[step, 64] by fours."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 3), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    e = Emitter(builder)
    u, x, out = function.args
    total = Sum(e.load(out, VI, 4))
    for step in range(steps):
        weights = WAYS[way].prepare(e, e.load(e.add(u, 64 * step), BYTES, 1), bits)
        WAYS[way].step(e, total, weights, e.load(e.add(x, 64 * step), VI, 1), bits)
    e.store(WAYS[way].value(e, total), out, 4)
    builder.ret_void()
    return loaded(str(module), 3)


def loaded(text: str, arguments: int) -> tuple[Any, Any]:
    """(owner, function "dot" of a module)."""
    from cupaged.kernels.cpu.compile import target_machine

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), target_machine())
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)
    return engine, kind(engine.get_function_address("dot"))


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_every_way_is_exact(bits: int) -> None:
    """Random and extreme operands: the greatest sums that 16 bits must hold, of either sign."""
    rng = np.random.default_rng(bits)
    top = 2**bits - 1
    ways = list(runnable())
    assert "plain" in ways
    for way in ways:
        engine, dot = compiled(way, bits, 8)
        for case in range(12):
            u = rng.integers(0, top + 1, (8, 16, 4)).astype(np.uint8)
            x = rng.integers(-127, 128, (8, 16, 4)).astype(np.int8)
            if case < 8:
                u[:] = (top, top, 0, 1)[case % 4]
                x[:] = 127 if case < 4 else -127
            if case == 8:
                u[:, ::2] = 0
            start = rng.integers(-1000, 1000, 16).astype(np.int32)
            weights = u.astype(np.int64) - (128 if bits == 8 and WAYS[way].signed8 else 0)
            expected = start + (weights * x).sum(axis=(0, 2))
            out = start.copy()
            dot(u.ctypes.data, x.ctypes.data, out.ctypes.data)
            assert np.array_equal(out, expected), (way, case)
        del engine


def test_pairs_are_multiplied_exactly_on_every_processor() -> None:
    """low * lower half + high * upper half: random, and the largest that there can be."""
    rng = np.random.default_rng(5)
    for way in runnable():
        module = ir.Module()
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 4), "dot")
        builder = ir.IRBuilder(function.append_basic_block())
        e = Emitter(builder)
        low, high, pairs = (e.load(argument, VI, 4) for argument in function.args[:3])
        e.store(WAYS[way].pair_dot(e, low, high, pairs), function.args[3], 4)
        builder.ret_void()
        engine, dot = loaded(str(module), 4)
        for case in range(20):
            f, s = rng.integers(-32512, 32513, 16), rng.integers(-4064, 4065, 16)
            scales = rng.integers(-32767, 32768, (2, 16))
            if case < 16:
                f[:], s[:] = (1, -1)[case & 1] * 32512, (1, -1)[case >> 1 & 1] * 4064
                scales[0], scales[1] = (1, -1)[case >> 2 & 1] * 32767, (1, -1)[case >> 3] * 32767
            arrays = [f, s << 16, (scales[0] & 0xFFFF) | scales[1] << 16]
            words = [np.ascontiguousarray(array.astype(np.int64).astype(np.int32)) for array in (*arrays, 0 * f)]
            dot(*(word.ctypes.data for word in words))
            assert np.array_equal(words[3], f * scales[0] + s * scales[1]), (way, case)
        del engine


# -- which processor is compiled for

HOST = {"avx", "avx2", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "avx512vnni", "bmi", "bmi2", "cx16",
        "f16c", "fma", "lzcnt", "movbe", "popcnt", "sahf", "sse3", "ssse3", "sse4.1", "sse4.2", "xsave", "64bit",
        "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"}  # fmt: skip


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the processor's features and the environment, and gives the target."""
    if not X86:
        pytest.skip("levels of x86-64")

    def choose(present: set[str] = HOST, **environment: str) -> processor.Target:
        known = {feature: feature in present for feature in HOST | {"avxvnni", "amx-int8"}}
        monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: dict(known))
        for name in ("CUPAGED_CPU", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        processor.target.cache_clear()
        return processor.target()

    yield choose
    processor.target.cache_clear()


def test_the_processor_itself_is_the_default(host: Any) -> None:
    assert host().dot == "vnni512" and host().wide and host().half
    assert host(HOST - {"avx512vnni"}).dot == "madd512"
    assert host(HOST - {f for f in HOST if f.startswith("avx512")}).dot == "madd256"
    assert host({*(f for f in HOST if not f.startswith("avx512")), "avxvnni"}).dot == "vnni256"
    small = host({"64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"})
    assert (small.dot, small.wide, small.half) == ("plain", False, False)


@pytest.mark.parametrize(
    ("level", "dot"), [("plain", "plain"), ("avx2", "madd256"), ("avx512", "madd512"), ("AVX512vnni ", "vnni512")]
)
def test_a_lesser_processor_can_be_asked_for(host: Any, level: str, dot: str) -> None:
    target = host(CUPAGED_CPU=level)
    assert target.dot == dot
    assert target.features == processor.LEVELS[level.strip().lower()]
    assert NEEDS[dot] <= target.features
    listed = {word[1:]: word[0] for word in target.flags.split(",")}
    assert all(listed[feature] == ("+" if feature in target.features else "-") for feature in HOST)


def test_what_the_processor_lacks_is_refused(host: Any) -> None:
    with pytest.raises(OptionError, match="avxvnni needs avxvnni, which this processor does not have"):
        host(CUPAGED_CPU="avxvnni")
    with pytest.raises(OptionError, match="avx512 needs avx512bw"):
        host(HOST - {"avx512bw"}, CUPAGED_CPU="avx512")
    with pytest.raises(OptionError, match=r"CUPAGED_CPU: 'sse9' is not one of native, plain, avx2"):
        host(CUPAGED_CPU="sse9")


def test_what_numba_may_not_use_we_do_not(host: Any) -> None:
    assert host(NUMBA_ENABLE_AVX="0").dot == "plain"
    assert host(NUMBA_CPU_NAME="generic").dot == "plain"
    assert host(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx,+avx2,+fma,+f16c").dot == "madd256"
    assert host(HOST - {"avx2"}, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx,+avx2").dot == "plain"
    with pytest.raises(OptionError, match="avx2 needs avx"):
        host(NUMBA_ENABLE_AVX="0", CUPAGED_CPU="avx2")
