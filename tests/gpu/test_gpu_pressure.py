"""Too little memory on the device: blocks move to the host, are read there, come back; the tokens are the same."""

from __future__ import annotations

from collections import Counter

import gpu_device
import pytest
from checkpoints import DATA
from cuda_support import jobs_of, ways
from engine_support import block_bytes, scatter, tiny
from recording import run

MOVES = ("preemptions_by_swap", "swapped_out", "swapped_in", "read_in_place", "copies")
SEEDS = range(8 if gpu_device.is_real() else 2)


@pytest.mark.parametrize("folder", ["llama", "mistral-window"] if gpu_device.is_real() else ["llama"])
def test_tokens_are_those_of_the_cpu_with_room_for_all(folder: str) -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        jobs = jobs_of(seed)
        with tiny(folder, block_size=8, kv_memory="8MiB") as llm:
            whole, want, size = run(llm.engine, jobs), llm.engine.stats().peak_blocks[0], block_bytes(llm)
        memory = {"block_size": 8, "kv_memory": max(want // 4, 8) * size, "swap_memory": want * size}
        with gpu_device.on_gpu(DATA / folder, seed, deterministic=True, **memory) as llm:
            scatter(llm.engine, seed)
            ways(llm.engine, seed)
            pressed = run(llm.engine, jobs)
            stats = llm.engine.stats()
            met.update({name: getattr(stats, name) for name in MOVES})
        for name in jobs:
            ours, theirs = pressed.outputs[name], whole.outputs[name]
            if "abort" not in (ours.finish_reason, theirs.finish_reason):
                assert [o.token_ids for o in ours.outputs] == [o.token_ids for o in theirs.outputs], (seed, name)
    assert all(met[name] for name in MOVES), met
