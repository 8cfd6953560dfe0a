"""Kernels of a model compiled ahead of its first use, and kept: what `cupaged warmup` does."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from cupaged.errors import DeviceError
from cupaged.loading import LoadOptions, ProgressEvent, ProgressSink, Reports, chosen_device, open_model


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """device: kind and name. compiled: kernels that were not there, 0 if all were. folder: where they are kept."""

    device: str
    compiled: int
    seconds: float
    folder: Path


def warm_up(weights: str | Path, options: LoadOptions, progress: ProgressSink | None = None) -> WarmedUp:
    """Have every kernel compiled and kept that this model needs on this device; its weights are not read.

    Errors are those of loading it; DeviceError if there is no folder where kernels can be kept.
    """
    compiled = 0

    def count(event: ProgressEvent) -> None:
        nonlocal compiled
        if event.stage == "kernels":
            compiled = event.total or 0
        if progress is not None:
            progress(event)

    reports = Reports(count)
    device = chosen_device(options, reports)
    try:
        opened = open_model(weights, options, reports, device)
        before, began = _kept(), time.monotonic()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "compiled kernels cannot be kept")
            opened.prepare(device, options.block_size)
        seconds = time.monotonic() - began
    except UserWarning:  # of some at least: the disk may be full
        raise _not_kept(compiled) from None
    finally:
        device.close()
    places = list(_kept()) if not compiled else [path for path, when in _kept().items() if before.get(path) != when]
    if not places or (device.kind == "cuda" and len(places) < compiled):  # a file each there
        raise _not_kept(compiled)
    return WarmedUp(f"{device.name} ({device.kind})", compiled, seconds, places[0].parent)


def _not_kept(compiled: int) -> DeviceError:
    return DeviceError(
        f"{compiled} kernels were compiled but could not all be kept: no folder for them can be written, or it "
        "is full; set CUPAGED_CACHE_DIR to another one"
    )


def _kept() -> dict[Path, int]:
    """Files of kernels in the cache folders, best folder first, and when each was written."""
    from cupaged.kernels.cpu.library import cache_folders

    found: dict[Path, int] = {}
    for folder in cache_folders():
        try:
            found |= {path: path.stat().st_mtime_ns for path in sorted(folder.iterdir())}
        except OSError:  # not there, or a file went meanwhile
            continue
    return found
