"""The same bits on every processor: kernels compiled for lesser ones (no AVX-512; no AVX, FMA or half conversion) give
the logits that this one's own give."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROCESSORS = {
    "haswell": "+avx2,+fma,+f16c,+avx,+sse4.2,+sse4.1,+ssse3,+sse3,+sse2,+bmi,+bmi2,+popcnt",
    "x86-64": "+sse2",
}

PROGRAM = """
import hashlib, os, sys
name, features, model = sys.argv[1:]
if features:
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = name, features
    import llvmlite.binding as llvm

    class Features(dict):
        def flatten(self, sort=True):
            return features

    present = Features({feature[1:]: True for feature in features.split(",")})
    llvm.get_host_cpu_features = lambda: present
    llvm.get_host_cpu_name = lambda: name
from cupaged import LLM, SamplingParams

digest = hashlib.sha256()
for dtype in ("float32", "float16", "bfloat16"):
    with LLM(model, dtype=dtype, kv_dtype=dtype, kv_memory="4MiB") as llm:
        forward = llm.engine._forward

        def recorded(chunks):
            logits = forward(chunks)
            digest.update(logits.tobytes())
            return logits

        llm.engine._forward = recorded
        llm.generate([list(range(3, 80)), [5, 6, 7]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
print(digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64 processors")
def test_lesser_processors_give_the_same_bits(checkout_env: dict[str, str], root: Path, tmp_path: Path) -> None:
    digests = {}
    for name, features in {"native": "", **PROCESSORS}.items():
        # the native one may use the user's compiled kernels; the others get a cache of their own
        env = checkout_env | ({"CUPAGED_CACHE_DIR": str(tmp_path / name)} if features else {})
        command = [sys.executable, "-c", PROGRAM, name, features, str(root / "tests" / "golden_data" / "llama")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        digests[name] = done.stdout
    assert len(set(digests.values())) == 1, digests
