"""The check of a GPU, without one: what it reports, how a section fails, and every timing on a pretended GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cupaged.bench.gpu_check import __main__ as command
from cupaged.bench.gpu_check import runner, sections, suites
from cupaged.bench.gpu_check.report import Result, Row, as_object, table
from cupaged.bench.gpu_check.runner import Failed, Section, Skipped, outcome, read_rows, run_all, run_here
from cupaged.bench.gpu_check.sizes import TINY, Sizes
from cupaged.device import driver
from cupaged.errors import DeviceError

ROWS = [Row("one", 1234.5, "GB/s", "copy", 2000.0), Row("two", 3, ""), Row("three", 0.25, "µs", "none", 0.0)]


def section(run: Callable[[Sizes], Iterator[Row]], name: str = "it", limit: float = 30) -> Section:
    return Section(name, f"section {name}", limit, run)


# -- what is reported


def test_rows_become_a_table_and_an_object() -> None:
    results = [
        Result("a", "the first", "done", 1.25, ROWS),
        Result("b", "the second", "failed", 0.5, note="it broke"),
        Result("c", "the third", "skipped", 0.0, note="no tool"),
    ]
    assert table(results).splitlines() == [
        "done       1.2 s  the first",
        "    one    1,234 GB/s         copy 2,000, ratio 0.62",
        "    two    3",
        "    three  0.2500 µs          none 0",
        "failed     0.5 s  the second: it broke",
        "skipped    0.0 s  the third: no tool",
    ]
    found = as_object(results, {"card": "X"})
    assert (found["about"], found["ok"], found["complete"]) == ({"card": "X"}, False, False)
    assert as_object(results[:1], {})["complete"] is as_object(results[:1], {})["ok"] is True
    assert as_object([results[0], results[2]], {})["ok"] is True
    rows = found["sections"][0]["rows"]
    assert rows[0]["ratio"] == pytest.approx(0.61725) and rows[1]["ratio"] is None and rows[2]["ratio"] is None
    assert [Row.of(row) for row in json.loads(json.dumps(rows))] == ROWS


# -- sections


def test_rows_of_a_section_are_written_as_they_come(tmp_path: Path) -> None:
    def broken(sizes: Sizes) -> Iterator[Row]:
        yield ROWS[0]
        raise ZeroDivisionError("by\nzero")

    def found(sizes: Sizes) -> Iterator[Row]:
        yield from ROWS[:2]
        raise Failed("wrong tokens")

    def absent(sizes: Sizes) -> Iterator[Row]:
        raise Skipped("no torch")
        yield

    expected = [
        (lambda sizes: iter(ROWS), 0, "done", "", ROWS),
        (broken, 1, "failed", "ZeroDivisionError: by zero", ROWS[:1]),
        (found, 1, "failed", "wrong tokens", ROWS[:2]),
        (absent, 0, "skipped", "no torch", []),
    ]
    for index, (run, code, state, note, rows) in enumerate(expected):
        path = tmp_path / f"{index}.jsonl"
        assert run_here(section(run), TINY, path) == code
        result = outcome(section(run), code, read_rows(path), "noise", 1.0, 30)
        assert (result.state, result.note, list(result.rows)) == (state, note, rows)


def test_a_section_that_dies_or_hangs_keeps_the_rows_it_had(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0].as_object()) + '\n{"case": "cut o')
    lines = read_rows(path)
    dead = outcome(section(lambda sizes: iter(())), -11, lines, "starting\nCUDA error 700\n\n", 2.0, 30)
    assert (dead.state, dead.note, list(dead.rows)) == (
        "failed", "its process ended with SIGSEGV: CUDA error 700", ROWS[:1],
    )  # fmt: skip
    hung = outcome(section(lambda sizes: iter(())), None, lines, "", 30.0, 30)
    assert (hung.state, hung.note, list(hung.rows)) == ("failed", "took more than 30 s and was ended", ROWS[:1])
    early = outcome(section(lambda sizes: iter(())), 3, read_rows(tmp_path / "absent"), "", 1.0, 30)
    assert (early.state, early.note) == ("failed", "its process ended with exit code 3: no word")


def test_the_others_go_on_and_there_is_a_report_after_each() -> None:
    published: list[int] = []
    given: list[tuple[str, float]] = []

    def launch(which: Section, seconds: float) -> Result:
        given.append((which.name, seconds))
        time.sleep(1.2 if which.name == "slow" else 0)
        return Result(which.name, which.title, "failed" if which.name == "bad" else "done", 0.0)

    named = [section(lambda sizes: iter(()), name, 0.5 if name == "bad" else 30) for name in ("bad", "slow", "late")]
    results = run_all(named, launch, 2.0, lambda found: published.append(len(found)))
    assert [result.state for result in results] == ["failed", "done", "skipped"]
    assert results[-1].note == "no time was left" and published == [1, 2, 3]
    assert given[0] == ("bad", 0.5) and 1.5 < given[1][1] <= 2.0


def test_a_section_has_a_process_of_its_own_which_is_ended_with_all_it_started(tmp_path: Path) -> None:
    """The command on this machine: no GPU, so the process says so and ends; and one that would never end."""
    if driver_works():
        pytest.skip("this machine has a GPU")
    result = runner.in_process([], section(lambda sizes: iter(()), "facts"), 30)
    assert result.state == "failed" and result.note.startswith("its process ended with exit code 2: cupaged: error:")
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"],
        start_new_session=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    runner._end(process)
    assert process.stdout is not None and process.stdout.read() == b""  # nobody holds the pipe any more
    assert time.monotonic() - began < 30


def driver_works() -> bool:
    from cupaged.device import why_no_gpu

    return why_no_gpu() is None


# -- the command


def test_without_a_gpu_it_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(index: int = 0) -> driver.Card:
        raise DeviceError("no driver; install one")

    monkeypatch.setattr(driver, "find_card", missing)
    assert command.main([]) == 2
    assert capsys.readouterr() == ("", "cupaged: error: device 'cuda': no driver; install one\n")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_gpu_check_ends_at_once_without_a_gpu(root: Path, tmp_path: Path) -> None:
    if driver_works():
        pytest.skip("this machine has a GPU")
    given = [f"PYTHON={sys.executable}", f"VENV={tmp_path}/none", f"OUT={tmp_path}/check.json"]
    done = subprocess.run(["make", "-C", str(root), "gpu-check", *given], capture_output=True, text=True, timeout=60)
    line, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("cupaged: error: device 'cuda': ")
    assert all("make" in each for each in rest) and list(tmp_path.iterdir()) == []


def test_a_whole_check_writes_its_table_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def launched(arguments: Sequence[str], which: Section, seconds: float) -> Result:
        assert arguments == ["--quick"]
        state: Any = {"swaps": "failed", "sanitizer": "skipped"}.get(which.name, "done")
        return Result(which.name, which.title, state, 1.0, ROWS[:1], "a note" if state != "done" else "")

    monkeypatch.setattr(driver, "find_card", lambda index=0: driver.Card("NVIDIA H200", 90, 143771 << 20, 13000))
    monkeypatch.setattr(runner, "in_process", launched)
    out = tmp_path / "new" / "check.json"
    assert command.main(["--quick", "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert found["about"]["card"] == "NVIDIA H200" and found["about"]["driver_cuda"] == "13.0"
    assert [each["name"] for each in found["sections"]] == [each.name for each in sections.SECTIONS]
    assert found["ok"] is False
    printed = capsys.readouterr().out
    assert printed.startswith("date: ") and printed.count("1,234 GB/s") == len(sections.SECTIONS)
    assert "failed     1.0 s  swapping: a note" in printed
    assert command.main(["--quick", "--only", "decode"]) == 0
    with pytest.raises(SystemExit) as stopped:
        command.main(["--only", "nothing"])
    assert stopped.value.code == 2 and "sections are facts, models, decode" in capsys.readouterr().err


def test_limits_of_the_sections_are_within_reason() -> None:
    assert command.BUDGET < 300 and all(section.limit <= 150 for section in sections.SECTIONS)
    assert len({section.name for section in (*sections.SECTIONS, *sections.INNER)}) == len(sections.SECTIONS) + 1


# -- tests and tools that it starts

REPORT = '<testsuites><testsuite tests="5" failures="{0}" errors="0" skipped="{1}">{2}</testsuite></testsuites>'
CASE = '<testcase name="test_x[{}]"><failure/></testcase>'


def test_what_a_test_run_found_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"

    def counted(failures: int, skipped: int, in_time: bool = True) -> tuple[list[float], str]:
        path.write_text(REPORT.format(failures, skipped, "".join(CASE.format(i) for i in range(failures))))
        rows: list[float] = []
        try:
            for row in suites.counted(path, "", in_time):
                rows.append(row.value)
        except Failed as why:
            return rows, str(why)
        return rows, ""

    assert counted(0, 1) == ([4, 0, 1], "")
    assert counted(4, 0) == ([1, 4, 0], "test_x[0], test_x[1], test_x[2] and 1 more")
    assert counted(0, 0, in_time=False) == ([5, 0, 0], "not all ran: the time was up")
    assert counted(0, 5) == ([0, 0, 5], "no test ran")
    path.unlink()
    with pytest.raises(Failed, match="the tests did not run: collected nothing"):
        list(suites.counted(path, "\ncollected nothing\n\n", True))


def test_a_test_run_is_this_pytest_with_a_gpu_required(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], dict[str, str], float]] = []

    def bounded(arguments: Sequence[str], cwd: Path, env: dict[str, str], seconds: float) -> tuple[str, bool]:
        asked.append((list(arguments), env, seconds))
        report = next(a.partition("=")[2] for a in arguments if a.startswith("--junitxml="))
        Path(report).write_text(REPORT.format(0, 0, ""))
        return "", True

    monkeypatch.setattr(suites, "bounded", bounded)
    assert [row.value for row in suites.kernel_tests(9.0)] == [5, 0, 0]
    assert [row.value for row in suites.model_tests(8.0)] == [5, 0, 0]
    (kernels, env, seconds), (models, _, _) = asked
    assert seconds == 9.0 and env["CUPAGED_GPU"] == "required"
    assert kernels[-2:] == ["-k", "cuda-device"]
    files = {path.relative_to(root).as_posix() for path in (root / "tests" / "kernels").glob("test_kernel_*.py")}
    on_any = {name for name in files if "def test_" in (text := (root / name).read_text()) and "(ops: Any" in text}
    assert {argument for argument in kernels if argument.startswith("tests/")} == on_any
    assert models[-1] == "tests/gpu"
    monkeypatch.setattr(suites.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Skipped, match=r"pytest is not installed; pip install pytest hypothesis"):
        list(suites.model_tests(8.0))
    monkeypatch.chdir("/")
    monkeypatch.setattr(suites, "__file__", "/usr/lib/python3/site-packages/cupaged/bench/gpu_check/suites.py")
    with pytest.raises(Skipped, match="the tests are in the checkout"):
        suites.checkout()


def test_a_program_that_takes_too_long_is_interrupted_and_may_still_speak(tmp_path: Path) -> None:
    patient = (
        "import time\ntry:\n    print('on', flush=True); time.sleep(60)\nexcept KeyboardInterrupt:\n    print('bye')"
    )
    assert suites.bounded([sys.executable, "-c", patient], tmp_path, {}, 2.0) == ("on\nbye\n", False)
    assert suites.bounded([sys.executable, "-c", "print('hi')"], tmp_path, {}, 30.0) == ("hi\n", True)


def test_a_program_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suites, "_GRACE", 0.2)
    stubborn = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('on', flush=True)\ntime.sleep(60)"
    )
    assert suites.bounded([sys.executable, "-c", stubborn], tmp_path, {}, 2.0) == ("on\n", False)


def test_what_the_sanitizer_says_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suites.errors_found("memcheck", "========= ERROR SUMMARY: 0 errors\n", True) == 0
    assert suites.errors_found("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)\n", True) == 0
    bad = "=========\n========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 12 errors\n"
    with pytest.raises(Failed, match="memcheck: 12 errors: "):
        suites.errors_found("memcheck", bad, True)
    with pytest.raises(Failed, match="memcheck: the time was up: half"):
        suites.errors_found("memcheck", "half", False)
    with pytest.raises(Failed, match="memcheck: no summary: nothing was said"):
        suites.errors_found("memcheck", "", True)
    with pytest.raises(Skipped, match="does not support"):
        suites.errors_found("memcheck", "========= Error: Device not supported.", True)
    monkeypatch.setattr(suites.shutil, "which", lambda name, path=None: None)
    with pytest.raises(Skipped, match="not on PATH"):
        list(suites.sanitizer(1.0))
    monkeypatch.setattr(suites.shutil, "which", lambda name, path=None: "/opt/sanitizer")
    said = []

    def bounded(arguments: Sequence[str], cwd: Path, env: dict[str, str], seconds: float) -> tuple[str, bool]:
        said.append(list(arguments))
        return "ERROR SUMMARY: 0 errors", True

    monkeypatch.setattr(suites, "bounded", bounded)
    assert [row.value for row in suites.sanitizer(10.0)] == [0, 0]
    assert said[0][:3] == [sys.executable, "-m", "cupaged.bench.gpu_check"]
    assert [arguments[:3] for arguments in said[1:]] == [
        ["/opt/sanitizer", "--tool", name] for name in ("memcheck", "racecheck")
    ]
    monkeypatch.setattr(suites, "bounded", lambda *arguments: ("", False))
    with pytest.raises(Failed, match="did not end without the tool either"):
        list(suites.sanitizer(10.0))
