"""A model as a whole: prefill and decode of one LLM, beside the roofs of its threads. `cupaged bench generate`.

Prefill ends when every stream has its first token; what comes after is decoding. Bytes a decode step: all matrices but
an embedding that is only looked up, and the K/V of all streams at the middle of their way. Operations a prefill token:
two for each weight of the layers (the head runs once a stream), attention left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cupaged.bench.roofs import Roofs
from cupaged.device.cpu import CpuDevice
from cupaged.engine import Engine
from cupaged.errors import OptionError
from cupaged.kernels.interface import STORAGE_BYTES
from cupaged.llm import LLM
from cupaged.sampling import SamplingParams

_READ = 64 << 20
_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class Task:
    """`streams` prompts of `prompt` random tokens, each continued greedily by `new` (2 at least), through any stop."""

    streams: int = 1
    prompt: int = 512
    new: int = 128


@dataclass(slots=True)
class Rates:
    """A value a round. Tokens a second; roofs of the same round, None off the CPU. decode_bytes: of a step;
    prefill_operations: of a token."""

    decode_bytes: float
    prefill_operations: float
    arithmetic: str
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    read_roof: list[float] = field(default_factory=list)
    arithmetic_roof: list[float] = field(default_factory=list)


def check(llm: LLM, task: Task) -> None:
    """OptionError for a task that the model's positions or its K/V memory cannot hold at once."""
    memory = llm.info()["kv_cache"]
    length = task.prompt + task.new
    if length > memory["max_model_len"]:
        raise OptionError(
            f"--prompt-tokens {task.prompt} and --new-tokens {task.new} are more than the {memory['max_model_len']} "
            "positions of a sequence"
        )
    needed = task.streams * -(-length // memory["block_size"]) * memory["block_size"]
    if needed > memory["tokens_that_fit"]:
        raise OptionError(
            f"--streams {task.streams} of {length} tokens need room for {needed} in K/V memory, which has "
            f"{memory['tokens_that_fit']}; give more by --kv-memory"
        )


def measure(llm: LLM, task: Task, rounds: int, begins: Callable[[int], None] | None = None) -> Rates:
    """Rates of so many rounds; a short one before them, number 0, warms. `begins(number)` is called before each."""
    check(llm, task)
    engine = llm.engine
    rates = _rates(engine, task)
    device = engine.device
    roofs = Roofs(device.team) if isinstance(device, CpuDevice) else None
    for number in range(rounds + 1):
        if begins is not None:
            begins(number)
        prefill, decode = _run(engine, task if number else Task(task.streams, task.prompt, 2), number)
        if number == 0:
            continue
        rates.prefill.append(prefill)
        rates.decode.append(decode)
        if roofs is not None:
            rates.read_roof.append(_rate(lambda r=roofs: r.read(_READ), _READ))  # type: ignore[misc]
            integer = rates.arithmetic == "byte dot products"
            run, operations = (roofs.dot, roofs.dots) if integer else (roofs.multiply_add, roofs.flops)
            rates.arithmetic_roof.append(_rate(lambda f=run: f(_CHUNKS), operations(_CHUNKS)))  # type: ignore[misc]
    return rates


def _rate(run: object, amount: int) -> float:
    """Giga-units a second, median of nine."""
    assert callable(run)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return amount / statistics.median(times) / 1e9


def _rates(engine: Engine, task: Task) -> Rates:
    parameters = engine.decoder.parameters
    matrices = [m for layer in parameters.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    weights = sum(matrix.nbytes for matrix in matrices) + parameters.head.nbytes
    tokens = task.streams * (task.prompt + task.new / 2)
    block = sum(cache.bytes_per_block for cache in engine.caches) / engine.caches[0].block_size
    integer = any(matrix.dtype not in STORAGE_BYTES for matrix in matrices)
    return Rates(
        weights + tokens * block, 2.0 * sum(matrix.rows * matrix.cols for matrix in matrices),
        "byte dot products" if integer else "float multiply-adds",
    )  # fmt: skip


def _run(engine: Engine, task: Task, number: int) -> tuple[float, float]:
    """(prefill, decode) tokens a second."""
    rng = np.random.default_rng(number)
    params = SamplingParams(max_tokens=task.new, temperature=0, ignore_eos=True)
    prompts = rng.integers(0, engine.config.vocab_size, (task.streams, task.prompt))
    waiting = {engine.add_request(prompt.tolist(), params, watched=False) for prompt in prompts}
    ids = set(waiting)
    first = late = 0.0
    tokens = 0
    start = time.perf_counter()
    try:
        while engine.has_work:
            pieces = engine.step()
            late = time.perf_counter()
            if not waiting:
                tokens += sum(len(piece.token_ids) for piece in pieces)
                continue
            waiting -= {piece.request_id for piece in pieces if piece.token_ids}
            if not waiting:
                first = late
    finally:
        for request_id in ids:
            engine.forget(request_id)
    return task.streams * task.prompt / (first - start), tokens / (late - first)
