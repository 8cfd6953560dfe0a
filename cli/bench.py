"""`cupaged bench`: measurements of this machine's kernels."""

from __future__ import annotations

from dataclasses import asdict

import click

from cupaged.cli import runtime
from cupaged.cli.bench_memory import memory
from cupaged.cli.bench_quality import quality
from cupaged.cli.output import Output
from cupaged.cli.values import number


@click.group(invoke_without_command=True)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure kernels on this machine."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@bench.command()
@click.option("--threads", type=number(int, 1, 256), help="CPU threads.  [default: the cores we may use]")
@click.option(
    "--seconds", type=number(float, 0.05, 60), default=0.5, show_default=True, help="Time for each row."
)  # fmt: skip
@click.option("--only", metavar="KERNEL", type=click.Choice(["matmul", "attention"]), help="Only these rows.")
@click.option("--json", "as_object", is_flag=True, help="A JSON object a row.")
@runtime.debug_option
def kernels(threads: int | None, seconds: float, only: str | None, as_object: bool) -> int:
    """The CPU kernels against this machine's roofs: read bandwidth, or fused multiply-adds.

    Kernel and roof are run in turn, in the same rounds, and medians are compared; on a machine that is busy with other
    things the shares hold better than the rates. A share over 100% means that something else slowed the roof's rounds.
    """
    from cupaged.bench.kernels import run_all

    output = Output()
    if not as_object:
        output.write(f"{'kernel':8} {'case':58} {'rate':>8} {'roof':>8} {'unit':8} share\n")
    for row in run_all(threads, seconds, only):
        if as_object:
            output.json(asdict(row) | {"share": row.share})
        else:
            line = f"{row.kernel:8} {row.case:58} {row.rate:8.1f} {row.roof:8.1f} {row.unit:8} {row.share:5.0%}"
            output.write(line + "\n")
    return 0


bench.add_command(memory)
bench.add_command(quality)
