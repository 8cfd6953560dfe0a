"""Checks that are programs of their own: our tests on the device, and compute-sanitizer."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

from cupaged.bench.gpu_check.report import Row
from cupaged.bench.gpu_check.runner import Failed, Skipped

_WORKERS = 8  # processes of a test run, as far as there are cores: most of the time is NVRTC's
_GRACE = 15.0  # seconds that a test run has to write down what it found, once its time is up
_TOOLS = ("memcheck", "racecheck")
KERNELS = ("attention", "blocks", "dense", "invariance", "sampling")  # files of tests that every implementation passes


def model_tests(seconds: float) -> Iterator[Row]:
    """tests/gpu: golden models, graphs, swapping and partial residency, on the device."""
    return _tests(["tests/gpu"], seconds)


def kernel_tests(seconds: float) -> Iterator[Row]:
    """The conformance suite of all kernels, on the device."""
    return _tests([*(f"tests/kernels/test_kernel_{name}.py" for name in KERNELS), "-k", "cuda-device"], seconds)


def checkout() -> Path:
    """The folder with tests/: the current one, or the one that this file is in. Skipped without."""
    for place in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (place / "tests" / "gpu").is_dir() and (place / "pyproject.toml").is_file():
            return place
    raise Skipped("the tests are in the checkout, not in an installed package; run it there")


def _tests(selected: Sequence[str], seconds: float) -> Iterator[Row]:
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"{missing[0]} is not installed; pip install {' '.join(missing)}")
    home = checkout()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--maxfail=20", "--no-header"]
        command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={report}"]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(min(_WORKERS, os.cpu_count() or 1))]
        env = {**os.environ, "CUPAGED_GPU": "required"}
        said, in_time = bounded([*command, *selected], home, env, seconds)
        yield from counted(report, said, in_time)


def bounded(command: Sequence[str], cwd: Path, env: dict[str, str], seconds: float) -> tuple[str, bool]:
    """(what a program said, whether it ended within its time). Else it is interrupted, as by Ctrl-C, then killed."""
    process = subprocess.Popen(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        return process.communicate(timeout=seconds)[0], True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=_GRACE)[0], False
    process.kill()
    return process.communicate()[0], False


def counted(report: Path, said: str, in_time: bool) -> Iterator[Row]:
    """Tests that passed, failed and were left out. Failed if one did, or if not all ran."""
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing was said")
        raise Failed(f"the tests did not run: {last}") from None
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    yield Row("tests that passed", tests - failures - errors - skipped, "")
    yield Row("tests that failed", failures + errors, "")
    yield Row("tests left out", skipped, "")
    if failures or errors:
        names = [case.get("name", "?") for suite in suites for case in suite.iter("testcase") if _bad(case)]
        raise Failed(f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}")
    if not in_time:
        raise Failed("not all ran: the time was up")
    if tests == skipped:
        raise Failed("no test ran")


def _bad(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def sanitizer(seconds: float) -> Iterator[Row]:
    """compute-sanitizer over a small model's run: errors of memory, then races in shared memory."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        raise Skipped("compute-sanitizer is not on PATH")
    each = seconds / (1 + len(_TOOLS))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        program = [sys.executable, "-m", "cupaged.bench.gpu_check", "--section", "small"]
        program += ["--rows", str(Path(folder) / "rows.jsonl")]
        said, in_time = bounded(program, Path.cwd(), dict(os.environ), each)  # kernels are compiled without the tool
        if not in_time:
            raise Failed("the small model's run did not end without the tool either")
        for name in _TOOLS:
            command = [tool, "--tool", name, "--error-exitcode", "9", *program]
            said, in_time = bounded(command, Path.cwd(), dict(os.environ), each)
            yield Row(f"{name}: errors", errors_found(name, said, in_time), "")


def errors_found(name: str, said: str, in_time: bool) -> int:
    """0 from the tool's summary; Failed if it found something or did not end, Skipped if it cannot run here."""
    if "Device not supported" in said:
        raise Skipped("compute-sanitizer does not support this device, or the machine it is in")
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", said)
    if summary is None:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing was said")
        raise Failed(f"{name}: {'no summary' if in_time else 'the time was up'}: {last}")
    if summary[1] != "0":
        first = next((line for line in said.splitlines() if line.startswith("=========")), "")
        raise Failed(f"{name}: {summary[1]} errors: {first.strip('= ')}")
    return 0
