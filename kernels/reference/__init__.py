"""The meaning of every operation, in plain NumPy. The Numba and the CUDA C kernels are tested against this package.

Arithmetic is float64 inside and float32 (or the storage type) outside. Speed is not a goal; being obviously right is.
"""

from __future__ import annotations

from cupaged.kernels.reference.operations import ReferenceOperations

__all__ = ["ReferenceOperations"]
