"""The command line: `cupaged generate`, `cupaged info`. `main` is the script's entry; the rest loads when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `cupaged` with `argv` (default: the process's arguments) and return the exit code; never raises."""
    # NumPy's BLAS is not used; to start its threads on every core costs 50 ms of each process.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from cupaged.cli.app import run

        return run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:  # while the imports ran; later ones are met in `run`
        sys.stderr.write("cupaged: interrupted\n")
        return 130
