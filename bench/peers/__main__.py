"""`python -m cupaged.bench.peers`: the options, and what is printed."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from cupaged.bench.machine import describe_machine, machine_line
from cupaged.bench.peers.catalog import PEERS, RUNTIMES, Runtime, chosen
from cupaged.bench.peers.process import RuntimeFailed
from cupaged.bench.peers.rounds import Measured, Rounds, Setting
from cupaged.bench.peers.table import as_json, markdown, rows_of
from cupaged.bench.peers.workloads import WORKLOADS, Workload
from cupaged.device.cpu import usable_processors
from cupaged.errors import CupagedError, OptionError
from cupaged.model.source import resolve_weights

STARTUP = "startup"
_PARTS = (*(workload.name for workload in WORKLOADS), STARTUP)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--weights", "-w", required=True, metavar="WEIGHTS", help="As for cupaged generate; peers need a .gguf file."
)
@click.option(
    "--peers", default=",".join(PEERS), show_default=True, metavar="NAMES", help="Which, separated by commas."
)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="[NAME=]PATH",
    help="Interpreter that has the peers, or the peer NAME; ours runs on this one.  [default: this one]",
)
@click.option(
    "--threads", type=click.IntRange(1, 256), help="Threads of each runtime.  [default: the cores we may use]"
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Rounds that count.")
@click.option(
    "--only",
    metavar="NAMES",
    help=f"Only these parts, separated by commas: {', '.join(_PARTS)}.",
)
@click.option(
    "--work", type=click.Path(path_type=Path, file_okay=False), help="Folder to keep files made for peers in."
)
@click.option(
    "--lock", type=click.Path(path_type=Path, dir_okay=False), help="File to lock (flock) around each timing."
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures to this file."
)
def command(
    weights: str, peers: str, pythons: Sequence[str], threads: int | None, rounds: int, only: str | None,
    work: Path | None, lock: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """cupaged beside other runtimes on the same weights and prompts.

    Medians of interleaved rounds, and our ratio to the best peer. Nothing is installed: a missing peer is left out.
    """
    try:
        runtimes = chosen(peers)
        interpreters = _interpreters(pythons)
        workloads, startup = _parts(only)
        with _folder(work) as folder:
            setting = Setting(lambda r: _python(r, interpreters), threads or usable_processors(), rounds, folder, lock)
            path = resolve_weights(weights, _tell)
            runs = Rounds(setting, runtimes, path, _tell)
            if workloads:
                runs.run_workloads(workloads)
            if startup:
                runs.run_startups()
    except CupagedError as error:
        raise click.ClickException(str(error)) if error.exit_code == 1 else click.UsageError(str(error)) from None
    except OSError as error:  # of --lock
        raise click.ClickException(str(error)) from None
    _show(runs.measured, runtimes, path.name, setting, json_file)


def _show(
    measured: Measured, runtimes: Sequence[Runtime], weights: str, setting: Setting, json_file: Path | None
) -> None:
    machine = describe_machine()
    click.echo(f"{machine_line(machine)}; {setting.threads} threads, medians of {setting.rounds} rounds, {weights}")
    click.echo("; ".join(f"{name} {version}" for name, version in measured.versions.items()))
    for group in dict.fromkeys(runtime.group for runtime in runtimes):
        rows = rows_of(group, measured)
        if rows:
            click.echo(f"\n{markdown(rows)}")
    if json_file is not None:
        header = {"machine": machine, "weights": weights, "threads": setting.threads, "command": sys.argv[1:]}
        try:
            json_file.write_text(json.dumps(as_json(measured, header), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"--json {json_file}: cannot be written ({error.strerror or error})") from None
    if not any(RUNTIMES[name].ours for name, _ in measured.figures):
        raise click.ClickException("cupaged itself was not measured")


def _tell(line: str) -> None:
    click.echo(f"peers: {line}", err=True)


def _parts(only: str | None) -> tuple[list[Workload], bool]:
    names = [name.strip() for name in only.split(",")] if only is not None else list(_PARTS)
    for name in names:
        if name not in _PARTS:
            raise OptionError(f"--only: {name!r} is not one of {', '.join(_PARTS)}")
    return [workload for workload in WORKLOADS if workload.name in names], STARTUP in names


def _interpreters(pythons: Sequence[str]) -> dict[str, str]:
    """Runtime name ("": all peers) -> interpreter."""
    found = {}
    for value in pythons:
        name, equals, path = value.partition("=")
        if not equals:
            name, path = "", value
        elif name not in PEERS:
            raise OptionError(f"--python: {name!r} is not one of {', '.join(PEERS)}")
        found[name] = path
    return found


def _python(runtime: Runtime, interpreters: dict[str, str]) -> str:
    if runtime.ours:
        return sys.executable
    return interpreters.get(runtime.name, interpreters.get("", sys.executable))


@contextlib.contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    if work is None:
        with tempfile.TemporaryDirectory(prefix="cupaged-peers-") as folder:
            yield Path(folder)
        return
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeFailed(f"--work {work}: cannot be made ({error.strerror or error})") from None
    yield work


if __name__ == "__main__":
    command()
