"""The figures of `cupaged bench memory` with their formulas, beside what Kwon et al. 2023 (SOSP, "PagedAttention")
report. The picture needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cupaged.bench.memory.shapes import KVShape
from cupaged.bench.memory.simulate import Outcome
from cupaged.errors import OptionError, shown

SOURCE = "Kwon et al. 2023"
_SAVED = {  # sharing saves so many per cent of the blocks, section 6.3 and figure 15 (OPT-13B)
    ("sharegpt-like", False): "16.2-30.5 %",
    ("sharegpt-like", True): "44.3-66.3 %",
    ("alpaca-like", False): "6.1-9.8 %",
    ("alpaca-like", True): "37.6-55.2 %",
}


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines: a row for each allocator."""
    lines = [
        f"{'allocator':20} {'sequences':>9} {'most':>5} {'used':>6} {'reserved':>8} {'internal':>8} {'external':>8} "
        f"{'waste':>6} {'steps':>7} {'preempted':>9} {'copied':>11}"
    ]
    for o in outcomes:
        lines.append(
            f"{o.name:20} {o.sequences:9.1f} {o.most_sequences:5} {o.used:6.1%} {o.reserved:8.1%} {o.internal:8.1%} "
            f"{o.external:8.1%} {o.waste:6.1%} {o.steps:7,} {o.preemptions:9,} {o.copied_slots:11,}"
        )
    return lines


def findings(
    outcomes: Sequence[Outcome], shape: KVShape, element_bytes: int, budget: int, max_len: int, trace: str,
    width: int, beams: bool,
) -> list[dict[str, str]]:  # fmt: skip
    """Each figure: what, value, formula, and the source's claim where it has one for this case ("" elsewhere)."""
    by_name = {o.name: o for o in outcomes}
    contiguous = by_name["contiguous, max"]
    token = shape.token_bytes(element_bytes)
    same_model = token == 819_200  # OPT-13B's shape, which Llama-13B shares
    same_trace = trace == "sharegpt-like" and width == 1 and same_model
    slots = budget // token
    rows = [
        _row("K/V of a token", f"{token:,} bytes", shape.formula(element_bytes), "800 KB (section 3)" * same_model),
        _row("slots", f"{slots:,}", f"{budget:,} bytes // {token:,}"),
        _row(
            f"sequences of {max_len:,} tokens that fit contiguously", f"{slots // max_len}",
            f"{slots:,} slots // {max_len:,}",
        ),
        _row(
            "contiguous, max: wasted", f"{contiguous.waste:.1%}",
            "reserved + internal + external, of all slots, mean over steps",
            "61.8-79.6 % by existing systems (figure 2)" * same_trace,
        ),
    ]  # fmt: skip
    for o in outcomes:
        if not o.name.startswith("paged"):
            continue
        rows += [
            _row(
                f"{o.name}: wasted", f"{o.waste:.1%}", "as above",
                "3.7 % (figure 2)" * (same_trace and o.name == "paged, block 16"),
            ),
            _row(
                f"{o.name}: sequences against contiguous, max", f"{o.sequences / contiguous.sequences:.2f} times",
                f"{o.sequences:.2f} / {contiguous.sequences:.2f}, means over steps",
                "30.42 / 7.00 = 4.3 times (figure 13a)" * same_trace,
            ),
        ]  # fmt: skip
        if width > 1:
            claim = _SAVED.get((trace, beams), "") if same_model else ""
            rows.append(
                _row(f"{o.name}: saved by sharing", f"{o.sharing_saved:.1%}", "1 - stored / sum over sequences", claim)
            )
    return rows


def _row(what: str, value: str, formula: str, claim: str = "") -> dict[str, str]:
    return {"what": what, "value": value, "formula": formula, "claim": claim}


def finding_lines(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = []
    for row in rows:
        lines.append(f"{row['what']}: {row['value']}")
        lines.append(f"    {row['formula']}" + (f"; {SOURCE}: {row['claim']}" if row["claim"] else ""))
    return lines


def as_object(outcomes: Sequence[Outcome], rows: Sequence[dict[str, str]], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "settings": settings,
        "allocators": [asdict(o) | {"waste": o.waste} for o in outcomes],
        "findings": list(rows),
    }


def check_picture(path: Path) -> None:
    """OptionError if no picture can be written there: before anything is simulated."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise OptionError(f"cannot write {shown(str(path))}: a name that ends in .png, .pdf or .svg is allowed")
    if not path.parent.is_dir():
        raise OptionError(f"cannot write {shown(str(path))}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("a picture needs matplotlib: pip install matplotlib")


def draw_picture(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Sequences over time, and where the slots are. OptionError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    over_time, split = figure.subplots(1, 2)
    for o in outcomes:
        over_time.plot(*zip(*o.history, strict=True), label=o.name, linewidth=1)
    over_time.set(xlabel="step", ylabel="sequences running", xlim=(0, None), ylim=(0, None))
    over_time.legend(frameon=False)
    left = [0.0] * len(outcomes)
    names = [o.name for o in outcomes]
    colours = {"used": "#2a7f62", "reserved": "#e0b040", "internal": "#c05040", "external": "#9a9a9a"}
    for part, colour in colours.items():
        values = [100 * getattr(o, part) for o in outcomes]
        split.barh(names, values, left=left, label=part, color=colour)
        left = [a + b for a, b in zip(left, values, strict=True)]
    split.invert_yaxis()
    split.set(xlabel="% of all slots, mean over the steady part", xlim=(0, 100))
    split.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.1))
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: the picture cannot be written ({error})") from None
