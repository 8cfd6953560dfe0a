"""The CUDA C sources as data: their text and headers, the kernels in them and what each takes, how NVRTC takes them.

Nothing here needs a GPU, a compiler or CuPy, so that the test bench reads sources the way the launch layer does.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cupaged.errors import KernelError

FOLDER = Path(__file__).resolve().parent

# No fused multiply-adds but those written as fmaf, so that variants of a kernel agree in every bit; no fast math, which
# would break infinities and NaN.
NVRTC_OPTIONS = ("-std=c++17", "-fmad=false", "-default-device")

# C types of kernel parameters -> NumPy's names for them. Pointers are 8 bytes; of their targets the launch layer checks
# the size, so that float32 is not passed for float16.
SCALARS = {
    "int": "int32",
    "unsigned": "uint32",
    "long long": "int64",
    "unsigned long long": "uint64",
    "float": "float32",
    "double": "float64",
}
_TARGETS = {"unsigned char": 1, "signed char": 1, "__half": 2, "float": 4, "int": 4, "unsigned": 4, "long long": 8}
_TARGETS |= {"double": 8, "unsigned long long": 8}
_KERNEL = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\([^)]*\))?\s*(\w+)\(([^)]*)\)', re.S)
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.M)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel. `kind`: "pointer" or NumPy's name of a scalar. `size`: bytes of what a pointer points
    to, 0 where the variant decides (stored_t) or anything will do."""

    name: str
    kind: str
    size: int


@functools.cache
def text(name: str) -> str:
    """The text of a source file of this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


@functools.cache
def files(name: str) -> tuple[str, ...]:
    """A source and the headers of ours that it includes, directly or not, each once."""
    found = [name]
    for current in found:
        found += [header for header in _INCLUDE.findall(text(current)) if header not in found]
    return tuple(found)


def digest(name: str) -> str:
    """A hash of everything of ours that a source is made of."""
    return hashlib.sha256("\0".join(text(file) for file in files(name)).encode()).hexdigest()


def source_names() -> tuple[str, ...]:
    """All `.cu` files, sorted."""
    return tuple(sorted(path.name for path in FOLDER.glob("*.cu")))


@functools.cache
def kernels(name: str) -> Mapping[str, tuple[Parameter, ...]]:
    """The kernels of a source and their parameters in order. KernelError for one that the launch layer cannot check."""
    found: dict[str, tuple[Parameter, ...]] = {}
    for kernel, parameters in _KERNEL.findall(text(name)):
        found[kernel] = tuple(_parameter(part, f"{name}: {kernel}") for part in parameters.split(","))
    return found


def _parameter(declaration: str, where: str) -> Parameter:
    words = " ".join(declaration.replace("__restrict__", " ").replace("*", " * ").split())
    head, _, name = words.rpartition(" ")
    head = head.removeprefix("const ").strip()
    if head.endswith("*"):
        target = head.removesuffix("*").strip()
        return Parameter(name, "pointer", _TARGETS.get(target, 0))
    if head not in SCALARS:
        raise KernelError(f"{where}: parameter {name} has type {head!r}, which the launch layer does not know")
    return Parameter(name, SCALARS[head], 0)


@functools.cache
def inlined(name: str) -> str:
    """A source with our headers in place of their includes, each once: what NVRTC gets, and a cache can be keyed by."""
    done: set[str] = set()

    def expand(file: str) -> str:
        done.add(file)
        return _INCLUDE.sub(lambda match: "" if match[1] in done else expand(match[1]), text(file))

    return expand(name)
