"""`cupaged warmup`: kernels compiled before somebody waits for them."""

from __future__ import annotations

from typing import Any

import click

from cupaged.cli import runtime
from cupaged.cli.output import Output
from cupaged.cli.progress import Progress


@click.command(short_help="Compile the kernels that a model needs.")
@runtime.model_options(required=True, only=("device", "dtype", "quantize", "kv_dtype", "block_size", "deterministic"))
@runtime.debug_option
def warmup(weights: str, **options: Any) -> int:
    """Compile the kernels that a model needs on this machine, and keep them for later starts.

    For an image of a container, say. The model is fetched if need be, but not loaded. The options are those of
    `generate` that say which kernels it needs.
    """
    from cupaged.loading import LoadOptions
    from cupaged.warmup import warm_up

    with Progress() as progress:
        done = warm_up(weights, LoadOptions(**options), progress)
    if done.compiled:
        line = f"{done.compiled} kernels compiled for {done.device} in {done.seconds:.1f} s, kept in {done.folder}"
    else:
        line = f"nothing to do: the kernels for {done.device} are in {done.folder}"
    Output().write(line + "\n")
    return 0
