"""The timings of the check of a GPU, on a pretended one: every line of them runs, and their figures mean nothing."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from streamdouble import StreamDouble

from cupaged.bench.gpu_check import rivals, sections, small
from cupaged.bench.gpu_check.report import Row
from cupaged.bench.gpu_check.runner import Failed, Skipped
from cupaged.bench.gpu_check.sizes import TINY
from cupaged.device.cuda import CudaDevice
from cupaged.errors import DeviceError


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device is a GPU that tests pretend, with a library for products."""

    def device(*arguments: Any, deterministic: bool = False, graphs: bool = True, **options: Any) -> CudaDevice:
        return CudaDevice(StreamDouble(3, bias="at once", gemm=True), deterministic, graphs)

    monkeypatch.setattr(sections, "make_cuda", device)
    monkeypatch.setattr("cupaged.device.make_device", device)


def run(name: str) -> list[Row]:
    found = {each.name: each for each in (*sections.SECTIONS, *sections.INNER)}
    rows = list(found[name].run(TINY))
    assert all(np.isfinite(row.value) and row.value >= 0 for row in rows), rows
    return rows


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("facts", ["memory", "of it free", "multiprocessors", "cuBLAS found", "a launch, all in all"]),
        ("decode", ["copy on the device", "decode, 2 x 40 tokens", "decode, 1 x 70 tokens"]),
        ("layouts", ["block-major, 2 x 40 tokens"]),
        (
            "products",
            ["cuBLAS, 20 rows of float16", "float16, 20 rows", "Q8_0, 1 row", "attention, a chunk of 20 tokens"],
        ),
        ("steps", ["decode, 2 streams: a step", "decode, 1 stream: gaps between launches"]),
        ("prefill", ["prefill, 20 tokens, 2 layers", "its products over all of its time"]),
        ("swaps", ["swap out, block-major", "swap in, layer-major", "both ways at once"]),
    ],
)
def test_every_timing_runs(pretended: None, name: str, cases: list[str]) -> None:
    rows = run(name)
    assert set(cases) <= {row.case for row in rows}
    assert all(row.value > 0 for row in rows if row.unit in ("GB/s", "TFLOP/s", "tokens/s"))


def test_graphs_that_do_not_work_are_a_fault_but_timings_are_there(
    pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: StreamDouble, stream: Any) -> None:
        raise DeviceError("no capture today")

    monkeypatch.setattr(StreamDouble, "begin_capture", refuse)
    rows: list[Row] = []
    decode = next(each for each in sections.SECTIONS if each.name == "decode")
    with (
        pytest.raises(Failed, match="timed launch by launch, because graphs do not work: no capture today"),
        pytest.warns(RuntimeWarning, match="CUDA graphs are not used"),
    ):
        for row in decode.run(TINY):
            rows.append(row)
    assert len(rows) == 1 + len(TINY.decode)


def test_the_small_run_uses_every_kind_of_kernel(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    doubles: list[StreamDouble] = []

    def device(*arguments: Any, deterministic: bool = False, graphs: bool = True, **options: Any) -> CudaDevice:
        doubles.append(StreamDouble(len(doubles), bias="at once", gemm=True))
        return CudaDevice(doubles[-1], deterministic, graphs)

    monkeypatch.setattr("cupaged.device.make_device", device)
    monkeypatch.setattr(small, "SETTINGS", (small.SETTINGS[0], {"quantize": "q8_0", "kv_dtype": "float32"}))
    rows = run("small")
    assert [row.value for row in rows[::3]] == [12 + 3 * 12 + 2 * 8 + 12] * len(small.SETTINGS)
    assert all(row.value > 0 for row in rows)  # blocks moved, and were read on the host
    launched = {name for double in doubles for name in double.launched}
    assert {
        "paged_attention", "paged_attention_tensor", "merge_parts", "write_kv", "copy_blocks", "rms_norm", "rope",
        "gated_activation", "matmul", "embed", "take_rows", "sample_max", "sample_weights", "sample_select",
    } <= launched  # fmt: skip


def test_graphs_that_give_other_tokens_are_a_fault(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupaged.bench.gpu_check import steps

    tokens = iter([[[1, 2]], [[1, 3]]])
    monkeypatch.setattr(steps, "decode", lambda llm, streams, sizes: (1.0, 1.0, next(tokens)))
    with pytest.raises(Failed, match="1 streams: graphs and single launches gave different tokens"):
        list(steps.step_rows(TINY))


class FakeTorch:
    """As much of PyTorch as the check touches."""

    float16 = "float16"
    cuda = SimpleNamespace(
        is_available=lambda: True, synchronize=lambda: None,
        Event=lambda enable_timing: SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 2.0),
    )  # fmt: skip

    def __init__(self) -> None:
        self.attended: list[tuple[int, ...]] = []
        self.nn = SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=self._attend))

    def _attend(self, query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
        assert enable_gqa and key.shape == value.shape
        self.attended.append((*query.shape, *key.shape))

    def randn(self, shape: tuple[int, ...], dtype: str, device: str) -> np.ndarray:
        return np.zeros(shape, np.float16)

    def tensor(self, rows: Any) -> Any:
        return SimpleNamespace(to=lambda device: np.array(rows))

    def ones_like(self, array: np.ndarray) -> np.ndarray:
        return np.ones_like(array)

    def inference_mode(self) -> Any:
        import contextlib

        return contextlib.nullcontext()


def test_others_are_timed_where_they_are(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, generated = FakeTorch(), []

    class Model:
        @classmethod
        def from_pretrained(cls, path: Path, dtype: str) -> Model:
            assert (path / "config.json").is_file() and dtype == "float16"
            return cls()

        def to(self, device: str) -> Model:
            return self

        def generate(self, ids: np.ndarray, **options: Any) -> None:
            time.sleep(0.001)
            generated.append((ids.shape, options["max_new_tokens"], options["min_new_tokens"]))

    modules = {"torch": torch, "transformers": SimpleNamespace(AutoModelForCausalLM=Model)}
    monkeypatch.setattr(rivals, "_import", modules.__getitem__)
    rows = run("attention")
    assert [row.case for row in rows] == ["attention, 2 x 40 tokens", "attention, 1 x 70 tokens"]
    assert set(torch.attended) == {(2, 4, 1, 32, 2, 1, 40, 32), (1, 4, 1, 32, 1, 1, 70, 32)}
    rows = run("generate")
    assert [row.case for row in rows] == ["generate, 1 x 64 + 4", "generate, 8 x 64 + 4"]
    assert set(generated) == {((1, 64), 4, 4), ((8, 64), 4, 4)}
    torch.cuda.is_available = lambda: False
    try:
        for name in ("attention", "generate"):
            with pytest.raises(Skipped, match="sees no GPU"):
                run(name)
    finally:
        torch.cuda.is_available = lambda: True


def test_others_that_are_not_installed_are_left_out(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Skipped, match="torch is not installed"):
        run("attention")


def test_a_random_model_is_one_that_loads(tmp_path: Path) -> None:
    from cupaged.bench.gpu_check.models import layer_weights, shapes, write_model

    path = write_model(tmp_path / "model", TINY.small)
    with loading_llm(path) as llm:
        info = llm.info()
    assert info["model"]["layers"] == 2 and info["weights"]["stored_dtype"] == "F16"
    assert layer_weights(TINY.small) == 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 96 * 64)
    assert "lm_head.weight" not in shapes(TINY.small)


def loading_llm(path: Path) -> Any:
    from cupaged import LLM

    return LLM(path, device="cpu", threads=1, tokenizer=False)
