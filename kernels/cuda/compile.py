"""CUDA C to machine code by NVRTC, kept in the user's cache folder.

CuPy's own RawModule would do, but it compiles with -ftz=true (denormals become zero), where ours are the same numbers
on every implementation. NVRTC needs no GPU, so what is written here is tested without one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cupaged.errors import DeviceError, KernelError
from cupaged.kernels.cpu.library import cache_folders
from cupaged.kernels.cuda import sources


def options(architecture: int, defines: Mapping[str, int]) -> tuple[str, ...]:
    """NVRTC's options for a variant; architecture 80 is sm_80."""
    macros = tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))
    return (f"-arch=sm_{architecture}", *sources.NVRTC_OPTIONS, *macros)


def headers() -> Path:
    """The folder with cuda_fp16.h: of the wheel nvidia-cuda-runtime-cu12, else of $CUDA_PATH. DeviceError: neither."""
    places = []
    spec = importlib.util.find_spec("nvidia")
    if spec is not None:
        places += [Path(place) / "cuda_runtime" / "include" for place in spec.submodule_search_locations or ()]
    places += [Path(os.environ.get("CUDA_PATH") or "/usr/local/cuda") / "include"]
    for place in places:
        if (place / "cuda_fp16.h").is_file():
            return place
    raise DeviceError("cuda_fp16.h: not found; pip install nvidia-cuda-runtime-cu12, or set CUDA_PATH")


def cubin(source: str, architecture: int, defines: Mapping[str, int]) -> bytes:
    """The machine code of a source for one variant: from the cache, else compiled (about a second) and kept.

    KernelError with the compiler's log; DeviceError without NVRTC or CUDA's headers.
    """
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise DeviceError(f"CuPy's NVRTC cannot be loaded ({error}); pip install 'cupaged[gpu]'") from error
    flags = options(architecture, defines)
    text = sources.inlined(source)
    key = hashlib.sha256(repr((text, flags, nvrtc.getVersion())).encode()).hexdigest()[:32]
    paths = [folder / f"cuda-{Path(source).stem}-{key}.cubin" for folder in cache_folders()]
    for path in paths:
        if (kept := _read(path)) is not None:
            return kept
    program = nvrtc.createProgram(text, source, (), ())
    try:
        nvrtc.compileProgram(program, (*flags, f"-I{headers()}"))
        code: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        raise KernelError(f"{source}, {' '.join(flags)}: {nvrtc.getProgramLog(program)[:2000]}") from None
    finally:
        nvrtc.destroyProgram(program)
    for path in paths:
        if _write(path, code):
            break
    return code


def _read(path: Path) -> bytes | None:
    """A file that is whole and that only we, or root, could have written: it holds code that will run. Else None."""
    try:
        with open(path, "rb") as file:
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
