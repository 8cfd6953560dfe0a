"""Who runs when: in each round every runtime does the workload once, in turn, so that drift hits all alike.

A round before the first warms what is warmed once: compiled shapes, buffers, the processor's clock. A runtime that
fails in a workload is left out of that workload; one that dies, of all that follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupaged.bench.peers.catalog import Files, Runtime
from cupaged.bench.peers.process import Process, RuntimeFailed
from cupaged.bench.peers.workloads import FIRST_PROMPTS, FIRST_TEXT, MEMORY, MEMORY_WORKLOAD, Workload
from cupaged.errors import CupagedError

WARM_TOKENS = 4  # of the warming round: shapes and buffers are those of the workload, most steps are left out

Tell = Callable[[str], None]
Prompt = str | list[int]


@dataclass(slots=True)
class Measured:
    """figures[runtime, workload]: one a round; tokens/s of workloads, seconds or MiB of start-ups. failures: why a
    runtime is missing in a workload ("": in all). versions: what the runtimes call themselves."""

    figures: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """python: runtime name -> interpreter. folder: for logs and files made. lock: a file that is locked while something
    is timed, so that users of one machine can take turns; None: none."""

    python: Callable[[Runtime], str]
    threads: int
    rounds: int
    folder: Path
    lock: Path | None = None

    def start(self, runtime: Runtime, **options: Any) -> Process:
        log = self.folder / f"{runtime.name}.log"
        options = {"threads": self.threads, "variant": runtime.variant, "text": False} | options
        return Process(self.python(runtime), runtime.module, options, log, runtime.ours)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        if self.lock is None:
            yield
            return
        import fcntl

        with self.lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def files(self, weights: Path) -> Files:
        def prepare(runtime: Runtime, path: Path, folder: Path) -> str:
            process = self.start(runtime, weights=str(path), prepare=str(folder))
            try:
                return process.ready()
            finally:
                process.close()

        return Files(weights, self.folder, prepare)


class Rounds:
    """All measurements of some runtimes. `tell` gets a line for what is left out and for each thing that begins."""

    def __init__(self, setting: Setting, runtimes: Sequence[Runtime], weights: Path, tell: Tell) -> None:
        self._setting = setting
        self._tell = tell
        self.measured = Measured()
        self._files: dict[str, str] = {}
        self.runtimes: list[Runtime] = []
        files = setting.files(weights)
        for runtime in runtimes:
            with self._blame(runtime):
                self._files[runtime.name] = files.of(runtime)
                self.runtimes.append(runtime)

    @contextlib.contextmanager
    def _blame(self, runtime: Runtime, workload: str = "") -> Iterator[None]:
        try:
            yield
        except CupagedError as error:
            if (runtime.name, workload) not in self.measured.failures:
                self.measured.failures[runtime.name, workload] = str(error)
                self._tell(f"{runtime.name}{': ' + workload if workload else ''} left out: {error}")

    def _failed(self, runtime: Runtime, workload: str) -> bool:
        return (runtime.name, "") in self.measured.failures or (runtime.name, workload) in self.measured.failures

    def _note(self, runtime: Runtime, workload: str, figure: float) -> None:
        self.measured.figures.setdefault((runtime.name, workload), []).append(figure)

    def run_workloads(self, workloads: Sequence[Workload]) -> None:
        """Every runtime is loaded before the first round and stays so. Failures are noted."""
        processes: dict[str, Process] = {}
        try:
            for runtime in self.runtimes:
                self._tell(f"{runtime.name}: loading")
                with self._blame(runtime):
                    process = self._setting.start(runtime, weights=self._files[runtime.name])
                    processes[runtime.name] = process
                    self.measured.versions[runtime.name] = process.ready()
            for workload in workloads:
                for number in range(self._setting.rounds + 1):
                    what = f"round {number} of {self._setting.rounds}" if number else "warming"
                    self._tell(f"{workload.title}: {what}")
                    with self._setting.turn():
                        self._round(workload, number, processes)
        finally:
            for process in processes.values():
                process.close()

    def _round(self, workload: Workload, number: int, processes: dict[str, Process]) -> None:
        job = workload.job(number)
        if number == 0:
            job["new"] = min(workload.new, WARM_TOKENS)
        for runtime in self.runtimes:
            if self._failed(runtime, workload.name):
                continue
            with self._blame(runtime, workload.name):
                process = processes[runtime.name]
                seconds, tokens = process.ask("result", job)
                expected = workload.streams * job["new"] * workload.samples
                if tokens != expected:
                    raise RuntimeFailed(f"made {tokens} tokens where {expected} were asked for")
                if number:
                    self._note(runtime, workload.name, workload.tokens / seconds)

    def run_startups(self) -> None:
        """First token from process start, for a prompt of text and one of ids; then peak memory. The first start of
        each warms the file cache and is not counted."""
        for name, prompt in FIRST_PROMPTS.items():
            for number in range(self._setting.rounds + 1):
                self._tell(f"first token ({name}): " + (f"round {number}" if number else "warming"))
                with self._setting.turn():
                    for runtime in self.runtimes:
                        if not self._failed(runtime, name):
                            with self._blame(runtime, name):
                                self._first(runtime, name, prompt, counted=number > 0)
        self._tell("peak memory")
        for runtime in self.runtimes:
            if not self._failed(runtime, MEMORY):
                with self._blame(runtime, MEMORY):
                    self._memory(runtime)

    def _first(self, runtime: Runtime, name: str, prompt: Prompt, counted: bool) -> None:
        text = name == FIRST_TEXT
        process = self._setting.start(runtime, weights=self._files[runtime.name], first=prompt, text=text)
        try:
            _, came = process.answer("first")
            self.measured.versions.setdefault(runtime.name, process.ready())
            if counted:
                self._note(runtime, name, came - process.started)
        finally:
            process.kill()

    def _memory(self, runtime: Runtime) -> None:
        process = self._setting.start(runtime, weights=self._files[runtime.name])
        try:
            process.ready()
            process.ask("result", MEMORY_WORKLOAD.job(0))
            self._note(runtime, MEMORY, process.ask("peak_bytes", {"memory": True}) / 2**20)
        finally:
            process.close()
