"""Tests on a GPU, or on a pretended one where there is none (gpu_device.py). Engine tests' helpers are within reach."""

import sys
from collections.abc import Iterator
from pathlib import Path

import gpu_device
import pytest

from cupaged.device.cuda import CudaDevice

sys.path.append(str(Path(__file__).resolve().parent.parent / "engine"))


@pytest.fixture(scope="module", params=[True, False], ids=["deterministic", "default"])
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    """The device with products of our own, and with the library's."""
    device = gpu_device.make(request.param)
    yield device
    device.close()
