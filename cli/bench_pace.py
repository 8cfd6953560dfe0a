"""`cupaged bench pace`: gaps between tokens while a long prompt arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cupaged.cli import runtime
from cupaged.cli.output import Output
from cupaged.cli.progress import Progress, say_round
from cupaged.cli.values import number

if TYPE_CHECKING:
    from cupaged.bench.pace import Gaps


@click.command(short_help="What decoding and an arriving prompt cost each other.")
@runtime.model_options(required=True)
@click.option("--decodes", type=number(int, 1, 4095), default=16, show_default=True, help="Sequences that decode.")
@click.option("--prompt-tokens", type=number(int, 1, 1 << 20), default=2000, show_default=True, help="That arrive.")
@click.option("--rounds", type=number(int, 1, 1000), default=5, show_default=True, help="Rounds that count.")
@click.option("--json", "as_object", is_flag=True, help="A JSON object, with all figures.")
@runtime.debug_option
def pace(weights: str, decodes: int, prompt_tokens: int, rounds: int, as_object: bool, **options: Any) -> int:
    """How long sequences wait for their next token while a long prompt is computed, and how fast that goes on.

    Both over what they are without the other, measured in the same rounds; --pace says how the engine shares its steps.
    """
    from cupaged.bench.pace import Company, measure

    output = Output()
    with Progress() as progress, runtime.open_llm(weights, **options, progress=progress) as llm:
        progress.clear()
        gaps = measure(llm, Company(decodes, prompt_tokens), rounds, lambda number: say_round(number, rounds))
        where = llm.info()["device"]
    figures = _figures(gaps)
    if as_object:
        from cupaged.bench.machine import describe_machine

        output.json({"machine": describe_machine(), "decodes": decodes, "prompt_tokens": prompt_tokens, **figures})
    else:
        threads = f", {_counted(where['threads'], 'thread')}" if where["threads"] else ""
        rows = _text(figures, prompt_tokens)
        output.write(f"{where['name']}{threads}; {decodes} decoding, {_counted(rounds, 'round')}\n{rows}")
    return 0


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _figures(gaps: Gaps) -> dict[str, Any]:
    import statistics

    from cupaged.bench.pace import quantile

    return {
        "gap_s": {
            name: {"without": quantile(gaps.without, share), "beside": quantile(gaps.beside, share)}
            for name, share in (("p50", 0.5), ("p99", 0.99))
        },
        "gap_ratio": {"p50": gaps.gap_ratio(0.5), "p99": gaps.gap_ratio(0.99)},
        "prompt_tokens_s": {
            "alone": statistics.median(gaps.speed_alone),
            "beside": statistics.median(gaps.speed_beside),
        },
        "speed_ratio": gaps.speed_ratio,
    }


def _text(figures: dict[str, Any], prompt: int) -> str:
    lines = [
        f"gap {name}   {1e3 * gap['without']:8.1f} ms alone {1e3 * gap['beside']:9.1f} ms beside the prompt"
        f"   {figures['gap_ratio'][name]:.2f} times"
        for name, gap in figures["gap_s"].items()
    ]
    speed = figures["prompt_tokens_s"]
    lines.append(
        f"prompt    {speed['alone']:8.1f} tokens/s alone {speed['beside']:6.1f} beside the others"
        f"   {figures['speed_ratio']:.0%}   ({prompt} tokens)"
    )
    return "\n".join(lines) + "\n"
