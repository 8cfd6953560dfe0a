"""`cupaged bench`: measurements."""

from __future__ import annotations

import click

from cupaged.cli.bench_generate import generate
from cupaged.cli.bench_kernels import attention, kernels, matmul
from cupaged.cli.bench_memory import memory
from cupaged.cli.bench_pace import pace
from cupaged.cli.bench_quality import quality


@click.group(invoke_without_command=True)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure models, kernels and memory on this machine."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for command in (attention, generate, kernels, matmul, memory, pace, quality):
    bench.add_command(command)
