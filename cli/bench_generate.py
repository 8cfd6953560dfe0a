"""`cupaged bench generate`: prefill and decode of a model as a whole."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import click

from cupaged.cli import runtime
from cupaged.cli.output import Output
from cupaged.cli.progress import Progress, say_round
from cupaged.cli.values import number

if TYPE_CHECKING:
    from cupaged.bench.generate import Rates, Task


@click.command(short_help="Tokens a second of a model's prefill and decode.")
@runtime.model_options(required=True)
@click.option("--prompt-tokens", type=number(int, 1, 1 << 20), default=512, show_default=True, help="In each stream.")
@click.option("--new-tokens", type=number(int, 2, 1 << 20), default=128, show_default=True, help="In each stream.")
@click.option("--streams", type=number(int, 1, 4096), default=1, show_default=True, help="Prompts at once.")
@click.option("--rounds", type=number(int, 1, 1000), default=3, show_default=True, help="Rounds that count.")
@click.option("--json", "as_object", is_flag=True, help="A JSON object, with the figures of every round.")
@runtime.debug_option
def generate(
    weights: str, prompt_tokens: int, new_tokens: int, streams: int, rounds: int, as_object: bool, **options: Any
) -> int:
    """Tokens a second of prefill and decode, with random prompts, greedily: medians of some rounds.

    Beside them, measured in the same rounds: the bytes that decoding reads over this machine's read bandwidth, and the
    operations of prefill over its arithmetic.
    """
    from cupaged.bench.generate import Task, measure

    if options["max_sequences"] is None and streams > 64:
        options["max_sequences"] = streams
    output = Output()
    task = Task(streams, prompt_tokens, new_tokens)
    with Progress() as progress, runtime.open_llm(weights, **options, progress=progress) as llm:
        progress.clear()
        rates = measure(llm, task, rounds, lambda number: say_round(number, rounds))
        info = llm.info()
    if as_object:
        output.json(_object(rates, task, info))
    else:
        output.write(_text(rates, task, info))
    return 0


def _figures(rates: Rates, task: Task) -> dict[str, float | None]:
    prefill, decode = statistics.median(rates.prefill), statistics.median(rates.decode)
    return {
        "prefill_tokens_s": prefill,
        "decode_tokens_s": decode,
        "decode_gb_s": decode / task.streams * rates.decode_bytes / 1e9,
        "read_roof_gb_s": statistics.median(rates.read_roof) if rates.read_roof else None,
        "prefill_gop_s": prefill * rates.prefill_operations / 1e9,
        "arithmetic_roof_gop_s": statistics.median(rates.arithmetic_roof) if rates.arithmetic_roof else None,
    }


def _object(rates: Rates, task: Task, info: dict[str, Any]) -> dict[str, Any]:
    from cupaged.bench.machine import describe_machine

    return {
        "machine": describe_machine(),
        "device": info["device"],
        "weights": info["weights"],
        "kv_dtype": info["kv_cache"]["kv_dtype"],
        "streams": task.streams,
        "prompt_tokens": task.prompt,
        "new_tokens": task.new,
        **_figures(rates, task),
        "arithmetic": rates.arithmetic,
        "rounds": {"prefill_tokens_s": rates.prefill, "decode_tokens_s": rates.decode},
    }


def _text(rates: Rates, task: Task, info: dict[str, Any]) -> str:
    figures = _figures(rates, task)
    threads = info["device"]["threads"]
    where = f"{info['device']['name']}" + (f", {threads} thread{'s' if threads != 1 else ''}" if threads else "")
    many = f"{task.streams} streams" if task.streams > 1 else "1 stream"
    lines = [
        f"{where}; weights {info['weights']['dtype']}, K/V {info['kv_cache']['kv_dtype']}; {many} of "
        f"{task.prompt} + {task.new} tokens, medians of {len(rates.decode)}",
        f"prefill {figures['prefill_tokens_s']:9,.1f} tokens/s"
        + _over(figures["prefill_gop_s"], figures["arithmetic_roof_gop_s"], "GOP/s", rates.arithmetic),
        f"decode  {figures['decode_tokens_s']:9,.1f} tokens/s"
        + _over(figures["decode_gb_s"], figures["read_roof_gb_s"], "GB/s", "read bandwidth"),
    ]
    return "\n".join(lines) + "\n"


def _over(value: float | None, roof: float | None, unit: str, name: str) -> str:
    if value is None or roof is None:
        return ""
    return f"   {value:6.1f} of {roof:6.1f} {unit} ({value / roof:.0%} of the {name})"
