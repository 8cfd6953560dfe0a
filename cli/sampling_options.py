"""The options of `cupaged generate` that are fields of SamplingParams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from cupaged.errors import OptionError


def sampling_options(default_max_tokens: int) -> Callable[[Any], Any]:
    """A decorator that adds them; `take` turns what click made of them into fields."""
    options = [
        click.option(
            "--max-tokens", "-n", type=int,
            help=f"Tokens to generate at most.  [default: {default_max_tokens}, or what the context has room for]",
        ),
        click.option("--min-tokens", type=int, default=0, show_default=True, help="No end before so many tokens."),
        click.option(
            "--temperature", "-t", type=float, default=0.0, show_default=True,
            help="0 takes the likeliest token each time, so that the output repeats; the library's default is 1.",
        ),
        click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k likeliest tokens; 0 is off."),
        click.option(
            "--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest p of the mass; 1 is off."
        ),
        click.option(
            "--min-p", type=float, default=0.0, show_default=True, help="Keep tokens this likely beside the best."
        ),
        click.option("--seed", type=int, help="Makes sampling repeatable."),
        click.option(
            "--repetition-penalty", type=float, default=1.0, show_default=True,
            help="Lower tokens of prompt and output by this factor; 1 is off.",
        ),
        click.option(
            "--presence-penalty", type=float, default=0.0, show_default=True, help="Lower generated tokens once."
        ),
        click.option(
            "--frequency-penalty", type=float, default=0.0, show_default=True,
            help="Lower generated tokens for each time they came.",
        ),
        click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Add to a token's logit; repeatable."),
        click.option("--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Never write this; repeatable."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
        click.option(
            "--stop-token-id", "stop_token_ids", multiple=True, type=int, metavar="ID", help="End at it; repeatable."
        ),
        click.option("--include-stop", "include_stop_str_in_output", is_flag=True, help="Show what ended the text."),
        click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token."),
        click.option("--keep-special", is_flag=True, help="Show special tokens in the text."),
        click.option("--logprobs", type=int, metavar="K", help="With --json: the K likeliest tokens of each place."),
        click.option("--prompt-logprobs", type=int, metavar="K", help="With --json: the same for the prompt."),
    ]  # fmt: skip

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


NAMES = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "keep_special", "logprobs", "prompt_logprobs",
)  # fmt: skip


def take(options: dict[str, Any]) -> dict[str, Any]:
    """Take the sampling options out of a command's options, as fields of SamplingParams."""
    fields = {name: options.pop(name) for name in NAMES}
    fields["skip_special_tokens"] = not fields.pop("keep_special")
    fields["logit_bias"] = _biases(fields["logit_bias"])
    return fields


def _biases(texts: Sequence[str]) -> dict[int, float] | None:
    biases = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise OptionError(f"--logit-bias: {text[:40]!r} is not ID=BIAS, such as 504=-100") from None
    return biases or None


def from_json(params: dict[str, Any]) -> dict[str, Any]:
    """Fields as a JSON object gives them: its keys are strings, so those of logit_bias become numbers again."""
    bias = params.get("logit_bias")
    if isinstance(bias, dict):
        params = params | {"logit_bias": {_number(key): value for key, value in bias.items()}}
    return params


def _number(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else key
