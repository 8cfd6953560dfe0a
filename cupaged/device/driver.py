"""What the NVIDIA driver says, asked directly: whether there is a GPU that cupaged can use, and if not, why.

Through ctypes, so that the answer costs neither CuPy's import nor a CUDA context. **No GPU has run this file yet**: on
machines without a driver it is tested as it is, else on a driver that tests make up.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupaged.errors import DeviceError

LEAST_CAPABILITY = 70
WHEELS = {11: "cupy-cuda11x", 12: "cupy-cuda12x", 13: "cupy-cuda13x"}
LEAST_DRIVER = {11: "450", 12: "525", 13: "580"}  # of a major version of CUDA, on Linux; minor ones are compatible
_NO_DEVICE, _NOT_INITIALISED = 100, 3  # CUresult
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
FORKED = (
    "this process was forked after its parent had begun to use the GPU, which CUDA does not survive; "
    "start it by multiprocessing.get_context('spawn') instead"
)

_initialised_in: int | None = None  # the process that called cuInit here


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as its driver describes it. cuda: the version of CUDA that the driver knows, 12040 for 12.4."""

    name: str
    capability: int
    total_bytes: int
    cuda: int


def forked() -> str | None:
    """Why a process that was forked cannot use the GPU that its parent uses; None for any other process."""
    if _initialised_in in (None, os.getpid()):
        return None
    return FORKED


def why_no_gpu() -> str | None:
    """Why device "cuda" cannot be had, in one line with what mends it; None if it can. Makes no CUDA context."""
    try:
        find_card()
    except DeviceError as error:
        return str(error)
    return None


def find_card(index: int = 0) -> Card:
    """The GPU of that number, if everything that cupaged needs to use it is there. DeviceError says what is missing."""
    if (reason := forked()) is not None:
        raise DeviceError(reason)
    cuda = _library()
    number = ctypes.c_int()
    _call(cuda, "cuDriverGetVersion", ctypes.byref(number))
    _check_wheel(number.value)
    card = _card(cuda, index, number.value)
    if card.capability < LEAST_CAPABILITY:
        raise DeviceError(f"{card.name}: compute capability {card.capability / 10} is below 7.0; use --device cpu")
    if card.capability < 75 and installed_wheel() == 13:
        raise DeviceError(
            f"{card.name}: compute capability {card.capability / 10} is not known to CUDA 13; "
            "pip uninstall cupy-cuda13x, then pip install cupy-cuda12x"
        )
    from cupaged.kernels.cuda import compile

    if (reason := compile.missing(installed_wheel() or None)) is not None:
        raise DeviceError(reason)
    return card


def _library() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError:
        pass
    if Path("/proc/driver/nvidia/version").exists():
        raise DeviceError(
            f"the NVIDIA driver is loaded, but {name} is not to be found here; "
            "give a container access to it: docker run --gpus all"
        )
    raise DeviceError(
        f"no NVIDIA driver ({name} is not there); install it (Debian: apt install nvidia-driver), "
        "or start the container with --gpus all, or use --device cpu"
    )


def installed_wheel() -> int | None:
    """The major version of CUDA that the installed CuPy is for; 0 if it does not say, None if there is no CuPy."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms that machines without a driver need not wait

    for major, name in WHEELS.items():
        with contextlib.suppress(PackageNotFoundError):
            version(name)
            return major
    return None if importlib.util.find_spec("cupy") is None else 0


def _check_wheel(cuda: int) -> None:
    """CuPy is there, and not for a newer CUDA than the driver knows."""
    major, known = cuda // 1000, installed_wheel()
    fitting = WHEELS[min(13, major)] if major >= 12 else None
    shown = f"{major}.{cuda % 1000 // 10}"
    if fitting is None:
        raise DeviceError(
            f"the NVIDIA driver is too old: it knows CUDA {shown}; update it to {LEAST_DRIVER[12]} or newer"
        )
    if known is None:
        raise DeviceError(f"CuPy is not installed; pip install {fitting}")
    if known > major:
        raise DeviceError(
            f"the NVIDIA driver knows CUDA {shown}, {WHEELS[known]} needs {known}.0; update the driver to "
            f"{LEAST_DRIVER[known]} or newer, or pip uninstall {WHEELS[known]}, then pip install {fitting}"
        )


def _card(cuda: Any, index: int, version: int) -> Card:
    global _initialised_in
    code = cuda.cuInit(ctypes.c_uint(0))
    if code == 0:
        _initialised_in = os.getpid()
    elif code == _NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r:.40}; unset it to see all)"
        raise DeviceError(f"the NVIDIA driver finds no GPU{hidden}; nvidia-smi lists what it knows")
    elif code == _NOT_INITIALISED:
        raise DeviceError(FORKED)
    else:
        raise DeviceError(f"the NVIDIA driver cannot be started ({_name(cuda, code)}); nvidia-smi may say more")
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if not 0 <= index < count.value:
        raise DeviceError(f"there is no GPU {index}: the NVIDIA driver finds {count.value}")
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call(cuda, "cuDeviceGetName", name, ctypes.c_int(256), device)
    numbers = []
    for attribute in _CAPABILITY:
        value = ctypes.c_int()
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
        numbers.append(value.value)
    total = ctypes.c_size_t()
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    return Card(name.value.decode(errors="replace"), 10 * numbers[0] + numbers[1], total.value, version)


def _call(cuda: Any, function: str, *arguments: Any) -> None:
    code = getattr(cuda, function)(*arguments)
    if code:
        raise DeviceError(f"{function}: {_name(cuda, code)}; nvidia-smi may say more")


def _name(cuda: Any, code: int) -> str:
    """CUDA_ERROR_... of a number."""
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
    return (name.value or b"").decode() or f"error {code}"
