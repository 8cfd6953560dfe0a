"""The GGUF reader: sound files give what they hold, damaged ones are refused fast, with the file and the reason."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf as public
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    T_F16,
    T_Q8_0,
    U8,
    U16,
    U32,
    U64,
    gguf,
    info,
    llama_gguf,
    llama_weights,
    pair,
    text,
)

from cupaged.errors import ModelFileError
from cupaged.model.gguf_file import TENSOR_TYPES, GGUFFile

ARCHITECTURE = pair("general.architecture", STRING, "llama")
DATA = bytes(range(32))  # eight float32

BAD = {
    "bad_magic": (gguf([ARCHITECTURE], [], magic=b"GGML"), "GGML"),
    "version_1": (gguf([ARCHITECTURE], [], version=1), "version 1;"),
    "version_99": (gguf([ARCHITECTURE], [], version=99), "version 99;"),
    "big_endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "truncated_header": (gguf([ARCHITECTURE], [])[:14], "left"),
    "too_many_pairs": (gguf([ARCHITECTURE], [], pair_count=1 << 60), "metadata of"),
    "too_many_tensors": (gguf([ARCHITECTURE], [], info_count=1 << 60), "infos of"),
    "huge_string": (gguf([text(b"x", 1 << 62)], [], pair_count=1), "left"),
    "huge_array": (gguf([text("a") + struct.pack("<IIQ", ARRAY, U32, 1 << 61)], []), "left"),
    "unknown_value_type": (gguf([text("a") + struct.pack("<I", 77) + bytes(8)], []), "value type 77"),
    "duplicate_key": (gguf([ARCHITECTURE, ARCHITECTURE], []), "twice"),
    "five_dimensions": (gguf([ARCHITECTURE], [info("t", [1, 1, 1, 1, 8])], DATA), "5 dimensions"),
    "dimension_product_2_64": (gguf([ARCHITECTURE], [info("t", [1 << 32, 1 << 32])], DATA), "needs"),
    "empty_but_2_124_rows": (gguf([ARCHITECTURE], [info("t", [0, 1 << 62, 1 << 62])], DATA), "no index can count"),
    "empty_but_2_126_wide": (gguf([ARCHITECTURE], [info("t", [1 << 63, 1 << 63, 0])], DATA), "no index can count"),
    "unknown_tensor_type": (gguf([ARCHITECTURE], [info("t", [8], 250)], DATA), "unknown type 250"),
    "offset_past_end": (gguf([ARCHITECTURE], [info("t", [8], offset=64)], DATA), "ends at byte"),
    "data_short": (gguf([ARCHITECTURE], [info("t", [8])], DATA[:-4]), "ends at byte"),
    "duplicate_tensor": (gguf([ARCHITECTURE], [info("t", [8]), info("t", [8], offset=32)], DATA * 2), "twice"),
    "row_not_of_32": (gguf([ARCHITECTURE], [info("t", [40], T_Q8_0)], bytes(64)), "multiple of 32"),
    # beyond the public list: what the public reader takes, and neighbours of the above
    "overlap": (gguf([ARCHITECTURE], [info("a", [16]), info("b", [8], offset=32)], DATA * 2), "overlap"),
    "same_place": (gguf([ARCHITECTURE], [info("a", [8]), info("b", [8])], DATA), "overlap"),
    "unaligned_offset": (gguf([ARCHITECTURE], [info("t", [4], offset=8)], DATA), "multiple of 32"),
    "offset_2_63": (gguf([ARCHITECTURE], [info("t", [8], offset=1 << 63)], DATA), "ends at byte"),
    "alignment_0": (gguf([pair("general.alignment", U32, 0)], [info("t", [8])], DATA), "power of two"),
    "alignment_24": (gguf([pair("general.alignment", U32, 24)], [info("t", [8])], DATA), "power of two"),
    "alignment_text": (gguf([pair("general.alignment", STRING, "32")], [info("t", [8])], DATA), "power of two"),
    "bool_2": (gguf([text("a") + struct.pack("<IB", BOOL, 2)], []), "neither 0 nor 1"),
    "key_not_utf8": (gguf([text(b"\xff\xfe") + struct.pack("<IB", U8, 0)], []), "not UTF-8"),
    "item_not_utf8": (gguf([pair("a", ARRAY, (STRING, ["x", b"\xff"]))], []), "not UTF-8"),
    "strings_cut": (gguf([pair("a", ARRAY, (STRING, ["x"] * 9))], [])[:-5], "left|ends after|runs past"),
    "string_in_array_huge": (
        gguf([text("a") + struct.pack("<IIQ", ARRAY, STRING, 1) + text(b"", 1 << 63)], []),
        "runs past",
    ),
    "strings_2_61": (gguf([text("a") + struct.pack("<IIQ", ARRAY, STRING, 1 << 61) + bytes(64)], []), "left"),
    "arrays_2_61": (gguf([text("a") + struct.pack("<IIQ", ARRAY, ARRAY, 1 << 61) + bytes(64)], []), "left"),
    "deep_arrays": (
        gguf([text("a") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000 + bytes(64)], []),
        "deeper",
    ),
    "empty_array_of_unknown": (gguf([text("a") + struct.pack("<IIQ", ARRAY, 99, 0)], []), "value type 99"),
    "empty_file": (b"", "left"),
}


@pytest.mark.parametrize("name", BAD)
def test_L06_damaged_gguf_is_refused_fast_with_file_and_reason(tmp_path: Path, name: str) -> None:
    raw, reason = BAD[name]
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(raw)
    start = time.perf_counter()
    with pytest.raises(ModelFileError, match=reason) as caught:
        GGUFFile(path)
    assert time.perf_counter() - start < 0.5
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
def test_L06_smallest_sound_gguf_loads(tmp_path: Path, version: int) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(gguf([ARCHITECTURE], [info("t", [8])], DATA, version=version))
    file = GGUFFile(path)
    assert (file.version, dict(file.metadata)) == (version, {"general.architecture": "llama"})
    assert file.tensors["t"].shape == (8,)
    assert file.raw("t").tobytes() == DATA


def test_L06_gguf_without_tensors_loads(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(gguf([ARCHITECTURE], []))
    assert not GGUFFile(path).tensors


def test_a_directory_or_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelFileError, match="cannot be read"):
            GGUFFile(path)


@given(cut=st.integers(0, 2000), at=st.integers(0, 2000), bits=st.integers(1, 255))
def test_L06_no_damage_raises_anything_but_our_error(
    tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, bits: int
) -> None:
    metadata, tensors = llama_gguf(llama_weights())
    infos = [info(name, list(reversed(shape)), kind) for name, (kind, shape, _) in tensors.items()]
    raw = bytearray(gguf([pair(key, kind, value) for key, (kind, value) in metadata.items()], infos))
    raw = raw[: len(raw) - cut % len(raw)]
    raw[at % len(raw)] ^= bits
    path = tmp_path_factory.mktemp("fuzz") / "damaged.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelFileError):  # the tensors' data are missing in any case
        GGUFFile(path)


def test_every_value_type_and_tensor_agrees_with_the_public_package(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = public.GGUFWriter(path, "llama")
    values = {
        "u8": (writer.add_uint8, 200),
        "i8": (writer.add_int8, -7),
        "u16": (writer.add_uint16, 60000),
        "i16": (writer.add_int16, -30000),
        "u32": (writer.add_uint32, 4_000_000_000),
        "i32": (writer.add_int32, -2_000_000_000),
        "f32": (writer.add_float32, 0.5),
        "bool": (writer.add_bool, True),
        "string": (writer.add_string, "Grüße 🎈"),
        "u64": (writer.add_uint64, 1 << 63),
        "i64": (writer.add_int64, -(1 << 62)),
        "f64": (writer.add_float64, 0.1),
        "ints": (writer.add_array, [3, -1, 2]),
        "floats": (writer.add_array, [0.25, -1.5]),
        "strings": (writer.add_array, ["a", "", "Ġb", "漢"]),
        "bools": (writer.add_array, [True, False]),
    }
    for key, (add, value) in values.items():
        add(f"x.{key}", value)
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.standard_normal((5, 7)).astype(np.float32),
        "half": rng.standard_normal((2, 3, 4)).astype(np.float16),
        "vector": rng.standard_normal(9).astype(np.float32),
    }
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile(path)
    for key, (_, value) in values.items():
        assert file.metadata[f"x.{key}"] == value
        assert type(file.metadata[f"x.{key}"]) is type(value)
    reader = public.GGUFReader(path)
    assert {tensor.name for tensor in reader.tensors} == set(file.tensors)
    for theirs in reader.tensors:
        ours = file.tensors[theirs.name]
        assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
        assert ours.dtype == theirs.tensor_type.name
        assert ours.shape == arrays[theirs.name].shape
        assert file.raw(theirs.name).tobytes() == arrays[theirs.name].tobytes()


def test_all_integer_widths_read_at_their_limits(tmp_path: Path) -> None:
    limits = {U8: 255, I8: -128, U16: 65535, I16: -32768, U32: 2**32 - 1, I32: -(2**31), U64: 2**64 - 1, I64: -(2**63)}
    pairs = [pair(f"k{kind}", kind, value) for kind, value in limits.items()]
    pairs += [pair(f"a{kind}", ARRAY, (kind, [value, 0])) for kind, value in limits.items()]
    pairs += [pair("nested", ARRAY, (ARRAY, [(U8, [1, 2]), (F64, [0.5]), (F32, [])]))]
    path = tmp_path / "limits.gguf"
    path.write_bytes(gguf(pairs, []))
    metadata = GGUFFile(path).metadata
    for kind, value in limits.items():
        assert metadata[f"k{kind}"] == value
        assert metadata[f"a{kind}"] == [value, 0]
    assert metadata["nested"] == [[1, 2], [0.5], []]


def test_tensor_type_sizes_are_the_public_ones() -> None:
    theirs = {kind.value: (kind.name, *public.GGML_QUANT_SIZES[kind]) for kind in public.GGML_QUANT_SIZES}
    # Q8_1 (9) never lies in a file: an activation format of ggml, 36 bytes in its C code, 40 in the package.
    shared = (theirs.keys() & TENSOR_TYPES.keys()) - {9}
    assert len(shared) > 25
    assert {kind: theirs[kind] for kind in shared} == {kind: TENSOR_TYPES[kind] for kind in shared}


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    path.write_bytes(gguf([pair("general.alignment", U32, 64)], [info("t", [8])], DATA, alignment=64))
    tensor = GGUFFile(path).tensors["t"]
    assert tensor.offset % 64 == 0
    assert GGUFFile(path).raw("t").tobytes() == DATA


def test_zero_sized_and_half_precision_tensors(tmp_path: Path) -> None:
    path = tmp_path / "sizes.gguf"
    path.write_bytes(gguf([ARCHITECTURE], [info("none", [4, 0]), info("half", [2, 3], T_F16)], DATA))
    file = GGUFFile(path)
    assert file.raw("none").size == 0
    assert file.raw("half").shape == (3, 4)


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(100_000)]
    raw = text("tokens") + struct.pack("<IIQ", ARRAY, STRING, len(tokens)) + b"".join(text(token) for token in tokens)
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(gguf([raw], []))
    start = time.perf_counter()
    assert GGUFFile(path).metadata["tokens"] == tokens
    assert time.perf_counter() - start < 1.0  # about 0.05 s alone; the public reader takes five
