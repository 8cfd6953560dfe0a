"""Stop strings in a stream: never shown in part, never depending on where tokens are cut."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupaged.stopping import StopMatcher

Result = tuple[str, str | None]


def run(tokens: list[str], stop: list[str], include: bool = False) -> tuple[list[str], Result]:
    """What each token showed (the last entry: the flush), and (whole text, matched stop)."""
    matcher = StopMatcher(stop, include)
    shown: list[str] = []
    for token in tokens:
        text, matched = matcher.push(token)
        shown.append(text)
        if matched is not None:
            break
    shown.append(matcher.flush())
    return shown, ("".join(shown), matcher.matched)


@pytest.mark.parametrize(
    "tokens, stop, include, text, matched",
    [
        (["AB", "CD", "EFG", "H"], ["DEF"], False, "ABC", "DEF"),
        (["AB", "CD", "EFG", "H"], ["DEF"], True, "ABCDEF", "DEF"),
        (["x", "DE", "Y", "Z"], ["DEF"], False, "xDEYZ", None),
        (["one two three"], ["three", "two"], False, "one ", "two"),
        (["abc", "DE"], ["DEF"], False, "abcDE", None),
        (["ok", "."], ["DEF"], False, "ok.", None),
    ],
    ids=["spans tokens", "spans tokens, included", "false alarm", "earliest wins", "flushed at eos", "not there"],
)
def test_T04_stop_strings_over_several_tokens(
    tokens: list[str], stop: list[str], include: bool, text: str, matched: str | None
) -> None:
    shown, result = run(tokens, stop, include)
    assert result == (text, matched)
    if matched and not include:
        assert not any("D" in piece for piece in shown)


def test_T04_text_is_held_back_only_while_it_can_become_a_stop_string() -> None:
    matcher = StopMatcher(["DEF", "xyz"])
    assert [matcher.push(token)[0] for token in ["aD", "E", "D", "x", "y", "-"]] == ["a", "", "DE", "D", "", "xy-"]


def test_T04_after_a_stop_string_nothing_more_is_shown() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", ".")
    assert matcher.push("c") == ("", ".")
    assert matcher.flush() == ""
    assert matcher.matched == "."


@pytest.mark.parametrize("stop", [["ab", "abc"], ["abc", "ab"]])
def test_the_stop_string_that_is_complete_first_wins(stop: list[str]) -> None:
    for tokens in (["xabc"], ["xa", "bc"]):
        assert run(tokens, stop)[1] == ("x", "ab")


def test_of_two_that_are_complete_together_the_longest_wins() -> None:
    assert run(["wxab"], ["ab", "xab"])[1] == ("w", "xab")
    assert run(["wab"], ["ab", "xab"])[1] == ("w", "ab")


def test_without_stop_strings_all_text_passes() -> None:
    assert run(["ab", "", "c"], []) == (["ab", "", "c", ""], ("abc", None))


def naive(text: str, stop: list[str], include: bool) -> Result:
    """The rule, read off the whole text."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            matched = max(complete, key=len)
            return text[: end if include else end - len(matched)], matched
    return text, None


letters = st.text(alphabet="abc", max_size=6)


@given(
    tokens=st.lists(letters, max_size=12),
    stop=st.lists(letters.filter(bool), max_size=4),
    include=st.booleans(),
)
def test_T04_equals_a_search_in_the_whole_text(tokens: list[str], stop: list[str], include: bool) -> None:
    assert run(tokens, stop, include)[1] == naive("".join(tokens), stop, include)


@given(tokens=st.lists(letters, max_size=12), stop=st.lists(letters.filter(bool), min_size=1, max_size=4))
def test_T04_exactly_the_longest_possible_beginning_is_held_back(tokens: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    text = shown = ""
    for token in tokens:
        piece, matched = matcher.push(token)
        if matched is not None:
            return
        text, shown = text + token, shown + piece
        beginnings = {string[:n] for string in stop for n in range(len(string))}
        held = max((text[i:] for i in range(len(text) + 1) if text[i:] in beginnings), key=len)
        assert shown + held == text


def test_cost_is_linear_in_text_and_independent_of_the_number_of_stop_strings() -> None:
    """The worst text: it nearly completes a long stop string all the time. Naive ways need 10**9 comparisons here."""
    stop = ["a" * length + "b" for length in range(192, 256)]
    matcher = StopMatcher(stop)
    start = time.process_time()
    length = sum(len(matcher.push("aaaa")[0]) for _ in range(50_000)) + len(matcher.flush())
    assert time.process_time() - start < 5
    assert length == 200_000
