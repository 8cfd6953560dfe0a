"""Devices by name. Nothing here imports CuPy or compiles a kernel before a device is asked for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cupaged.errors import DeviceError, OptionError

if TYPE_CHECKING:
    from cupaged.device.base import Device, ProgressCallback

DEVICE_NAMES = ("auto", "cpu", "cuda")

_shared: dict[str, Device] = {}
_lock = threading.Lock()


def make_device(name: str = "auto", threads: int | None = None, progress: ProgressCallback | None = None) -> Device:
    """A device of one's own: "auto", "cpu" or "cuda". OptionError for another name, DeviceError if it cannot be had."""
    if name not in DEVICE_NAMES:
        raise OptionError(f"device: {name!r} is not one of {', '.join(DEVICE_NAMES)}")
    if name == "cuda":
        raise DeviceError("device 'cuda': this version of cupaged runs on the CPU only; use device 'cpu' or 'auto'")
    from cupaged.device.cpu import CpuDevice

    return CpuDevice(threads, progress)


def get_device(name: str = "cpu") -> Device:
    """The process's shared device of that name, made at first use: what the library face uses by default."""
    with _lock:
        if name not in _shared:
            _shared[name] = make_device(name)
        return _shared[name]
