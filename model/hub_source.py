"""Repositories of the Hugging Face Hub as weights: `ORG/NAME`, `ORG/NAME@REVISION`, `ORG/NAME/FILE.gguf@REVISION`.

huggingface_hub does the fetching, so its settings hold: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN.
Only files that a model is loaded from are fetched: never pickles, never code, never a second copy of the weights in
another format. A branch is looked up at every start, as its owner may have moved it; if the Hub cannot be reached, the
copy in the cache serves. A full commit hash that is in the cache is used without network.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupaged.errors import DownloadError
from cupaged.model.cache_folder import safe_cache_folder
from cupaged.model.config_values import quote, read_json
from cupaged.model.regular_file import read_regular

Progress = Callable[[str], None]

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_FILE = r"(?:[A-Za-z0-9_][A-Za-z0-9._+-]*/)*[A-Za-z0-9_][A-Za-z0-9._+-]*\.gguf"
_SPEC = re.compile(rf"({_NAME}/{_NAME})(?:/({_FILE}))?(?:@([A-Za-z0-9][A-Za-z0-9._/+-]{{0,127}}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REFERENCE_BYTES = 1024  # the hash of a commit has 40
_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*\.safetensors")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Tokenizers that are not read here. One is fetched where there is no tokenizer.json, so that loading says what it is.
_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json", "tiktoken.model")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_UNREACHABLE = {
    "ConnectError", "ConnectionError", "LocalEntryNotFoundError", "NetworkError", "OfflineModeIsEnabled", "ProxyError",
    "RemoteProtocolError", "SSLError", "Timeout", "TimeoutError", "TimeoutException", "TransportError",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, maybe one file of it, at a revision (None: the main branch)."""

    spec: str
    repo: str
    file: str | None
    revision: str | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Files to have, in the order of fetching, and the one to load (None: the folder as a whole)."""

    files: tuple[str, ...]
    main: str | None


def hub_name(spec: str) -> HubName | None:
    """`spec` taken as the name of a repository, None if it cannot be one. `x/y.gguf` is a path: no repository."""
    match = _SPEC.fullmatch(spec)
    if match is None or ".." in spec or "--" in match[1] or match[1].lower().endswith((".gguf", ".git")):
        return None
    return HubName(spec, match[1], match[2], match[3])


def from_hub(name: HubName, progress: Progress, *, tokenizer_only: bool = False) -> Path:
    """A repository's snapshot folder, or the .gguf in it; fetches what the cache lacks.

    tokenizer_only: leave the weights, unless the tokenizer lies in them (GGUF). DownloadError in one line if it cannot
    be had: offline and not in the cache, no such repository, revision or file, gated, no usable model in it.
    """
    try:
        from huggingface_hub import constants
    except ImportError:
        raise DownloadError(
            f"weights {quote(name.spec)}: no such local file or folder, and for the Hub huggingface_hub is missing; "
            "pip install huggingface_hub"
        ) from None
    pinned = name.revision is not None and _COMMIT.fullmatch(name.revision) is not None
    if constants.HF_HUB_OFFLINE:
        return _cached(name, tokenizer_only, "HF_HUB_OFFLINE is set")
    if pinned:
        with contextlib.suppress(DownloadError):
            return _cached(name, tokenizer_only, "")
    try:
        return _fetch(name, tokenizer_only, progress)
    except Exception as error:
        if isinstance(error, DownloadError):
            raise
        kinds = {kind.__name__ for kind in type(error).__mro__}
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if not kinds & _UNREACHABLE and not status >= 500:
            raise _refusal(name, error, kinds, status) from None
        found = _cached(name, tokenizer_only, "the Hub cannot be reached (offline?)")
        progress(f"the Hub cannot be reached; using the copy of {name.repo} in the cache")
        return found


def _fetch(name: HubName, tokenizer_only: bool, progress: Progress) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    with _quiet():
        progress(f"looking up {name.repo} on the Hub")
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
        sizes: dict[str, int] = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
        # The file fetched first goes by the revision's name, which the cache then keeps as a reference; the others go
        # by the commit, so that all are of one, even if the branch moves meanwhile.
        commit: list[str] = []

        def get(file: str) -> Path:
            if not _has(name, commit[0] if commit else info.sha, file):
                progress(f"fetching {file} ({sizes[file] / 1e6:.1f} MB) from {name.repo}")
            revision = commit[0] if commit else name.revision
            path = Path(hf_hub_download(name.repo, file, revision=revision, cache_dir=_cache()))
            if not commit:
                commit.append(path.parents[file.count("/")].name)
            return path

        where = f"{name.spec}: the repository"
        plan = _plan(set(sizes), name, tokenizer_only, get, where)
        _check_space(name, sum(sizes[file] for file in plan.files if not _has(name, info.sha, file)))
        paths = {file: get(file) for file in plan.files}
    return paths[plan.main] if plan.main else paths[plan.files[0]].parent


def _cached(name: HubName, tokenizer_only: bool, reason: str) -> Path:
    """What the cache holds, if that is a whole model; DownloadError beginning with `reason`, if not."""
    folder = _snapshot(name)
    if folder is None or not folder.is_dir():
        at = f" at {name.revision}" if name.revision else ""
        raise DownloadError(
            f"weights {quote(name.spec)}: no such local file or folder, {reason}, and {name.repo}{at} is not in the "
            f"cache {_cache()}"
        )
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    plan = _plan(names, name, tokenizer_only, folder.joinpath, f"{name.spec}: {reason}, and the copy in {folder}")
    if not reason and not all((folder / file).exists() for file in plan.files):
        raise DownloadError(f"{name.spec}: a link in {folder} is broken")
    return folder / plan.main if plan.main else folder


def _plan(names: set[str], name: HubName, tokenizer_only: bool, get: Callable[[str], Path], where: str) -> _Plan:
    """Which of a repository's files make the model; `get` gives the path of one. Weights come last."""
    ggufs = _ggufs(names)
    if name.file is not None:
        found = next((parts for parts in ggufs.values() if name.file in parts), None)
        if found is None:
            raise DownloadError(f"{where} holds no {name.file}; its .gguf files: {_listed(ggufs) or 'none'}")
        return _gguf_plan(found, where)
    companions = [file for file in _COMPANIONS if file in names]
    if "tokenizer.json" not in names:
        companions += [file for file in _OTHER_TOKENIZERS if file in names][:1]
    if tokenizer_only and "tokenizer.json" in names:
        return _Plan(tuple(companions), None)
    if "config.json" in names and _SINGLE in names:
        return _Plan((*companions, *([] if tokenizer_only else [_SINGLE])), None)
    if "config.json" in names and _INDEX in names:
        shards = [] if tokenizer_only else _shards(get(_INDEX), where)
        missing = [shard for shard in shards if shard not in names]
        if missing:
            raise DownloadError(f"{where} lacks {', '.join(missing[:8])}, which {_INDEX} names")
        return _Plan((*companions, _INDEX, *shards), None)
    if len(ggufs) == 1:
        return _gguf_plan(next(iter(ggufs.values())), where)
    if ggufs:
        raise DownloadError(
            f"{where} holds {len(ggufs)} .gguf models; name one as {name.repo}/FILE.gguf: {_listed(ggufs)}"
        )
    pickles = sorted(file for file in names if file.endswith(_PICKLES))
    if pickles:
        raise DownloadError(
            f"{where} holds no safetensors, only {pickles[0]}; pickles are never loaded, because loading one can "
            "run code"
        )
    needed = [file for file in ("config.json", _SINGLE) if file not in names]
    raise DownloadError(f"{where} holds no model: no {' and no '.join(needed)}, and no .gguf")


def _ggufs(names: set[str]) -> dict[str, list[str]]:
    """The parts of each GGUF model by the model's name; most have one. Projectors (mmproj) belong to other models."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if re.fullmatch(_FILE, name) and not name.rsplit("/", 1)[-1].lower().startswith("mmproj"):
            split = _SPLIT.fullmatch(name)
            found.setdefault(f"{split[1]}-of-{split[3]}" if split else name, []).append(name)
    return found


def _gguf_plan(parts: list[str], where: str) -> _Plan:
    split = _SPLIT.fullmatch(parts[0])
    if split and len(parts) != int(split[3]):
        raise DownloadError(f"{where} holds {len(parts)} of the {int(split[3])} parts of {split[1]}")
    return _Plan(tuple(parts), parts[0])


def _listed(ggufs: Mapping[str, list[str]]) -> str:
    names = [parts[0] for parts in ggufs.values()]
    return ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")


def _shards(index: Path, where: str) -> list[str]:
    """File names in an index. Only plain ones: nothing outside the folder is asked for."""
    weight_map = read_json(index).get("weight_map")
    shards = sorted({str(file) for file in weight_map.values()}) if isinstance(weight_map, dict) else []
    wrong = [shard for shard in shards if _SHARD.fullmatch(shard) is None]
    if wrong or not shards:
        raise DownloadError(f"{where}: {_INDEX} names {quote(wrong[0]) if wrong else 'no shard'}")
    return shards


def _cache() -> Path:
    from huggingface_hub import constants

    place = os.path.expanduser(constants.HF_HUB_CACHE)
    # Without a home huggingface_hub would make a folder called "~".
    return safe_cache_folder(create=True) / "huggingface" / "hub" if place.startswith("~") else Path(place)


def _snapshot(name: HubName, commit: str | None = None) -> Path | None:
    """The cache's folder of a commit, by default that of the revision; None if the cache does not know the revision.

    The cache's layout is documented (huggingface_hub, "Understand caching"): refs/REVISION holds a commit's hash,
    snapshots/COMMIT the files, as links to blobs.
    """
    home = _cache() / f"models--{name.repo.replace('/', '--')}"
    revision = name.revision or "main"
    if commit is None and _COMMIT.fullmatch(revision):
        commit = revision
    if commit is None:
        try:
            commit = read_regular(home / "refs" / revision, _MAX_REFERENCE_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
    return home / "snapshots" / commit if _COMMIT.fullmatch(commit) else None


def _has(name: HubName, commit: str | None, file: str) -> bool:
    folder = _snapshot(name, commit) if commit else None
    return folder is not None and (folder / file).exists()


def _check_space(name: HubName, needed: int) -> None:
    place = _cache()
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise DownloadError(f"{name.spec}: needs {needed} bytes in {_cache()}, {free} are free")


def _refusal(name: HubName, error: Exception, kinds: set[str], status: int) -> DownloadError:
    """The Hub's answer in one line. By the names of classes, which have moved between modules over the versions."""
    login = "a token (HF_TOKEN, or `hf auth login`)"
    at = f" at revision {name.revision}" if name.revision else ""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        reason = f"the disk of {_cache()} is full"
    elif isinstance(error, PermissionError):
        reason = f"cannot write in the cache folder {error.filename or _cache()} ({error.strerror}); set HF_HOME"
    elif "GatedRepoError" in kinds:
        reason = f"the repository is gated: accept its terms on the Hub's page of {name.repo} and give {login}"
    elif "DisabledRepoError" in kinds:
        reason = "access to the repository is disabled by the Hub"
    elif "RevisionNotFoundError" in kinds:
        reason = f"the repository has no revision {name.revision}"
    elif "RepositoryNotFoundError" in kinds:
        reason = (
            f"no such local file or folder, and no such repository on the Hub, or a private one, which needs {login}"
        )
    elif "EntryNotFoundError" in kinds:
        reason = f"a file is gone from the repository{at}; try again"
    elif status in (401, 403):
        reason = f"the Hub refuses access (HTTP {status}); give {login}"
    else:
        words = str(error).split()
        reason = f"{type(error).__name__}: {' '.join(words)[:300]}" if words else type(error).__name__
    return DownloadError(f"weights {quote(name.spec)}: {reason}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without huggingface_hub's own bars and warnings: progress and errors are told by us, a line each."""
    from huggingface_hub import utils

    bars: Any = utils
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    disabled = bars.are_progress_bars_disabled()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bars.disable_progress_bars()
            yield
    finally:
        logger.setLevel(level)
        if not disabled:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                bars.enable_progress_bars()
