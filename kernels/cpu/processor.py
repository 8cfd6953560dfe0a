"""Which instructions the kernels may use: all that this processor has, or fewer if $CUPAGED_CPU asks for it.

LLVM ends the process when it is asked for an instruction that its target lacks. So kernels choose by `target()` alone,
the compiler gets the very same list of features, and what restricts Numba's own code generator (its NUMBA_CPU_NAME,
NUMBA_CPU_FEATURES and NUMBA_ENABLE_AVX) restricts the list too.

The bits of all results are the same at every level; only the speed differs.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cupaged.errors import OptionError, shown

_X86 = platform.machine().lower() in ("x86_64", "amd64")
_ARM = platform.machine().lower() in ("aarch64", "arm64")

# Levels of x86-64 by what they add to the one before, as LLVM names it.
_PLAIN = frozenset({"64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"})
_SSE4 = _PLAIN | {"cx16", "popcnt", "sahf", "sse3", "ssse3", "sse4.1", "sse4.2"}
_AVX2 = _SSE4 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS: dict[str, frozenset[str]] = {
    "plain": _PLAIN,
    "avx2": _AVX2,
    "avxvnni": _AVX2 | {"avxvnni"},
    "avx512": _AVX512,
    "avx512vnni": _AVX512 | {"avx512vnni"},
}
# Names by which LLVM tunes for a level that was asked for. They must not add features: the list is given in full.
_NAMES = {"plain": "x86-64", "avx2": "haswell", "avxvnni": "haswell", "avx512": "x86-64-v4", "avx512vnni": "x86-64-v4"}
VARIABLE = "CUPAGED_CPU"
# Lines of /proc/cpuinfo that tell one kind of processor from another, on x86 and on ARM.
_TELLING = frozenset({
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """A processor as LLVM knows it. flags: every known feature with + or -, as its compiler wants them."""

    name: str
    features: frozenset[str]
    flags: str

    @property
    def dot(self) -> str:
        """The way to integer dot products, a key of `quant_dot.WAYS`."""
        has = self.features.issuperset
        if has({"avx512vnni", "avx512f", "avx512bw"}):
            return "vnni512"
        if has({"avxvnni", "avx2"}):
            return "vnni256"
        if has({"avx512bw", "avx512f"}):
            return "madd512"
        if has({"avx2"}):
            return "madd256"
        if _ARM and has({"dotprod"}):
            return "sdot"
        return "plain"

    @property
    def wide(self) -> bool:
        """32 vector registers of 512 bits."""
        return "avx512f" in self.features

    @property
    def paired(self) -> bool:
        """Byte additions run beside integer dot products (quant_pairs.py): on Zen 4 and 5, as measured on the first. On
        Intel's processors they wait for one another. A level that was asked for is nobody's in particular."""
        return self.dot == "vnni512" and self.name.startswith("znver")

    @property
    def half(self) -> bool:
        """Conversion between float16 and float32 in hardware: without, LLVM would call a function that is not there."""
        return bool(self.features & {"f16c", "avx512f"}) or not _X86


@lru_cache(1)
def target() -> Target:
    """The processor to compile for. OptionError if $CUPAGED_CPU names no level, or one that this processor lacks."""
    import llvmlite.binding as llvm

    try:
        known = dict(llvm.get_host_cpu_features())
    except RuntimeError:  # LLVM cannot tell: the least that the architecture has
        known = {}
    name, present = llvm.get_host_cpu_name(), frozenset(feature for feature, there in known.items() if there)
    restricted = _restricted_by_numba(present)
    level = os.environ.get(VARIABLE, "").strip().lower() or "native"
    allowed = ("native", *(LEVELS if _X86 else ("plain",)))
    if level not in allowed:
        raise OptionError(f"{VARIABLE}: {shown(level)} is not one of {', '.join(allowed)}")
    if level != "native":
        wanted = LEVELS[level] if _X86 else frozenset({"fp-armv8", "neon"} & present)
        missing = sorted((wanted - _PLAIN) - restricted)
        if missing:
            raise OptionError(f"{VARIABLE}: {level} needs {', '.join(missing)}, which this processor does not have")
        restricted &= wanted | _PLAIN
        name = _NAMES[level] if _X86 else "generic"
    elif restricted != present:
        name = "x86-64" if _X86 else "generic"
    features = restricted
    flags = ",".join(f"{'+' if feature in features else '-'}{feature}" for feature in sorted({*known, *features}))
    return Target(name, features, flags)


def fingerprint() -> str:
    """What `target()` depends on, told without loading LLVM: two processors with one fingerprint have one target."""
    lines = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.partition(":")[0].strip() in _TELLING:
                lines.add(line)
    except OSError:
        pass
    if os.environ.get(VARIABLE, "").strip() or not any(line.startswith(("flags", "Features")) for line in lines):
        return repr((target().name, target().flags))  # a set has another order in each process
    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    return repr((platform.machine(), sorted(lines), sorted(settings.items())))


def _restricted_by_numba(present: frozenset[str]) -> frozenset[str]:
    """Those features that Numba will give its code generator as well."""
    if os.environ.get("NUMBA_CPU_NAME") not in (None, "", "host"):
        given = os.environ.get("NUMBA_CPU_FEATURES", "").split(",")
        present &= frozenset(feature[1:] for feature in given if feature.startswith("+")) | (_PLAIN if _X86 else set())
    if os.environ.get("NUMBA_ENABLE_AVX", "1").strip() == "0":
        present = frozenset(feature for feature in present if not feature.startswith(("avx", "fma", "f16c")))
    return present
