"""What only a process of its own can show: start-up, no home, a read-only cache, forks, threads at exit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import DATA

from cupaged.kernels.cpu.library import cache_folders, key, load_library

LLAMA = str(DATA / "llama")
GENERATE = f"""
from cupaged import LLM, SamplingParams
params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
with LLM({LLAMA!r}, device="cpu", threads=2) as llm:
    print(llm.generate([[1, 2, 3]], params)[0].token_ids)
"""


def python(code: str, env: dict[str, str], timeout: float = 120) -> str:
    """Output of a fresh interpreter; its exit code must be 0."""
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def kernels() -> list[Path]:
    """The files of compiled kernels that GENERATE uses; compiled now if need be."""
    load_library().require(["basic", "weights-float32", "cache-float32"])
    found = [sorted(folder.glob(f"cpu-{key()}-*.bin")) for folder in cache_folders()]
    return next(paths for paths in found if paths)


@pytest.fixture(scope="module")
def expected(checkout_env: dict[str, str], kernels: list[Path]) -> str:
    return python(GENERATE, checkout_env)


def homeless(env: dict[str, str], home: str, temporary: Path) -> dict[str, str]:
    kept = {k: v for k, v in env.items() if k not in ("XDG_CACHE_HOME", "CUPAGED_CACHE_DIR")}
    return {**kept, "HOME": home, "TMPDIR": str(temporary)}


def test_K18_importing_starts_nothing(checkout_env: dict[str, str]) -> None:
    """No thread, no device, no compiler: `LLM` and the library face are names until they are used."""
    code = """
import sys, threading
from cupaged import LLM, Engine, PagedKVCache, SamplingParams, paged_attention
import cupaged.device
assert threading.active_count() == 1, threading.enumerate()
assert not cupaged.device._shared
print(sorted({"numba", "llvmlite", "cupy", "tokenizers", "jinja2", "torch"} & set(sys.modules)))
"""
    assert python(code, checkout_env).strip() == "[]"


def test_K23_a_second_process_takes_kernels_from_the_cache_without_numba(
    checkout_env: dict[str, str], kernels: list[Path], expected: str
) -> None:
    assert python(GENERATE + "import sys; assert 'numba' not in sys.modules", checkout_env) == expected


def test_K23_without_a_home_kernels_are_kept_in_the_temporary_folder(
    checkout_env: dict[str, str], kernels: list[Path], expected: str, tmp_path: Path
) -> None:
    env = homeless(checkout_env, "/dev/null/nonexistent", tmp_path)
    folder = tmp_path / f"cupaged-{os.getuid()}" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    for path in kernels:
        shutil.copy2(path, folder)
    assert python(GENERATE + "import sys; assert 'numba' not in sys.modules", env) == expected


def test_K23_a_read_only_cache_is_read(
    checkout_env: dict[str, str], kernels: list[Path], expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    for path in kernels:
        shutil.copy2(path, folder)
        (folder / path.name).chmod(0o444)
    for path, mode in ((folder, 0o555), (tmp_path, 0o555)):
        path.chmod(mode)
    try:
        env = {**checkout_env, "CUPAGED_CACHE_DIR": str(tmp_path)}
        assert python(GENERATE + "import sys; assert 'numba' not in sys.modules", env) == expected
    finally:
        for path in (tmp_path, folder):
            path.chmod(0o755)


@pytest.mark.slow
def test_K23_where_nothing_can_be_kept_kernels_are_compiled_each_time(
    checkout_env: dict[str, str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    env = {**homeless(checkout_env, "/dev/null/nonexistent", tmp_path), "CUPAGED_CACHE_DIR": str(tmp_path / "file")}
    assert python(GENERATE + "import sys; assert 'numba' in sys.modules", env, timeout=280) == expected
    assert (tmp_path / "file").read_text() == "in the way"


def test_K22_a_forked_child_generates_on_threads_of_its_own(checkout_env: dict[str, str], expected: str) -> None:
    code = f"""
import os, signal, sys
from cupaged import LLM, SamplingParams
params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
llm = LLM({LLAMA!r}, device="cpu", threads=2)
before = llm.generate([[1, 2, 3]], params)[0].token_ids
sys.stdout.flush()
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang ends as a signal, which waitstatus tells
        same = llm.generate([[1, 2, 3]], params)[0].token_ids == before
        llm.close()
        os._exit(0 if same else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(llm.generate([[1, 2, 3]], params)[0].token_ids)
"""
    assert python(code, checkout_env) == expected


def test_K22_a_child_forked_in_the_middle_of_a_step_gets_an_error(checkout_env: dict[str, str]) -> None:
    """The thread that was in the step is not there in the child, and the engine is in the middle of a change."""
    code = f"""
import os, signal, threading
from cupaged import LLM, SamplingParams
from cupaged.errors import DeviceError
llm = LLM({LLAMA!r}, device="cpu", threads=2)
inside, forked = threading.Event(), threading.Event()
forward = llm.engine._forward
def waiting(chunks):
    inside.set()
    assert forked.wait(30)
    return forward(chunks)
llm.engine._forward = waiting
params = SamplingParams(max_tokens=2, temperature=0)
thread = threading.Thread(target=llm.generate, args=([[1, 2, 3]], params))
thread.start()
assert inside.wait(30)
child = os.fork()
if child == 0:
    signal.alarm(30)
    for use in (lambda: llm.generate([[1, 2, 3]], params), lambda: llm.stream([5]), llm.close):
        try:
            use()
        except DeviceError as error:
            assert "forked while another thread was generating" in str(error)
        else:
            os._exit(4)
    with LLM({LLAMA!r}, device="cpu", threads=2) as fresh:
        os._exit(0 if fresh.generate([[1, 2, 3]], params)[0].finish_reason == "length" else 5)
forked.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code, checkout_env).strip() == "0"


def test_K22_a_program_may_end_in_the_middle_of_everything(checkout_env: dict[str, str]) -> None:
    """Neither an open stream, nor an LLM that nobody closed, nor a thread that still generates holds up the exit."""
    code = f"""
import threading
from cupaged import LLM, SamplingParams
params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
one, two = (LLM({LLAMA!r}, device="cpu", threads=3) for _ in range(2))
stream = one.stream([1, 2, 3], params)
print(len(next(stream).token_ids))
started = threading.Event()
def forever():
    while True:
        two.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        started.set()
threading.Thread(target=forever, daemon=True).start()
started.wait(30)
"""
    assert python(code, checkout_env, timeout=60).strip() == "1"
