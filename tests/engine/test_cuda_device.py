"""The CUDA device on the stream double: what it promises, under many orders of what is queued."""

from __future__ import annotations

import pytest
from cuda_scripts import SCRIPTS, Script

SEEDS = 40


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_device_keeps_its_promises_under_every_order(script: Script) -> None:
    for seed in range(SEEDS):
        script(seed)
