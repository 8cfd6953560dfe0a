"""Compiles translated kernels with g++ into shared objects, cached by content."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from cudabench.errors import BenchError, BenchMissing
from cudabench.translate import translate

HERE = Path(__file__).resolve().parent
KEEP_DAYS = 14
# -ffp-contract=off: a sum is fused where the source says fmaf, so that equal sources give equal bits.
COMMON = ["-std=gnu++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-fno-exceptions", "-fno-rtti",
          "-ffp-contract=off", "-fno-math-errno", "-march=native", "-w"]  # fmt: skip
# Of the optimisations of -O1, "race" leaves out those that split a 16-byte load into smaller ones: each load of the
# source stays one request, with its alignment.
MODES = {
    "plain": ["-O2"],
    "race": ["-O1", "-gdwarf-4", "-fno-tree-sra", "-fno-tree-fre", "-fno-tree-pre", "-fno-tree-forwprop",
             "-fno-omit-frame-pointer", "-DCUDABENCH_CHECKED"],
    "asan": ["-O1", "-gdwarf-4", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
             "-fno-sanitize-recover=undefined"],
}  # fmt: skip
RUNTIME_FLAGS = {
    "plain": ["-O2"],
    "race": ["-O2", "-DCUDABENCH_CHECKED"],
    "asan": ["-O1", "-fsanitize=address"],
}
RUNTIME = {
    "plain": ("scheduler.cpp", "warp.cpp"),
    "race": ("scheduler.cpp", "warp.cpp", "check.cpp", "traffic.cpp"),
    "asan": ("scheduler.cpp", "warp.cpp"),
}


def cache_folder() -> Path:
    """`$CUPAGED_CACHE_DIR/cudabench`, else `~/.cache/cupaged/cudabench`; made private. Delete it whenever you like."""
    base = os.environ.get("CUPAGED_CACHE_DIR")
    home = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cupaged"
    folder = home / "cudabench"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="cudabench-"))
    return folder


def kept(path: Path) -> bool:
    """Whether a result is in the cache; it then counts as used today. The first that is not clears away others that
    were not used for `KEEP_DAYS`."""
    if path.exists():
        os.utime(path)
        return True
    oldest = time.time() - KEEP_DAYS * 86400
    for old in path.parent.iterdir():
        with contextlib.suppress(OSError):  # another process may be at the same
            if old.is_file() and old.stat().st_mtime < oldest:
                old.unlink()
    return False


@functools.cache
def compiler() -> tuple[str, str]:
    """(path of g++, what it calls itself). BenchMissing without one, or on another processor than x86-64."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BenchMissing(f"the emulator switches fibers on x86-64 only, this is {platform.machine()}")
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        raise BenchMissing("g++ is not installed (Debian, Ubuntu: apt-get install g++)")
    native = subprocess.run([path, "-march=native", "-Q", "--help=target"], capture_output=True, text=True)
    version = subprocess.run([path, "--version"], capture_output=True, text=True)
    return path, version.stdout.partition("\n")[0] + native.stdout


@functools.cache
def _sources_of(folder: str) -> str:
    return "".join(file.name + file.read_text() for file in sorted((HERE / folder).iterdir()))


def _key(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in (*parts, compiler()[1], _sources_of("include"), COMMON, MODES, RUNTIME_FLAGS):
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()[:24]


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line or "undefined reference" in line]
        raise BenchError(f"{what}: g++ says\n" + "\n".join(errors[:20] or done.stderr.splitlines()[-20:]))


def _runtime_objects(mode: str) -> list[str]:
    objects = []
    for name in RUNTIME[mode]:
        target = cache_folder() / f"{Path(name).stem}-{mode}-{_key(_sources_of('runtime'))}.o"
        if not kept(target):
            made = target.with_suffix(f".{os.getpid()}.tmp")
            flags = RUNTIME_FLAGS[mode]
            folders = [f"-I{HERE / 'include'}", f"-I{HERE / 'runtime'}"]
            _run([compiler()[0], *COMMON, *flags, *folders, "-c", str(HERE / "runtime" / name), "-o", str(made)], name)
            os.replace(made, target)
        objects.append(str(target))
    return objects


def build(source: Path, defines: tuple[str, ...], folders: tuple[Path, ...], mode: str) -> tuple[Path, list[str]]:
    """(shared object, names of its kernels) of a .cu file. BenchError with g++'s errors, in lines of the .cu file."""
    code, names = translate(source, folders)
    runtime = _runtime_objects(mode)
    target = cache_folder() / f"{source.stem}-{mode}-{_key(code, defines, [Path(path).name for path in runtime])}.so"
    if not kept(target):
        obj = _object(source, code, defines, mode)
        made = target.with_suffix(f".{os.getpid()}.tmp")
        link = ["-fsanitize=address,undefined"] if mode == "asan" else []
        shared = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", *link, "-o", str(made), str(obj), *runtime, "-lm"]
        _run([compiler()[0], *shared], str(source))
        os.replace(made, target)
    return target, names


def _object(source: Path, code: str, defines: tuple[str, ...], mode: str) -> Path:
    """The compiled kernels alone: kept, so that a change of the runtime does not compile them again."""
    target = cache_folder() / f"{source.stem}-{mode}-{_key(code, defines)}.o"
    if not kept(target):
        flags = [*COMMON, *MODES[mode], *defines, f"-I{HERE / 'include'}", f"-fdebug-prefix-map={Path.cwd()}=."]
        if mode == "race":
            flags += ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            cpp, made = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.o"
            cpp.write_text(code)
            _run([compiler()[0], *flags, "-c", str(cpp), "-o", str(made)], str(source))
            os.replace(made, target)
    return target
