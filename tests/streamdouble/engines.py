"""Engines on the double: `LLM`s whose device "cuda" is a `CudaDevice` over a `StreamDouble`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from cupaged import LLM
from cupaged.device.cuda import CudaDevice
from streamdouble.double import StreamDouble


def cuda_llm(weights: str | Path, gpu: StreamDouble, **options: Any) -> LLM:
    """An LLM on the double, in float32 unless told otherwise; `options` are the LLM's, deterministic and graphs too."""

    def device(name: str, *_: Any, deterministic: bool = False, graphs: bool = True) -> CudaDevice:
        assert name == "cuda"
        return CudaDevice(gpu, deterministic, graphs)

    with mock.patch("cupaged.device.make_device", device):
        return LLM(weights, **{"device": "cuda", "dtype": "float32", "pace": 1000, **options})
