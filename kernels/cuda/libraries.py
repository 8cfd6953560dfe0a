"""Where CUDA's libraries and headers lie: NVIDIA's wheels, a toolkit, what the system's loader knows. Loads no CUDA."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

VERSIONS = (12, 13)  # of CUDA: those that CuPy has wheels for


def find(name: str, wheel: str, major: int | None = None) -> str | None:
    """The file of a library, or its bare name where the system's loader has it; None for neither.

    name: "cublas", "nvrtc"; wheel: the folder of its wheel for CUDA 12 (those for 13 share one); major: the version of
    CUDA that it must be of, None for any.
    """
    versions = VERSIONS if major is None else (major,)
    for version, folder in _folders(wheel, versions, "bin" if sys.platform == "win32" else "lib"):
        for path in sorted(folder.glob(_pattern(name, version))):
            return str(path)
    for version in versions:
        bare = _pattern(name, version).replace("*", "0")
        try:
            ctypes.CDLL(bare)
        except OSError:
            continue
        return bare
    return None


def find_header(name: str) -> Path | None:
    """The folder with a header of CUDA's runtime."""
    folders = (folder for _, folder in _folders("cuda_runtime", VERSIONS, "include"))
    return next((folder for folder in folders if (folder / name).is_file()), None)


def _pattern(name: str, version: int) -> str:
    """NVRTC's name on Windows has a minor version behind the major one."""
    if sys.platform == "win32":
        return f"{name}64_{version}*.dll" if name != "nvrtc" else f"nvrtc64_{version}*_0.dll"
    return f"lib{name}.so.{version}"


def _folders(wheel: str, versions: Sequence[int], kind: str) -> Iterator[tuple[int, Path]]:
    """(version, folder): wheels of all versions, then the toolkit, which does not say of which it is."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    for version in versions:
        for place in places:
            yield version, place / wheel / kind
            yield version, place / f"cu{version}" / kind
            yield version, place / f"cu{version}" / kind / "x86_64"
    toolkit = Path(os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    for version in versions:
        yield from ((version, toolkit / kind), (version, toolkit / f"{kind}64"))
