"""CUDA C to machine code by NVRTC, kept in the user's cache folder.

CuPy's own RawModule would do, but it compiles with -ftz=true (denormals become zero), where ours are the same numbers
on every implementation. NVRTC needs no GPU, so what is written here is tested without one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cupaged.errors import DeviceError, KernelError
from cupaged.kernels.cpu.library import cache_folders
from cupaged.kernels.cuda import libraries, sources
from cupaged.kernels.kept_files import mark_used, remove_unused, without_waiting

_MISSING = "{}: not found; pip install {}, or set CUDA_PATH"


def options(architecture: int, defines: Mapping[str, int]) -> tuple[str, ...]:
    """NVRTC's options for a variant; architecture 80 is sm_80."""
    macros = tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))
    return (f"-arch=sm_{architecture}", *sources.NVRTC_OPTIONS, *macros)


def headers() -> Path:
    """The folder with cuda_fp16.h. DeviceError: there is none."""
    found = libraries.find_header("cuda_fp16.h")
    if found is None:
        raise DeviceError(_MISSING.format("cuda_fp16.h", "nvidia-cuda-runtime-cu12"))
    return found


def missing(major: int | None = None) -> str | None:
    """What there is not of a compiler for the GPU, in one line with what mends it; None if all is there. Loads none.

    major: the version of CUDA that the installed CuPy is for, None if that is not known.
    """
    suffix = "-cu12" if major in (None, 12) else ""  # the names of NVIDIA's wheels for CUDA 12, and from 13 on
    if libraries.find("nvrtc", "cuda_nvrtc", major) is None:
        return _MISSING.format("NVRTC, CUDA's compiler", f"nvidia-cuda-nvrtc{suffix}")
    if libraries.find_header("cuda_fp16.h") is None:
        return _MISSING.format("cuda_fp16.h", f"nvidia-cuda-runtime{suffix}")
    return None


def check(architecture: int) -> None:
    """DeviceError unless there is an NVRTC that compiles for this compute capability (80 for 8.0)."""
    nvrtc = _nvrtc()
    known = nvrtc.getSupportedArchs()
    if architecture not in known:
        major, minor = nvrtc.getVersion()
        raise DeviceError(
            f"NVRTC {major}.{minor} compiles for compute capability {min(known) / 10} to {max(known) / 10}, "
            f"not for {architecture / 10}; install a CuPy and CUDA wheels of another version"
        )
    headers()


def cubin(source: str, architecture: int, defines: Mapping[str, int]) -> bytes:
    """The machine code of a source for one variant: from the cache, else compiled (about a second) and kept.

    Any number of processes and threads may ask for the same at once: each finds a whole file, or compiles. KernelError
    with the compiler's log; DeviceError without NVRTC or CUDA's headers, or for a device that NVRTC does not know.
    """
    nvrtc = _nvrtc()
    paths = _paths(source, architecture, defines)
    for path in paths:
        if (kept := _read(path)) is not None:
            mark_used(path)
            return kept
    check(architecture)
    flags = options(architecture, defines)
    program = nvrtc.createProgram(sources.inlined(source), source, (), ())
    try:
        nvrtc.compileProgram(program, (*flags, f"-I{headers()}"))
        code: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        raise KernelError(f"{source}, {' '.join(flags)}: {nvrtc.getProgramLog(program)[:2000]}") from None
    finally:
        nvrtc.destroyProgram(program)
    for path in paths:
        if _write(path, code):
            remove_unused(path.parent)
            break
    return code


def is_kept(source: str, architecture: int, defines: Mapping[str, int]) -> bool:
    """Whether the cache has a whole file of this variant."""
    return any(_read(path) is not None for path in _paths(source, architecture, defines))


def announce(count: int, watched: bool) -> None:
    """Say in the log "cupaged" that so many kernels are compiled: as a warning, which Python shows by default, where
    nobody watches the progress."""
    log = logging.getLogger("cupaged")
    level = logging.INFO if watched else logging.WARNING
    log.log(level, "compiling %d CUDA kernels, once for this GPU and kind of model: a second or two each", count)


def _nvrtc() -> Any:
    """CuPy's NVRTC. Importing it makes no CUDA context."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # no CuPy, or a library that it cannot load
        message = " ".join(str(error).split())
        raise DeviceError(f"CuPy's NVRTC cannot be loaded ({message}); pip install 'cupaged[gpu]'") from error
    return nvrtc


def _paths(source: str, architecture: int, defines: Mapping[str, int]) -> list[Path]:
    """Where a variant may be kept, under a hash of all that its machine code depends on."""
    parts = (sources.inlined(source), options(architecture, defines), _nvrtc().getVersion(), _headers_digest())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return [folder / f"cuda-{Path(source).stem}-{key}.cubin" for folder in cache_folders()]


@functools.cache
def _headers_digest() -> str:
    """A hash of CUDA's headers that ours include."""
    folder, digest = headers(), hashlib.sha256()
    for name in ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp"):
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    """A file that is whole and that only we, or root, could have written: it holds code that will run. Else None."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            status = os.fstat(file.fileno())
            if hasattr(os, "getuid") and (status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022):
                return None
            data = file.read()
    except OSError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def _write(path: Path, code: bytes) -> bool:
    """A temporary file, then a rename: a reader sees all or nothing. False where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError:
        return False
    return True
