"""Object files of x86-64 Linux put into memory, ready to be called: no linker, and no LLVM either.

LLVM can link its own objects, but to load it takes a process 40 MB and as many milliseconds, which is a good part of a
small model's start. What our kernels are compiled to is simple: code and constants, bound to each other and to a few
functions of the C library relative to the place of the call (System V ABI, AMD64 supplement, 4.4). Anything else
(another machine, data that is written, another kind of relocation) is left to LLVM: `link` then says None.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_ELF64_LITTLE = b"\x7fELF\x02\x01\x01"
_RELOCATABLE, _X86_64 = 1, 62
_PROGBITS, _SYMTAB, _RELA = 1, 2, 4  # section types
_UNWIND = 0x70000001  # tables for exceptions, of which kernels have none
_WRITE, _ALLOC, _THREAD_LOCAL = 1, 2, 0x400  # section flags
_PC32, _PLT32 = 2, 4  # relocations: S + A - P, in 32 bits
_UNDEFINED, _RESERVED = 0, 0xFF00  # section numbers
_JUMP = b"\xff\x25\x00\x00\x00\x00"  # jmp [rip]: to the address that follows
_JUMP_SIZE = 16


class _NotSimpleError(Exception):
    """An object file that is more than this linker knows."""


@dataclass(frozen=True, slots=True)
class _Patch:
    """32 bits at `at` of the image become target + addend - at; target: an offset, or the name of a C function."""

    at: int
    target: int | str
    addend: int


def link(objects: Sequence[tuple[str, bytes]]) -> dict[str, int] | None:
    """(symbol, object file) of each kernel -> addresses by symbol; None where that is LLVM's work.

    The memory is never given back: threads may sleep in it to the end of the process.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        image, patches = bytearray(), list[_Patch]()
        places = {symbol: _place(code, symbol, image, patches) for symbol, code in objects}
        _bind(image, patches)
        base = _executable(bytes(image))
    except (_NotSimpleError, struct.error, IndexError, ValueError):
        return None
    return {symbol: base + place for symbol, place in places.items()}


def _place(code: bytes, wanted: str, image: bytearray, patches: list[_Patch]) -> int:
    """Append a file's code and constants to the image, note what must be bound; returns the place of `wanted`."""
    ident, kind, machine, _, _, _, table, _, _, _, _, size, count, _ = _HEADER.unpack_from(code)
    if not ident.startswith(_ELF64_LITTLE) or (kind, machine, size) != (_RELOCATABLE, _X86_64, _SECTION.size):
        raise _NotSimpleError
    sections = [_SECTION.unpack_from(code, table + size * index) for index in range(count)]
    homes: dict[int, int] = {}
    for index, (_, kind, flags, _, start, length, _, _, alignment, _) in enumerate(sections):
        if not flags & _ALLOC or kind == _UNWIND:
            continue
        if kind != _PROGBITS or flags & (_WRITE | _THREAD_LOCAL) or start + length > len(code):
            raise _NotSimpleError
        image += bytes(-len(image) % max(alignment, 1))
        homes[index] = len(image)
        image += code[start : start + length]
    found = None
    for _, kind, _, _, start, length, link_to, target, _, _ in sections:
        if kind == _SYMTAB:
            names = sections[link_to]
            for at in range(start, start + length, _SYMBOL.size):
                name, _, _, home, value, _ = _SYMBOL.unpack_from(code, at)
                if home in homes and _name(code, names, name) == wanted:
                    found = homes[home] + value
        elif kind == _RELA and target in homes:
            symbols = sections[link_to]
            for at in range(start, start + length, _RELOCATION.size):
                offset, what, addend = _RELOCATION.unpack_from(code, at)
                name, _, _, home, value, _ = _SYMBOL.unpack_from(code, symbols[4] + _SYMBOL.size * (what >> 32))
                how = what & 0xFFFFFFFF
                if home in homes and how in (_PC32, _PLT32):
                    patches.append(_Patch(homes[target] + offset, homes[home] + value, addend))
                elif home == _UNDEFINED and how == _PLT32:
                    patches.append(_Patch(homes[target] + offset, _name(code, sections[symbols[6]], name), addend))
                else:
                    raise _NotSimpleError
    if found is None:
        raise _NotSimpleError
    return found


def _name(code: bytes, strings: Sequence[int], at: int) -> str:
    start = strings[4] + at
    return code[start : code.index(b"\0", start)].decode()


def _bind(image: bytearray, patches: Sequence[_Patch]) -> None:
    """Write the patches; functions of the C library may be far away, and get a jump in the image each."""
    jumps: dict[str, int] = {}
    library = ctypes.CDLL(None)
    for name in {patch.target for patch in patches if isinstance(patch.target, str)}:
        try:
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            raise _NotSimpleError from None
        image += bytes(-len(image) % _JUMP_SIZE)
        jumps[name] = len(image)
        image += _JUMP + struct.pack("<Q", address or 0)
    for patch in patches:
        target = jumps[patch.target] if isinstance(patch.target, str) else patch.target
        struct.pack_into("<i", image, patch.at, target + patch.addend - patch.at)


def _executable(image: bytes) -> int:
    """The address of a copy of `image` that can be run and no longer written."""
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = library.mmap(None, len(image), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if base is None or base == ctypes.c_void_p(-1).value:
        raise _NotSimpleError
    ctypes.memmove(base, image, len(image))
    if library.mprotect(base, len(image), mmap.PROT_READ | mmap.PROT_EXEC):  # a hardened system may forbid it
        raise _NotSimpleError
    return int(base)
