"""`cupaged info`: facts of this machine and of a model."""

import json
import os
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest

from cupaged.cli import main
from cupaged.cli.info import lines
from cupaged.cli.runtime import DTYPES
from cupaged.device import driver
from cupaged.errors import DeviceError
from cupaged.kernels.cuda import cublas
from cupaged.kernels.interface import StorageType

Run = Callable[..., tuple[int, str, str]]


def test_without_a_model_the_machine_is_told(run: Run) -> None:
    code, out, err = run("info", "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["versions"]["cupaged"] == "0.1.0" and facts["versions"]["numpy"] == np.__version__
    assert 1 <= facts["cpu"]["usable_processors"] <= facts["cpu"]["processors"] == os.cpu_count()
    assert 0 < facts["host_memory"]["available_bytes"] <= facts["host_memory"]["total_bytes"]
    assert facts["folders"]["models"] and facts["folders"]["kernels"]
    assert isinstance(facts["gpu"]["cards"], list)


def test_why_there_is_no_gpu_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "find_card", no_card)
    _, out, _ = run("info")
    words = [" ".join(line.split()) for line in out.splitlines()]
    assert words[words.index("gpu") + 1 :][:2] == ["usable no", "reason no driver; install one"]
    assert not any(line.startswith(("card ", "memory bytes")) for line in words)


def test_U04_a_gpu_that_is_not_there_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the weights are looked for, which may be a download."""
    monkeypatch.setattr(driver, "find_card", no_card)
    for name in ("cuda", "gpu"):
        assert main(["generate", "-w", "nowhere", "-p", "a", "--device", name]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == "cupaged: error: device 'cuda': no driver; install one\n"


def test_a_gpu_is_told_with_its_card_and_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    card = driver.Card("NVIDIA H200", 90, 143771 << 20, 13000)
    monkeypatch.setattr(driver, "find_card", lambda index=0: card)
    monkeypatch.setattr(cublas, "found", lambda major: f"libcublas.so.{major}")
    monkeypatch.setattr(driver, "installed_wheel", lambda: 13)
    gpu = json.loads(run("info", "--json")[1])["gpu"]
    assert gpu["usable"] is True and gpu["reason"] is None
    assert (gpu["card"], gpu["memory_bytes"]) == ("NVIDIA H200", 143771 << 20)
    assert (gpu["compute_capability"], gpu["driver_cuda"], gpu["cublas"]) == ("9.0", "13.0", "libcublas.so.13")


def no_card(index: int = 0) -> driver.Card:
    raise DeviceError("no driver; install one")


def test_with_a_model_its_plan_is_told(run: Run) -> None:
    code, out, _ = run("info", "-w", "fake", "--block-size", "8")
    assert code == 0
    words = [" ".join(line.split()) for line in out.splitlines()]
    assert "num blocks 10" in words and "block size 8" in words
    assert "kv bytes per token 46080 (45 KiB)" in words and "kv memory bytes 3145728 (3 MiB)" in words
    assert "Q8_0 3145728 (3 MiB)" in words and "float32 524288 (512 KiB)" in words


def test_lines_align_and_nest() -> None:
    facts = {"a": None, "long_name": True, "inner": {"b": [1, 2], "bytes": 2**40 + 2**39, "few_bytes": 7, "none": []}}
    assert list(lines(facts)) == [
        "a          none",
        "long name  yes",
        "inner",
        "  b          1, 2",
        "  bytes      1649267441664 (1.5 TiB)",
        "  few bytes  7",
        "  none       none",
    ]


def test_the_dtypes_offered_are_those_that_kernels_store() -> None:
    assert set(DTYPES) == {"auto", *get_args(StorageType)}
