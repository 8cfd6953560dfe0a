"""`cupaged bench memory`: what paging saves, simulated with the real block manager. Needs no weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cupaged.cli import runtime
from cupaged.cli.output import Output
from cupaged.cli.progress import Progress
from cupaged.cli.values import Text, number
from cupaged.errors import OptionError, shown

T = TypeVar("T")
TRACES = ("sharegpt-like", "alpaca-like")


def named(option: str, work: Callable[[], T]) -> T:
    """What `work` gives; an OptionError of it begins with the option's name."""
    try:
        return work()
    except OptionError as error:
        raise OptionError(f"{option}: {error}") from None


@click.command(short_help="How many sequences fit, paged and contiguous.")
@click.option(
    "--trace",
    default=TRACES[0],
    show_default=True,
    metavar="TRACE",
    help="Request lengths: sharegpt-like, alpaca-like, or a CSV file with columns prompt and output.",
)
@click.option(
    "--model",
    default="llama-13b",
    show_default=True,
    metavar="MODEL",
    help="Shape of the K/V: opt-13b, opt-66b, opt-175b, llama-7b ... llama-3-70b, or a config.json.",
)
@click.option("--budget", default="24GiB", show_default=True, metavar="SIZE", help="Memory for K/V, such as 24GiB.")
@click.option(
    "--element-bytes", type=click.Choice(["1", "2", "4"]), default="2", show_default=True, help="Bytes of a number."
)
@click.option(
    "--block-size",
    "block_sizes",
    type=number(int, 1, 256),
    multiple=True,
    metavar="TOKENS",
    help="Tokens in a block; give it several times to compare.  [default: 16]",
)
@click.option("--requests", type=number(int, 20, 1_000_000), default=2000, show_default=True, help="Length of a trace.")
@click.option("--max-len", type=number(int, 16, 1 << 20), default=2048, show_default=True, help="Longest sequence.")
@click.option("--n", "samples", type=number(int, 1, 64), default=1, show_default=True, help="Samples of a request.")
@click.option("--beams", type=number(int, 2, 64), metavar="N", help="Beams of a request, instead of samples.")
@click.option(
    "--beam-churn",
    type=number(float, 0, 1),
    default=0.03,
    show_default=True,
    help="Chance that a beam goes on from another one at a step (an assumption: there is no model here).",
)
@click.option("--seed", type=number(int, 0, 2**63 - 1), default=0, show_default=True, help="Of trace and beams.")
@click.option("--picture", type=Text(), metavar="FILE", help="Draw a PNG, PDF or SVG.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@runtime.debug_option
def memory(
    trace: str, model: str, budget: str, element_bytes: str, block_sizes: tuple[int, ...], requests: int, max_len: int,
    samples: int, beams: int | None, beam_churn: float, seed: int, picture: str | None, as_json: bool,
) -> int:  # fmt: skip
    """How many sequences fit, paged and contiguous, and where the rest of the memory goes.

    Runs a trace of requests through the block manager that the engine uses, and through contiguous allocation with a
    buddy allocator at three reservations: the longest sequence, the next power of two, and the true length, which
    nobody knows beforehand. All requests wait from the start, so that memory alone is the limit.
    """
    from cupaged.bench.memory import report
    from cupaged.bench.memory.allocators import Allocator, Contiguous, Paged
    from cupaged.bench.memory.shapes import find_shape
    from cupaged.bench.memory.simulate import simulate
    from cupaged.bench.memory.traces import DISTRIBUTIONS, draw, read_csv
    from cupaged.loading import ProgressEvent
    from cupaged.memory_plan import parse_bytes

    if beams is not None and samples > 1:
        raise OptionError("--n and --beams exclude each other")
    shape = named("--model", lambda: find_shape(model))
    if picture is not None:
        named("--picture", lambda: report.check_picture(Path(picture)))
    size = int(element_bytes)
    if "%" in budget:
        raise OptionError(f"--budget: {shown(budget)} is a share of what? Give a size such as 24GiB")
    memory_bytes = parse_bytes("--budget", budget, available=0)
    slots = memory_bytes // shape.token_bytes(size)
    width = beams or samples
    distribution = DISTRIBUTIONS.get(trace)
    if distribution is not None:
        lengths, what = draw(distribution, requests, max_len, seed), distribution.describe(max_len)
    else:
        lengths = named("--trace", lambda: read_csv(Path(trace), max_len))
        what = f"{trace}: {len(lengths)} requests"
    if slots < width * max_len:
        raise OptionError(
            f"--budget {budget} holds {slots:,} tokens of {shape.name}; {width} x {max_len:,} (--max-len) must fit"
        )
    allocators: list[Allocator] = [Contiguous(slots, policy, max_len) for policy in ("max", "pow2", "oracle")]
    allocators += [Paged(slots, block_size) for block_size in dict.fromkeys(block_sizes or (16,))]
    outcomes = []
    with Progress() as progress:
        for allocator in allocators:

            def report_progress(done: int, total: int, stage: str = allocator.name) -> None:
                progress(ProgressEvent(f"simulating {stage}", done, total, "requests"))

            outcomes.append(simulate(allocator, lengths, width, beam_churn if beams else None, seed, report_progress))
    rows = report.findings(outcomes, shape, size, memory_bytes, max_len, trace, width, beams is not None)
    kind = f"{beams} beams, churn {beam_churn:g}" if beams else f"{samples} sample{'s' * (samples > 1)}"
    if picture is not None:
        report.draw_picture(outcomes, f"{shape.name}, {budget}, {trace}, {kind} a request", Path(picture))
    output = Output()
    if as_json:
        settings: dict[str, Any] = {
            "trace": trace, "lengths": what, "requests": len(lengths), "model": shape.name,
            "model_source": shape.source, "budget_bytes": memory_bytes, "element_bytes": size, "max_len": max_len,
            "samples": samples, "beams": beams, "beam_churn": beam_churn if beams else None, "seed": seed,
        }  # fmt: skip
        output.json(report.as_object(outcomes, rows, settings), indent=2)
        return 0
    output.write(f"{what}\n{len(lengths):,} requests, {kind} each; memory for {slots:,} tokens\n\n")
    output.write("\n".join([*report.table(outcomes), "", *report.finding_lines(rows)]) + "\n")
    return 0
