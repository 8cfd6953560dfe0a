"""Float weights narrowed to blocks: the public package's bits, whatever the values; what is refused, what is left."""

from __future__ import annotations

import mmap
from pathlib import Path

import gguf as public
import numpy as np
import pytest
from model_files import F32, STRING, T_BF16, T_F16, T_F32, gguf_model

from cupaged.errors import OptionError
from cupaged.kernels.interface import packed_bytes
from cupaged.model.gguf_file import GGUFFile
from cupaged.model.parameters import kept_bytes, weight_type
from cupaged.model.quantise import QUANTISED_AS, quantise
from cupaged.model.quants import dequantise
from cupaged.model.weights import (
    QuantisedWeight,
    StoredWeight,
    UnpermutedHeads,
    concat_rows,
    quantised_tensors,
    release,
)


def theirs(kind: str, values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return public.quantize(values, public.GGMLQuantizationType[kind])


def stored(kind: str, values: np.ndarray) -> StoredWeight:
    """A matrix of a file: floats, or blocks made by the public package."""
    if kind == "F32":
        return StoredWeight("w", values.shape, kind, np.ascontiguousarray(values, np.float32).view(np.uint8))
    return StoredWeight("w", values.shape, kind, theirs(kind, np.asarray(values, np.float32)))


def odd_values() -> np.ndarray:
    """Rows of 96 values: zeros of either sign, ties of rounding, one large value, equal ones, extremes of float32."""
    rows = [np.zeros(96), np.full(96, -0.0), np.full(96, 3.0), np.full(96, -1e-3)]
    ties = np.tile(np.arange(32), 3) / 2.0  # with 127/2 as the largest, q = 0.5, 1, 1.5, ... in Q8_0
    rows += [np.where(np.arange(96) % 32 == 31, sign * 63.5, ties) for sign in (1, -1)]
    rows += [np.where(np.arange(96) % 32 == at, sign * 16.0, ties - 8) for at in (0, 31) for sign in (1, -1)]
    rows += [np.where(np.arange(96) == 40, 1e6, 1e-6), np.linspace(-3e38, 3e38, 96), np.linspace(-1e-38, 1e-38, 96)]
    rows += [np.linspace(-1, 1, 96) * 1e-45, np.repeat([1e-8, 65504.0 * 127, 6e-8], 32)]
    return np.array(rows).astype(np.float32)


@pytest.mark.parametrize("kind", QUANTISED_AS)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 0.05, 1.0, 1e5])
def test_random_values_give_the_public_packages_bits(kind: str, scale: float) -> None:
    values = (np.random.default_rng(3).standard_normal((517, 96)) * scale).astype(np.float32)
    assert quantise(kind, values).tobytes() == theirs(kind, values).tobytes()


@pytest.mark.parametrize("kind", QUANTISED_AS)
def test_odd_values_give_the_public_packages_bits(kind: str) -> None:
    values = odd_values()
    for row, line in enumerate(values):
        assert quantise(kind, line[None]).tobytes() == theirs(kind, line[None]).tobytes(), row
    assert quantise(kind, values).tobytes() == theirs(kind, values).tobytes()


@pytest.mark.parametrize("kind", QUANTISED_AS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_spoils_its_block_alone(kind: str, wrong: float) -> None:
    values = np.ones((1, 96), np.float32)
    values[0, 40] = wrong
    back = dequantise(kind, quantise(kind, values))[0]
    assert not np.isfinite(back[32:64]).any()
    assert np.allclose(np.delete(back, range(32, 64)), 1, rtol=1e-3)


@pytest.mark.parametrize("kind", QUANTISED_AS)
def test_row_ranges_of_a_narrowed_matrix(kind: str) -> None:
    """More values than are narrowed at a time, in ranges of all kinds."""
    values = np.random.default_rng(5).standard_normal((9000, 64), dtype=np.float32)
    weight = QuantisedWeight(stored("F32", values), kind)
    whole = theirs(kind, values)
    assert (weight.shape, weight.dtype, weight.parts) == ((9000, 64), kind, (weight,))
    for start, stop in ((0, 9000), (0, 0), (7, 8), (4000, 8999)):
        assert weight.blocks(start, stop).tobytes() == whole[start:stop].tobytes()
        assert weight.float32(start, stop).tobytes() == dequantise(kind, whole[start:stop]).tobytes()
    with pytest.raises(IndexError, match=r"3\.\.9001"):
        weight.blocks(3, 9001)


def test_blocks_of_heads_out_of_order_and_of_joins() -> None:
    rows = np.random.default_rng(6).standard_normal((16, 32), dtype=np.float32)
    file_rows = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]  # two heads of 8, as a converter stores them
    query = UnpermutedHeads(stored("Q4_0", rows[file_rows]), 2)
    in_order = theirs("Q4_0", rows)
    for start, stop in ((0, 16), (3, 5), (6, 11), (9, 9)):
        blocks = query.blocks(start, stop)
        assert blocks is not None and blocks.tobytes() == in_order[start:stop].tobytes()
    narrowed = QuantisedWeight(UnpermutedHeads(stored("F32", rows[file_rows]), 2), "Q4_0")
    assert narrowed.blocks(0, 16).tobytes() == in_order.tobytes()
    floats = stored("F32", rows)
    assert floats.blocks(0, 16) is None and UnpermutedHeads(floats, 2).blocks(3, 9) is None
    joined = concat_rows([query, concat_rows([floats, narrowed])])
    assert joined.parts == (query, floats, narrowed)
    assert joined.blocks(0, 48) is None


def test_what_cannot_be_narrowed_is_left_or_refused() -> None:
    fits, odd, norm = (
        stored("F32", np.ones((4, 64))),
        stored("F32", np.ones((4, 48))),
        StoredWeight("n", (64,), "F32", np.zeros((1, 256), np.uint8)),
    )
    tensors, left = quantised_tensors({"a": fits, "b": odd, "c": norm}, "Q8_0", "model")
    assert left == ["b"]
    assert (tensors["a"].dtype, tensors["b"], tensors["c"]) == ("Q8_0", odd, norm)
    with pytest.raises(OptionError, match=r"^quantize: b of model is Q4_1, quantised already; only weights in F32"):
        quantised_tensors({"a": fits, "b": stored("Q4_1", np.ones((4, 32)))}, "Q8_0", "model")


def test_auto_means_as_stored_and_bytes_are_counted_by_what_is_kept() -> None:
    floats = stored("F32", np.ones((70, 64)))
    assert weight_type({"a": floats}, "F32") == "float32"
    assert weight_type({"a": floats}, "BF16") == "bfloat16"
    mixed = {
        "a": stored("Q4_1", np.ones((70, 64))),
        "b": stored("Q8_0", np.ones((33, 96))),
        "c": floats,
        "norm": StoredWeight("n", (64,), "F32", np.zeros((1, 256), np.uint8)),
    }
    assert weight_type(mixed, "F32") == "quantised"
    kept = kept_bytes(mixed, "quantised")
    sizes = {
        "float32": packed_bytes("float32", 70, 64),
        "Q4_1": packed_bytes("Q4_1", 70, 64),
        "Q8_0": packed_bytes("Q8_0", 33, 96),
    }
    assert kept == sizes and list(kept.values()) == sorted(kept.values(), reverse=True)
    assert kept_bytes(mixed, "float16") == {
        "float16": sum(packed_bytes("float16", *source.shape) for source in list(mixed.values())[:3])
    }


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="the system takes no advice about memory")
def test_a_files_pages_are_let_go_and_come_again(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((2048, 512), dtype=np.float32)
    half = values.astype(np.float16)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    path = tmp_path / "model.gguf"
    tensors = {
        "a": (T_F32, values.shape, values.tobytes()),
        "b": (T_F16, half.shape, half.tobytes()),
        "c": (T_BF16, bf16.shape, bf16.tobytes()),
    }
    path.write_bytes(gguf_model({"general.architecture": (STRING, "x"), "general.f": (F32, 1.0)}, tensors))
    file = GGUFFile(path)
    raw = {name: file.raw(name) for name in tensors}
    weights = {
        name: StoredWeight(
            name, file.tensors[name].shape, file.tensors[name].dtype, raw[name], lambda n=name: file.drop(n)
        )
        for name in tensors
    }
    sums = {name: int(raw[name].sum(dtype=np.int64)) for name in tensors}
    before = resident(path)
    assert before >= 7 << 20  # all of it was looked at
    release(concat_rows([UnpermutedHeads(weights["a"], 2), QuantisedWeight(weights["b"], "Q8_0")]))
    assert resident(path) <= before - (5 << 20)  # 4 and 2 MiB, but for pages that neighbours share
    release(weights["c"])
    assert resident(path) <= 1 << 20
    assert {name: int(raw[name].sum(dtype=np.int64)) for name in tensors} == sums


def resident(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    found = 0
    for line in lines:
        if line.endswith(str(path)):
            found += 1024 * int(next(entry for entry in lines if entry.startswith("Rss:")).split()[1])
    return found
