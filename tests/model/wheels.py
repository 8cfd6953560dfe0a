"""Wheels that pip accepts, made for a test."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def wheel(
    folder: Path, name: str, files: Mapping[str, bytes | str], version: str = "1.0", requires: Sequence[str] = ()
) -> Path:
    """A wheel that holds `files`; `requires`: requirements in its metadata."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path
