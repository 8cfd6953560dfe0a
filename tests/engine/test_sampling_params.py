"""Options of a request are right, or refused with their name, value and range."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from cupaged.errors import OptionError
from cupaged.sampling import SamplingParams

NAN, INF = float("nan"), float("inf")


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.max_tokens, params.seed, params.stop, params.stop_token_ids) == (None, None, (), ())
    assert (params.logprobs, params.ignore_eos, params.skip_special_tokens) == (None, False, True)
    assert params.include_stop_str_in_output is False
    assert not params.greedy


REFUSED: list[tuple[str, Any, str]] = [
    *(("temperature", value, r"0 \.\. 100") for value in (-1, 1e6, 100.1, NAN, INF, -INF, "0.7", True, None, 10**400)),
    *(("top_p", value, r"0 \.\. 1") for value in (-1, -1e-9, 1.5, NAN, INF, "1", False, None, [0.5])),
    *(("min_p", value, r"0 \.\. 1") for value in (2, -0.1, NAN, "0")),
    *(("top_k", value, r"-1 \.\. 2147483647") for value in (1.5, 1.0, -2, 2**31, True, "1", None, NAN)),
    *(("seed", value, r"0 \.\. 9223372036854775807") for value in (-1, 2**63, 10**400, 1.0, "1", True)),
    *(("max_tokens", value, r"0 \.\. 2147483647") for value in (-1, 1.5, 16.0, 2**31, "1", True, NAN)),
    *(("logprobs", value, r"0 \.\. 20") for value in (21, -1, 50_000, 1.0, True, "1")),
    *(("ignore_eos", value, "True or False") for value in (0, 1, None, "no")),
    *(("skip_special_tokens", value, "True or False") for value in (0, None)),
    *(("include_stop_str_in_output", value, "True or False") for value in (1, "yes")),
    *(("stop", value, "a string") for value in (5, b"x", ["a", 5], [None], {"a"}, {"a": 1})),
    *(("stop", value, r"1 \.\. 256") for value in ("", ["a", ""], "x" * 257)),
    ("stop", ["x"] * 65, "at most 64"),
    *(("stop_token_ids", value, "token ids") for value in (5, "12", b"12", None)),
    *(
        ("stop_token_ids", value, r"0 \.\. 2147483647")
        for value in ([-1], [2**31], [5279552648203111001], [1.0], [True])
    ),
]


@pytest.mark.parametrize("name, value, allowed", REFUSED, ids=[f"{name}={value!r:.20}" for name, value, _ in REFUSED])
def test_Q09_bad_values_are_refused_with_name_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(OptionError, match=allowed) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_Q09_the_refused_value_is_shown(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}=-1.25 is out of range"):
        SamplingParams(**{name: -1.25})


def test_Q09_a_number_too_long_to_print_is_refused_like_any_other() -> None:
    for name in ("seed", "temperature"):
        with pytest.raises(OptionError, match=f"^{name}=<int> is out of range"):
            SamplingParams(**{name: 10**5000})


def test_Q09_the_place_of_a_bad_item_is_named() -> None:
    with pytest.raises(OptionError, match=r"stop_token_ids\[1\]=-7"):
        SamplingParams(stop_token_ids=[3, -7])
    with pytest.raises(OptionError, match=r"stop\[1\] has 0 characters"):
        SamplingParams(stop=["a", ""])


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", 0),
        ("temperature", 100),
        ("top_p", 0),
        ("top_p", 1),
        ("min_p", 1),
        ("top_k", 2**31 - 1),
        ("seed", 2**63 - 1),
        ("max_tokens", 2**31 - 1),
        ("logprobs", 0),
        ("logprobs", 20),
    ],
)
def test_the_ends_of_each_range_are_allowed(name: str, value: float) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "temperature, greedy", [(0, True), (1e-12, True), (9.9e-6, True), (1e-5, False), (1e-4, False)]
)
def test_Q03_temperatures_too_small_to_divide_by_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_Q04_top_p_zero_is_allowed_and_means_the_best_token() -> None:
    assert SamplingParams(top_p=0.0).top_p == 0.0


def test_S06_no_tokens_at_all_may_be_asked_for() -> None:
    assert SamplingParams(max_tokens=0).max_tokens == 0


def test_R01_logprobs_are_capped() -> None:
    with pytest.raises(OptionError, match=r"logprobs=154880 is out of range: 0 \.\. 20"):
        SamplingParams(logprobs=154_880)


def test_top_k_minus_one_is_off_as_in_vllm() -> None:
    assert SamplingParams(top_k=-1).top_k == 0


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=np.float64(0.5),
        seed=np.uint64(2**63 - 1),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2], dtype=np.int32),  # type: ignore[arg-type]
    )
    assert params == SamplingParams(max_tokens=5, temperature=0.5, top_p=0.5, seed=2**63 - 1, stop_token_ids=[1, 2])
    assert {type(params.max_tokens), type(params.seed), type(params.stop_token_ids[0])} == {int}
    assert type(params.temperature) is float
    with pytest.raises(OptionError, match="seed"):
        SamplingParams(seed=np.uint64(2**63))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="top_k"):
        SamplingParams(top_k=np.bool_(True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name, hint",
    [
        ("temprature", "did you mean temperature?"),
        ("max_new_tokens", "did you mean max_tokens?"),
        ("stop_strings", "did you mean stop"),
        ("xyz", "known are max_tokens, temperature"),
    ],
)
def test_unknown_options_are_named_with_the_nearest_known_one(name: str, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**{name: 1})
    assert repr(name) in str(caught.value)
    assert hint in str(caught.value)
    with pytest.raises(OptionError):
        replace(SamplingParams(), **{name: 1})


def test_one_stop_string_or_several() -> None:
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_params_are_values() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1], seed=3)
    assert replace(params, seed=4) == SamplingParams(stop="a", stop_token_ids=(1,), seed=4)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert len({params, SamplingParams(stop="a", stop_token_ids=[1], seed=3)}) == 1
    with pytest.raises(FrozenInstanceError):
        params.seed = 5  # type: ignore[misc]


def test_importing_needs_the_standard_library_alone() -> None:
    code = (
        "import sys; import cupaged.sampling, cupaged.stopping;"
        "third = {n.split('.')[0] for n in sys.modules} - set(sys.stdlib_module_names) - before;"
        "print(sorted(third))"
    )
    code = "import sys; before = {n.split('.')[0] for n in sys.modules};" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "['cupaged']"


def test_the_signature_that_help_shows_is_the_fields() -> None:
    assert list(inspect.signature(SamplingParams).parameters) == list(SamplingParams.__dataclass_fields__)
