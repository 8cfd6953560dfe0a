"""The random stream, and sampling against a plain walk through its contract (kernels/reference/sampling.py)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupaged.errors import KernelError
from cupaged.kernels.interface import SampleRows
from cupaged.kernels.philox import philox4x32, uniform
from cupaged.kernels.reference import ReferenceOperations

OFF: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "sample": 0,
    "position": 0,
}


def rows_of(*settings: dict[str, Any]) -> SampleRows:
    full = [OFF | given for given in settings]
    return SampleRows(**{name: [row[name] for row in full] for name in OFF})


def draw(ops: Any, logits: Any, count: int, **given: Any) -> np.ndarray:
    """`count` tokens for one row of logits, at positions 0, 1, 2, ..."""
    many = np.tile(np.asarray(logits, np.float32), (count, 1))
    rows = rows_of(*[given | {"position": position} for position in range(count)])
    return np.array([int(token) for token in ops.sample(many, rows)])


def distribution(logits: Any, **given: Any) -> np.ndarray:
    """The probabilities that a row's settings mean, by sorting ids with their weights."""
    row = OFF | given
    wide = [float(x) for x in np.asarray(logits, np.float32)]
    if row["temperature"] < 1e-5:
        return np.eye(len(wide))[wide.index(max(wide))]
    order = sorted(range(len(wide)), key=lambda token: (-wide[token], token))
    weight = {token: math.exp((wide[token] - max(wide)) / row["temperature"]) for token in order}
    if 0 < row["top_k"] < len(wide):
        order = order[: row["top_k"]]
    if row["top_p"] < 1:
        total, mass, kept = math.fsum(weight[token] for token in order), 0.0, []
        for token in order:
            kept.append(token)
            mass += weight[token]
            if mass >= (row["top_p"] - 1e-12) * total:
                break
        order = kept
    order = [token for token in order if weight[token] >= row["min_p"]]
    total = math.fsum(weight[token] for token in order)
    result = np.zeros(len(wide))
    for token in order:
        result[token] = weight[token] / total
    return result


def expected_token(logits: Any, **given: Any) -> int:
    """The first id whose running sum exceeds u."""
    row = OFF | given
    probabilities = distribution(logits, **row)
    u = uniform(row["seed"], row["sample"], row["position"])
    running = 0.0
    for token, probability in enumerate(probabilities):
        running += probability
        if running > u:
            return token
    return int(np.flatnonzero(probabilities)[-1])


@pytest.mark.parametrize(
    ("counter", "key", "result"),
    [  # known answers of the authors (Random123, kat_vectors, philox4x32 10)
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], result: str) -> None:
    expected = [int(word, 16) for word in result.split()]
    assert list(philox4x32(counter, key)) == expected
    arrays = philox4x32([np.array([c], np.uint64) for c in counter], [np.array([k], np.uint64) for k in key])
    assert [int(word[0]) for word in arrays] == expected


def test_uniform_is_the_documented_layout() -> None:
    """Counter 0, key 0: x0 = 6627e8d5, x1 = e169c58d; 52 bits of them, and a half."""
    assert uniform(0, 0, 0) == (0x6627E8D5E169C + 0.5) / 2**52
    seed, sample, position = 0x299F31D0A4093822, 5, 0x85A308D3243F6A88
    x0, x1, _, _ = philox4x32((0x243F6A88, 0x85A308D3, 5, 0), (0xA4093822, 0x299F31D0))
    assert uniform(seed, sample, position) == ((x0 << 20 | x1 >> 12) + 0.5) / 2**52
    assert uniform(-1, 1, 2) == uniform(2**64 - 1, 1, 2)


def test_the_kernel_draws_the_same_numbers() -> None:
    from numba import njit

    from cupaged.kernels.cpu import sampling_math

    @njit("float64(int64, int64, int64)")
    def draw(seed: int, sample: int, position: int) -> float:
        return sampling_math.uniform(seed, sample, position)

    rng = np.random.default_rng(0)
    seeds = [*rng.integers(-(2**63), 2**63, 500).tolist(), -1, 0]
    samples = [*rng.integers(0, 2**32, 501).tolist(), 2**32 - 1]
    positions = [*rng.integers(0, 2**20, 501).tolist(), 2**40]
    drawn = [draw(*row) for row in zip(seeds, samples, positions, strict=True)]
    assert drawn == [uniform(*row) for row in zip(seeds, samples, positions, strict=True)]
    assert len(set(drawn)) == 502


def test_uniform_never_reaches_its_ends() -> None:
    assert (2**52 - 1 + 0.5) * 2.0**-52 == 1 - 2.0**-53 < 1
    many = np.array([uniform(7, 0, position) for position in range(40000)])
    assert 0 < many.min() < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.005
    counts = np.histogram(many, 64, (0, 1))[0]
    assert ((counts - 625) ** 2 / 625).sum() < 120  # chi-square, 63 degrees of freedom: p = 2e-5


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 999999},
    {"top_k": -1},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.5},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 3, 50, 1000])
def test_tokens_follow_the_contract(ops: Any, case: dict[str, Any], vocabulary: int) -> None:
    """Every implementation picks the very tokens of the plain walk, so they agree with each other."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((12, vocabulary), np.float32) * 3
    logits[3] = np.round(logits[3])  # ties
    logits[4, : vocabulary // 2] = -np.inf
    logits[5] = 0
    settings = [case | {"seed": 11 * r, "sample": r % 2, "position": 5 + r} for r in range(12)]
    tokens = [int(token) for token in ops.sample(logits, rows_of(*settings))]
    assert tokens == [expected_token(row, **given) for row, given in zip(logits, settings, strict=True)]


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_large_vocabularies_of_any_shape(ops: Any, case: dict[str, Any]) -> None:
    """Flat, peaked, mostly impossible, tied, with an outlier: the reference's tokens, which the test above holds."""
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((7, 49152), np.float32)
    logits[1] *= 1e-4
    logits[2] *= 20
    logits[3, 50:] = -np.inf
    logits[4] = np.round(logits[4])
    logits[5, 40000] = 3e38
    logits[6] -= 1e6
    settings = [case | {"seed": r, "position": 9} for r in range(7)]
    tokens = [int(token) for token in ops.sample(logits, rows_of(*settings))]
    assert tokens == ReferenceOperations().sample(logits, rows_of(*settings))
    assert tokens[5] == 40000


def test_ties_at_the_edge_of_top_k_go_to_the_lower_id(ops: Any) -> None:
    logits = [1.0, 3.0, 2.0, 2.0, 3.0, 2.0]
    assert set(draw(ops, logits, 200, top_k=3).tolist()) == {1, 4, 2}
    assert set(draw(ops, logits, 50, top_k=1).tolist()) == {1}
    assert set(draw(ops, [0.0] * 6, 200, top_p=0.5).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("vocabulary", [1, 8, 33, 49152])
def test_greedy_is_the_lowest_id_of_the_maximum(ops: Any, vocabulary: int) -> None:
    rng = np.random.default_rng(1)
    logits = np.round(rng.standard_normal((6, vocabulary), np.float32), 1)
    logits[1] = -np.inf
    logits[1, vocabulary // 2] = -5
    tokens = [int(token) for token in ops.sample(logits, rows_of(*[{"temperature": 0.0}] * 6))]
    assert tokens == np.argmax(logits, axis=1).tolist()


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-12, 0.0])
def test_Q03_tiny_temperatures_are_greedy_and_finite(ops: Any, temperature: float) -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((20, 500), np.float32) * 50
    logits[0] *= 1e30
    logits[1, :2] = (3.4e38, -3.4e38)
    settings = [{"temperature": temperature, "position": r} for r in range(20)]
    with np.errstate(all="raise", under="ignore"):
        tokens = [int(token) for token in ops.sample(logits, rows_of(*settings))]
    assert tokens == np.argmax(logits, axis=1).tolist()


def test_Q03_the_border_of_greedy(ops: Any) -> None:
    """Below 1e-5 a tie is the lower id's; from there on it is drawn."""
    assert set(draw(ops, [0.0, 2.0, 2.0], 60, temperature=9.9e-6).tolist()) == {1}
    assert set(draw(ops, [0.0, 2.0, 2.0], 60, temperature=1e-5).tolist()) == {1, 2}


@pytest.mark.parametrize("top_p", [0.5, 0.0, 1e-12, 0.9])
def test_Q04_top_p_keeps_at_least_the_first_token(ops: Any, top_p: float) -> None:
    assert set(draw(ops, np.log([0.05, 0.9, 0.05]), 300, top_p=top_p).tolist()) == {1}


def test_Q04_top_p_is_measured_on_what_top_k_left(ops: Any) -> None:
    """Of .5 .3 .15 .05, top_k 2 leaves .625 .375: p = .6 keeps the first alone; of the whole it would keep two."""
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(draw(ops, logits, 300, top_k=2, top_p=0.6).tolist()) == {0}
    assert set(draw(ops, logits, 300, top_p=0.6).tolist()) == {0, 1}
    assert set(draw(ops, logits, 300, top_p=0.79).tolist()) == {0, 1}
    assert set(draw(ops, logits, 300, top_p=0.81).tolist()) == {0, 1, 2}


def test_min_p_is_relative_to_the_best(ops: Any) -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(draw(ops, logits, 300, min_p=0.29).tolist()) == {0, 1, 2}
    assert set(draw(ops, logits, 300, min_p=0.31).tolist()) == {0, 1}


@pytest.mark.parametrize("case", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_tokens_are_distributed_as_asked(ops: Any, case: dict[str, Any]) -> None:
    """Chi-square over 6,000 draws; they are fixed by the seed, so this fails always or never."""
    logits = np.array([0.3, -1.0, 2.0, 1.5, 0.0, 1.9, -0.5, 0.8])
    counts = np.bincount(draw(ops, logits, 6000, seed=12345, **case), minlength=8)
    expected = distribution(logits, **case) * 6000
    possible = expected > 0
    assert not counts[~possible].any()
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 30  # at most 7 degrees of freedom: p = 1e-4


def test_seed_sample_and_position_each_change_the_stream(ops: Any) -> None:
    logits = np.zeros((40, 1000), np.float32)

    def tokens(**given: Any) -> list[int]:
        return [int(t) for t in ops.sample(logits, rows_of(*[{"position": p} | given for p in range(40)]))]

    base = tokens()
    assert len(set(base)) > 30
    assert tokens() == base
    for other in ({"seed": 1}, {"sample": 1}, {"seed": 1 << 32}, {"seed": -1}):
        assert sum(a == b for a, b in zip(tokens(**other), base, strict=True)) < 5
    assert len(set(tokens(position=3))) == 1


def test_no_rows_and_rows_that_do_not_fit(ops: Any) -> None:
    assert list(ops.sample(np.empty((0, 10), np.float32), rows_of())) == []
    with pytest.raises(KernelError, match="rows"):
        ops.sample(np.zeros((2, 10), np.float32), rows_of({}))


@pytest.mark.parametrize("vocabulary", [1, 255, 1000])
def test_rows_that_are_not_finite_are_found(ops: Any, vocabulary: int) -> None:
    logits = np.random.default_rng(vocabulary).standard_normal((5, vocabulary)).astype(np.float32)
    assert ops.broken_rows(logits) is None
    assert ops.broken_rows(logits[:0]) is None
    logits[0] = np.finfo(np.float32).max  # whose sum overflows
    assert ops.broken_rows(logits) is None
    logits[1, -1], logits[3, 0], logits[4, vocabulary // 2] = np.nan, -np.inf, np.inf
    assert list(ops.broken_rows(logits)) == [False, True, False, True, True]
    for temperature in (0.0, 1.0):
        settings = rows_of(*[{"temperature": temperature, "seed": 5}] * 5)
        tokens = [int(token) for token in ops.sample(logits, settings, checked=True)]
        assert [token < 0 for token in tokens] == [False, True, False, True, True]
        whole = np.where(np.isfinite(logits), logits, np.float32(0))
        assert tokens[0] == ops.sample(whole, settings)[0] and tokens[2] == ops.sample(whole, settings)[2]
    masked = np.full((1, vocabulary + 1), -np.inf, np.float32)
    masked[0, vocabulary] = -3
    assert list(ops.sample(masked, rows_of({"temperature": 1.0}))) == [vocabulary]  # what is ruled out may be -inf
