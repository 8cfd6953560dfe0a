"""Types of option values that the library itself checks: one range for each option, however it is given.

A refusal is a usage error, so that it names the option as it was typed, the value and what is allowed. What cannot be
parsed goes to the library as text, since its answer then holds the range too (click's own says "not a valid integer").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from cupaged.errors import OptionError, shown


class Checked(click.ParamType):
    """`parse` makes a value of the text; `check` raises OptionError for one that cannot be used. `field`: what the
    library calls it in its message."""

    def __init__(self, parse: Callable[[Any], Any], field: str, check: Callable[[Any], object]) -> None:
        self.name = {int: "integer", float: "float"}.get(parse, "text")  # type: ignore[call-overload]
        self._parse = parse
        self._field = field
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            parsed = self._parse(value)
        except ValueError:
            parsed = value
        try:
            self._check(parsed)
        except OptionError as error:
            message = str(error)
            for prefix in (f"{self._field}=", f"{self._field}: ", f"{self._field}[0]="):
                message = message.removeprefix(prefix)
            self.fail(message, param, ctx)
        return parsed


def sampling(field: str, parse: Callable[[Any], Any], *, many: bool = False, **others: Any) -> Checked:
    """A field of SamplingParams; `many`: the option gives one item of the field's list. `others`: fields without which
    it means nothing."""

    def check(value: Any) -> None:
        from cupaged.sampling import SamplingParams

        if isinstance(value, str):
            utf8(value)
        options: dict[str, Any] = {field: [value] if many else value, **others}
        SamplingParams(**options)

    return Checked(parse, field, check)


def loading(field: str, parse: Callable[[Any], Any]) -> Checked:
    """A field of LoadOptions."""

    def check(value: Any) -> None:
        from cupaged.loading import LoadOptions

        LoadOptions(**{field: value})

    return Checked(parse, field, check)


def number(parse: Callable[[Any], Any], low: float, high: float) -> Checked:
    """An int or float in low .. high, NaN not among them."""

    def check(value: Any) -> None:
        if isinstance(value, str) or not low <= value <= high or not math.isfinite(value):
            raise OptionError(f"{shown(value)} is not a {'whole ' if parse is int else ''}number in {low} .. {high}")

    return Checked(parse, "", check)


def utf8(text: str) -> None:
    """OptionError for text with lone surrogates, which stand for bytes of the command line that are no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise OptionError(f"{shown(text)} is not valid UTF-8") from None


class Text(click.ParamType):
    """Any text in UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            utf8(value)
        except OptionError as error:
            self.fail(str(error), param, ctx)
        return str(value)
