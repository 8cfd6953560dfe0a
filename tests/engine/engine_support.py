"""Tiny engines for tests: golden checkpoints with any options, a tokenizer for them, and scripted logits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import DATA
from recording import GREEDY, Job
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cupaged import LLM, SamplingParams
from cupaged.cache import PagedKVCache
from cupaged.engine import Engine
from cupaged.model.detokenizer import byte_of_char
from cupaged.step_logits import StepLogits
from cupaged.step_plan import Chunk

VOCAB = 320  # of the golden checkpoints; their end-of-sequence token is 2
CONTEXT = 256
PIECES = ("AB", "CD", "EFG", "DE", "one two three", "abc", "ok", "é", "🙂")


def tiny(folder: str | Path = "llama", **options: Any) -> LLM:
    """A golden checkpoint in float32 on the CPU, which takes some 30 ms to load. Its chunks do not follow the clock, so
    that a busy machine takes the same steps as an idle one."""
    path = DATA / folder if isinstance(folder, str) else folder
    return LLM(path, **{"device": "cpu", "dtype": "float32", "threads": 1, "pace": 1000, **options})


def block_bytes(llm: LLM) -> int:
    """Bytes of one block of every KV group together: what `kv_memory` is divided by."""
    return sum(cache.bytes_per_block for cache in llm.engine.caches)


def use_layout(engine: Engine, layout: Any) -> None:
    """Put caches of another layout into an engine that holds nothing yet."""
    engine.caches = [
        PagedKVCache(
            *(cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_dim, cache.num_layers, cache.dtype),
            engine.device,
            layout,
            host_blocks=cache.host_blocks,
        )
        for cache in engine.caches
    ]
    engine.swaps.caches = engine.caches
    engine.manager.in_place = all(cache.reads_in_place for cache in engine.caches)


def scatter(engine: Engine, seed: int) -> None:
    """Have the pools hand out their blocks in random order (reaches into the pool: an order is not its promise)."""
    for pool in (*engine.manager.pools, *filter(None, engine.manager.host_pools)):
        random.Random(seed).shuffle(pool._free)


def poison(engine: Engine) -> None:
    """NaN in every slot of every block."""
    for cache in engine.caches:
        for array in (cache.array, cache.host_array):
            if array is not None:
                array[:] = 0x7FC0 if array.dtype == np.uint16 else np.nan


def mix(seed: int, count: int = 10, longest: int = 150, new: int = 24, vocab: int = VOCAB, aborts: bool = True) -> Any:
    """Random jobs: prompts of all lengths, greedy and sampled, arriving one after the other, some aborted."""
    rng = random.Random(seed)
    jobs = {}
    for index in range(count):
        length = rng.choice([1, 2, rng.randint(3, 20), rng.randint(21, longest), rng.randint(21, longest)])
        sampled = {
            "temperature": rng.choice([0.7, 1.0, 1.5]),
            "top_p": rng.choice([1.0, 0.9]),
            "seed": rng.randrange(99),
        }
        params = SamplingParams(
            max_tokens=rng.randint(1, new),
            ignore_eos=rng.random() < 0.7,
            top_k=rng.choice([0, 40]),
            **(sampled if rng.random() < 0.5 else {"temperature": 0.0}),
        )
        arrives = rng.randint(0, 12)
        aborted = arrives + rng.randint(0, 20) if aborts and rng.random() < 0.2 else None
        ids = [rng.randrange(3, vocab) for _ in range(length)]
        jobs[f"job{index}"] = Job(ids, params, arrives, aborted)
    return jobs


def prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]


def greedy(new: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": new, "temperature": 0, "ignore_eos": True, **options})


def with_tokenizer(folder: Path) -> Path:
    """The golden llama with a tokenizer: <unk> <s> </s>, every byte, and PIECES, each one token."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(DATA / "llama" / name)
    chars = {byte: char for char, byte in byte_of_char().items()}
    words = ["".join(chars[byte] for byte in piece.encode()) for piece in PIECES]
    texts = ["<unk>", "<s>", "</s>", *(chars[byte] for byte in range(256)), *words]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts[:3]])
    (folder / "tokenizer.json").write_text(backend.to_str())
    return folder


def ids_of(*pieces: str) -> list[int]:
    """Token ids of pieces of that tokenizer: PIECES and </s> are one token, anything else one per byte."""
    ids: list[int] = []
    for piece in pieces:
        if piece == "</s>":
            ids.append(2)
        elif piece in PIECES:
            ids.append(3 + 256 + PIECES.index(piece))
        else:
            ids += [3 + byte for byte in piece.encode()]
    return ids


def script(engine: Engine, texts: Mapping[str, Sequence[int]] | Sequence[int]) -> None:
    """Have the engine's model write given tokens: by request id, or the same for all; then token 3 for ever."""
    forward = engine._forward

    def scripted(chunks: Sequence[Chunk]) -> Any:
        logits = np.array(forward(chunks).host)
        for row, chunk in zip(logits, [chunk for chunk in chunks if chunk.samples], strict=True):
            request = chunk.sequence.request
            tokens = texts[request.request_id] if isinstance(texts, Mapping) else texts
            done = len(chunk.sequence.output_ids)
            row[:] = -5.0
            row[tokens[done] if done < len(tokens) else 3] = 5.0
        return StepLogits(engine.device, engine.device.upload(logits))

    engine._forward = scripted  # type: ignore[method-assign]


__all__ = [
    "CONTEXT", "GREEDY", "PIECES", "VOCAB", "Job", "block_bytes", "greedy", "ids_of", "mix", "poison", "prompt",
    "scatter", "script", "tiny", "use_layout", "with_tokenizer",
]  # fmt: skip
