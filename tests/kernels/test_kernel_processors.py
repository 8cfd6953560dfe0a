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


def printed(level: str, env: dict[str, str], root: Path) -> str:
    """The digests that PROGRAM prints at a level of $CUPAGED_CPU."""
    model, tests = root / "tests" / "golden_data" / "llama", root / "tests" / "kernels"
    command = [sys.executable, "-c", PROGRAM, str(model), str(tests)]
    done = subprocess.run(command, env=env | {"CUPAGED_CPU": level}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64 processors")
@pytest.mark.parametrize("level", LEVELS)
def test_lesser_processors_give_the_same_bits(
    level: str, checkout_env: dict[str, str], root: Path, tmp_path: Path
) -> None:
    """Kernels of a lesser processor come from a cache of their own; the native ones, which have dot products of
    bfloat16, too, where there are any, may be the user's."""
    if not LEVELS[level] - LEVELS["plain"] <= target().features:
        pytest.skip(f"this processor has not all of {level}")
    lesser = printed(level, checkout_env | {"CUPAGED_CACHE_DIR": str(tmp_path)}, root)
    assert lesser.count("\n") > 9 and lesser == printed("native", checkout_env, root)
