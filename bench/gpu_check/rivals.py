"""Beside others, where they are installed: PyTorch's attention on contiguous K/V, and Transformers' generate.

They are imported by name, as nobody's dependency, and nothing else of cupaged knows of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cupaged.bench.gpu_check.attention import decode_case
from cupaged.bench.gpu_check.clock import Clock
from cupaged.bench.gpu_check.models import write_model
from cupaged.bench.gpu_check.report import Row
from cupaged.bench.gpu_check.runner import Skipped
from cupaged.bench.gpu_check.sizes import Sizes
from cupaged.bench.gpu_check.steps import prompts
from cupaged.device.cuda import CudaDevice
from cupaged.llm import LLM
from cupaged.sampling import SamplingParams

_ROUNDS = 3
_STREAMS = (1, 8)
_PROMPT = 64


def _import(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise Skipped(f"{name} is not installed")
    return importlib.import_module(name)


def attention_rows(device: CudaDevice, sizes: Sizes) -> Iterator[Row]:
    """Decode attention over blocks, beside scaled_dot_product_attention over the same K/V without blocks."""
    torch = _import("torch")
    if not torch.cuda.is_available():
        raise Skipped("this PyTorch sees no GPU")
    attend = torch.nn.functional.scaled_dot_product_attention
    clock = Clock(device, sizes.seconds)
    heads = sizes.heads
    for sequences, context in sizes.decode:
        case = decode_case(device, sizes, sequences, context, "block_major")
        ours = clock.median(clock.captured(case.run)) / case.layers
        shape = (case.layers, sequences, heads.kv, context, heads.dim)
        keys, values = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(2))
        query = torch.randn((sequences, heads.query, 1, heads.dim), dtype=torch.float16, device="cuda")

        def theirs(keys: Any = keys, values: Any = values, query: Any = query) -> None:
            for key, value in zip(keys, values, strict=True):
                attend(query, key, value, enable_gqa=True)

        seconds = _torch_median(torch, theirs, sizes.seconds) / case.layers
        yield Row(f"attention, {sequences} x {context} tokens", ours * 1e6, "µs", "PyTorch, contiguous", seconds * 1e6)


def _torch_median(torch: Any, work: Callable[[], None], seconds: float) -> float:
    """As `Clock.median`, on PyTorch's stream."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    times: list[float] = []
    stop = time.monotonic() + seconds
    while time.monotonic() < stop or len(times) < _ROUNDS:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times)


def generate_rows(sizes: Sizes) -> Iterator[Row]:
    """Tokens a second of greedy generation with the small model, prompts' time included."""
    torch, transformers = _import("torch"), _import("transformers")
    if not torch.cuda.is_available():
        raise Skipped("this PyTorch sees no GPU")
    params = SamplingParams(max_tokens=sizes.new, temperature=0, ignore_eos=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = write_model(Path(folder) / "small", sizes.small)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16).to("cuda")
        with LLM(path, device="cuda", tokenizer=False, prefix_cache=False) as llm:
            for streams in _STREAMS:
                asked = prompts(streams, _PROMPT, sizes.small.vocab)
                ids = torch.tensor(asked).to("cuda")

                def theirs(ids: Any = ids) -> None:
                    with torch.inference_mode():
                        model.generate(
                            ids, attention_mask=torch.ones_like(ids), max_new_tokens=sizes.new,
                            min_new_tokens=sizes.new, do_sample=False, pad_token_id=0,
                        )  # fmt: skip
                    torch.cuda.synchronize()

                def ours(asked: Any = asked) -> None:
                    llm.generate(asked, params)

                mine, other = (streams * sizes.new / _host_median(work) for work in (ours, theirs))
                yield Row(f"generate, {streams} x {_PROMPT} + {sizes.new}", mine, "tokens/s", "Transformers", other)


def _host_median(work: Callable[[], None]) -> float:
    work()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
