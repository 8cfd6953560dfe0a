"""Whether there is a GPU, and what a user is told if not: on a driver that these tests make up."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from cupaged.device import driver, make_device, why_no_gpu
from cupaged.errors import DeviceError, NoDeviceError, OptionError


class FakeDriver:
    """The entry points of libcuda that are asked, answering by setting what a pointer points to."""

    def __init__(self, cuda: int = 12040, started: int = 0, count: int = 1, capability: int = 80) -> None:
        self.cuda, self.started, self.count, self.capability = cuda, started, count, capability

    def cuDriverGetVersion(self, number: Any) -> int:
        number._obj.value = self.cuda
        return 0

    def cuInit(self, flags: Any) -> int:
        assert isinstance(flags, ctypes.c_uint) and flags.value == 0
        return self.started

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, index: Any) -> int:
        device._obj.value = index.value + 7
        return 0

    def cuDeviceGetName(self, name: Any, size: Any, device: Any) -> int:
        assert size.value == len(name) and device.value == 7
        name.value = b"Card A"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> int:
        assert device.value == 7
        value._obj.value = {75: self.capability // 10, 76: self.capability % 10}[attribute.value]
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: Any) -> int:
        total._obj.value = 24 << 30
        return 0

    def cuGetErrorName(self, code: Any, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_NOBODY_KNOWS"
        return 0


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a driver and an installed CuPy in place."""

    def put(wheel: int | None = 12, **facts: int) -> None:
        monkeypatch.setattr(driver, "_library", lambda: FakeDriver(**facts))
        monkeypatch.setattr(driver, "installed_wheel", lambda: wheel)
        monkeypatch.setattr(driver, "_initialised_in", None)

    return put


def test_a_usable_card_is_described(made_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupaged.kernels.cuda.compile.missing", lambda major: None)
    made_up()
    assert why_no_gpu() is None
    assert driver.find_card() == driver.Card("Card A", 80, 24 << 30, 12040)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"wheel": None}, "CuPy is not installed; pip install cupy-cuda12x"),
        ({"wheel": None, "cuda": 13000}, "CuPy is not installed; pip install cupy-cuda13x"),
        ({"wheel": None, "cuda": 14010}, "CuPy is not installed; pip install cupy-cuda13x"),
        ({"cuda": 11040}, "too old: it knows CUDA 11.4; update it to 525 or newer"),
        (
            {"wheel": 13},
            "knows CUDA 12.4, cupy-cuda13x needs 13.0; update the driver to 580 or newer, or pip",
        ),
        ({"started": 100}, "finds no GPU; nvidia-smi"),
        ({"started": 3}, "the GPU, which CUDA does not survive; start it by multiprocessing.get_context('spawn')"),
        ({"started": 999}, "cannot be started (CUDA_ERROR_NOBODY_KNOWS)"),
        ({"count": 0}, "there is no GPU 0: the NVIDIA driver finds 0"),
        ({"capability": 61}, "Card A: compute capability 6.1 is below 7.0; use --device cpu"),
        ({"capability": 70, "wheel": 13, "cuda": 13000}, "7.0 is not known to CUDA 13; pip uninstall cupy-cuda13x"),
    ],
)
def test_what_is_missing_is_one_line_with_what_mends_it(
    made_up: Any, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made_up(**facts)
    with pytest.raises(NoDeviceError, match=re.escape(message)) as caught:
        make_device("cuda")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("device 'cuda': ")
    assert caught.value.exit_code == 2
    assert why_no_gpu() == str(caught.value).removeprefix("device 'cuda': ")
    assert make_device("auto").kind == "cpu"


def test_what_there_is_not_of_a_compiler_is_said(made_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupaged.kernels.cuda.compile.missing", lambda major: "NVRTC is not installed; pip install it")
    made_up()
    assert why_no_gpu() == "NVRTC is not installed; pip install it"


def test_a_card_that_does_not_start_is_an_error_or_for_auto_a_warning(
    made_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver says that all is well, and then CuPy cannot be imported."""
    monkeypatch.setattr("cupaged.kernels.cuda.compile.missing", lambda major: None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    made_up()
    with pytest.raises(NoDeviceError, match="CuPy cannot be imported"):
        make_device("cuda")
    with pytest.warns(RuntimeWarning, match="CuPy cannot be imported .*; the CPU is used"):
        assert make_device("auto").kind == "cpu"


def test_hidden_cards_are_said_to_be(made_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    made_up(started=100)
    assert "finds no GPU (CUDA_VISIBLE_DEVICES is '-1'; unset it to see all)" in str(why_no_gpu())


def test_without_a_driver_a_container_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    for loaded, words in ((True, "driver is loaded, but lib"), (False, "no NVIDIA driver")):
        monkeypatch.setattr(driver.Path, "exists", lambda path, loaded=loaded: loaded)
        reason = str(why_no_gpu())
        assert words in reason and "--gpus all" in reason and "\n" not in reason


def test_threads_are_for_the_cpu(made_up: Any) -> None:
    with pytest.raises(OptionError, match="threads: 2 is for device 'cpu'"):
        make_device("cuda", threads=2)
    made_up(count=0)
    assert make_device("auto", threads=1).kind == "cpu"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_K18_a_forked_child_is_told_to_be_spawned(made_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupaged.kernels.cuda.compile.missing", lambda major: None)
    made_up()
    assert why_no_gpu() is None
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(why_no_gpu()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as file:
        assert "forked after its parent had begun to use the GPU, which CUDA does not survive" in file.read()
    with pytest.raises(DeviceError, match="forked"):
        monkeypatch.setattr(driver, "_initialised_in", -1)
        driver.find_card()


def test_K18_to_ask_for_a_gpu_brings_neither_cupy_nor_numba(checkout_env: dict[str, str]) -> None:
    code = """
import sys, cupaged.device
cupaged.device.why_no_gpu()
print([m for m in sys.modules if m.startswith(("cupy", "numba"))])
"""
    assert subprocess.check_output([sys.executable, "-c", code], env=checkout_env, text=True) == "[]\n"
