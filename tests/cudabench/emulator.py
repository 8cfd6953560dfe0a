"""Runs kernels on NumPy arrays: see `cudabench.emulate`."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cudabench.build import build
from cudabench.errors import BenchError, KernelFault
from cudabench.traffic import TrafficReport, read_traffic

_ORDERS = {"forward": 0, "reverse": 1, "random": 2}
_GUARD = 4 << 20  # bytes on either side of an array's copy: an address that far off is still known for what it is
_COPY_MOST = 256 << 20  # larger arrays are used where they lie


class Undefined:
    """An output array whose content is undefined before the launch: with check="race" reading it first is a fault."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint64),
        ("order", ctypes.c_int), ("traffic", ctypes.c_int), ("seed", ctypes.c_uint64),
        ("max_switches", ctypes.c_uint64), ("error", ctypes.c_char_p), ("error_bytes", ctypes.c_uint64),
    ]  # fmt: skip


class Library:
    """One compiled variant: a shared object of one mode."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lib = ctypes.CDLL(str(path))
        self.checked = hasattr(self.lib, "cudabench_base")
        if self.checked:
            self.lib.cudabench_base.restype = ctypes.c_void_p
            self.lib.cudabench_add_buffer.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    @functools.cache  # noqa: B019 - libraries live as long as the process
    def signature(self, name: str) -> list[tuple[str, int]]:
        """(C type, bytes) of every parameter."""
        function = getattr(self.lib, f"cudabench_signature_{name}")
        function.restype = ctypes.c_char_p
        sizes = ctypes.POINTER(ctypes.c_int)()
        text = function(ctypes.byref(sizes)).decode()
        inside = text[text.index("A = {") + 5 : text.rindex("}")]
        types = [part.strip() for part in re.split(r",(?![^<(]*[>)])", inside) if part.strip()]
        return [(kind, sizes[i]) for i, kind in enumerate(types)]

    def lines(self, text: str) -> str:
        """`<pc:...>` replaced by file:line."""
        places = self.places([int(offset, 16) for offset in re.findall(r"<pc:(\w+)>", text)])
        return re.sub(r"<pc:(\w+)>", lambda match: places[int(match[1], 16)], text)

    def places(self, offsets: Sequence[int]) -> dict[int, str]:
        """file:line of return addresses in this library: the innermost line in the kernel's own sources."""
        if not offsets:
            return {}
        command = ["addr2line", "-a", "-i", "-e", str(self.path), *(hex(offset - 1) for offset in offsets)]
        done = subprocess.run(command, capture_output=True, text=True)
        own = str(Path(__file__).resolve().parent / "include")
        found: dict[int, str] = {}
        for part in re.split(r"^0x", done.stdout, flags=re.M)[1:]:
            address, *frames = [re.sub(r"^\./| \(discriminator.*", "", line) for line in part.splitlines()]
            place = next((frame for frame in frames if not frame.startswith((own, "/usr", "?"))), frames[0])
            found[int(address, 16) + 1] = place
        return found


class Kernel:
    """A kernel that can be called; made by `emulate`."""

    def __init__(self, name: str, source: Path, defines: tuple[str, ...], folders: tuple[Path, ...]) -> None:
        self.name, self.source, self._defines, self._folders = name, source, defines, folders
        self._libraries: dict[str, Library] = {}

    def library_path(self, mode: str) -> Path:
        """The shared object of a mode (plain, race, asan), built if need be."""
        return build(self.source, self._defines, self._folders, mode)[0]

    def library(self, mode: str) -> Library:
        if mode not in self._libraries:
            self._libraries[mode] = Library(self.library_path(mode))
        return self._libraries[mode]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_libraries": {}}

    @property
    def signature(self) -> list[str]:
        """C types of the parameters, e.g. ["const float*", "long int", "float"]."""
        return [kind for kind, _ in self.library("plain").signature(self.name)]

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        order: str = "forward",
        check: str | None = None,
        max_switches: int = 0,
    ) -> TrafficReport | None:
        """Launch and wait. Arrays are changed in place.

        grid, block: 1 to 3 numbers. args: an ndarray (or `Undefined`) for a pointer, of which the kernel gets the
        address, as from CuPy, strided or not; a NumPy scalar of the parameter's type for anything else, np.void for a
        struct; np.uint64(0) is a null pointer. shared_mem: bytes of dynamic shared memory. order: forward, reverse,
        random:SEED. check: None, "race", "asan" or "traffic", which returns a TrafficReport. max_switches: give up
        after so many fiber switches (0: never).
        BenchError: arguments that do not fit. KernelFault: what the kernel did wrong, and where.
        """
        if check == "asan":
            from cudabench.asan import launch_in_child

            launch_in_child(self, grid, block, args, shared_mem, order)
            return None
        if check not in (None, "race", "traffic"):
            raise BenchError(f"check: {check!r} is not None, 'race', 'asan' or 'traffic'")
        mode = "plain" if check is None else "race"
        traffic = check == "traffic"
        how: dict[str, Any] = {"shared_mem": shared_mem, "order": order, "max_switches": max_switches}
        library = self.launch(mode, grid, block, args, traffic=traffic, **how)
        return read_traffic(library) if traffic else None

    def launch(
        self,
        mode: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        order: str = "forward",
        max_switches: int = 0,
        traffic: bool = False,
    ) -> Library:
        """What `__call__` does, in this process and with a mode of build.py; returns the library that ran."""
        library = self.library(mode)
        dims = [_three(grid, "grid", 2**31 - 1), _three(block, "block", 1024)]
        if np.prod(dims[1]) > 1024:
            raise BenchError(f"block {tuple(block)}: more than 1024 threads")
        if not 0 <= shared_mem <= 227 << 10:
            raise BenchError(f"shared_mem: {shared_mem} bytes are not in 0..{227 << 10}")
        kind, _, seed = order.partition(":")
        if kind not in _ORDERS or bool(seed) != (kind == "random"):
            raise BenchError(f"order: {order!r} is not forward, reverse or random:SEED")
        values, copies = self._values(library, args)
        error = ctypes.create_string_buffer(4096)
        how = _Launch(
            (ctypes.c_uint * 3)(*dims[0]), (ctypes.c_uint * 3)(*dims[1]), shared_mem, _ORDERS[kind],
            int(traffic), int(seed or 0), max_switches, ctypes.cast(error, ctypes.c_char_p), len(error),
        )  # fmt: skip
        pointers = (ctypes.c_void_p * (len(values) + 1))(*[ctypes.addressof(value) for value in values])
        failed = getattr(library.lib, f"cudabench_launch_{self.name}")(pointers, ctypes.byref(how))
        for copy in copies:
            copy.write_back()
        if failed:
            raise KernelFault(library.lines(error.value.decode()))
        return library

    def _values(self, library: Library, args: Sequence[Any]) -> tuple[list[Any], list[_Copy]]:
        parameters = library.signature(self.name)
        if len(args) != len(parameters):
            raise BenchError(f"{self.name} takes {len(parameters)} arguments, not {len(args)}")
        if library.checked:
            library.lib.cudabench_forget_buffers()
        values: list[Any] = []
        copies: dict[int, _Copy] = {}
        for number, (arg, (kind, size)) in enumerate(zip(args, parameters, strict=True)):
            where = f"{self.name}, argument {number} ({kind})"
            array = arg.array if isinstance(arg, Undefined) else arg
            if not isinstance(array, np.ndarray):
                _check_scalar(array, kind, size, where)
                values.append(ctypes.create_string_buffer(array.tobytes(), size))
                continue
            if not kind.endswith("*"):
                raise BenchError(f"{where}: got an array")
            shift = 0
            low, high = _bounds(array)
            if library.checked:  # what lies in one array stays in one copy
                start, stop = _bounds(owner_of(array))
                if stop - start <= _COPY_MOST:
                    if start not in copies:
                        copies[start] = _Copy(start, stop - start)
                    shift = copies[start].shift
                library.lib.cudabench_add_buffer(low + shift, high - low, int(isinstance(arg, Undefined)))
            values.append(ctypes.c_void_p(array.ctypes.data + shift))
        return values, list(copies.values())


class _Copy:
    """An array's memory between guard zones, for a checked launch."""

    def __init__(self, start: int, size: int) -> None:
        self._zone = np.empty(size + 2 * _GUARD, np.uint8)
        offset = _GUARD - self._zone.ctypes.data % 256 + start % 256  # aligned as the original is
        self._inside = self._zone[offset : offset + size]
        self._original = _bytes(start, size) if size else self._inside
        self._inside[:] = self._original
        self.shift = self._inside.ctypes.data - start

    def write_back(self) -> None:
        changed = self._inside != self._original
        if changed.any():  # else the original may be read-only
            self._original[changed] = self._inside[changed]


def owner_of(array: np.ndarray) -> np.ndarray:
    """The array that a view was taken of, at first; as_strided puts an object of another kind in between."""
    while True:
        base = array.base if isinstance(array.base, np.ndarray) else getattr(array.base, "base", None)
        if not isinstance(base, np.ndarray):
            return array
        array = base


def _bytes(start: int, size: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * size).from_address(start), np.uint8)


def bytes_of(array: np.ndarray) -> np.ndarray:
    """The memory of an array, from its first byte to its last."""
    start, stop = _bounds(array)
    return _bytes(start, stop - start)


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """Addresses of the first byte of an array, strides of any sign, and of the first beyond it."""
    address = array.ctypes.data
    if not array.size:
        return address, address
    ends = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    return address + sum(min(end, 0) for end in ends), address + sum(max(end, 0) for end in ends) + array.itemsize


def _three(numbers: Sequence[int], what: str, most: int) -> list[int]:
    out = [int(n) for n in numbers]
    if not 1 <= len(out) <= 3 or min(out) < 1 or max(out) > most:
        raise BenchError(f"{what}: {tuple(numbers)} is not 1 to 3 numbers in 1..{most}")
    return out + [1] * (3 - len(out))


def _check_scalar(value: Any, kind: str, size: int, where: str) -> None:
    """A launch passes bytes: a Python float would be 8 of them, and an int32 for a float is four wrong ones."""
    if not isinstance(value, np.generic):
        raise BenchError(f"{where}: {type(value).__name__} is neither an array nor a NumPy scalar")
    words = set(kind.replace("*", " * ").split())
    expected = "f" if words & {"float", "double"} and "*" not in words else "iu"
    if kind in ("bool", "char", "signed char", "unsigned char"):
        expected = "iub"
    is_number = bool(words & {"float", "double", "int", "long", "short", "char", "bool", "unsigned", "*"})
    if value.nbytes != size or (is_number and value.dtype.kind not in expected):
        raise BenchError(f"{where}: got {value.dtype}, {value.nbytes} bytes")


def emulate(
    source: str | Path,
    name: str | None = None,
    *,
    defines: Mapping[str, object] | None = None,
    include: Sequence[str | Path] = (),
    arch: int = 80,
) -> Kernel:
    """The kernel `name` of a .cu file, compiled for the CPU. `name` may be left out if the file has one kernel.

    defines: -D names and values (None or "": defined to nothing). include: folders for quoted includes. arch: the
    compute capability that __CUDA_ARCH__ says, 80 for 8.0.
    BenchError: what g++ says; an instruction of inline PTX that is not emulated. BenchMissing: no g++.
    """
    path = Path(source).resolve()
    flags = tuple(f"-D{key}" + ("" if value in (None, "") else f"={value}") for key, value in (defines or {}).items())
    flags += (f"-D__CUDA_ARCH__={arch * 10}",)
    folders = tuple(Path(folder).resolve() for folder in include)
    from cudabench.translate import translate

    names = translate(path, folders)[1]
    if name is None and len(names) > 1:
        raise BenchError(f"{path}: which kernel? It has {', '.join(names)}")
    if name is not None and name not in names:
        raise BenchError(f"{path}: no kernel {name}; it has {', '.join(names)}")
    return Kernel(name or names[0], path, flags, folders)
