"""The way by which the conformance suite's NumPy arrays get to a GPU and back: views, overlaps, what lies around."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_support import guarded, paged, queries_for, split
from on_device import OnDevice
from streamdouble import StreamDouble

from cupaged.device.cuda import CudaDevice


@pytest.fixture
def ops() -> Iterator[Any]:
    device = CudaDevice(StreamDouble(4))
    yield OnDevice(device)
    device.close()


def test_strides_and_overlaps_are_those_of_the_host(ops: Any) -> None:
    wide = np.arange(60, dtype=np.float32).reshape(5, 12)
    before = wide.copy()
    ops.add(wide[1:3], wide[3:5])  # two views of one memory
    assert np.array_equal(wide[1:3], before[1:3] + before[3:5])
    assert np.array_equal(wide[[0, 3, 4]], before[[0, 3, 4]])
    heads = split(wide[:, 4:12], 5, 2, 4)
    expected = heads / np.sqrt((heads.astype(np.float64) ** 2).mean(-1, keepdims=True))
    ops.head_norm(heads, np.ones(4, np.float32), 0.0)
    np.testing.assert_allclose(heads, expected, rtol=1e-6)
    assert np.array_equal(wide[0, :4], before[0, :4])


def test_what_is_written_beside_an_output_is_found(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded(3, 8) as out:
        ops.rms_norm(np.ones((3, 8), np.float32), np.ones(8, np.float32), 0.0, out)
    assert (out == 1).all()
    inner = ops.device.ops.rms_norm

    def beside(x: Any, weight: Any, eps: float, out: Any) -> None:
        inner(x, weight, eps, out)
        far = np.lib.stride_tricks.as_strided(out, (4, 8), out.strides)  # a row too many
        ops.device.upload(np.full(8, 5, np.float32), far[3])

    monkeypatch.setattr(ops.device.ops, "rms_norm", beside)
    with pytest.raises(AssertionError), guarded(3, 8) as out:
        ops.rms_norm(np.ones((3, 8), np.float32), np.ones(8, np.float32), 0.0, out)


def test_a_cache_and_what_operations_made_go_along(ops: Any) -> None:
    case = paged(ops, [40, 70], dtype="float16")
    queries = queries_for([1, 3], 4, 64)
    np.testing.assert_allclose(case.run(queries), case.expected(queries), rtol=2e-4, atol=2e-4)
    before = case.cache.block_bytes(int(case.tables[0, 0]))
    ops.copy_blocks(case.view, [int(case.tables[0, 0])], [int(case.tables[1, 1])])
    assert np.array_equal(case.cache.block_bytes(int(case.tables[1, 1])), before)
    weight = ops.vector(type("Source", (), {"shape": (4,), "float32": lambda self, a, b: np.full(4, 3, np.float32)})())
    out = np.empty((2, 4), np.float32)
    ops.rms_norm(np.ones((2, 4), np.float32), weight, 0.0, out)
    assert (out == 3).all()
