"""The click group, and `run`, which turns whatever a command ends with into an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

import cupaged
from cupaged.cli import errors
from cupaged.cli.interrupt import Interrupt

# Where commands are; each is imported when it is used, because the first token waits for every import.
_HOMES = {
    "bench": "cupaged.cli.bench",
    "convert": "cupaged.cli.convert",
    "detokenize": "cupaged.cli.tokenize",
    "generate": "cupaged.cli.generate",
    "info": "cupaged.cli.info",
    "tokenize": "cupaged.cli.tokenize",
    "warmup": "cupaged.cli.warmup",
}


@dataclass
class Settings:
    """What a command tells `run` beside its result."""

    debug: bool = False


class Commands(Mapping[str, click.Command]):
    """The commands by name."""

    def __getitem__(self, name: str) -> click.Command:
        command: click.Command = getattr(import_module(_HOMES[name]), name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


class Group(click.Group):
    """A group that names the nearest command when there is none of the given name."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            hint = errors.nearest(args[0], self.commands) or f"; commands are {', '.join(sorted(self.commands))}"
            raise click.UsageError(f"no such command: {args[0]}{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=Group,
    commands=Commands(),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(cupaged.__version__, message="cupaged %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """LLM inference with a paged KV cache, without PyTorch."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(args: list[str]) -> int:
    """Run the command line `args`; prints at most one line of error (plus a traceback with --debug).

    Exit codes: 0 done; 1 failed; 2 the command line or a request is not usable; 130 Ctrl-C; 141 the reader of our
    output went away. `click.Command.main` is not used: on Ctrl-C it prints a line of its own.
    """
    settings = Settings()
    with Interrupt() as interrupt, warnings.catch_warnings():
        warnings.showwarning = errors.show_warning
        try:
            with cli.make_context("cupaged", args, obj=settings) as ctx:
                code = cli.invoke(ctx)
            return _flushed(code or 0)
        except click.exceptions.Exit as done:
            return _flushed(done.exit_code)
        except (KeyboardInterrupt, click.Abort):
            return interrupt.finish()
        except (errors.OutputClosedError, BrokenPipeError):
            _discard_output()
            return errors.BROKEN_PIPE
        except Exception as error:
            if interrupt.hit:  # what became of the KeyboardInterrupt on its way here
                return interrupt.finish()
            code = errors.report(error, debug=settings.debug)
            try:
                return _flushed(code)
            except OSError:  # a full disk: what was not taken will not be, and the interpreter would complain again
                _discard_output()
                return code


def _flushed(code: int) -> int:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return errors.BROKEN_PIPE
    return code


def _discard_output() -> None:
    """Point stdout at nothing, or the interpreter complains when it flushes what the reader never took."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
