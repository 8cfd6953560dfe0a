"""What only a GPU can show of single operations: far offsets, the library's products, forks."""

from __future__ import annotations

import os
from typing import Any

import gpu_device
import numpy as np
import pytest

from cupaged.bench.cases import RandomWeights
from cupaged.cache import PagedKVCache
from cupaged.device.cuda import CudaDevice
from cupaged.errors import DeviceError

# A block of a layer has 2^15 elements: frame 65535 ends at element 2^31 - 1, frame 65536 begins at 2^31.
FAR = [65535, 65536, 131071, 131072] if gpu_device.is_real() else [1, 2, 5]


def test_K01_offsets_beyond_31_bits(device: CudaDevice) -> None:
    """A sequence in a far block equals the same one in block 0, written, attended to and copied (8.6 GB)."""
    ops = device.ops
    cache = PagedKVCache(max(FAR) + 1, 16, 8, 128, 1, "bfloat16", device)
    rng = np.random.default_rng(0)
    key, value, query = (
        device.upload(rng.standard_normal((n, h, 128), np.float32)) for n, h in ((13, 8), (13, 8), (2, 16))
    )

    def attended(frame: int) -> np.ndarray:
        plan = ops.plan_attention(cache.view, np.array([[frame]], np.int32), [0, 2], [13], 16)
        out = device.empty(query.shape, np.float32)
        ops.paged_attention(query, cache.view, 0, plan, out, 0.1)
        return np.array(device.download(out))

    for frame in (0, *FAR):
        slots = device.upload(frame * 16 + np.arange(13, dtype=np.int64))
        ops.write_kv(key, value, cache.view, 0, slots)
    near = attended(0)
    assert np.isfinite(near).all() and near.any()
    for frame in FAR:
        assert np.array_equal(attended(frame), near), frame
    ops.copy_blocks(cache.view, [FAR[-1]], [FAR[0]])
    assert np.array_equal(attended(FAR[0]), near)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("rows", [9, 64, 200])
def test_K20_products_of_many_rows_are_right_and_repeat(kind: str, rows: int, device: CudaDevice) -> None:
    """Beside float64 on the weights as they are kept; rows of x are rounded to 16 bits where the library multiplies."""
    quantised = kind.startswith("Q")
    source = RandomWeights((96, 256), kind if quantised else "F32")
    kept: Any = "quantised" if quantised else kind
    weight = device.ops.matrix(source, kept)
    x = np.random.default_rng(1).standard_normal((rows, 256), np.float32)
    wide = device.empty((96, 256), np.float32)
    device.ops.embed(device.upload(np.arange(96, dtype=np.int32)), weight, wide)  # the rows of the weight, widened
    there = device.upload(x)
    found = []
    for _ in range(2):
        out = device.empty((rows, 96), np.float32)
        device.ops.matmul(there, weight, out)
        found.append(np.array(device.download(out)))
    assert np.array_equal(*found)
    values = np.array(device.download(wide)).astype(np.float64)
    exact, size = x.astype(np.float64) @ values.T, np.abs(x).astype(np.float64) @ np.abs(values).T
    bound = 2**-18 if kind == "float32" else 2**-7 if kind == "bfloat16" else 2**-10
    assert (np.abs(found[0] - exact) <= bound * size + 1e-30).all()


def test_K18_a_forked_child_is_told_to_spawn(device: CudaDevice) -> None:
    x = device.upload(np.ones((1, 4), np.float32))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            device.upload(np.ones((1, 4), np.float32))
        except DeviceError as error:
            code = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    device.ops.add(x, x)
    assert np.array(device.download(x)).tolist() == [[2.0] * 4]
