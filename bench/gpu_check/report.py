"""What a check found: rows of figures by section, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["done", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Row:
    """A figure. beside: what `other`, in the same unit, is a figure of; both empty where nothing is compared."""

    case: str
    value: float
    unit: str
    beside: str = ""
    other: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.value / self.other if self.other else None

    def as_object(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Row:
        return cls(*(found[name] for name in ("case", "value", "unit", "beside", "other")))


@dataclass(frozen=True, slots=True)
class Result:
    """A section's outcome. note: why it failed or was skipped, or what else there is to say, in one line."""

    name: str
    title: str
    state: State
    seconds: float
    rows: Sequence[Row] = ()
    note: str = ""

    def as_object(self) -> dict[str, Any]:
        head = {"name": self.name, "title": self.title, "state": self.state, "seconds": round(self.seconds, 2)}
        return {**head, "note": self.note, "rows": [row.as_object() for row in self.rows]}


def as_object(results: Sequence[Result], about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for JSON. ok: nothing failed; complete: nothing was skipped either."""
    states = {result.state for result in results}
    return {
        "about": dict(about),
        "ok": "failed" not in states,
        "complete": states == {"done"},
        "sections": [result.as_object() for result in results],
    }


def table(results: Iterable[Result]) -> str:
    """The same for people: a line a section, its rows below it."""
    lines = []
    for result in results:
        note = f": {result.note}" if result.note else ""
        lines.append(f"{result.state:<7} {result.seconds:6.1f} s  {result.title}{note}")
        width = max((len(row.case) for row in result.rows), default=0)
        lines += [f"    {row.case:<{width}}  {_figures(row)}" for row in result.rows]
    return "\n".join(lines) + "\n"


def _figures(row: Row) -> str:
    text = f"{_number(row.value)} {row.unit}".rstrip()
    if row.other is None:
        return text
    ratio = "" if row.ratio is None else f", ratio {row.ratio:.2f}"
    return f"{text:<18} {row.beside} {_number(row.other)}{ratio}"


def _number(value: float) -> str:
    """Four digits, no exponent."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    digits = max(0, 3 - len(str(int(abs(value)))) + (1 if abs(value) >= 1 else 0))
    return f"{value:,.{digits}f}" if abs(value) >= 1 else f"{value:.4f}"
