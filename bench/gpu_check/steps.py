"""Whole steps of a model: decoding with and without CUDA graphs, what lies between its launches, and prefill."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.bench.gpu_check.clock import Clock
from cupaged.bench.gpu_check.models import layer_weights, write_model
from cupaged.bench.gpu_check.report import Row
from cupaged.bench.gpu_check.runner import Failed
from cupaged.bench.gpu_check.sizes import Sizes
from cupaged.llm import LLM
from cupaged.sampling import SamplingParams

_PROMPT = 32  # tokens before those that are timed


def step_rows(sizes: Sizes) -> Iterator[Row]:
    """Decode steps of the small model: as graphs, beside kernel by kernel; and how much of a step is not its forward.

    Fails if the two give different tokens.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = write_model(Path(folder) / "small", sizes.small)
        for streams in sizes.streams:
            found = {}
            for graphs in (True, False):
                with LLM(path, device="cuda", graphs=graphs, tokenizer=False, max_sequences=streams) as llm:
                    found[graphs] = decode(llm, streams, sizes)
            (step, forward, tokens), (eager, eager_forward, eager_tokens) = found[True], found[False]
            if tokens != eager_tokens:
                raise Failed(f"{streams} streams: graphs and single launches gave different tokens")
            case = f"decode, {streams} stream{'s' if streams > 1 else ''}"
            yield Row(f"{case}: a step", step * 1e6, "µs", "without graphs", eager * 1e6)
            yield Row(f"{case}: its forward on the device", forward * 1e6, "µs", "without graphs", eager_forward * 1e6)
            yield Row(f"{case}: gaps between launches", max(0.0, eager_forward - forward) * 1e6, "µs")
            yield Row(f"{case}: what is not forward", max(0.0, step - forward) * 1e6, "µs")
            yield Row(f"{case}: speed", streams / step, "tokens/s")


def decode(llm: LLM, streams: int, sizes: Sizes) -> tuple[float, float, list[list[int]]]:
    """(median seconds of a step on the host's clock, of its forward on the device, token ids of each stream)."""
    engine = llm.engine
    params = SamplingParams(max_tokens=sizes.new, temperature=0, ignore_eos=True)
    names = [engine.add_request(prompt, params) for prompt in prompts(streams, _PROMPT, sizes.small.vocab)]
    times = []
    while engine.has_work:
        began = time.perf_counter()
        pieces = engine.step()
        if len(pieces) == streams:
            times.append(time.perf_counter() - began)
    tokens = [engine.request(name).output().token_ids for name in names]
    for name in names:
        engine.forget(name)
    step = engine.passes.captured[streams, streams].step  # the last one, which computes the same again
    device: Any = engine.device
    forward = Clock(device, sizes.seconds).median(step.replay)
    return statistics.median(times[1:]), forward, tokens


def prefill_rows(sizes: Sizes, rate: float | None) -> Iterator[Row]:
    """A prompt's chunk through layers as wide as an 8B model's; rate: operations a second of cuBLAS, beside it."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = write_model(Path(folder) / "wide", sizes.wide)
        options: dict[str, Any] = {"device": "cuda", "tokenizer": False, "prefix_cache": False, "pace": 1000}
        with LLM(path, max_batch_tokens=sizes.prefill, max_model_len=sizes.prefill + 1, **options) as llm:
            params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            times = []
            for prompt in prompts(6, sizes.prefill, sizes.wide.vocab):
                began = time.perf_counter()
                llm.generate([prompt], params)
                times.append(time.perf_counter() - began)
    seconds = statistics.median(times[2:])
    yield Row(f"prefill, {sizes.prefill} tokens, {sizes.wide.layers} layers", sizes.prefill / seconds, "tokens/s")
    done = 2 * sizes.prefill * layer_weights(sizes.wide) / seconds / 1e12
    beside = None if rate is None else rate / 1e12
    yield Row("its products over all of its time", done, "TFLOP/s", "" if rate is None else "cuBLAS", beside)


def prompts(count: int, length: int, vocab: int) -> Sequence[list[int]]:
    found: list[list[int]] = np.random.default_rng(5).integers(3, vocab, (count, length)).tolist()
    return found
