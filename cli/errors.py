"""What a user sees when something fails: one line on stderr and an exit code. A traceback comes only with --debug."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterable

import click

from cupaged.errors import CupagedError

INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
BROKEN_PIPE = 141  # as a shell reports a process that SIGPIPE ended
USAGE = 2

_UNPRINTABLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {9: " ", 10: " ", 13: " "}


class OutputClosedError(Exception):
    """The reader of our standard output went away (`| head -1`): nothing to report, just stop."""


def one_line(text: str) -> str:
    """`text` without line breaks and control characters, so that a message stays one line whatever a file is named."""
    return " ".join(text.translate(_UNPRINTABLE).split())


def complain(message: str) -> None:
    """Write one `cupaged: error: ...` line to stderr."""
    note(f"error: {message}")


def note(message: str) -> None:
    """Write one `cupaged: ...` line to stderr, if there is one (`2>&-`) and somebody reads it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"cupaged: {one_line(message)}", file=sys.stderr, flush=True)


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Stands in for `warnings.showwarning`, which prints a line of our source, too."""
    note(f"warning: {message}")


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing if no known name is near."""
    import difflib

    matches = difflib.get_close_matches(name, sorted(known), n=2)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def report(error: BaseException, *, debug: bool) -> int:
    """Print the one line that `error` deserves and return the exit code."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, click.ClickException):
        complain(_usage_message(error))
        return error.exit_code
    if isinstance(error, CupagedError):
        complain(str(error) or type(error).__name__)
        return error.exit_code
    if isinstance(error, MemoryError):
        complain(f"out of memory: {error}" if str(error) else "out of memory")
    elif isinstance(error, OSError):
        complain(str(error))
    else:  # a bug of ours
        hint = "" if debug else " (--debug shows where)"
        complain(f"internal error: {type(error).__name__}: {error}{hint}")
    return 1


def _usage_message(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        known = {name for param in error.ctx.command.params for name in param.opts} if error.ctx else set()
        message = f"no such option: {error.option_name}{nearest(error.option_name, known)}"
    else:
        message = error.format_message().removesuffix(".")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message += f" (see {error.ctx.command_path} --help)"
    return message
