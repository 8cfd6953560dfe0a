"""`cupaged bench quality`: what narrow weights cost, on a text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from cupaged.cli import runtime
from cupaged.cli.output import Output
from cupaged.cli.progress import Progress
from cupaged.cli.values import Text, number
from cupaged.errors import OptionError, shown

MAX_TEXT_BYTES = 64 << 20


@click.command(short_help="What narrow weights cost: perplexity, divergence.")
@runtime.model_options(required=True)
@click.option(
    "--text", type=Text(), required=True, metavar="FILE", help="A text in UTF-8; its first --tokens tokens are read."
)
@click.option("--tokens", type=number(int, 2, 1 << 20), default=8192, show_default=True, help="So many are read.")
@click.option(
    "--window", type=number(int, 2, 1 << 20), default=2048, show_default=True, metavar="TOKENS",
    help="The text is read in pieces of so many tokens, each from its own beginning.",
)  # fmt: skip
@click.option("--json", "as_object", is_flag=True, help="One JSON object.")
@runtime.debug_option
def quality(weights: str, text: str, tokens: int, window: int, as_object: bool, **options: Any) -> int:
    """A model as it would be served against the same file with weights and K/V in float32.

    Prints perplexity, the mean Kullback-Leibler divergence between the distributions of the next token, and how often
    both have the same best token.
    """
    from cupaged.bench.quality import measure
    from cupaged.loading import LoadOptions
    from cupaged.model.regular_file import read_regular

    if options["max_model_len"] is not None:
        raise OptionError("--max-model-len is --window here")
    for name in ("max_batch_tokens", "max_sequences", "pace"):
        if options[name] is not None:
            raise OptionError(f"--{name.replace('_', '-')} has no effect here")
    try:
        content = read_regular(text, MAX_TEXT_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"--text: cannot read {shown(text)} ({reason})") from None
    with Progress() as progress:
        found = measure(weights, LoadOptions(**options), content, tokens, window, progress)
    output = Output()
    if as_object:
        output.json({**asdict(found), "perplexity_change": found.perplexity_change})
        return 0
    kept = ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in found.kept.items())
    output.write(f"{found.tokens} tokens, weights kept as {kept}, against float32\n")
    change = f"({found.perplexity_change:+.3%})"
    output.write(f"perplexity        {found.perplexity:.4f}  float32 {found.exact_perplexity:.4f}  {change}\n")
    output.write(f"mean KL           {found.mean_kl:.6f}\n")
    output.write(f"same best token   {found.top1:.2%}\n")
    return 0
