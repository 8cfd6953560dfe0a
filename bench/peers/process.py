"""A loaded runtime behind a pipe: starts worker.py, asks it, and notices when it dies or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import cupaged
from cupaged.errors import CupagedError

WORKER = Path(__file__).with_name("worker.py")
ROOT = Path(cupaged.__file__).resolve().parent.parent  # where our own worker finds `cupaged`, installed or not


class RuntimeFailed(CupagedError):
    """A runtime is not installed, refused, died, or gave no answer in time."""


class Process:
    """One worker. `start` returns when it has been asked to load; `ready` waits until it has.

    python: the interpreter that has the runtime. log: file for what it prints. ours: let it find this cupaged. seconds:
    the longest wait for an answer.
    """

    def __init__(
        self, python: str, module: str, options: Mapping[str, Any], log: Path, ours: bool = False, seconds: float = 900
    ) -> None:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": str(options["threads"]),
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if ours:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._seconds = seconds
        self._log = log
        self.started = time.perf_counter()
        with log.open("ab") as errors:
            try:
                self._process = subprocess.Popen(
                    [python, str(WORKER), module, json.dumps(dict(options))],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, text=True, encoding="utf-8",
                )  # fmt: skip
            except OSError as error:
                raise RuntimeFailed(f"{python} cannot be run ({error.strerror or error})") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input: IO[str] = self._process.stdin
        self._answers: queue.Queue[tuple[float, str]] = queue.Queue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._answers.put((time.perf_counter(), line))
        self._answers.put((time.perf_counter(), ""))

    def answer(self, key: str) -> tuple[Any, float]:
        """(value under `key` of the next answer, the time it came, on perf_counter's clock)."""
        try:
            came, line = self._answers.get(timeout=self._seconds)
        except queue.Empty:
            self.close()
            raise RuntimeFailed(f"gave no answer in {self._seconds:.0f} s") from None
        if not line:
            self._answers.put((came, ""))  # for whoever asks again
            raise RuntimeFailed(f"ended with exit code {self._process.wait()}{self._last_words()}")
        message = json.loads(line)
        if "error" in message:
            raise RuntimeFailed(" ".join(str(message["error"]).split())[:300])
        return message[key], came

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f" after: {lines[-1][:200]}" if lines else ""

    def ready(self) -> str:
        """The runtime's version, once it is loaded."""
        return str(self.answer("ready")[0])

    def ask(self, key: str, job: Mapping[str, Any]) -> Any:
        """The value under `key` of the answer to `job`."""
        with contextlib.suppress(OSError):  # if it has died, the missing answer says so
            self._input.write(json.dumps(dict(job)) + "\n")
            self._input.flush()
        return self.answer(key)[0]

    def close(self) -> None:
        """End the process, asked or killed."""
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.close()
