"""check="asan": the launch in a child process, since AddressSanitizer must be there before anything else is loaded.

The child finds overflows of shared memory, of local arrays and of the arrays passed, and what UBSan finds: overflow of
signed integers, shifts too far, misaligned pointers, null pointers, floats that no integer can hold.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabench.build import compiler
from cudabench.errors import BenchError, BenchMissing, KernelFault

if TYPE_CHECKING:
    from cudabench.emulator import Kernel


@functools.cache
def sanitizer_library() -> str:
    """libasan.so of g++."""
    path = subprocess.run([compiler()[0], "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():
        raise BenchMissing("g++ has no libasan (Debian, Ubuntu: apt-get install libasan8)")
    return path


def launch_in_child(
    kernel: Kernel, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int, order: str
) -> None:
    """The launch of `Kernel.__call__`; arrays come back changed, a report becomes a KernelFault."""
    from cudabench.emulator import Undefined

    kernel.library_path("asan")  # built here, with errors of g++ told here
    plain = [arg.array if isinstance(arg, Undefined) else arg for arg in args]
    names: dict[int, int] = {}  # arrays passed twice stay one array
    first = [names.setdefault(id(arg), number) for number, arg in enumerate(plain)]
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request", Path(folder) / "answer"
        request.write_bytes(pickle.dumps((kernel, list(grid), list(block), plain, first, shared_mem, order)))
        env = {
            **os.environ,
            "LD_PRELOAD": sanitizer_library(),
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=1:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=0",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-m", "cudabench.asan", str(request), str(answer)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if not answer.exists():
            raise KernelFault(f"{kernel.name}: {_summary(done.stderr)}")
        error, arrays = pickle.loads(answer.read_bytes())
    for array, result in zip(plain, arrays, strict=True):
        if isinstance(array, np.ndarray):
            array[...] = result
    if isinstance(error, Exception):
        raise error


def _summary(report: str) -> str:
    """The one line of a sanitizer's report that says what and where."""
    undefined = re.search(r"^(.*): runtime error: (.*)$", report, re.M)
    if undefined is not None:
        return f"{undefined[1]}: {undefined[2]}"
    address = re.search(r"AddressSanitizer: (.*?) (?:on|at pc|\()", report)
    access = re.search(r"^((?:READ|WRITE) of size \d+)", report, re.M)
    frame = re.search(r"#\d+ 0x\w+ in \S+ (\S*\.cuh?:\d+)", report)
    variable = re.search(r"is located (.*)$", report, re.M)
    parts = [match[1] for match in (frame, address, access, variable) if match is not None]
    return ": ".join(parts) if address is not None else f"the child ended without an answer: {report[-2000:]}"


def _child(request: Path, answer: Path) -> None:
    kernel, grid, block, args, first, shared_mem, order = pickle.loads(request.read_bytes())
    args = [args[number] for number in first]
    error: Exception | None = None
    try:
        kernel.launch("asan", grid, block, args, shared_mem=shared_mem, order=order)
    except (KernelFault, BenchError) as raised:
        error = raised
    answer.write_bytes(pickle.dumps((error, args)))


if __name__ == "__main__":
    _child(Path(sys.argv[1]), Path(sys.argv[2]))
