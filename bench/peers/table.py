"""Figures to rows: medians, our ratio to the best peer, the goals they are held against; as Markdown and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupaged.bench.peers.catalog import RUNTIMES, Runtime
from cupaged.bench.peers.rounds import Measured
from cupaged.bench.peers.workloads import STARTUPS, WORKLOADS

Figures = dict[str, float]

# Our rate over the best peer's, by group and workload: what the project wants to reach. "any file": over peers that run
# whichever 4-bit file suits them best; the plain goals are over those that run ours, or a form of it.
GOALS = {
    ("quantised", "decode"): 1.6,
    ("quantised", "decode any file"): 1.25,
    ("quantised", "prefill512"): 1.7,
    ("quantised", "prefill2048"): 1.7,
    ("quantised", "streams32"): 2.5,
    ("quantised", "samples8"): 4.0,
    ("float32", "decode"): 1.2,
    ("float32", "prefill512"): 1.1,
    ("float32", "prefill2048"): 1.1,
}


@dataclass(frozen=True, slots=True)
class Row:
    """figures: the median of each runtime that has one, in `unit`. ratio: how many times better ours is than the best
    peer that runs the same weights; any_ratio: than the best of all (None where that is the same peer); None where
    either is missing. goal, any_goal: for these ratios. limit: for our figure itself, where less is better.
    """

    name: str
    title: str
    unit: str
    figures: Figures
    ratio: float | None = None
    best: str | None = None
    any_ratio: float | None = None
    any_best: str | None = None
    goal: float | None = None
    any_goal: float | None = None
    limit: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether all goals of the row are; None if it has none, or ours has no figure."""
        any_ratio = self.ratio if self.any_ratio is None else self.any_ratio
        held = [(self.ratio, self.goal), (any_ratio, self.any_goal)]
        answers = [ratio >= goal for ratio, goal in held if ratio is not None and goal is not None]
        if self.limit is not None and self._ours is not None:
            answers.append(self._ours <= self.limit)
        return all(answers) if answers else None

    @property
    def _ours(self) -> float | None:
        return next((value for name, value in self.figures.items() if RUNTIMES[name].ours), None)


def rows_of(group: str, measured: Measured) -> list[Row]:
    """A row for each workload and start-up figure that any runtime of the group has."""
    rows = []
    runtimes = [runtime for runtime in RUNTIMES.values() if runtime.group == group]
    for workload in WORKLOADS:
        figures = _medians(workload.name, runtimes, measured)
        if figures:
            ratio, best = _ratio(figures, [r for r in runtimes if not r.own_file], more=True)
            any_ratio, any_best = _ratio(figures, runtimes, more=True)
            other = any_best != best
            any_goal = GOALS.get((group, f"{workload.name} any file"))
            rows.append(
                Row(
                    workload.name, workload.title, "tokens/s", figures, ratio, best,
                    any_ratio if other else None, any_best if other else None,
                    GOALS.get((group, workload.name)), any_goal,
                )
            )  # fmt: skip
    for startup in STARTUPS:
        figures = _medians(startup.name, runtimes, measured)
        if figures:
            ratio, best = _ratio(figures, runtimes, more=False)
            limit = startup.limit if group == "quantised" else None
            rows.append(Row(startup.name, startup.title, startup.unit, figures, ratio, best, limit=limit))
    return rows


def _medians(name: str, runtimes: Sequence[Runtime], measured: Measured) -> Figures:
    found = {runtime.name: measured.figures.get((runtime.name, name)) for runtime in runtimes}
    return {runtime: statistics.median(values) for runtime, values in found.items() if values}


def _ratio(figures: Figures, runtimes: Sequence[Runtime], more: bool) -> tuple[float | None, str | None]:
    """(how many times better ours is, the best peer); None for what is missing."""
    peers = {r.name: figures[r.name] for r in runtimes if not r.ours and r.name in figures}
    ours = next((figures[r.name] for r in runtimes if r.ours and r.name in figures), None)
    if not peers:
        return None, None
    best = (max if more else min)(peers, key=lambda name: peers[name])
    if ours is None:
        return None, best
    return (ours / peers[best] if more else peers[best] / ours), best


def markdown(rows: Sequence[Row]) -> str:
    """A table with a column for each runtime, the ratio and the goal."""
    names = [name for name in RUNTIMES if any(name in row.figures for row in rows)]
    lines = [
        "| | " + " | ".join([*names, "ratio to the best peer", "goal"]) + " |",
        "| --- |" + " --- |" * (len(names) + 2),
    ]
    for row in rows:
        cells = [_figure(row.figures.get(name), row.unit) for name in names]
        lines.append(f"| {row.title} ({row.unit}) | " + " | ".join([*cells, _ratios(row), _goals(row)]) + " |")
    return "\n".join(lines)


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if unit == "s" else f"{value:,.0f}"


def _ratios(row: Row) -> str:
    parts = []
    if row.ratio is not None:
        parts.append(f"{row.ratio:.2f} ({row.best})")
    if row.any_ratio is not None:
        parts.append(f"{row.any_ratio:.2f} ({row.any_best})")
    return ", ".join(parts) or "-"


def _goals(row: Row) -> str:
    parts = [] if row.goal is None else [f"{row.goal:g}"]
    if row.any_goal is not None:
        parts.append(f"{row.any_goal:g} on any file")
    if row.limit is not None:
        parts.append(f"at most {row.limit:g} {row.unit}")
    if not parts:
        return ""
    return ", ".join(parts) + {True: ": met", False: ": not met", None: ""}[row.met]


def as_json(measured: Measured, header: dict[str, Any]) -> dict[str, Any]:
    """All figures, round by round, with the rows made of them."""
    return {
        **header,
        "versions": measured.versions,
        "left_out": [
            {"runtime": runtime, "workload": workload or None, "reason": reason}
            for (runtime, workload), reason in measured.failures.items()
        ],
        "figures": [
            {"runtime": runtime, "workload": workload, "rounds": values}
            for (runtime, workload), values in measured.figures.items()
        ],
        "rows": [
            {
                "group": group, "workload": row.name, "unit": row.unit, "medians": row.figures,
                "ratio": row.ratio, "best_peer": row.best, "any_file_ratio": row.any_ratio,
                "any_file_best_peer": row.any_best, "goal": row.goal, "any_file_goal": row.any_goal,
                "limit": row.limit, "met": row.met,
            }
            for group in ("quantised", "float32")
            for row in rows_of(group, measured)
        ],
    }  # fmt: skip
