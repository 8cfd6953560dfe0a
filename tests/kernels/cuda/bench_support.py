"""What the tests of the bench share."""

from __future__ import annotations

import os

import pytest
from cudabench import BenchMissing
from cudabench.asan import sanitizer_library
from cudabench.build import compiler
from cudabench.nvrtc import library

ORDERS = ["forward", "reverse", "random:7"]


def skip_unless(available: object, tool: str) -> pytest.MarkDecorator:
    """Skip where a tool is missing, unless $CUDABENCH=required: .ci/run sets it, so that nothing is skipped there."""
    missing = None
    try:
        available()  # type: ignore[operator]
    except BenchMissing as error:
        missing = str(error)
    if missing and os.environ.get("CUDABENCH") == "required":
        raise RuntimeError(f"CUDABENCH=required, but {missing}")
    return pytest.mark.skipif(missing is not None, reason=f"{tool}: {missing}")


need_emulator = skip_unless(compiler, "CUDA C on the CPU")
need_sanitizers = skip_unless(sanitizer_library, "sanitizers on emulated CUDA C")
need_nvrtc = skip_unless(library, "CUDA C compiled by NVRTC")
