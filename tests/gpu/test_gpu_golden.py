"""Real architectures on the device: logits and tokens as Hugging Face computes them."""

from __future__ import annotations

import gpu_device
import numpy as np
import pytest
from checkpoints import DATA, FOLDERS, Bare, expected
from recording import GREEDY

from cupaged.device import get_device
from cupaged.device.cuda import CudaDevice

TOLERANCE = 1e-4  # as on the CPU, whose largest difference is 2e-5
# Of narrow weights beside the CPU's, which multiplies them in float32: here the library gets rows of x in their type,
# 2^-11 or 2^-8 of a value each. Measured on the pretended GPU: 0.07 with bfloat16.
NARROW = {"float16": 0.03, "bfloat16": 0.3}
FEW = FOLDERS if gpu_device.is_real() else FOLDERS[::3]


@pytest.mark.parametrize("folder", FEW)
def test_logits_are_those_of_transformers(folder: str, device: CudaDevice) -> None:
    model = Bare(DATA / folder, device)
    table = np.random.default_rng(7).permutation(model.cache.num_blocks).tolist()
    for ids, logits, _ in expected(folder):
        for chunk in (None, 3 if gpu_device.is_real() else 17):
            assert np.abs(model.logits(ids, chunk, table) - logits).max() < TOLERANCE, (len(ids), chunk)


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_weights_give_the_logits_of_the_cpu(dtype: str, device: CudaDevice) -> None:
    ours, theirs = (Bare(DATA / "qwen3", each, dtype=dtype) for each in (device, get_device("cpu")))
    for ids, _, _ in expected("qwen3")[: None if gpu_device.is_real() else 2]:
        assert np.abs(ours.logits(ids) - theirs.logits(ids)).max() < NARROW[dtype]


@pytest.mark.parametrize("folder", FOLDERS if gpu_device.is_real() else FEW[:1])
def test_greedy_tokens_are_those_of_transformers(folder: str) -> None:
    with gpu_device.on_gpu(DATA / folder) as llm:
        together = llm.generate([ids for ids, _, _ in expected(folder)], GREEDY)
        llm.engine.check_idle()
    assert [output.token_ids for output in together] == [greedy for _, _, greedy in expected(folder)]
