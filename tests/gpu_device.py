"""The device of tests that want a GPU: the real one, or a pretended one where there is none.

CUPAGED_GPU=required: the real one, and no test may do without. CUPAGED_GPU=double: the pretended one (`streamdouble`)
even beside a GPU; it also puts the conformance suite of kernels on it, which is otherwise on real ones only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from streamdouble import StreamDouble
from streamdouble.engines import cuda_llm

from cupaged import LLM
from cupaged.device import why_no_gpu
from cupaged.device.cuda import CudaDevice

ASKED = os.environ.get("CUPAGED_GPU", "")


def is_real() -> bool:
    """Whether tests run on a GPU. RuntimeError if there must be one and is not."""
    if ASKED == "double":
        return False
    reason = why_no_gpu()
    if reason is not None and ASKED == "required":
        raise RuntimeError(f"CUPAGED_GPU=required: {reason}")
    return reason is None


def make(deterministic: bool = False, seed: int = 0) -> CudaDevice:
    return CudaDevice(None if is_real() else StreamDouble(seed, gemm=True, memory=1 << 30), deterministic)


def on_gpu(weights: str | Path, seed: int = 0, **options: Any) -> LLM:
    """A model on the device, in float32 unless told otherwise; its chunks do not follow the clock."""
    if not is_real():
        return cuda_llm(weights, StreamDouble(seed, gemm=True), **options)
    return LLM(weights, **{"device": "cuda", "dtype": "float32", "pace": 1000, **options})
