"""`cupaged generate`: text or JSON from one prompt or many."""

from __future__ import annotations

from typing import Any

import click

from cupaged.cli import runtime
from cupaged.cli.errors import note
from cupaged.cli.output import Output
from cupaged.cli.progress import Progress
from cupaged.cli.prompts import collect
from cupaged.cli.sampling_options import sampling_options, take
from cupaged.cli.session import DEFAULT_MAX_TOKENS, Job, Session
from cupaged.cli.statistics import Statistics
from cupaged.cli.values import Text
from cupaged.errors import OptionError


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
    help="A prompt a line; blank lines are skipped; - is standard input. A .jsonl file, or any with --jsonl, holds an "
    "object a line: "
    '{"prompt": a string or a list of ids}, and sampling parameters for that prompt, such as "max_tokens".',
)
@click.option("--jsonl", is_flag=True, help="The lines of --prompts-file are JSON objects, whatever its name.")
@click.option("--chat", is_flag=True, help="Prompts are a user's messages, put into the model's chat template.")
@click.option("--system", type=Text(), metavar="TEXT", help="System message of a chat.")
@sampling_options(DEFAULT_MAX_TOKENS)
@click.option("--json", "as_objects", is_flag=True, help="A JSON object a line for each prompt.")
@click.option("--stats", is_flag=True, help="Tokens, tokens/s, times and memory on standard error.")
@runtime.debug_option
def generate(
    prompts: tuple[str, ...],
    token_ids: tuple[str, ...],
    prompts_file: str | None,
    jsonl: bool,
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
    sampling = take(options)
    if system is not None and not chat:
        raise OptionError("--system needs --chat")
    if jsonl and prompts_file is None:
        raise OptionError("--jsonl needs --prompts-file")
    if chat and token_ids:
        raise OptionError("--chat takes text, not --token-ids")
    jobs = [Job(prompt, sampling) for prompt in collect(prompts, token_ids, prompts_file, jsonl)]
    for job in jobs:
        if chat and not isinstance(job.prompt.content, str):
            raise OptionError(f"{job.prompt.where}: --chat takes text, not token ids")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(job.params, name) is not None and not as_objects:
                raise OptionError(f"--{name.replace('_', '-')} needs --json")

    samples = [job.params for job in jobs if job.params.beam_width is None and job.params.num_sequences > 1]
    if any(params.greedy for params in samples):
        note("at temperature 0 the outputs of a prompt are all the same; --temperature 0.8 makes them differ")

    output = Output()
    statistics = Statistics()
    with Progress() as progress, runtime.open_llm(weights, progress=progress, **options) as llm:
        progress.clear()
        statistics.start()
        session = Session(llm, output, progress, statistics, chat, system)
        failed = session.show_objects(jobs) if as_objects else session.show_texts(jobs)
        if stats:
            statistics.print(llm.stats(), llm.info()["weights"]["kept_bytes"])
        return 1 if failed else 0
