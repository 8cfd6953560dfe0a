"""Damages model files at random and opens them: `python tests/model/fuzz_files.py KIND SEED COUNT`.

Each damaged file must load, or raise one of our errors for model files in one line, within a second, and all of them
within 300 MB. Anything else ends the run with the case's number, so that it can be made again. A process of its own,
because a hang, a signal or a flood of memory would take the tests with it.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import model_files as mf
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from cupaged.errors import ModelFileError, TokenizerError
from cupaged.model.checkpoint import Checkpoint, open_checkpoint
from cupaged.model.gguf_file import GGUFFile
from cupaged.model.safetensors_file import SafetensorsFile
from cupaged.model.tokenizer import Tokenizer, load_tokenizer

SECONDS, MEGABYTES = 1.0, 300
TEXT = "ab  <s>12 a\u2581é\x00\n<0x41>好 </s>b"
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    12,
    13,
    31,
    32,
    255,
    256,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**60,
    2**61,
    2**62,
]
NUMBERS += [2**63 - 1, 2**63, 2**64 - 1]

Run = Callable[[random.Random, Path], None]


def damaged(rng: random.Random, raw: bytes, others: list[bytes]) -> bytes:
    """One to four blows, more of them to the front, where headers are."""
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 4])):
        size = len(data)
        at = min(rng.randrange(size + 1), rng.randrange(size + 1))
        kind = rng.randrange(9)
        if kind == 0 and at < size:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < size:
            data[at] = rng.choice([0, 1, 0x20, 0x22, 0x2C, 0x30, 0x39, 0x5B, 0x5D, 0x7B, 0x7D, 0x7F, 0x80, 0xFF])
        elif kind in (2, 3):
            width = rng.choice([1, 2, 4, 8])
            number = rng.choice([*NUMBERS, size, size - at, size - at - 8, rng.randrange(64)])
            data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 4:
            del data[at : at + rng.choice([1, 4, 8, rng.randrange(64)])]
        elif kind == 5:
            data[at:at] = data[at : at + rng.randrange(1, 64)] * rng.choice([1, 1, 3, 40])
        elif kind == 6:
            data[at:at] = rng.randbytes(rng.randrange(1, 24))
        elif kind == 7:
            del data[at:]
        else:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            data[at : at + rng.randrange(64)] = other[start : start + rng.randrange(64)]
    return bytes(data)


ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 23, 24, 25, 1 << 31, 1 << 63, 10**400, 0.0, -0.5, 1.5, 4.0, 1e-30, 1e308,
    float("nan"), float("inf"), "", "a", "1", "true", "\x00", "\U0010ffff", "a" * 5000, [], [0], [1, 2],
    [None], ["a"], [[]], [{}], {}, {"a": 1}, {"type": "BPE"}, {"type": "Sequence"}, list(range(1000)),
    [0.5] * 24, ["a"] * 24,
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            found.append((item, key))
            waiting.append(item[key])
    return found


def altered(rng: random.Random, value: Any) -> Any:
    """A JSON value with one to three places changed, removed, doubled or exchanged."""
    value = deepcopy(value)
    for _ in range(rng.randrange(1, 4)):
        spots = places(value)
        if not spots:
            return rng.choice(ODD)
        container, key = rng.choice(spots)
        kind = rng.randrange(10)
        if kind < 6:
            container[key] = deepcopy(rng.choice(ODD))
        elif kind == 6:
            del container[key]
        elif kind == 7 and isinstance(container, list):
            container.insert(key, deepcopy(container[key]))
        elif kind == 8 and isinstance(container, dict):
            container[rng.choice(["x", "", key + "x", "type", "content", "vocab"])] = container.pop(key)
        else:
            other, other_key = rng.choice(spots)
            container[key] = deepcopy(other[other_key])
    return value


def use(tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None:
        ids = tokenizer.encode(TEXT)
        stream = tokenizer.detokenizer()
        streamed = "".join(stream.push(i) for i in ids) + stream.finish()
        if streamed != tokenizer.decode(ids):
            raise AssertionError(f"streamed {streamed!r}, decoded {tokenizer.decode(ids)!r}")


def read(checkpoint: Checkpoint) -> None:
    for weight in checkpoint.tensors.values():
        weight.float32(0, weight.shape[0])


def safetensors_bytes() -> Run:
    from test_safetensors_file import BAD, SOUND

    seeds = [SOUND] * 8 + [raw for raw, _ in BAD.values() if raw]

    length = int.from_bytes(SOUND[:8], "little")
    header, data = json.loads(SOUND[8 : 8 + length]), SOUND[8 + length :]

    def run(rng: random.Random, folder: Path) -> None:
        path = folder / "model.safetensors"
        if rng.random() < 0.5:
            raw = damaged(rng, rng.choice(seeds), seeds)
        else:  # JSON is too brittle for blows to get far
            changed = json.dumps(altered(rng, header)).encode()
            raw = struct.pack("<Q", len(changed)) + changed + data
        path.write_bytes(raw)
        file = SafetensorsFile(path)
        for name in file.tensors:
            file.raw(name)

    return run


def gguf_seeds() -> list[tuple[dict[str, tuple[int, Any]], dict[str, tuple[int, tuple[int, ...], bytes]]]]:
    """Two small models with a tokenizer each: byte-level BPE, and SentencePiece's."""
    metadata, tensors = mf.llama_gguf(mf.llama_weights())
    prefix = "tokenizer.ggml."
    letters = ["a", "b", "Ġ", "Ã", "©", "1", "2", "ab", "Ġa", "12"]
    tokens = ["<unk>", "<s>", "</s>", *letters, *(f"<{i}>" for i in range(24 - 3 - len(letters)))]
    bpe = {
        f"{prefix}model": (mf.STRING, "gpt2"),
        f"{prefix}pre": (mf.STRING, "gpt-2"),
        f"{prefix}tokens": (mf.ARRAY, (mf.STRING, tokens)),
        f"{prefix}token_type": (mf.ARRAY, (mf.I32, [2, 3, 3] + [1] * 10 + [4] * 5 + [5] * 6)),
        f"{prefix}merges": (mf.ARRAY, (mf.STRING, ["a b", "Ġ a", "1 2"])),
        f"{prefix}add_bos_token": (mf.BOOL, 1),
        "tokenizer.chat_template": (mf.STRING, "{{ messages }}"),
    }
    pieces = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "1", "é", *(f"<{i}>" for i in range(14))]
    spm = {
        f"{prefix}model": (mf.STRING, "llama"),
        f"{prefix}tokens": (mf.ARRAY, (mf.STRING, pieces)),
        f"{prefix}scores": (mf.ARRAY, (mf.F32, [-float(i) for i in range(24)])),
        f"{prefix}token_type": (mf.ARRAY, (mf.I32, [2, 3, 3] + [1] * 10 + [4] * 5 + [5] * 6)),
        f"{prefix}unknown_token_id": (mf.U32, 0),
        f"{prefix}add_space_prefix": (mf.BOOL, 1),
    }
    return [({**metadata, **bpe}, tensors), ({**metadata, **spm}, tensors)]


def gguf_bytes() -> Run:
    from test_gguf_file import BAD

    headers = [
        mf.gguf([mf.pair(k, t, v) for k, (t, v) in metadata.items()], [mf.info("t", [8])], bytes(32))
        for metadata, _ in gguf_seeds()
    ]
    seeds = headers * 8 + [raw for raw, _ in BAD.values()]

    def run(rng: random.Random, folder: Path) -> None:
        path = folder / "model.gguf"
        path.write_bytes(damaged(rng, rng.choice(seeds), seeds))
        file = GGUFFile(path)
        for name in file.tensors:
            file.raw(name)
        use(load_tokenizer(path, "gguf", file.metadata))

    return run


ODD_GGUF: list[tuple[int, Any]] = [
    (mf.U8, 0), (mf.U8, 255), (mf.I8, -1), (mf.U16, 65535), (mf.I32, -1), (mf.I32, 2**31 - 1), (mf.U32, 2**32 - 1),
    (mf.U64, 2**64 - 1), (mf.I64, -(2**63)), (mf.U32, 0), (mf.U32, 1), (mf.U32, 23), (mf.U32, 24), (mf.F32, 0.0),
    (mf.F32, -1.0), (mf.F32, float("nan")), (mf.F32, float("inf")), (mf.F64, 1e308), (mf.F32, 0.5), (mf.BOOL, 0),
    (mf.BOOL, 1), (mf.STRING, ""), (mf.STRING, "llama"), (mf.STRING, "gpt2"), (mf.STRING, "qwen2"),
    (mf.STRING, "x" * 3000),
    (mf.ARRAY, (mf.STRING, [])), (mf.ARRAY, (mf.STRING, ["a"] * 24)), (mf.ARRAY, (mf.STRING, ["a b"] * 24)),
    (mf.ARRAY, (mf.I32, [])), (mf.ARRAY, (mf.I32, [1] * 24)), (mf.ARRAY, (mf.I32, [6] * 24)),
    (mf.ARRAY, (mf.I32, [-5] * 24)),
    (mf.ARRAY, (mf.F32, [float("nan")] * 24)), (mf.ARRAY, (mf.F32, [0.0] * 24)),
    (mf.ARRAY, (mf.F64, [1e300] * 24)),
    (mf.ARRAY, (mf.U8, [1] * 100_000)), (mf.ARRAY, (mf.STRING, [str(i) for i in range(3000)])),
    (mf.ARRAY, (mf.ARRAY, [(mf.U8, [1]), (mf.STRING, ["a"])])), (mf.ARRAY, (mf.BOOL, [1] * 24)),
    (mf.ARRAY, (mf.U32, [4, 4])),
]  # fmt: skip
ADDED_KEYS = [
    "split.no", "split.count", "general.alignment", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.x",
    "llama.attention.key_length", "llama.rope.dimension_count", "llama.attention.sliding_window", "llama.expert_count",
    "tokenizer.ggml.eot_token_id", "tokenizer.ggml.seperator_token_id", "tokenizer.ggml.remove_extra_whitespaces",
    "tokenizer.ggml.add_eos_token", "tokenizer.ggml.scores", "tokenizer.ggml.merges",
    "tokenizer.ggml.precompiled_charsmap", "tokenizer.chat_template",
]  # fmt: skip


def gguf_metadata() -> Run:
    """Sound files whose metadata, or tensor shapes, say something odd: the readers behind the format."""
    seeds = gguf_seeds()

    def run(rng: random.Random, folder: Path) -> None:
        metadata, tensors = (dict(part) for part in rng.choice(seeds))
        for _ in range(rng.randrange(1, 4)):
            key = rng.choice([*metadata, *ADDED_KEYS])
            kind = rng.randrange(8)
            if kind == 0:
                metadata.pop(key, None)
            elif kind == 1 and key in metadata:
                metadata[key] = metadata[rng.choice(list(metadata))]
            elif kind in (2, 3) and metadata.get(key, (0,))[0] == mf.ARRAY:
                item, values = metadata[key][1]
                values = list(values)
                at = rng.randrange(len(values) + 1)
                few = rng.choice([[], values[:1], values[at:] + values[:at], values[: at + 1] * 2])
                values[at : at + rng.randrange(3)] = few
                metadata[key] = (mf.ARRAY, (item, values))
            else:
                metadata[key] = rng.choice(ODD_GGUF)
        if rng.random() < 0.2:
            name = rng.choice(list(tensors))
            dtype, shape, raw = tensors.pop(name)
            if rng.random() < 0.7:
                shape = rng.choice([shape[::-1], (*shape, 1), shape[:1], (1, len(raw) // 4), (len(raw) // 4,)])
                size = 4
                for length in shape:
                    size *= length
                tensors[rng.choice([name, "rope_freqs.weight", "blk.1.attn_q.bias", "x"])] = (dtype, shape, raw[:size])
        path = folder / "model.gguf"
        path.write_bytes(mf.gguf_model(metadata, tensors))
        checkpoint = open_checkpoint(path)
        read(checkpoint)
        use(load_tokenizer(path, "gguf", checkpoint.metadata))

    return run


def hub_folder() -> Run:
    """Sound weights; config.json, tokenizer.json and the files beside them changed."""
    import numpy as np

    backend = Backend(
        models.BPE(vocab={t: i for i, t in enumerate(["a", "b", "Ġ", "ab", "1", "Ã", "©"])}, merges=[("a", "b")])
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    vocabulary = {token: i for i, token in enumerate(["▁", "a", "b", "<unk>", "▁a", "ab", "<0x0A>"])}
    metaspace = Backend(models.BPE(vocab=vocabulary, merges=[("a", "b")], unk_token="<unk>"))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    for each in (backend, metaspace):
        each.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizers = [json.loads(backend.to_str()), json.loads(metaspace.to_str())]
    config = {**mf.LLAMA_CONFIG, "eos_token_id": [2], "bos_token_id": 1, "head_dim": 4, "hidden_act": "silu"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    old = {**mf.LLAMA_CONFIG, "rope_theta": 500000.0, "rope_scaling": rope}
    beside = {
        "config.json": [config, old],
        "tokenizer.json": tokenizers,
        "tokenizer_config.json": [{
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "special": True},
            "add_bos_token": True,
            "added_tokens_decoder": {"7": {"content": "<s>", "special": True}},
            "chat_template": [{"name": "default", "template": "x"}],
        }],
        "generation_config.json": [{"eos_token_id": [2, 3], "bos_token_id": 1}],
        "special_tokens_map.json": [{"bos_token": "<s>", "additional_special_tokens": ["a"]}],
    }  # fmt: skip
    weights = mf.safetensors({n: ("F32", a.shape, np.asarray(a).tobytes()) for n, a in mf.llama_weights().items()})

    def run(rng: random.Random, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(weights)
        victims = rng.sample(list(beside), rng.choice([1, 1, 1, 2]))
        for name, values in beside.items():
            value = rng.choice(values)
            text = json.dumps(altered(rng, value) if name in victims else value).encode()
            if name in victims and rng.random() < 0.15:
                text = damaged(rng, text, [text])
            (folder / name).write_bytes(text)
        checkpoint = open_checkpoint(folder)
        read(checkpoint)
        use(load_tokenizer(folder, "hub", checkpoint.metadata["config.json"]))

    return run


WRITTEN = {"model.safetensors", "model.gguf", "config.json", "tokenizer.json", "tokenizer_config.json"}
WRITTEN |= {"generation_config.json", "special_tokens_map.json"}
KINDS: dict[str, Callable[[], Run]] = {
    "safetensors": safetensors_bytes,
    "gguf": gguf_bytes,
    "gguf-metadata": gguf_metadata,
    "hub": hub_folder,
}


def main(kind: str, seed: int, count: int) -> None:
    run = KINDS[kind]()
    warnings.simplefilter("ignore")
    loaded, slowest = 0, 0.0
    start_memory = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for case in range(count):
            start = time.process_time()
            try:
                run(random.Random(f"{seed}/{case}"), folder)
                loaded += 1
            except (ModelFileError, TokenizerError) as error:
                message = str(error)
                if "\n" in message or len(message) > 20_000 or (str(folder) not in message and "encode" not in message):
                    raise AssertionError(f"case {seed}/{case}: message {message[:500]!r}") from error
            except BaseException:
                print(f"case {kind} {seed}/{case}", file=sys.stderr)
                raise
            slowest = max(slowest, time.process_time() - start)
            if slowest > SECONDS:
                raise AssertionError(f"case {seed}/{case} took {slowest:.2f} s")
            if case == 0:
                start_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        strange = {entry.name for entry in folder.iterdir()} - WRITTEN
        if strange:
            raise AssertionError(f"left behind: {strange}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_memory) // 1024
    if grown > MEGABYTES:
        raise AssertionError(f"memory grew by {grown} MB")
    print(json.dumps({"loaded": loaded, "refused": count - loaded, "slowest": round(slowest, 3), "megabytes": grown}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
