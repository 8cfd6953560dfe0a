"""The same bits on every processor: kernels compiled for lesser ones (no VNNI; no AVX-512; no AVX, FMA or half
conversion) give the logits and products that this one's own give."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from cupaged.kernels.cpu.processor import LEVELS, target

PROGRAM = """
import hashlib, sys
model, tests = sys.argv[1:]
sys.path.insert(0, tests)
import numpy as np
from quant_support import KINDS, blocks_of, columns_for
from cupaged import LLM, SamplingParams
from cupaged.device import get_device

digest = hashlib.sha256()
for dtype in ("float32", "float16", "bfloat16"):
    with LLM(model, dtype=dtype, kv_dtype=dtype, kv_memory="4MiB") as llm:
        forward = llm.engine._forward

        def recorded(chunks):
            logits = forward(chunks)
            digest.update(logits.host.tobytes())
            return logits

        llm.engine._forward = recorded
        prompts = [list(range(3, 80)), [5, 6, 7]]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        assert all(len(output.token_ids) == 8 for output in outputs), outputs
print("floats", digest.hexdigest())
ops = get_device("cpu").ops
for kind in KINDS:
    cols = columns_for(kind, 27)
    source = blocks_of(kind, 101, cols)
    weight, exact = ops.matrix(source, "quantised"), ops.matrix(source, "float32")
    x = np.random.default_rng(7).standard_normal((69, cols), np.float32)
    rows, out, few, many = (np.empty(shape, np.float32) for shape in ((101, cols), (69, 101), (7, 101), (69, 101)))
    ops.embed(np.arange(101, dtype=np.int32), weight, rows)
    ops.matmul(x, weight, out)
    ops.matmul(x[:7], exact, few)
    ops.matmul(x, exact, many)
    assert np.array_equal(few, many[:7])
    print(kind, hashlib.sha256(rows.tobytes() + out.tobytes() + many.tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64 processors")
def test_lesser_processors_give_the_same_bits(checkout_env: dict[str, str], root: Path, tmp_path: Path) -> None:
    digests = {}
    here = target().features
    levels = [level for level, needed in LEVELS.items() if needed - LEVELS["plain"] <= here]
    assert "plain" in levels
    for name in ["native", *levels]:  # the native one has dot products of bfloat16, too, where there are any
        # the native one may use the user's compiled kernels; the others get a cache of their own
        env = checkout_env | {"CUPAGED_CPU": name}
        if name != "native":
            env["CUPAGED_CACHE_DIR"] = str(tmp_path / name)
        model, tests = root / "tests" / "golden_data" / "llama", root / "tests" / "kernels"
        command = [sys.executable, "-c", PROGRAM, str(model), str(tests)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        digests[name] = done.stdout
    assert len(set(digests.values())) == 1, digests
