"""The cache of machine code: what its keys cover, folders that cannot be written, many processes at once.

NVRTC is made up here, since what is compiled does not matter; with the real one: test_conformance_dense.py.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cupaged.errors import DeviceError, KernelError
from cupaged.kernels.cuda import compile, libraries, sources
from cupaged.kernels.cuda.variants import builds_for


class FakeNvrtc(types.ModuleType):
    """Compiles to the program's text and options. `compiled`: what was asked, in this process."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self) -> None:
        super().__init__("nvrtc")
        self.version = (12, 9)
        self.compiled: list[str] = []
        self.seconds = 0.0
        self.failing = False

    def getVersion(self) -> tuple[int, int]:
        return self.version

    def getSupportedArchs(self) -> tuple[int, ...]:
        return (70, 75, 80, 90)

    def createProgram(self, text: str, name: str, headers: Any, includes: Any) -> list[str]:
        return [text, name]

    def compileProgram(self, program: list[str], options: tuple[str, ...]) -> None:
        assert options[-1] == f"-I{compile.headers()}"
        self.compiled.append(program[1])
        time.sleep(self.seconds)
        if self.failing:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION")
        program.append(" ".join(options[:-1]))

    def getCUBIN(self, program: list[str]) -> bytes:
        return f"{program[1]}: {program[2]}".encode() * 1000

    def getProgramLog(self, program: list[str]) -> str:
        return "line 7: no such thing"

    def destroyProgram(self, program: list[str]) -> None:
        pass


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvrtc:
    fake = FakeNvrtc()
    include = tmp_path / "toolkit" / "include"
    include.mkdir(parents=True)
    (include / "cuda_fp16.h").write_text("// half")
    for name, module in (("cupy", types.ModuleType("cupy")), ("cupy.cuda", types.ModuleType("cupy.cuda"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["cupy.cuda"], "nvrtc", fake, raising=False)
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "headers", lambda: include)
    compile._headers_digest.cache_clear()
    yield fake
    compile._headers_digest.cache_clear()


def test_a_variant_is_compiled_once(nvrtc: FakeNvrtc) -> None:
    assert not compile.is_kept("norms.cu", 80, {})
    code = compile.cubin("norms.cu", 80, {})
    assert compile.cubin("norms.cu", 80, {}) == code and nvrtc.compiled == ["norms.cu"]
    assert compile.is_kept("norms.cu", 80, {})


def test_keys_cover_all_that_the_machine_code_depends_on(nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(what: str) -> None:
        if what == "version":
            nvrtc.version = (12, 8)
        elif what == "header of CUDA":
            (compile.headers() / "cuda_fp16.h").write_text("// another half")
            compile._headers_digest.cache_clear()
        elif what == "option":
            monkeypatch.setattr(sources, "NVRTC_OPTIONS", (*sources.NVRTC_OPTIONS, "-lineinfo"))
        else:
            monkeypatch.setattr(sources, "inlined", lambda name: f"// {what}")

    compile.cubin("norms.cu", 80, {"A": 1})
    for number, what in enumerate(("version", "header of CUDA", "option", "source", "a header of ours"), 2):
        change(what)
        compile.cubin("norms.cu", 80, {"A": 1})
        assert len(nvrtc.compiled) == number, what
    for number, (source, architecture, macros) in enumerate(
        (("norms.cu", 90, {"A": 1}), ("norms.cu", 80, {"A": 2}), ("norms.cu", 80, {}), ("sample.cu", 80, {"A": 1})), 7
    ):
        compile.cubin(source, architecture, macros)
        assert len(nvrtc.compiled) == number


def test_a_header_of_ours_is_part_of_the_source() -> None:
    assert "BLOCK_SIZE" in sources.text("attention.cuh") and "BLOCK_SIZE" in sources.inlined("merge_parts.cu")


def test_a_folder_that_cannot_be_written_is_passed_over(
    nvrtc: FakeNvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    for number in (1, 2):
        assert compile.cubin("norms.cu", 80, {}) and len(nvrtc.compiled) == number
    # One that another run has filled is read, though nothing can be written to it.
    (tmp_path / "cache").unlink()
    code = compile.cubin("norms.cu", 80, {})

    def read_only(*_: Any, **__: Any) -> Any:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(compile.tempfile, "mkstemp", read_only)
    monkeypatch.setattr(compile.os, "utime", read_only)
    assert compile.cubin("norms.cu", 80, {}) == code and len(nvrtc.compiled) == 3
    assert compile.cubin("sample.cu", 80, {}) and not compile.is_kept("sample.cu", 80, {})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders")
def test_what_is_no_file_of_ours_holds_nobody_up(nvrtc: FakeNvrtc) -> None:
    for place, make in enumerate((os.mkfifo, os.mkdir), 1):
        path = compile._paths("norms.cu", 80, {"A": place})[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
        assert compile.cubin("norms.cu", 80, {"A": place}) and len(nvrtc.compiled) == place


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_many_processes_and_threads_at_once_find_whole_files(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    nvrtc.seconds = 0.02
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with ThreadPoolExecutor(4) as pool:
                    codes = list(pool.map(lambda number: compile.cubin("norms.cu", 80, {"A": number % 3}), range(24)))
                right = [f"norms.cu: {' '.join(compile.options(80, {'A': n % 3}))}".encode() * 1000 for n in range(24)]
                status = 0 if codes == right else 2
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    assert sorted(path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()) == [".cubin"] * 3


def test_what_cannot_be_compiled_is_said(nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"NVRTC 12\.9 compiles for compute capability 7\.0 to 9\.0, not for 12\.0"):
        compile.cubin("norms.cu", 120, {})
    nvrtc.failing = True
    with pytest.raises(KernelError, match=r"norms\.cu, -arch=sm_80 .*: line 7: no such thing"):
        compile.cubin("norms.cu", 80, {})

    def missing() -> Any:
        raise RuntimeError("CuPy failed to load libnvrtc.so.12:\n OSError: no such file")

    monkeypatch.setattr(nvrtc, "getVersion", missing)
    with pytest.raises(
        DeviceError, match=r"NVRTC cannot be loaded \(CuPy failed to load libnvrtc.so.12: OSError"
    ) as caught:
        compile.cubin("norms.cu", 80, {})
    assert "\n" not in str(caught.value)


def test_headers_of_cuda_come_from_wheels_of_12_or_13_or_a_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spec:
        submodule_search_locations = (str(tmp_path / "nvidia"),)

    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: Spec)
    monkeypatch.setattr(libraries.sys, "platform", "linux")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    with pytest.raises(DeviceError, match=r"cuda_fp16\.h: not found; pip install nvidia-cuda-runtime-cu12"):
        compile.headers()
    for place in ("toolkit/include", "nvidia/cu13/include", "nvidia/cuda_runtime/include"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "cuda_fp16.h").touch()
        assert compile.headers() == tmp_path / place
    # The compiler itself: the same places, else what the loader knows.
    monkeypatch.setattr(libraries.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    words = "NVRTC, CUDA's compiler: not found; pip install nvidia-cuda-nvrtc"
    assert [compile.missing(major) for major in (None, 12, 13)] == [
        f"{words}-cu12, or set CUDA_PATH", f"{words}-cu12, or set CUDA_PATH", f"{words}, or set CUDA_PATH"
    ]  # fmt: skip
    (tmp_path / "nvidia" / "cuda_nvrtc" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12").touch()
    assert compile.missing() is None and compile.missing(12) is None and compile.missing(13) is not None


def test_compiling_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cupaged"):
        compile.announce(3, False)
        compile.announce(3, True)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    assert "compiling 3 CUDA kernels" in caplog.text


@pytest.mark.parametrize("architecture", [70, 80, 90])
@pytest.mark.parametrize(("weights", "cache"), [(["Q4_1", "Q5_0", "float32"], "float16"), (["bfloat16"], "bfloat16")])
def test_what_a_model_needs_are_kernels_of_our_sources(architecture: int, weights: list[str], cache: Any) -> None:
    from cupaged.device.base import ModelShape

    shape = ModelShape(head_dim=64, group=3, block_size=16, activation="silu")
    found = list(builds_for(architecture, 163 << 10, weights, cache, shape))
    for build in found:
        assert build.kernel in sources.kernels(build.source)
    kinds = {build.label.partition(",")[0] for build in found if build.kernel == "matmul"}
    assert kinds == ({"Q4_1", "float16", "float32"} if len(weights) == 3 else {"bfloat16"})
    attention = [build for build in found if build.kernel.startswith("paged_attention")]
    assert len(attention) == 2 and all(build.defines["BLOCK_SIZE"] == 16 for build in attention)
    without = list(builds_for(architecture, 163 << 10, weights, cache, None))
    assert {build.kernel for build in found} - {build.kernel for build in without} == {
        "paged_attention", "merge_parts", "gated_activation"
    }  # fmt: skip
