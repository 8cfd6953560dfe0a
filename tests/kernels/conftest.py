"""The implementations that the conformance suite is run on."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

IMPLEMENTATIONS = ["reference", "cpu", "cuda"]


def make_operations(name: str) -> Any:
    if name == "reference":
        from cupaged.kernels.reference import ReferenceOperations

        return ReferenceOperations()
    if name == "cuda":
        if shutil.which("g++") is None:
            pytest.skip("no g++, which runs the CUDA C kernels on the CPU")
        from emulated import emulated_operations

        return emulated_operations()
    from cupaged.device import get_device

    return get_device("cpu").ops


@pytest.fixture(scope="session", params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Any:
    """A set of kernels; each test that asks for it holds for all of them."""
    return make_operations(request.param)
