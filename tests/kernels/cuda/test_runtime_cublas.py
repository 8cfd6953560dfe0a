"""What cuBLAS is called with, on a library that these tests make up: it reads by columns, as cuBLAS does."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_support import rounded

from cupaged.errors import DeviceError
from cupaged.kernels import bfloat16
from cupaged.kernels.cuda import cublas, libraries

NARROW = {0: np.float32, 2: np.float16, 14: np.uint16}  # cudaDataType: float32, float16, bfloat16
CODES = {"float32": 0, "float16": 2, "bfloat16": 14}
# library_types.h and cublas_api.h by name, as they stand in NVIDIA's headers.
OP_N, OP_T = 0, 1
COMPUTE_32F, COMPUTE_32F_PEDANTIC, DEFAULT_ALGORITHM = 68, 69, -1


class FakeFunction:
    """An entry point that converts its arguments as ctypes would, by `argtypes`."""

    def __init__(self, library: FakeCublas, name: str) -> None:
        self.library, self.name = library, name
        self.argtypes: tuple[Any, ...] = ()
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        assert self.restype is ctypes.c_int and len(arguments) == len(self.argtypes), self.name
        values = []
        for kind, argument in zip(self.argtypes, arguments, strict=True):
            if hasattr(argument, "_obj"):  # byref
                values.append(argument._obj)
            else:
                values.append(kind(getattr(argument, "value", argument)).value)
        self.library.calls.append((self.name, values))
        return getattr(self.library, "do_" + self.name, lambda *_: self.library.status)(*values)


class FakeCublas:
    """libcublas: products of matrices that lie column by column, at addresses of NumPy arrays."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.status = 0
        self.stream = self.workspace = None

    def __getattr__(self, name: str) -> FakeFunction:
        if not name.startswith("cublas"):
            raise AttributeError(name)
        self.__dict__[name] = function = FakeFunction(self, name)
        return function

    def do_cublasCreate_v2(self, handle: Any) -> int:
        handle.value = 4711
        return self.status

    def do_cublasSetStream_v2(self, handle: int, stream: int) -> int:
        assert handle == 4711
        self.stream, self.workspace = stream, None  # back to cuBLAS's own workspace
        return 0

    def do_cublasSetWorkspace_v2(self, handle: int, address: int, size: int) -> int:
        self.workspace = (address, size)
        return 0

    def do_cublasGemmEx(self, handle: int, opa: int, opb: int, m: int, n: int, k: int, alpha: Any, a: int, atype: int,
                        lda: int, b: int, btype: int, ldb: int, beta: Any, c: int, ctype: int, ldc: int, compute: int,
                        algorithm: int) -> int:  # fmt: skip
        assert handle == 4711 and self.workspace == (0xABC00, cublas.WORKSPACE_BYTES)
        assert (alpha.value, beta.value, type(alpha)) == (1.0, 0.0, ctypes.c_float)
        assert ctype == 0 and algorithm == DEFAULT_ALGORITHM
        assert compute == (COMPUTE_32F_PEDANTIC if atype == 0 else COMPUTE_32F)
        left, right = columns(a, atype, lda, k if opa else m, m if opa else k), columns(b, btype, ldb, k, n)
        assert opb == OP_N
        product = columns(c, 0, ldc, m, n)
        product[...] = wide(left.T if opa == OP_T else left, atype) @ wide(right, btype)
        return self.status


def columns(address: int, code: int, leading: int, rows: int, cols: int) -> np.ndarray:
    """The matrix [rows, cols] at an address, element (i, j) at i + j * leading."""
    kind = np.dtype(NARROW[code])
    span = ((cols - 1) * leading + rows) * kind.itemsize
    raw = np.frombuffer((ctypes.c_char * span).from_address(address), kind)
    return np.lib.stride_tricks.as_strided(raw, (rows, cols), (kind.itemsize, leading * kind.itemsize))


def wide(array: np.ndarray, code: int) -> np.ndarray:
    return bfloat16.to_float32(array) if code == 14 else array.astype(np.float32)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeCublas:
    fake = FakeCublas()
    monkeypatch.setattr(cublas.ctypes, "CDLL", lambda path: fake)
    return fake


@pytest.mark.parametrize("dtype", CODES)
def test_a_row_major_product_is_asked_for_by_columns(library: FakeCublas, dtype: str) -> None:
    blas = cublas.Cublas("somewhere", (0xABC00, cublas.WORKSPACE_BYTES))
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((5, 7), np.float32), rng.standard_normal((3, 7), np.float32)
    stored = [bfloat16.from_float32(a) if dtype == "bfloat16" else a.astype(dtype) for a in (x, weight)]
    around = np.full((5, 10), 777, np.float32)
    out = around[:, 4:7]
    addresses = [array.ctypes.data for array in (*stored, out)]
    blas.gemm(*addresses, 5, 3, 7, 10, dtype, 99)
    expected = rounded(x, dtype) @ rounded(weight, dtype).T
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert (np.delete(around, [4, 5, 6], 1) == 777).all()


def test_the_workspace_is_set_after_the_stream_and_again_when_it_changes(library: FakeCublas) -> None:
    blas = cublas.Cublas("somewhere", (0xABC00, cublas.WORKSPACE_BYTES))
    modes = {name: values[1] for name, values in library.calls if name.startswith("cublasSet")}
    assert modes == {"cublasSetMathMode": 0, "cublasSetAtomicsMode": 0, "cublasSetPointerMode_v2": 0}
    x = np.ones((2, 4), np.float32)
    out = np.zeros((2, 2), np.float32)
    for stream in (7, 7, 8):
        blas.gemm(x.ctypes.data, x.ctypes.data, out.ctypes.data, 2, 2, 4, 2, "float32", stream)
        assert library.stream == stream and (out == 4).all()
    names = [name for name, _ in library.calls]
    assert names.count("cublasSetStream_v2") == names.count("cublasSetWorkspace_v2") == 2
    blas.close()
    blas.close()
    assert [name for name, _ in library.calls].count("cublasDestroy_v2") == 1


def test_a_refusal_is_named(library: FakeCublas, monkeypatch: pytest.MonkeyPatch) -> None:
    library.status = 13
    with pytest.raises(DeviceError, match="cublasCreate_v2: cuBLAS status 13"):
        cublas.Cublas("somewhere", (0, 0))
    library.status = 0
    blas = cublas.Cublas("somewhere", (0, 0))
    with pytest.raises(DeviceError, match="more than cuBLAS takes"):
        blas.gemm(0, 0, 0, 1 << 31, 1, 1, 1, "float16", 0)

    def missing(path: str) -> Any:
        raise OSError("libcublasLt.so.12: not found")

    monkeypatch.setattr(cublas.ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match=r"cuBLAS cannot be loaded \(libcublasLt"):
        cublas.Cublas("somewhere", (0, 0))


def test_cublas_is_found_in_wheels_then_a_toolkit_then_by_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[str] = []

    def loader(name: str) -> Any:
        if name not in known:
            raise OSError(name)
        return object()

    class Spec:
        submodule_search_locations = (str(tmp_path / "nvidia"),)

    monkeypatch.setattr(libraries.ctypes, "CDLL", loader)
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: Spec)
    monkeypatch.setattr(libraries.sys, "platform", "linux")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    assert cublas.found() is None and cublas.found(12) is None
    known += ["libcublas.so.13"]
    assert cublas.found() == "libcublas.so.13" and cublas.found(12) is None
    places = ["toolkit/lib64/libcublas.so.12", "nvidia/cu13/lib/libcublas.so.13", "nvidia/cublas/lib/libcublas.so.12"]
    for place in places:
        path = tmp_path / place
        path.parent.mkdir(parents=True)
        path.touch()
        assert cublas.found(int(place[-2:])) == str(path)
    assert cublas.found() == str(tmp_path / places[-1])
