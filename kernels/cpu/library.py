"""The compiled kernels of this processor: from the cache without importing Numba, else compiled and kept.

The cache file holds object code and is keyed by the sources of the kernels, the versions of Numba and LLVM, and the
processor with its features, so it can never be stale. It lies in the user's cache folder (`cache_folders`); a folder
that is missing, read-only or not ours only means that the next start compiles again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cupaged.kernels.cpu.catalog import BASIC, GROUP_OF
from cupaged.kernels.cpu.processor import fingerprint
from cupaged.kernels.kept_files import mark_used, remove_unused, without_waiting

_FORMAT = 2
_lock = threading.Lock()
_loaded: KernelLibrary | None = None

Progress = Callable[[int, int], None]


class _Addresses(dict[str, int]):
    """name -> address of a kernel; a name not seen before brings its group in."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library

    def __missing__(self, name: str) -> int:
        group = GROUP_OF.get(name)
        if group is None:
            raise RuntimeError(f"there is no kernel {name}")
        self._library.require([group])
        return self[name]


class KernelLibrary:
    """Addresses of the native kernels. `addresses[name]`; `call` runs a three-argument kernel, without the GIL.

    Groups of kernels are loaded when first asked for, the basic ones with the first; `require` brings several in at
    once, compiled in one go with `progress(done, total)` where they are not in the cache.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.addresses = _Addresses(self)
        self._progress = progress
        self._lock = threading.RLock()
        self._groups: set[str] = set()
        self._engines: list[Any] = []
        i64 = ctypes.c_int64
        # Numba's native form: int32 f(void *result, void **error, arguments); both pointers stay untouched here.
        self._type = ctypes.CFUNCTYPE(ctypes.c_int32, i64, i64, i64, i64, i64)
        self._scratch = ctypes.create_string_buffer(16)
        self._result = ctypes.addressof(self._scratch)
        self._functions: dict[str, Any] = {}

    def require(self, groups: Iterable[str], progress: Progress | None = None) -> None:
        """Load these groups (names of `catalog.MEMBERS`) if they are not yet."""
        with self._lock:
            wanted = [group for group in dict.fromkeys([BASIC, *groups]) if group not in self._groups]
            objects, missing = [], []
            for group in wanted:
                found = _kept(group)
                if found is None:
                    missing.append(group)
                else:
                    objects += found
            if missing:
                objects += _compiled(missing, progress or self._progress)
            if objects:
                self._link(objects)
            self._groups.update(wanted)

    def _link(self, objects: list[tuple[str, str, bytes]]) -> None:
        """Put object files into memory, with the smallest means that will do."""
        from cupaged.kernels.cpu.link import link

        if len({symbol for _, symbol, _ in objects}) < len(objects):
            raise RuntimeError("two kernels have one symbol")  # one of them would run in the other's place
        addresses = link([(symbol, code) for _, symbol, code in objects])
        if addresses is None:
            self._link_by_llvm(objects)
        else:
            self.addresses.update({name: addresses[symbol] for name, symbol, _ in objects})

    def _link_by_llvm(self, objects: list[tuple[str, str, bytes]]) -> None:
        import llvmlite.binding as llvm

        from cupaged.kernels.cpu.compile import target_machine

        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
        for _, _, code in objects:
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        found = {name: engine.get_function_address(symbol) for name, symbol, _ in objects}
        missing = [name for name, address in found.items() if not address]
        if missing:
            raise RuntimeError(f"kernels without an address: {', '.join(missing)}")
        self._engines.append(engine)
        self.addresses.update(found)

    def call(self, name: str, a: int, b: int = 0, c: int = 0) -> None:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._type(self.addresses[name])
        function(self._result, self._result + 8, a, b, c)


def cache_folders() -> list[Path]:
    """Folders for compiled kernels, best first: $CUPAGED_CACHE_DIR alone, or the user's cache, a temporary one."""
    folders = []
    chosen = os.environ.get("CUPAGED_CACHE_DIR")
    if chosen:
        return [Path(chosen) / "kernels"]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(base):
        folders.append(Path(base) / "cupaged" / "kernels")
    if hasattr(os, "getuid"):
        with contextlib.suppress(OSError):  # where nothing can be written, kernels may have been compiled before
            folders.append(Path(tempfile.gettempdir()) / f"cupaged-{os.getuid()}" / "kernels")
    return folders


def _version(package: str) -> str:
    """What version of a package is installed: the text of its own _version.py, which takes no import of anything."""
    spec = find_spec(package)
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError):
            return (Path(spec.origin).parent / "_version.py").read_text()
    from importlib.metadata import version

    return version(package)


@lru_cache(1)
def key() -> str:
    """Hash of all that the object code depends on."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for source in [*sorted(here.glob("*.py")), here.parent / "interface.py", here.parent / "philox.py"]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(repr((_FORMAT, _version("numba"), _version("llvmlite"), fingerprint())).encode())
    return digest.hexdigest()[:32]


def _trusted(status: os.stat_result) -> bool:
    """Whether only we, or root, could have written a file: it holds code that will run."""
    return not hasattr(os, "getuid") or (status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022)


def _read(path: Path) -> list[tuple[str, str, bytes]] | None:
    """The objects of a cache file, or None if it is missing, damaged or writable by others.

    What is checked is the opened file: a path may lead elsewhere a moment later. A pipe there must not hold us up.
    """
    try:
        with open(path, "rb", opener=without_waiting) as file:
            if not _trusted(os.fstat(file.fileno())):
                return None
            data = file.read()
    except OSError:
        return None
    if len(data) < 64 or hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    objects: list[tuple[str, str, bytes]] = []
    at = 32
    while at < len(data):
        sizes = [int.from_bytes(data[at + 4 * i : at + 4 * i + 4], "little") for i in range(3)]
        at += 12
        parts = []
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        objects.append((parts[0].decode(), parts[1].decode(), parts[2]))
    mark_used(path)
    return objects


def _write(path: Path, objects: list[tuple[str, str, bytes]]) -> bool:
    """Keep the objects: a temporary file, then a rename: a reader sees all or nothing. False if not possible."""
    body = b"".join(
        b"".join(len(part).to_bytes(4, "little") for part in parts) + b"".join(parts)
        for parts in ((name.encode(), symbol.encode(), code) for name, symbol, code in objects)
    )
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        return False
    return _read(path) is not None


def _paths(group: str) -> list[Path]:
    return [folder / f"cpu-{key()}-{group}.bin" for folder in cache_folders()]


def _kept(group: str) -> list[tuple[str, str, bytes]] | None:
    """A group's objects from the first cache folder that has them."""
    return next((found for found in map(_read, _paths(group)) if found is not None), None)


def _compiled(groups: list[str], progress: Progress | None) -> list[tuple[str, str, bytes]]:
    """Some groups' objects, compiled, and kept in the first cache folder that can be written.

    Says so in the log "cupaged": as a warning, which Python shows by default, where nobody watches the progress.
    """
    import logging

    from cupaged.kernels.cpu.compile_apart import compile_together

    log = logging.getLogger("cupaged")
    level = logging.WARNING if progress is None else logging.INFO
    log.log(level, "compiling kernels, once for this processor and kind of model: 10 to 30 seconds")
    began = time.monotonic()
    objects = compile_together(groups, progress, key())
    kept = set()
    for group in groups:
        members = [item for item in objects if GROUP_OF[item[0]] == group]
        kept.add(next((path.parent for path in _paths(group) if _write(path, members)), None))
    for folder in kept:
        if folder is None:
            tried = ", ".join(map(str, cache_folders())) or "any folder"
            warnings.warn(
                f"compiled kernels cannot be kept, so each start compiles: {tried}: not writable", stacklevel=2
            )
        else:
            remove_unused(folder)
    log.info("%d kernels compiled in %.1f s", len(objects), time.monotonic() - began)
    return objects


def load_library(progress: Progress | None = None) -> KernelLibrary:
    """The kernels of this process, one library for all; they come when they are required or first used.

    `progress(done, total)` is called while some are compiled.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = KernelLibrary(progress)
    return _loaded
