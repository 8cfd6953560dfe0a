"""Kernels put into memory by our own linker and by LLVM do the same; what it does not know, our own leaves to LLVM."""

from __future__ import annotations

import platform
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupaged.kernels.cpu import library, link
from cupaged.kernels.cpu.arrays import address
from cupaged.kernels.cpu.catalog import BASIC
from cupaged.kernels.cpu.executor import Records
from cupaged.kernels.cpu.library import KernelLibrary, load_library

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the linker is for x86-64 Linux"
)


@pytest.fixture(scope="module")
def objects() -> list[tuple[str, bytes]]:
    """(symbol, object file) of the basic kernels."""
    load_library()
    kept = library._kept(BASIC) or library._compiled([BASIC], None)
    return [(symbol, code) for _, symbol, code in kept]


def activation(kernels: KernelLibrary) -> np.ndarray:
    """GELU of some numbers, for which the kernel calls the C library."""
    x = np.linspace(-4, 4, 96, dtype=np.float32).reshape(3, 32)
    out = np.zeros((3, 16), np.float32)
    records = Records(1)
    records.append(kernels.addresses["gated_activation"], 3, (address(x), address(out), 16, 1, 64, 0, 0, 0, 3, 1))
    kernels.call("run_alone", records.address)
    return out


def test_both_ways_of_linking_give_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = KernelLibrary()
    ours.require([BASIC])
    assert not ours._engines
    monkeypatch.setattr(link, "link", lambda objects: None)
    llvms = KernelLibrary()
    llvms.require([BASIC])
    assert llvms._engines
    assert ours.addresses.keys() == llvms.addresses.keys()
    assert activation(ours).tobytes() == activation(llvms).tobytes()
    assert len(np.unique(activation(ours))) > 30


def test_code_cannot_be_written(objects: list[tuple[str, bytes]]) -> None:
    places = link.link(objects)
    assert places is not None and len(set(places.values())) == len(objects)
    at = next(iter(places.values()))
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(edge, 16) for edge in line.split()[0].split("-"))
        if low <= at < high:
            assert line.split()[1] == "r-xp"
            break
    else:
        raise AssertionError("the code is in no mapping")


def section_table(code: bytes) -> tuple[int, int]:
    return struct.unpack_from("<Q", code, 40)[0], struct.unpack_from("<H", code, 60)[0]


def test_what_is_not_known_is_left_to_llvm(objects: list[tuple[str, bytes]]) -> None:
    symbol, code = objects[0]
    assert link.link([(symbol, code)]) is not None
    table, count = section_table(code)
    damaged = {
        "empty": b"",
        "no ELF": b"MZ" + code[2:],
        "big-endian": code[:5] + b"\x02" + code[6:],
        "a program": code[:16] + struct.pack("<H", 2) + code[18:],
        "another machine": code[:18] + struct.pack("<H", 183) + code[20:],
        "cut": code[: len(code) // 2],
        "sections beyond the end": code[:40] + struct.pack("<Q", len(code)) + code[48:],
    }
    for index in range(count):
        at = table + 64 * index
        kind, flags = struct.unpack_from("<IQ", code, at + 4)
        if kind == 1 and flags & 2:  # code or constants: as data that is written, as zeros, as too long
            damaged[f"written {index}"] = code[: at + 8] + struct.pack("<Q", flags | 1) + code[at + 16 :]
            damaged[f"zeros {index}"] = code[: at + 4] + struct.pack("<I", 8) + code[at + 8 :]
            damaged[f"long {index}"] = code[: at + 32] + struct.pack("<Q", len(code)) + code[at + 40 :]
    for name, bad in damaged.items():
        assert link.link([(symbol, bad)]) is None, name
    assert link.link([("no such symbol", code)]) is None


def test_other_relocations_and_functions_that_are_not_there(objects: list[tuple[str, bytes]]) -> None:
    """Each relocation in turn becomes an absolute address, which this linker does not do."""
    tried = 0
    for symbol, code in objects:
        table, count = section_table(code)
        for index in range(count):
            kind, start, length = (
                struct.unpack_from("<I", code, table + 64 * index + 4)[0],
                *struct.unpack_from("<QQ", code, table + 64 * index + 24),
            )
            if kind == 4:
                info = struct.unpack_from("<Q", code, start + 8)[0]
                target = struct.unpack_from("<I", code, table + 64 * index + 44)[0]
                if not struct.unpack_from("<Q", code, table + 64 * target + 8)[0] & 4:
                    continue  # not of code
                absolute = struct.pack("<Q", info >> 32 << 32 | 1)
                assert link.link([(symbol, code[: start + 8] + absolute + code[start + 16 :])]) is None
                assert length
                tried += 1
        if b"\0erff\0" in code:
            assert link.link([(symbol, code.replace(b"\0erff\0", b"\0erfX\0"))]) is None
            tried += 1
    assert tried > 5


def test_a_warm_start_loads_no_llvm(checkout_env: dict[str, str]) -> None:
    """40 MB and as many milliseconds of every process."""
    code = (
        "import sys; from cupaged.kernels.cpu.library import load_library\n"
        "load_library().addresses['add']; print('llvmlite' in sys.modules, 'numba' in sys.modules)"
    )
    for _ in range(2):  # the first may compile
        printed = subprocess.check_output([sys.executable, "-c", code], env=checkout_env, text=True)
    assert printed == "False False\n"
