"""Devices by name. Nothing here imports CuPy, starts a GPU or compiles a kernel before a device is asked for."""

from __future__ import annotations

import threading
import warnings
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

    "auto" is the GPU if there is one that can be used and no `threads` are asked for, else the CPU; with a warning
    where there seems to be one that then does not start. deterministic,
    graphs: see `CudaDevice`; on the CPU sums always have one order, and there are no graphs. OptionError for another
    name, or threads on a GPU; NoDeviceError, in one line with what mends it, if there is no such device.
    """
    if name not in DEVICE_NAMES:
        raise OptionError(f"device: {name!r} is not one of {', '.join(DEVICE_NAMES)}")
    if name == "cuda" and threads is not None:
        raise OptionError(f"threads: {threads!r} is for device 'cpu'; device 'cuda' takes none")
    if name == "cuda" or (name == "auto" and threads is None and why_no_gpu() is None):
        from cupaged.device.cuda import CudaDevice

        try:
            return CudaDevice(None, deterministic, graphs, progress)
        except NoDeviceError as error:
            if name == "cuda":
                raise
            warnings.warn(f"{error}; the CPU is used", RuntimeWarning, stacklevel=2)
    from cupaged.device.cpu import CpuDevice

    return CpuDevice(threads, progress)


def get_device(name: str = "cpu") -> Device:
    """The process's shared device of that name, made at first use: what the library face uses by default."""
    with _lock:
        if name not in _shared:
            _shared[name] = make_device(name)
        return _shared[name]
