"""`cupaged generate`: text or JSON from one prompt or many."""

from __future__ import annotations

from typing import Any

import click

from cupaged.cli import runtime
from cupaged.cli.output import Output
from cupaged.cli.progress import Progress
from cupaged.cli.prompts import collect
from cupaged.cli.session import DEFAULT_MAX_TOKENS, Job, Session
from cupaged.cli.statistics import Statistics
from cupaged.errors import OptionError

# The options that are fields of SamplingParams, by name.
SAMPLING_OPTIONS = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "logprobs",
)  # fmt: skip


@click.command(epilog="Exit codes: 0 done, 1 failed, 2 unusable option or request, 130 Ctrl-C.")
@runtime.model_options(required=True)
@click.option(
    "--prompt",
    "-p",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="A prompt; repeatable. - is standard input as a whole, less one final line break.",
)
@click.option("--token-ids", multiple=True, metavar="IDS", help="A prompt as token ids, such as 504,3575; repeatable.")
@click.option(
    "--prompts-file",
    metavar="FILE",
    help="A prompt a line; blank lines are skipped; - is standard input. A .jsonl file holds an object a line: "
    '{"prompt": a string or a list of ids}, and sampling parameters for that prompt, such as "max_tokens".',
)
@click.option("--chat", is_flag=True, help="Prompts are a user's messages, put into the model's chat template.")
@click.option("--system", metavar="TEXT", help="System message of a chat.")
@click.option(
    "--max-tokens",
    "-n",
    type=int,
    help=f"Tokens to generate at most.  [default: {DEFAULT_MAX_TOKENS}, or what the context has room for]",
)
@click.option(
    "--temperature",
    "-t",
    type=float,
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token each time, so that the output repeats; the library's default is 1.",
)
@click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k likeliest tokens; 0 is off.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest p of the mass; 1 is off.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="Keep tokens this likely beside the best.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token.")
@click.option("--logprobs", type=int, metavar="K", help="With --json: log-probabilities of the K likeliest tokens.")
@click.option("--json", "as_objects", is_flag=True, help="A JSON object a line for each prompt.")
@click.option("--stats", is_flag=True, help="Tokens, tokens/s, times and memory on standard error.")
@runtime.debug_option
def generate(
    prompts: tuple[str, ...],
    token_ids: tuple[str, ...],
    prompts_file: str | None,
    chat: bool,
    system: str | None,
    as_objects: bool,
    stats: bool,
    weights: str,
    **options: Any,
) -> int:
    """Generate text from a prompt, or from many at once.

    Text is shown as it comes. Several prompts are computed together and shown in order.
    """
    sampling = {name: options.pop(name) for name in SAMPLING_OPTIONS}
    if system is not None and not chat:
        raise OptionError("--system needs --chat")
    if chat and token_ids:
        raise OptionError("--chat takes text, not --token-ids")
    jobs = [Job(prompt, sampling) for prompt in collect(prompts, token_ids, prompts_file)]
    for job in jobs:
        if chat and not isinstance(job.prompt.content, str):
            raise OptionError(f"{job.prompt.where}: --chat takes text, not token ids")
        if job.params.logprobs is not None and not as_objects:
            raise OptionError("--logprobs needs --json")

    output = Output()
    statistics = Statistics()
    with Progress() as progress, runtime.open_llm(weights, progress=progress, **options) as llm:
        progress.clear()
        statistics.start()
        session = Session(llm, output, progress, statistics, chat, system)
        failed = session.show_objects(jobs) if as_objects else session.show_texts(jobs)
        if stats:
            statistics.print()
        return 1 if failed else 0
