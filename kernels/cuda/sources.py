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

# C types of kernel parameters, and of what pointers point to -> NumPy's names for them.
SCALARS = {
    "int": "int32",
    "unsigned": "uint32",
    "long long": "int64",
    "unsigned long long": "uint64",
    "float": "float32",
    "double": "float64",
}
TARGETS = SCALARS | {"unsigned char": "uint8", "signed char": "int8", "__half": "float16"}
_SIZES = {"uint8": 1, "int8": 1, "float16": 2, "int64": 8, "uint64": 8, "float64": 8}  # the rest: 4
STORED = ("float32", "float16", "uint16")  # `stored_t` by -DSTORAGE; bfloat16 is kept as uint16
_KERNEL = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\([^)]*\))?\s*(\w+)\(([^)]*)\)', re.S)
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.M)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel. `kind`: "pointer" or NumPy's name of a scalar. Of a pointer: `element`, NumPy's name
    of what it points to, "stored" where the variant decides (stored_t), "" where anything will do; `size`, its bytes,
    or 0 where that is open."""

    name: str
    kind: str
    size: int = 0
    element: str = ""


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
        element = "stored" if target == "stored_t" else TARGETS.get(target, "")
        return Parameter(name, "pointer", _SIZES.get(element, 4) if target in TARGETS else 0, element)
    if head not in SCALARS:
        raise KernelError(f"{where}: parameter {name} has type {head!r}, which the launch layer does not know")
    return Parameter(name, SCALARS[head])


@functools.cache
def inlined(name: str) -> str:
    """A source with our headers in place of their includes, each once: what NVRTC gets, and a cache can be keyed by."""
    done: set[str] = set()

    def expand(file: str) -> str:
        done.add(file)
        return _INCLUDE.sub(lambda match: "" if match[1] in done else expand(match[1]), text(file))

    return expand(name)
