"""CUDA C compiled by NVRTC, which needs no GPU and no driver: PTX, and what ptxas says of registers and memory.

libnvrtc is called through ctypes (wheel nvidia-cuda-nvrtc-cu12), with the headers of nvidia-cuda-runtime-cu12.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cudabench.build import cache_folder, kept
from cudabench.errors import BenchError, BenchMissing
from cudabench.translate import with_includes

ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread or block of a compiled kernel takes. Sizes in bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A source compiled for one architecture: its PTX, and the resources of each kernel by name."""

    ptx: str
    resources: dict[str, Resources]


def _wheel_folder(package: str, inside: str) -> Path:
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(place) / package / inside
        if folder.is_dir():
            return folder
    wheel = f"nvidia-{package.replace('_', '-')}-cu12"
    raise BenchMissing(f"{wheel} is not installed (pip install {wheel})")


@functools.cache
def library() -> tuple[ctypes.CDLL, str, Path]:
    """(libnvrtc, its version, the folder of CUDA's headers). BenchMissing without one of the two wheels."""
    include = _wheel_folder("cuda_runtime", "include")
    folder = _wheel_folder("cuda_nvrtc", "lib")
    paths = sorted(folder.glob("libnvrtc.so*"))
    if not paths:
        raise BenchMissing(f"no libnvrtc in {folder}")
    for path in sorted(folder.glob("libnvrtc-builtins.so*")):  # it looks for these by name
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(str(paths[0]))
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    major, minor = ctypes.c_int(), ctypes.c_int()
    _must(lib, lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return lib, f"{major.value}.{minor.value}", include


def _must(lib: ctypes.CDLL, code: int) -> None:
    if code:
        raise BenchError(f"NVRTC: {lib.nvrtcGetErrorString(code).decode()}")


def _text(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _must(lib, getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _must(lib, getattr(lib, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode()


def compile_cuda(
    source: str | Path,
    *,
    arch: int = 80,
    defines: Mapping[str, object] | None = None,
    include: Sequence[str | Path] = (),
    options: Sequence[str] = ("-std=c++17",),
) -> Compiled:
    """Compile a .cu file for sm_`arch`; results are kept in the cache folder.

    defines, include: as for `emulate`. options: NVRTC's own. BenchError with the compiler's log.
    """
    path = Path(source).resolve()
    text = with_includes(path, tuple(Path(folder).resolve() for folder in include))
    flags = [f"-arch=sm_{arch}", *options, "--ptxas-options=-v"]
    flags += [f"-D{key}" + ("" if value in (None, "") else f"={value}") for key, value in (defines or {}).items()]
    key = hashlib.sha256(repr((text, flags, library()[1])).encode()).hexdigest()[:24]
    cached = cache_folder() / f"{path.stem}-sm_{arch}-{key}.json"
    if not kept(cached):
        compiled = _compile(path, text, flags)
        made = cached.with_suffix(f".{os.getpid()}.tmp")
        made.write_text(json.dumps(asdict(compiled)))
        os.replace(made, cached)
    stored = json.loads(cached.read_text())
    return Compiled(stored["ptx"], {name: Resources(**row) for name, row in stored["resources"].items()})


def _compile(path: Path, text: str, flags: list[str]) -> Compiled:
    lib, _, headers = library()
    program = ctypes.c_void_p()
    _must(lib, lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), path.name.encode(), 0, None, None))
    try:
        arguments = [flag.encode() for flag in (*flags, f"-I{headers}")]
        failed = lib.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
        log = _text(lib, program, "ProgramLog")
        if failed:
            raise BenchError(f"{path}, {' '.join(flags)}: NVRTC says\n{log[:4000]}")
        return Compiled(_text(lib, program, "PTX"), resources_of(log))
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def resources_of(log: str) -> dict[str, Resources]:
    """Resources by kernel, from the log that ptxas -v writes."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.partition("'")[0]
        stack, stores, loads = _numbers(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        )
        (registers,) = _numbers(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        found[name] = Resources(registers, stack, stores, loads, int(shared[1]) if shared else 0)
    return found


def _numbers(pattern: str, text: str) -> list[int]:
    match = re.search(pattern, text)
    if match is None:
        raise BenchError(f"ptxas log without {pattern!r}: {text[:500]}")
    return [int(number) for number in match.groups()]
