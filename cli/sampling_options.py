"""The options of `cupaged generate` that are fields of SamplingParams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from cupaged.cli.values import Checked, sampling
from cupaged.errors import OptionError, shown


def sampling_options(default_max_tokens: int) -> Callable[[Any], Any]:
    """A decorator that adds them; `take` turns what click made of them into fields."""
    options = [
        click.option(
            "--max-tokens", "-n", type=sampling("max_tokens", int),
            help=f"Tokens to generate at most.  [default: {default_max_tokens}, or what the context has room for]",
        ),
        click.option(
            "--min-tokens", type=sampling("min_tokens", int), default=0, show_default=True,
            help="No end before so many tokens.",
        ),
        click.option(
            "--temperature", "-t", type=sampling("temperature", float), default=0.0, show_default=True,
            help="0 takes the likeliest token each time, so that the output repeats; the library's default is 1.",
        ),
        click.option(
            "--top-k", type=sampling("top_k", int), default=0, show_default=True,
            help="Keep the k likeliest tokens; 0 is off.",
        ),
        click.option(
            "--top-p", type=sampling("top_p", float), default=1.0, show_default=True,
            help="Keep the likeliest p of the mass; 1 is off.",
        ),
        click.option(
            "--min-p", type=sampling("min_p", float), default=0.0, show_default=True,
            help="Keep tokens this likely beside the best.",
        ),
        click.option(
            "--n", type=sampling("n", int), default=1, show_default=True,
            help="Outputs for each prompt, which is computed and stored once.",
        ),
        click.option(
            "--best-of", type=sampling("best_of", int),
            help="Sample so many and show the n best by mean log-probability.",
        ),
        click.option("--beams", "beam_width", type=sampling("beam_width", int), help="Beam search with so many beams."),
        click.option(
            "--length-penalty", type=sampling("length_penalty", float, beam_width=1), default=1.0, show_default=True,
            help="Of beams: score = log-probability / length to this power.",
        ),
        click.option(
            "--early-stopping", type=click.Choice(["true", "false", "never"]), default="false", show_default=True,
            help="Of beams: end once there are enough finished ones; when no running one is better now; or only when "
            "none can become better.",
        ),
        click.option("--seed", type=sampling("seed", int), help="Makes sampling repeatable."),
        click.option(
            "--repetition-penalty", type=sampling("repetition_penalty", float), default=1.0, show_default=True,
            help="Lower tokens of prompt and output by this factor; 1 is off.",
        ),
        click.option(
            "--presence-penalty", type=sampling("presence_penalty", float), default=0.0, show_default=True,
            help="Lower generated tokens once.",
        ),
        click.option(
            "--frequency-penalty", type=sampling("frequency_penalty", float), default=0.0, show_default=True,
            help="Lower generated tokens for each time they came.",
        ),
        click.option(
            "--logit-bias", multiple=True, type=_bias_type(), metavar="ID=BIAS",
            help="Add to a token's logit; repeatable.",
        ),
        click.option(
            "--bad-word", "bad_words", multiple=True, type=sampling("bad_words", str, many=True), metavar="TEXT",
            help="Never write this; repeatable.",
        ),
        click.option(
            "--stop", multiple=True, type=sampling("stop", str, many=True), metavar="TEXT",
            help="End before this text; repeatable.",
        ),
        click.option(
            "--stop-token-id", "stop_token_ids", multiple=True, type=sampling("stop_token_ids", int, many=True),
            metavar="ID", help="End at it; repeatable.",
        ),
        click.option("--include-stop", "include_stop_str_in_output", is_flag=True, help="Show what ended the text."),
        click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token."),
        click.option("--keep-special", is_flag=True, help="Show special tokens in the text."),
        click.option(
            "--logprobs", type=sampling("logprobs", int), metavar="K",
            help="With --json: the K likeliest tokens of each place.",
        ),
        click.option(
            "--prompt-logprobs", type=sampling("prompt_logprobs", int), metavar="K",
            help="With --json: the same for the prompt.",
        ),
    ]  # fmt: skip

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


NAMES = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "keep_special", "logprobs", "prompt_logprobs", "n", "best_of",
    "beam_width", "length_penalty", "early_stopping",
)  # fmt: skip


EARLY_STOPPING = {"true": True, "false": False, "never": "never"}


def take(options: dict[str, Any]) -> dict[str, Any]:
    """Take the sampling options out of a command's options, as fields of SamplingParams."""
    fields = {name: options.pop(name) for name in NAMES}
    fields["skip_special_tokens"] = not fields.pop("keep_special")
    fields["early_stopping"] = EARLY_STOPPING[fields["early_stopping"]]
    fields["logit_bias"] = dict(fields["logit_bias"]) or None
    return fields


def _bias_type() -> Checked:
    def pair(text: str) -> tuple[int, float]:
        token, _, bias = text.partition("=")
        return int(token), float(bias)

    def check(value: Any) -> None:
        from cupaged.sampling import SamplingParams

        if isinstance(value, str):
            raise OptionError(f"{shown(value)} is not ID=BIAS, such as 504=-100")
        SamplingParams(logit_bias=dict([value]))

    return Checked(pair, "logit_bias", check)


def from_json(params: dict[str, Any]) -> dict[str, Any]:
    """Fields as a JSON object gives them: its keys are strings, so those of logit_bias become numbers again."""
    bias = params.get("logit_bias")
    if isinstance(bias, dict):
        params = params | {"logit_bias": {_number(key): value for key, value in bias.items()}}
    return params


def _number(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else key
