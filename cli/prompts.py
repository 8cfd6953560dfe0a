"""Where prompts come from: the command line, standard input, a file of lines, a file of JSON objects."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupaged.cli.errors import note
from cupaged.errors import OptionError, shown
from cupaged.model.regular_file import read_bounded

MAX_BYTES = 1 << 30  # of a prompts file or standard input: a device without an end must not fill the memory


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as text or token ids; where it stood, for messages; and values of SamplingParams for it alone."""

    content: str | list[int]
    where: str
    params: Mapping[str, Any] = field(default_factory=dict)


def collect(texts: Sequence[str], token_ids: Sequence[str], file: str | None, jsonl: bool = False) -> list[Prompt]:
    """All prompts: those given as text, then those given as ids, then those of the file.

    A text `-` is the whole standard input, less one final line break. Raises OptionError naming option and line;
    also for a file or standard input of more than MAX_BYTES.
    """
    if texts.count("-") + (file == "-") > 1:
        raise OptionError("standard input (-) can be read only once")
    prompts = [_from_text(text) for text in texts]
    prompts += [Prompt(_ids(text), "--token-ids") for text in token_ids]
    if file is not None:
        prompts += _from_file(file, jsonl or file.endswith(".jsonl"))
    if not prompts:
        raise OptionError("no prompt: give --prompt, --token-ids or --prompts-file (--prompt - reads standard input)")
    return prompts


def _from_text(text: str) -> Prompt:
    if text != "-":
        return Prompt(_encodable(text, "--prompt"), "--prompt")
    if sys.stdin is not None and sys.stdin.isatty():
        note("reading the prompt from the terminal; end it with Ctrl-D")
    content = _decode(_standard_input(), "standard input")
    return Prompt(content.removesuffix("\n").removesuffix("\r"), "standard input")


def _ids(text: str) -> list[int]:
    """Token ids from `1,2,3`; whether they exist is for the model to say."""
    words = text.replace(",", " ").split()
    for word in words:
        if re.fullmatch(r"-?[0-9]{1,20}", word) is None:
            raise OptionError(f"--token-ids: {word[:40]!r} is not a token id; ids look like 504,3575")
    return [int(word) for word in words]


def _from_file(name: str, as_objects: bool) -> list[Prompt]:
    if name == "-":
        data, label = _standard_input(), "standard input"
    else:
        label = name
        try:
            # Not only a regular file: `--prompts-file <(program)` gives a pipe.
            with open(name, "rb") as file:
                data = read_bounded(file, MAX_BYTES, name)
        except (OSError, ValueError) as error:  # ValueError: no name that a file can have
            reason = getattr(error, "strerror", None) or error
            raise OptionError(f"--prompts-file: cannot read {name}: {reason}") from None
    prompts = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{label}, line {number}"
        text = _decode(line, where).removesuffix("\r")
        if not text.strip():
            continue
        prompts.append(_from_object(text, where) if as_objects else Prompt(text, where))
    if not prompts:
        raise OptionError(f"--prompts-file: {label} holds no prompt")
    return prompts


def _from_object(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_without_doubles)
    except KeyError as twice:  # Python would take the last one, other readers the first
        raise OptionError(f"{where}: {shown(twice.args[0])} is given twice") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict) or "prompt" not in value:
        raise OptionError(f'{where}: expected an object with "prompt", a string or a list of token ids')
    content = value.pop("prompt")
    are_ids = isinstance(content, list) and all(type(item) is int for item in content)
    if not isinstance(content, str) and not are_ids:
        raise OptionError(f'{where}: "prompt" is neither a string nor a list of token ids')
    return Prompt(_encodable(content, where) if isinstance(content, str) else content, where, value)


def _encodable(text: str, where: str) -> str:
    """`text`, unless it has lone surrogates: bytes of the command line that are no UTF-8, or JSON's \\ud800."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise OptionError(f"{where}: the text is not valid UTF-8") from None
    return text


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; KeyError with the name that it has twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise KeyError(name)
        found[name] = value
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise OptionError("standard input is closed")
    try:
        return read_bounded(sys.stdin.buffer, MAX_BYTES, "standard input")
    except OSError as error:
        raise OptionError(f"standard input: cannot be read: {error.strerror or error}") from None


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise OptionError(f"{where}: not valid UTF-8 (byte 0x{byte:02x} at offset {error.start})") from None
