"""Comparing runtimes: who runs when, what is said of one that fails, the table. The runtimes here are pretended."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA
from click.testing import CliRunner, Result

from cupaged.bench.peers import catalog
from cupaged.bench.peers.__main__ import command
from cupaged.bench.peers.catalog import RUNTIMES, Runtime, chosen
from cupaged.bench.peers.process import Process, RuntimeFailed
from cupaged.bench.peers.rounds import Measured, Rounds, Setting
from cupaged.bench.peers.table import as_json, markdown, rows_of
from cupaged.bench.peers.workloads import VOCABULARY, WORKLOADS
from cupaged.errors import OptionError

DECODE, STREAMS4 = WORKLOADS[0], WORKLOADS[1]


def pretend(name: str, variant: str = "", **options: Any) -> Runtime:
    return Runtime(name, "engine_pretend", "file", variant=variant, **options)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pretended runtimes were asked to do, in order."""
    path = tmp_path / "runs.log"
    path.touch()
    monkeypatch.setenv("PRETEND_LOG", str(path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return path


@pytest.fixture
def rounds(tmp_path: Path, log: Path) -> Callable[..., tuple[Rounds, list[str]]]:
    def make(*runtimes: Runtime, count: int = 2) -> tuple[Rounds, list[str]]:
        told: list[str] = []
        setting = Setting(lambda _: sys.executable, 1, count, tmp_path, tmp_path / "lock")
        return Rounds(setting, runtimes, tmp_path / "weights.gguf", told.append), told

    return make


def test_rounds_are_interleaved_after_one_that_warms(rounds: Callable[..., Any], log: Path) -> None:
    runs, _ = rounds(pretend("cupaged"), pretend("a", "first"), pretend("b", "second", prepares=True))
    runs.run_workloads([DECODE, STREAMS4])
    lines = log.read_text().splitlines()
    names = ["ours", "first", "second"]
    assert lines[:3] == [f"{name} 1x8+4 of 1" for name in names]  # warming: few tokens
    assert lines[3:9] == [f"{name} 1x8+128 of 1" for name in names] * 2
    assert lines[12:] == [f"{name} 4x64+64 of 1" for name in names] * 2
    assert {key: len(values) for key, values in runs.measured.figures.items()} == {
        (name, workload): 2 for name in ("cupaged", "a", "b") for workload in ("decode", "streams4")
    }
    assert all(rate > 0 for rates in runs.measured.figures.values() for rate in rates)
    assert runs.measured.versions == dict.fromkeys(("cupaged", "a", "b"), "pretend 1")
    assert not runs.measured.failures


@pytest.mark.parametrize(
    ("variant", "workload", "reason"),
    [
        ("refuses", "", "RuntimeError: no such model"),
        ("unpreparable", "", "ValueError: this file cannot be made"),
        ("raises", "streams4", "MemoryError: too many streams"),
        ("short", "decode", "made 3 tokens where 4 were asked for"),
        ("dies", "decode", "ended with exit code 7 after: the last words"),
    ],
)
def test_a_runtime_that_fails_is_named_and_the_others_go_on(
    variant: str, workload: str, reason: str, rounds: Callable[..., Any]
) -> None:
    runs, told = rounds(pretend("cupaged"), pretend("bad", variant, prepares=variant == "unpreparable"), count=1)
    runs.run_workloads([DECODE, STREAMS4])
    assert runs.measured.failures["bad", workload] == reason
    assert any(line.startswith("bad") and reason in line for line in told)
    assert {("cupaged", "decode"), ("cupaged", "streams4")} <= set(runs.measured.figures)
    assert ("bad", workload or "decode") not in runs.measured.figures


def test_a_runtime_that_is_not_installed_is_left_out(rounds: Callable[..., Any]) -> None:
    runs, _ = rounds(pretend("cupaged"), Runtime("absent", "engine_absent", "file"), count=1)
    runs.run_workloads([DECODE])
    assert runs.measured.failures == {("absent", ""): "ModuleNotFoundError: No module named 'engine_absent'"}


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailed, match="nowhere/python cannot be run"):
        Process(str(tmp_path / "nowhere/python"), "engine_pretend", {"threads": 1}, tmp_path / "log")


def test_a_runtime_that_hangs_is_ended(tmp_path: Path, log: Path) -> None:
    options = {"weights": "w", "threads": 1, "variant": "", "text": False}
    process = Process(sys.executable, "engine_pretend", options, tmp_path / "log", seconds=30)
    assert process.ready() == "pretend 1"
    process._seconds = 0.05
    with pytest.raises(RuntimeFailed, match="gave no answer"):
        process.answer("result")  # nothing was asked
    assert process._process.poll() is not None


def test_first_tokens_and_memory_are_those_of_fresh_processes(rounds: Callable[..., Any], log: Path) -> None:
    runs, _ = rounds(pretend("cupaged"), pretend("a", "first"), count=1)
    runs.run_startups()
    assert not runs.measured.failures
    assert {name for _, name in runs.measured.figures} == {"first_text", "first_ids", "memory"}
    assert 0 < runs.measured.figures["a", "first_text"][0] < 60
    assert 1 < runs.measured.figures["a", "memory"][0] < 1000  # MiB of an interpreter
    assert log.read_text().splitlines() == ["ours 1x2032+16 of 1", "first 1x2032+16 of 1"]


def test_each_round_asks_for_other_prompts_and_each_run_for_the_same() -> None:
    jobs = [workload.job(number) for workload in WORKLOADS for number in range(3)]
    prompts = [tuple(prompt) for job in jobs for prompt in job["prompts"]]
    assert len(set(prompts)) == len(prompts)
    assert all(token in VOCABULARY for prompt in prompts for token in prompt)
    assert WORKLOADS[3].job(1) == WORKLOADS[3].job(1)


def figures(**rates: dict[str, list[float]]) -> Measured:
    measured = Measured()
    for workload, by_name in rates.items():
        for name, values in by_name.items():
            measured.figures[name.replace("_f32", "-f32").replace("_q4", "-q4_0"), workload] = values
    return measured


def test_rows_hold_medians_and_the_ratio_to_the_best_peer() -> None:
    rates = {
        "cupaged": [150.0, 170.0, 90.0],
        "llama_cpp": [100.0, 90.0, 120.0],
        "openvino": [99.0],
        "llama_cpp_q4": [125.0],
    }
    (row,) = rows_of("quantised", figures(decode=rates))
    assert row.figures == {"cupaged": 150, "llama_cpp": 100, "llama_cpp-q4_0": 125, "openvino": 99}
    assert (row.ratio, row.best, row.any_ratio, row.any_best) == (1.5, "llama_cpp", 1.2, "llama_cpp-q4_0")
    assert row.met is False  # 1.6 and 1.25 are wanted
    (row,) = rows_of("quantised", figures(decode=rates | {"cupaged": [160.0]}))
    assert row.met is True
    (row,) = rows_of("quantised", figures(decode=rates | {"cupaged": [160.0], "llama_cpp_q4": [129.0]}))
    assert row.ratio == 1.6 and row.met is False  # the best peer on its own file is too near
    (row,) = rows_of("quantised", figures(decode=rates | {"cupaged": [160.0], "llama_cpp_q4": [20.0]}))
    assert (row.any_ratio, row.met) == (None, True)


def test_groups_are_compared_apart() -> None:
    measured = figures(prefill512={"cupaged": [1000.0], "cupaged_f32": [330.0], "transformers": [300.0]})
    (row,) = rows_of("float32", measured)
    assert (row.figures, row.met) == ({"cupaged-f32": 330.0, "transformers": 300.0}, True)
    (row,) = rows_of("quantised", measured)
    assert (row.ratio, row.best, row.met) == (None, None, None)


def test_of_seconds_and_memory_less_is_better() -> None:
    measured = figures(
        first_text={"cupaged": [0.5], "llama_cpp": [0.25]}, memory={"cupaged": [400.0], "openvino": [600.0]}
    )
    first, memory = rows_of("quantised", measured)
    assert (first.ratio, first.best, first.limit, first.met) == (0.5, "llama_cpp", 0.7, True)
    assert (memory.ratio, memory.best, memory.limit, memory.met) == (1.5, "openvino", 300.0, False)


def test_without_ours_or_without_peers_there_is_no_ratio() -> None:
    (row,) = rows_of("quantised", figures(streams32={"openvino": [300.0]}))
    assert (row.ratio, row.best, row.met) == (None, "openvino", None)
    (row,) = rows_of("quantised", figures(streams32={"cupaged": [300.0]}))
    assert (row.ratio, row.best, row.met) == (None, None, None)
    assert rows_of("quantised", Measured()) == []


def test_the_table_as_markdown_and_json() -> None:
    measured = figures(
        decode={"cupaged": [160.0], "llama_cpp": [100.0], "llama_cpp_q4": [120.0]},
        streams4={"cupaged": [1234.5]},
        first_ids={"cupaged": [0.456], "llama_cpp": [0.3]},
    )
    measured.failures["openvino", ""] = "not installed"
    table = markdown(rows_of("quantised", measured)).splitlines()
    assert table == [
        "| | cupaged | llama_cpp | llama_cpp-q4_0 | ratio to the best peer | goal |",
        "| --- | --- | --- | --- | --- | --- |",
        "| decode, 1 stream (tokens/s) | 160 | 100 | 120 | 1.60 (llama_cpp), 1.33 (llama_cpp-q4_0) "
        "| 1.6, 1.25 on any file: met |",
        "| 4 streams of 64+64 (tokens/s) | 1,234 | - | - | - |  |",
        "| first token from process start, ids (s) | 0.46 | 0.30 | - | 0.66 (llama_cpp) | at most 0.5 s: met |",
    ]
    data = json.loads(json.dumps(as_json(measured, {"weights": "w"})))
    assert data["weights"] == "w" and len(data["rows"]) == 3
    assert data["rows"][0]["met"] is True and data["rows"][0]["medians"]["llama_cpp"] == 100
    assert data["left_out"] == [{"runtime": "openvino", "workload": None, "reason": "not installed"}]
    assert {"runtime": "cupaged", "workload": "decode", "rounds": [160.0]} in data["figures"]


def test_peers_are_chosen_by_name_and_bring_ours_along() -> None:
    assert [r.name for r in chosen("openvino, llama_cpp")] == ["cupaged", "llama_cpp", "openvino"]
    assert [r.name for r in chosen("transformers")] == ["cupaged-f32", "transformers"]
    for names in ("vllm", "cupaged", "", "openvino,openvino"):
        with pytest.raises(OptionError, match="--peers: "):
            chosen(names)


def peers(*args: str) -> Result:
    return CliRunner().invoke(command, list(args))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    for name, variant in (("cupaged", ""), ("llama_cpp", "first"), ("openvino", "refuses")):
        monkeypatch.setitem(RUNTIMES, name, pretend(name, variant))


def test_the_command_prints_the_table_and_writes_all_figures(pretended: None, tmp_path: Path) -> None:
    weights = ["--weights", str(DATA / "llama"), "--threads", "1", "--rounds", "1", "--peers", "llama_cpp,openvino"]
    done = peers(*weights, "--only", "decode", "--json", str(tmp_path / "all.json"), "--work", str(tmp_path / "work"))
    assert done.exit_code == 0, done.output
    assert "openvino left out: RuntimeError: no such model" in done.stderr
    assert "| decode, 1 stream (tokens/s) |" in done.stdout and "1 threads, medians of 1 rounds, llama" in done.stdout
    data = json.loads((tmp_path / "all.json").read_text())
    assert data["versions"] == {"cupaged": "pretend 1", "llama_cpp": "pretend 1"}
    assert data["machine"]["cores"] >= 1 and data["left_out"][0]["runtime"] == "openvino"


def test_the_command_fails_if_ours_was_not_measured(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.RUNTIMES, "cupaged", pretend("cupaged", "refuses"))
    done = peers("--weights", str(DATA / "llama"), "--peers", "llama_cpp", "--only", "decode", "--rounds", "1")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == "Error: cupaged itself was not measured"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--peers", "vllm"], "--peers: 'vllm' is not one of llama_cpp, "),
        (["--only", "decode,x"], "--only: 'x' is not one of decode, streams4, "),
        (["--python", "vllm=/bin/true"], "--python: 'vllm' is not one of llama_cpp, "),
        (["--rounds", "0"], "Invalid value for '--rounds'"),
        (["--thread", "1"], "No such option"),
        (["--weights", "no/such/file.gguf"], "no/such/file.gguf"),
    ],
)
def test_options_that_cannot_be_used_are_refused_in_a_line(args: list[str], message: str, tmp_path: Path) -> None:
    done = peers("--weights", str(DATA / "llama"), *args)
    assert done.exit_code in (1, 2) and message in done.stderr and "Traceback" not in done.output


def test_a_peer_that_needs_a_gguf_file_says_so_of_a_folder(tmp_path: Path) -> None:
    setting = Setting(lambda _: sys.executable, 1, 1, tmp_path)
    with pytest.raises(Exception, match=r"openvino takes a \.gguf file"):
        setting.files(DATA / "llama").of(RUNTIMES["openvino"])
    assert setting.files(DATA / "llama").of(RUNTIMES["transformers"]) == str(DATA / "llama")


def test_our_own_engine_makes_as_many_tokens_as_it_is_asked_for() -> None:
    path = Path(catalog.__file__).with_name("engine_cupaged.py")
    spec = importlib.util.spec_from_file_location("engine_cupaged", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine = module.Engine(str(DATA / "llama"), 1, "f32", False)
    assert engine.version
    engine.first([5, 6, 7])
    assert engine.run([[5, 6, 7], [7, 8, 9]], 3, 1) == 6
