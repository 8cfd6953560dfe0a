"""Rotary tables against published values and an independent formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupaged.model.config import RopeConfig
from cupaged.model.rope import inverse_frequencies, rope_rows


def test_M01_llama_3_2_1b_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(5e5, 64))
    scaled = inverse_frequencies(RopeConfig(5e5, 64, "llama3", 32.0, 1.0, 4.0, 8192))
    assert np.array_equal(scaled[:15], plain[:15])
    np.testing.assert_allclose(scaled[15:18], [1.2905479e-3, 4.2955680e-4, 9.7082878e-5], rtol=1e-7)
    assert np.array_equal(scaled[18:], plain[18:] / 32)


def test_M01_llama_3_1_8b_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(5e5, 128))
    scaled = inverse_frequencies(RopeConfig(5e5, 128, "llama3", 8.0, 1.0, 4.0, 8192))
    ratio = scaled / plain
    assert (ratio[:29] == 1).all()
    assert ((ratio[29:35] < 1) & (ratio[29:35] > 1 / 8)).all()
    np.testing.assert_allclose(ratio[35:], 1 / 8, rtol=1e-15)


def test_default_linear_and_divisors() -> None:
    plain = inverse_frequencies(RopeConfig(1e4, 8))
    np.testing.assert_allclose(plain, [1.0, 1e-1, 1e-2, 1e-3], rtol=1e-15)
    assert np.array_equal(inverse_frequencies(RopeConfig(1e4, 8, "linear", factor=2.0)), plain / 2)
    divided = inverse_frequencies(RopeConfig(1e4, 8, "divisors", divisors=(1.0, 2.0, 4.0, 8.0)))
    assert np.array_equal(divided, plain / [1, 2, 4, 8])


def test_M05_angles_are_not_rounded_before_the_cosine() -> None:
    assert rope_rows(RopeConfig(1e4, 2), 15962, 15963)[0, 0] == pytest.approx(-0.908016, abs=1e-6)
    # theta 1e4, d 32, pair 1, position 1857; half-precision angles give -0.408165
    assert rope_rows(RopeConfig(1e4, 32), 1857, 1858)[0, 1] == pytest.approx(0.306693, abs=1e-6)


def test_rows_hold_cosines_then_sines() -> None:
    rope = RopeConfig(1e4, 12)
    rows = rope_rows(rope, 1000, 1100)
    assert rows.dtype == np.float32
    assert rows.shape == (100, 12)
    for offset in (0, 23, 24, 99):
        for pair in range(6):
            angle = (1000 + offset) * 1e4 ** (-2 * pair / 12)
            assert rows[offset, pair] == pytest.approx(math.cos(angle), abs=1e-7)
            assert rows[offset, 6 + pair] == pytest.approx(math.sin(angle), abs=1e-7)


@given(start=st.integers(0, 3000), length=st.integers(0, 1500), pairs=st.sampled_from([1, 3, 32, 40]))
def test_the_bits_of_a_row_depend_on_its_position_alone(start: int, length: int, pairs: int) -> None:
    rope = RopeConfig(5e5, 2 * pairs, "llama3", 8.0, 1.0, 4.0, 8192)
    rows = rope_rows(rope, start, start + length)
    for offset in {0, 1, length // 2, length - 1} & set(range(length)):
        alone = rope_rows(rope, start + offset, start + offset + 1)
        assert alone.tobytes() == rows[offset].tobytes()


def test_an_impossible_range_is_refused() -> None:
    for start, stop in ((-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="positions"):
            rope_rows(RopeConfig(1e4, 8), start, stop)
