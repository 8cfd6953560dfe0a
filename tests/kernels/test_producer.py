"""Rows of floats that only the product after them reads: quantised by what makes them, and not written to memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_support import ArraySource
from quant_support import JoinedSource, blocks_of

from cupaged.device.cpu import CpuDevice

COLS = 96  # three blocks: fewer than the quantiser takes at once
UNTOUCHED = np.float32(-7.5)


def made(device: Any, maker: str, rows: int, out: np.ndarray, residual: np.ndarray | None = None) -> None:
    rng = np.random.default_rng(rows)
    if maker == "rms_norm":
        x = rng.standard_normal((rows, COLS), np.float32)
        device.team.hold(x)
        device.ops.rms_norm(x, np.linspace(0.5, 2, COLS, dtype=np.float32), 1e-5, out, residual)
    else:
        x = rng.standard_normal((rows, 2 * COLS), np.float32)
        device.team.hold(x)
        device.ops.gated_activation(x, maker, out)


@pytest.fixture(params=[1, 3])
def device(request: pytest.FixtureRequest) -> Any:
    with_threads = CpuDevice(request.param)
    yield with_threads
    with_threads.close()


@pytest.mark.parametrize("maker", ["rms_norm", "silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_spent_rows_are_not_written_and_the_product_is_the_same(device: Any, maker: str, rows: int) -> None:
    weight = device.ops.matrix(blocks_of("Q4_1", 96, COLS), "quantised")
    hidden = np.full((rows, COLS), UNTOUCHED, np.float32)
    outs = np.full((2, rows, 96), np.nan, np.float32)
    with device.capture() as step:
        made(device, maker, rows, hidden)
        device.ops.matmul(hidden, weight, outs[0], precise=True, precise_from=64, x_spent=True)
    step.replay()
    assert (hidden == UNTOUCHED).all()
    made(device, maker, rows, hidden)
    device.ops.matmul(hidden, weight, outs[1], precise=True, precise_from=64)
    assert outs[0].tobytes() == outs[1].tobytes()


def test_rows_that_others_read_are_written(device: Any) -> None:
    """Not spent; of a product with floats; and of one that is not the next operation."""
    blocks = blocks_of("Q8_0", 32, COLS)
    floats = ArraySource(np.random.default_rng(2).standard_normal((8, COLS), np.float32))
    quantised = device.ops.matrix(blocks, "quantised")
    mixed = device.ops.matrix(JoinedSource(blocks, floats), "quantised")
    expected = np.empty((6, COLS), np.float32)
    made(device, "rms_norm", 6, expected)
    for weight, spent, between in ((quantised, False, False), (mixed, True, False), (quantised, True, True)):
        hidden, other = np.full((2, 6, COLS), UNTOUCHED, np.float32)
        out = np.empty((6, weight.rows), np.float32)
        with device.capture() as step:
            made(device, "rms_norm", 6, hidden)
            if between:
                device.ops.add(other, hidden)
            device.ops.matmul(hidden, weight, out, x_spent=spent)
        step.replay()
        assert hidden.tobytes() == expected.tobytes()
        if between:
            assert np.array_equal(other, UNTOUCHED + expected)


def test_a_norm_in_place_reads_rows_that_no_other_has_overwritten(device: Any) -> None:
    """The residual stream is added to as ever, and rows that are spent lie apart from those still to be read."""
    weight = device.ops.matrix(blocks_of("Q4_0", 32, COLS), "quantised")
    x = np.random.default_rng(3).standard_normal((70, COLS), np.float32)
    scale = np.linspace(0.5, 2, COLS, dtype=np.float32)
    streams, outs = np.ones((2, 70, COLS), np.float32), np.empty((2, 70, 32), np.float32)
    for stream, out, spent in zip(streams, outs, (False, True), strict=True):
        rows = x.copy()
        with device.capture() as step:
            device.ops.rms_norm(rows, scale, 1e-5, rows, stream)
            device.ops.matmul(rows, weight, out, x_spent=spent)
        step.replay()
    assert outs[0].tobytes() == outs[1].tobytes()
    assert streams[0].tobytes() == streams[1].tobytes()


def mlp(device: Any, kind: str, rows: int, activation: Any, spent: bool, bias: bool = False) -> tuple[Any, ...]:
    """A gated MLP run at once and captured: (what the captured one left in gate_up, records of the capture, whether
    both have the same outputs)."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, COLS_IN), np.float32)
    up = device.ops.matrix(blocks_of(kind, 2 * INNER, COLS_IN), "quantised")
    down = device.ops.matrix(blocks_of("Q4_0", 40, INNER), "quantised")
    added = rng.standard_normal(2 * INNER, np.float32) if bias else None
    gate_up, active = np.empty((rows, 2 * INNER), np.float32), np.empty((rows, INNER), np.float32)
    outs = np.full((2, rows, 40), np.nan, np.float32)
    device.ops.matmul(x, up, gate_up, added)
    device.ops.gated_activation(gate_up, activation, active)
    device.ops.matmul(active, down, outs[0])
    gate_up[:] = active[:] = UNTOUCHED
    with device.capture() as step:
        device.ops.matmul(x, up, gate_up, added)
        device.ops.gated_activation(gate_up, activation, active, spent=spent)
        device.ops.matmul(active, down, outs[1], x_spent=True)
    step.replay()
    assert (active == UNTOUCHED).all()
    return gate_up, step.records.count, outs[0].tobytes() == outs[1].tobytes()


COLS_IN, INNER = 256, 288  # nine panels of gates: threads get unequal shares


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize(("rows", "activation"), [(9, "silu"), (130, "silu"), (30, "gelu_tanh"), (261, "relu")])
def test_gates_are_activated_where_they_are_multiplied(device: Any, kind: str, rows: int, activation: Any) -> None:
    gate_up, records, same = mlp(device, kind, rows, activation, spent=True)
    assert same
    assert records == 3  # quantising x, the gated product, and the one after it
    assert (gate_up == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("rows", "activation", "spent", "bias"),
    [(8, "silu", True, False), (9, "gelu", True, False), (9, "silu", False, False), (9, "silu", True, True)],
)
def test_gates_that_are_few_or_read_later_or_biased_are_written(
    device: Any, rows: int, activation: Any, spent: bool, bias: bool
) -> None:
    gate_up, records, same = mlp(device, "Q4_1", rows, activation, spent, bias)
    assert same
    assert records == 4
    assert not (gate_up == UNTOUCHED).any()
