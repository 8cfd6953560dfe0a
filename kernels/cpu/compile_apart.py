"""Kernels compiled by several processes at once: what one alone takes half a minute for.

A process that helps is this interpreter again, with the same path to import from; it is told groups by its standard
input and writes frames to its standard output:

    b"k" + key          first: what its object code depends on (library.py); another key than ours, and it is not used
    b"p" + count        kernels of its groups that it has begun
    b"o" + object       name, symbol and code of a kernel
    b"e"                last

each payload after its length in 4 bytes. Whatever goes wrong with it (no second interpreter to be had, as in an
application that holds Python; nothing found to import; killed), its groups are compiled here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO

Objects = list[tuple[str, str, bytes]]
Progress = Callable[[int, int], None]

# Seconds that a group takes, about, by its family (Zen 4, 2026-11-30): only shares are made of them.
_SECONDS = {"basic": 6.0, "cache": 11.0, "quantised": 2.5, "exact": 2.6, "weights": 1.6}
_LITTLE = 0.3
_WORTH = 2.0  # seconds: less is not worth another process, which takes one to import the compiler
_BEGIN = (
    "import sys, json; given = json.loads(sys.stdin.readline()); sys.path[:] = given['path']; "
    "from cupaged.kernels.cpu.compile_apart import work; work(given['groups'])"
)


def shares(groups: Sequence[str], processes: int) -> list[list[str]]:
    """Groups dealt to at most `processes`, the largest share first, none of it hardly worth a process but the first."""
    bins: list[tuple[float, list[str]]] = [(0.0, []) for _ in range(max(1, processes))]
    for group in sorted(groups, key=_seconds, reverse=True):
        least = min(range(len(bins)), key=lambda i: bins[i][0])
        bins[least] = (bins[least][0] + _seconds(group), [*bins[least][1], group])
    bins.sort(key=lambda share: -share[0])
    dealt = [members for seconds, members in bins[1:] if seconds >= _WORTH]
    taken = {group for members in dealt for group in members}
    return [[group for group in groups if group not in taken], *dealt]


def _seconds(group: str) -> float:
    return _SECONDS.get(group.partition("-")[0], _LITTLE)


def interpreter() -> str | None:
    """A Python to start; None where `sys.executable` is none, as in a program that holds the interpreter."""
    path = sys.executable or ""
    named = os.path.basename(path).lower().startswith(("python", "pypy"))
    return path if named and not getattr(sys, "frozen", False) else None


def processors() -> int:
    """On how many processors this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_together(groups: Sequence[str], progress: Progress | None, key: str) -> Objects:
    """The objects of some groups (`compile_kernels`), by as many processes as there are processors and work for them.

    progress(done, total), of all kernels, is called by this thread alone.
    """
    from cupaged.kernels.cpu.catalog import MEMBERS

    program = interpreter()
    own, *others = shares(groups, processors() if program else 1)
    helpers = [Helper(program or "", members, key) for members in others]
    counts = {group: len(MEMBERS[group]) for group in groups}
    total, begun = sum(counts.values()), 0

    def tell(done: int, _: int = 0) -> None:
        if progress is not None:
            progress(min(total, begun + done + sum(helper.begun for helper in helpers)), total)

    try:
        for helper in helpers:
            helper.start()
        objects = _compile_here(own, tell)
        begun = sum(counts[group] for group in own)
        for helper in helpers:
            while helper.running(0.2):
                tell(0)
            found = helper.objects()
            if found is None:
                helper.begun = 0
                found = _compile_here(helper.groups, tell)
                helper.begun = sum(counts[group] for group in helper.groups)
            objects += found
        tell(0)
    finally:
        for helper in helpers:
            helper.stop()
    return objects


def _compile_here(groups: Sequence[str], progress: Progress) -> Objects:
    from cupaged.kernels.cpu.compile import compile_kernels

    return list(compile_kernels(groups, progress))


class Helper:
    """A process that compiles `groups`. begun: of its kernels; read and written as a whole, so without a lock."""

    def __init__(self, program: str, groups: Sequence[str], key: str) -> None:
        self.groups = groups
        self.begun = 0
        self._program = program
        self._key = key.encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._found: Objects = []
        self._whole = False

    def start(self) -> None:
        """Nothing happens where no process can be had: `objects` then is None."""
        quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        given = json.dumps({"path": sys.path, "groups": list(self.groups)})
        command = [self._program, "-I", *(["-B"] if sys.dont_write_bytecode else []), "-c", _BEGIN]
        try:
            self._process = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
            assert self._process is not None and self._process.stdin is not None
            with self._process.stdin as pipe:
                pipe.write(given.encode() + b"\n")
        except (OSError, ValueError):
            self.stop()
            return
        self._reader.start()

    def running(self, seconds: float) -> bool:
        """Whether it still is after so long a wait, or the end of it."""
        if not self._reader.is_alive():
            return False
        self._reader.join(seconds)
        return self._reader.is_alive()

    def objects(self) -> Objects | None:
        """What it made, once it runs no longer; None if that is not everything."""
        return self._found if self._whole else None

    def stop(self) -> None:
        """End it, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if self._reader.is_alive():
                self._reader.join()
            if process.stdout is not None:
                process.stdout.close()

    def _read(self) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        known = False
        while (frame := _frame(process.stdout)) is not None:
            kind, payload = frame
            if kind == b"k":
                known = payload == self._key
            elif kind == b"p":
                self.begun = int.from_bytes(payload, "little")
            elif kind == b"o":
                name, symbol, code = payload.split(b"\0", 2)
                self._found.append((name.decode(), symbol.decode(), code))
            elif kind == b"e":
                self._whole = known
                return


def _frame(pipe: IO[bytes]) -> tuple[bytes, bytes] | None:
    """The next frame, None at the end, of half a frame too."""
    head = pipe.read(5)
    if len(head) < 5:
        return None
    size = int.from_bytes(head[1:], "little")
    payload = pipe.read(size)
    return (head[:1], payload) if len(payload) == size else None


def work(groups: Sequence[str]) -> None:
    """What a helping process does."""
    import signal

    from cupaged.kernels.cpu.compile import compile_kernels
    from cupaged.kernels.cpu.library import key

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for who started us
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever prints: not among the frames

        def send(kind: bytes, payload: bytes = b"") -> None:
            out.write(kind + len(payload).to_bytes(4, "little") + payload)
            out.flush()

        send(b"k", key().encode())
        for name, symbol, code in compile_kernels(groups, lambda done, _: send(b"p", done.to_bytes(4, "little"))):
            send(b"o", name.encode() + b"\0" + symbol.encode() + b"\0" + code)
        send(b"e")
