"""Devices by name. Nothing here imports CuPy, starts a GPU or compiles a kernel before a device is asked for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cupaged.errors import NoDeviceError, OptionError

if TYPE_CHECKING:
    from cupaged.device.base import Device, ProgressCallback

DEVICE_NAMES = ("auto", "cpu", "cuda")

_shared: dict[str, Device] = {}
_lock = threading.Lock()


def why_no_gpu() -> str | None:
    """Why device "cuda" cannot be had, in one line with what mends it; None if it can. Makes no CUDA context."""
    from cupaged.device import driver

    return driver.why_no_gpu()


def make_device(
    name: str = "auto",
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    *,
    deterministic: bool = False,
    graphs: bool = True,
) -> Device:
    """A device of one's own: "auto", "cpu" or "cuda".

    "auto" is the GPU if there is one that can be used and no `threads` are asked for, else the CPU. deterministic,
    graphs: see `CudaDevice`; on the CPU sums always have one order, and there are no graphs. OptionError for another
    name, or threads on a GPU; NoDeviceError, in one line with what mends it, if there is no such device.
    """
    if name not in DEVICE_NAMES:
        raise OptionError(f"device: {name!r} is not one of {', '.join(DEVICE_NAMES)}")
    if name == "cuda" and threads is not None:
        raise OptionError(f"threads: {threads!r} is for device 'cpu'; device 'cuda' takes none")
    reason = None if name == "cpu" or (name == "auto" and threads is not None) else why_no_gpu()
    if name == "cuda" and reason is not None:
        raise NoDeviceError(f"device 'cuda': {reason}")
    if name == "cuda" or (name == "auto" and threads is None and reason is None):
        from cupaged.device.cuda import CudaDevice

        return CudaDevice(None, deterministic, graphs, progress)
    from cupaged.device.cpu import CpuDevice

    return CpuDevice(threads, progress)


def get_device(name: str = "cpu") -> Device:
    """The process's shared device of that name, made at first use: what the library face uses by default."""
    with _lock:
        if name not in _shared:
            _shared[name] = make_device(name)
        return _shared[name]
