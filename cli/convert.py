"""`cupaged convert`: a model as a Hub folder of one precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupaged.cli import runtime
from cupaged.cli.output import Output
from cupaged.cli.progress import Progress
from cupaged.errors import OptionError

DTYPES = ("float16", "bfloat16", "float32")


@click.command(short_help="Write a model as a folder as on the Hub.")
@click.argument("source")
@click.argument("target")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Of all weights.  [default: the stored one, or float16 if that is quantised]",
)
@runtime.debug_option
def convert(source: str, target: str, dtype: Any) -> int:
    """Write the model SOURCE (as for --weights) as TARGET, a folder as on the Hugging Face Hub.

    TARGET must be new or empty, and is there once it is whole. Quantised weights are expanded.
    """
    from cupaged.loading import ProgressEvent
    from cupaged.model import convert as conversion
    from cupaged.model.source import resolve_weights

    if not target:
        raise OptionError("target '': a folder is needed")
    folder = Path(target)
    conversion.check_target(folder)  # before anything is fetched
    output = Output()
    with Progress() as progress:

        def report(done: int, total: int) -> None:
            progress(ProgressEvent("writing weights", done, total, "bytes"))

        path = resolve_weights(source, lambda line: progress(ProgressEvent(line, 0, None, "")))
        progress.clear()
        written = conversion.convert(path, folder, dtype, report)
    output.write(f"{target}: {written.tensors} tensors, {written.weight_bytes / 1e6:.1f} MB in {written.dtype}\n")
    return 0
