"""The command. Nothing but the standard library is imported before a GPU is known to be there."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUDGET = 285.0  # seconds of all sections together
QUICK_BUDGET = 150.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all is well, 1 a section failed, 2 there is no GPU that can be used, or the options are wrong."""
    parser = argparse.ArgumentParser(
        prog="gpu-check", description="Check cupaged on this machine's GPU, and time it. Less than five minutes."
    )
    parser.add_argument("--out", metavar="FILE.json", help="write everything there, after each section anew")
    parser.add_argument("--quick", action="store_true", help="shorter timings, half the time in all")
    parser.add_argument("--only", action="append", metavar="SECTION", help="run only this section; repeatable")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # in a process of its own: runner.in_process
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    from cupaged.device import why_no_gpu

    if (reason := why_no_gpu()) is not None:
        print(f"cupaged: error: device 'cuda': {reason}", file=sys.stderr)
        return 2
    from cupaged.bench.gpu_check.sections import INNER, SECTIONS
    from cupaged.bench.gpu_check.sizes import FULL, QUICK

    known = {section.name: section for section in (*SECTIONS, *INNER)}
    for name in [*(options.only or ()), *([options.section] if options.section else ())]:
        if name not in known:
            parser.error(f"there is no section {name}; sections are {', '.join(s.name for s in SECTIONS)}")
    if options.section:
        from cupaged.bench.gpu_check.runner import run_here

        return run_here(known[options.section], QUICK if options.quick else FULL, Path(options.rows))
    chosen = SECTIONS if options.only is None else tuple(known[name] for name in options.only)
    return check(chosen, options.out, options.quick)


def check(sections: Sequence[Any], out: str | None, quick: bool) -> int:
    """Run the sections; the table goes to standard output as it grows, JSON to `out`."""
    from cupaged.bench.gpu_check.report import Result, as_object, table
    from cupaged.bench.gpu_check.runner import in_process, run_all

    found_about = about(quick)
    print("  ".join(f"{name}: {value}" for name, value in found_about.items()))

    def publish(results: Sequence[Result]) -> None:
        print(table(results[-1:]), end="", flush=True)
        if out is not None:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            Path(out).write_text(json.dumps(as_object(results, found_about), indent=1, ensure_ascii=False) + "\n")

    arguments = ["--quick"] if quick else []
    results = run_all(
        sections, lambda section, seconds: in_process(arguments, section, seconds),
        QUICK_BUDGET if quick else BUDGET, publish,
    )  # fmt: skip
    return int(any(result.state == "failed" for result in results))


def about(quick: bool) -> dict[str, Any]:
    """Date, card and versions, for the record."""
    import cupaged
    from cupaged.bench.machine import describe_machine
    from cupaged.device.driver import WHEELS, find_card, installed_wheel

    card, machine = find_card(), describe_machine()
    return {
        "date": machine["date"],
        "card": card.name,
        "memory_gib": round(card.total_bytes / 2**30, 1),
        "compute_capability": f"{card.capability // 10}.{card.capability % 10}",
        "driver_cuda": f"{card.cuda // 1000}.{card.cuda % 1000 // 10}",
        "cupy": WHEELS.get(installed_wheel() or 0, "cupy"),
        "processor": machine["processor"],
        "python": machine["python"],
        "cupaged": cupaged.__version__,
        "quick": quick,
    }


if __name__ == "__main__":
    sys.exit(main())
