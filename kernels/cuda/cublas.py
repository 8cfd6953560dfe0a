"""cuBLAS by ctypes: one kind of product, on a handle and a workspace of our own.

CuPy has no call that sets a handle's workspace, and its own products reset it; a captured graph needs one that stays.
cuBLAS is no dependency: it has some 500 MB, and without it every product is `matmul.cu`'s.

**No GPU has run this file yet.** Numbers of enumerations are those of cublas_api.h and library_types.h; what is passed
is checked in the tests on a library that they make up.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cupaged.errors import DeviceError
from cupaged.kernels.cuda import libraries

WORKSPACE_BYTES = 32 << 20  # what cuBLAS asks for on Hopper; less elsewhere

_R_32F, _R_16F, _R_16BF = 0, 2, 14  # cudaDataType
_TYPES = {"float32": _R_32F, "float16": _R_16F, "bfloat16": _R_16BF}
_OP_N, _OP_T = 0, 1  # cublasOperation_t
_COMPUTE_32F, _COMPUTE_32F_PEDANTIC = 68, 69  # cublasComputeType_t; pedantic: no TF32 in place of float32
_DEFAULT_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT: by shape and workspace alone, on one card and version
_DEFAULT_MATH = 0
_ATOMICS_NOT_ALLOWED = 0
_POINTERS_ON_HOST = 0
_MOST = (1 << 31) - 1

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cublasDestroy_v2": (ctypes.c_void_p,),
    "cublasSetStream_v2": (ctypes.c_void_p, ctypes.c_void_p),
    "cublasSetWorkspace_v2": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    "cublasSetMathMode": (ctypes.c_void_p, ctypes.c_int),
    "cublasSetAtomicsMode": (ctypes.c_void_p, ctypes.c_int),
    "cublasSetPointerMode_v2": (ctypes.c_void_p, ctypes.c_int),
    "cublasGemmEx": (
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int,  # handle, transa, transb
        ctypes.c_int, ctypes.c_int, ctypes.c_int,  # m, n, k
        ctypes.c_void_p,  # alpha
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int,  # A, its type, lda
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int,  # B
        ctypes.c_void_p,  # beta
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int,  # C
        ctypes.c_int, ctypes.c_int,  # compute type, algorithm
    ),
}  # fmt: skip


def found(major: int | None = None) -> str | None:
    """The file of cuBLAS that would be loaded, or its bare name where the system's loader knows it; None for none.

    major: the version of CUDA that it must be of (that of the installed CuPy), None for any. Makes no context.
    """
    return libraries.find("cublas", "cublas", major)


class Cublas:
    """A handle on the current device. `workspace`: (address, bytes) of device memory, which the caller keeps."""

    def __init__(self, path: str, workspace: tuple[int, int]) -> None:
        """DeviceError where the library cannot be loaded or does not start."""
        try:
            self._library: Any = ctypes.CDLL(path)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
        except (OSError, AttributeError) as error:
            raise DeviceError(f"cuBLAS cannot be loaded ({error})") from error
        self._workspace = workspace
        self._stream: int | None = None
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetMathMode", self._handle, _DEFAULT_MATH)
        self._call("cublasSetAtomicsMode", self._handle, _ATOMICS_NOT_ALLOWED)
        self._call("cublasSetPointerMode_v2", self._handle, _POINTERS_ON_HOST)

    def gemm(
        self, x: int, weight: int, out: int, rows: int, outputs: int, inner: int, out_stride: int, dtype: str,
        stream: int,
    ) -> None:  # fmt: skip
        """Queue out = x @ weight.T. Addresses of x [rows, inner] and weight [outputs, inner] of `dtype`, contiguous,
        and of out [rows, outputs] float32, whose rows are out_stride elements apart.

        cuBLAS reads by columns: to it our row-major arrays are their transposes, so it is asked for
        out^T [outputs, rows] = weight [outputs, inner] (a transpose to it) times x^T [inner, rows] (as it lies).
        """
        if max(rows, outputs, inner, out_stride) > _MOST:
            raise DeviceError(f"product: {rows} x {inner} by {outputs}: more than cuBLAS takes")
        if stream != self._stream:
            self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream))
            # After it: cublasSetStream goes back to cuBLAS's own workspace.
            self._call("cublasSetWorkspace_v2", self._handle, ctypes.c_void_p(self._workspace[0]), self._workspace[1])
            self._stream = stream
        kind = _TYPES[dtype]
        self._call(
            "cublasGemmEx", self._handle, _OP_T, _OP_N, outputs, rows, inner, ctypes.byref(self._one),
            ctypes.c_void_p(weight), kind, inner, ctypes.c_void_p(x), kind, inner, ctypes.byref(self._zero),
            ctypes.c_void_p(out), _R_32F, out_stride,
            _COMPUTE_32F_PEDANTIC if dtype == "float32" else _COMPUTE_32F, _DEFAULT_ALGORITHM,
        )  # fmt: skip

    def close(self) -> None:
        """Free the handle; waits for its work."""
        if self._handle:
            self._call("cublasDestroy_v2", self._handle)
            self._handle = ctypes.c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DeviceError(f"{name}: cuBLAS status {status}")
