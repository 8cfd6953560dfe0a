"""The safetensors reader: damage, shards, links and pickles."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import GOLDEN, safetensors
from safetensors.numpy import save_file

from cupaged.errors import ModelFileError
from cupaged.model.safetensors_file import SafetensorsFile, open_folder

ZERO16 = bytes(16)


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2, 2), offsets: tuple[int, int] = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def whole(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    raw = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


BAD = {
    "empty_file": (b"", "too few"),
    "seven_bytes": (b"\x02" + bytes(6), "too few"),
    "header_beyond_file": (whole(b"{}", length=60), "left"),
    "header_2_63": (whole({"w": entry()}, ZERO16, length=(1 << 63) + 5), "at most"),
    "header_over_100_mb": (whole({"w": entry()}, ZERO16, length=100_000_001), "at most"),
    "not_utf8": (whole(b"\xff"), "UTF-8"),
    "not_json": (whole(b'{"w":'), "not JSON"),
    "a_list": (whole(b"[]"), "list"),
    "overlap": (whole({"a": entry(), "b": entry()}, ZERO16), "overlaps"),
    "hole": (whole({"a": entry(), "b": entry(offsets=(20, 36))}, bytes(36)), "hole"),
    "truncated": (whole({"w": entry()}, ZERO16[:-2]), "truncated"),
    "trailing": (whole({"w": entry()}, ZERO16 + b"polyglot"), "after the last tensor"),
    "size_mismatch": (whole({"w": entry(offsets=(0, 4))}, ZERO16[:4]), "does not take 4 bytes"),
    "begin_after_end": (whole({"w": entry(offsets=(16, 0))}, ZERO16), "after its end"),
    "shape_overflow": (
        whole(b'{"w":{"dtype":"I32","shape":[2,18446744073709551614],"data_offsets":[0,16]}}', ZERO16),
        "does not take",
    ),
    "unknown_dtype": (whole({"w": entry(dtype="Q9")}, ZERO16), "unknown dtype 'Q9'"),
    # neighbours of these
    "hole_at_start": (whole({"w": entry(offsets=(4, 20))}, bytes(20)), "hole after the header"),
    "negative_shape": (whole({"w": entry(shape=(-2, -2))}, ZERO16), "shape"),
    "float_shape": (whole(b'{"w":{"dtype":"F32","shape":[4.0],"data_offsets":[0,16]}}', ZERO16), "shape"),
    "bool_shape": (whole(b'{"w":{"dtype":"F32","shape":[true,4],"data_offsets":[0,16]}}', ZERO16), "shape"),
    "three_offsets": (whole(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16,16]}}', ZERO16), "offsets"),
    "missing_shape": (whole(b'{"w":{"dtype":"F32","data_offsets":[0,16]}}', ZERO16), "must have"),
    "duplicate_name": (
        whole(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"w":{"dtype":"F32","shape":[4],'
              b'"data_offsets":[0,16]}}', ZERO16),
        "twice",
    ),
    "deep_json": (whole(b"[" * 100_000, ZERO16), "not JSON"),
    "half_a_byte": (whole({"w": entry(dtype="F4", shape=(3,), offsets=(0, 1))}, b"\0"), "does not take"),
    "empty_but_2_124_rows": (whole({"w": entry(shape=(1 << 62, 1 << 62, 0), offsets=(0, 0))}), "no index can count"),
    "empty_but_2_126_wide": (whole({"w": entry(shape=(0, 1 << 63, 1 << 63), offsets=(0, 0))}), "no index can count"),
    "many_dimensions": (whole({"w": entry(shape=(1,) * 31 + (2, 2))}, ZERO16), "shape"),
    "f4_column": (whole({"w": entry("F4", (4, 1), (0, 2))}, bytes(2)), r"F4 \[4, 1\] has rows that end within a byte"),
    "f4_odd_rows": (whole({"w": entry("F4", (2, 3), (0, 3))}, bytes(3)), "within a byte"),
    "f4_deep": (whole({"w": entry("F4", (3, 2, 1), (0, 3))}, bytes(3)), "within a byte"),
    "f6_column": (whole({"w": entry("F6_E2M3", (8, 1), (0, 6))}, bytes(6)), "within a byte"),
    "f6_rows": (whole({"w": entry("F6_E3M2", (2, 2), (0, 3))}, bytes(3)), "within a byte"),
    "metadata_of_numbers": (whole({"__metadata__": {"a": 1}, "w": entry()}, ZERO16), "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_L01_damaged_safetensors_is_refused_fast_with_file_and_reason(tmp_path: Path, name: str) -> None:
    raw, reason = BAD[name]
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes(raw)
    start = time.perf_counter()
    with pytest.raises(ModelFileError, match=reason) as caught:
        SafetensorsFile(path)
    assert time.perf_counter() - start < 0.5
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "shape"),
    [
        (whole({"w": entry(shape=(2, 0), offsets=(0, 0))}), (2, 0)),
        (whole(json.dumps({"w": entry()}).encode() + b"     ", ZERO16), (2, 2)),
        (whole({"w": entry(shape=(0, 1 << 59), offsets=(0, 0))}), (0, 1 << 59)),
        (whole({"w": entry(shape=(1 << 59, 0), offsets=(0, 0))}), (1 << 59, 0)),
    ],
    ids=["zero_sized", "space_padded", "no_rows", "no_columns"],
)
def test_L01_sound_safetensors_loads(tmp_path: Path, raw: bytes, shape: tuple[int, ...]) -> None:
    path = tmp_path / "good.safetensors"
    path.write_bytes(raw)
    file = SafetensorsFile(path)
    assert file.tensors["w"].shape == shape
    assert file.array("w").shape == shape
    assert not file.array("w").any()


SOUND = safetensors({"a": ("F32", (2, 3), bytes(24)), "b": ("BF16", (5,), bytes(10))})


SIZES = st.one_of(st.integers(0, 5), st.sampled_from([1 << 30, 1 << 31, 1 << 60, 1 << 62, (1 << 64) - 1]))


@given(
    dtype=st.sampled_from(["F4", "F6_E2M3", "F8_E4M3", "BF16", "F32"]),
    shape=st.lists(SIZES, max_size=4),
    rest=st.integers(0, 1),
)
def test_every_header_that_is_taken_gives_rows(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, shape: list[int], rest: int
) -> None:
    bits = {"F4": 4, "F6_E2M3": 6, "F8_E4M3": 8, "BF16": 16, "F32": 32}[dtype] * math.prod(shape)
    nbytes = min(bits // 8 + rest, 5000)
    path = tmp_path_factory.mktemp("any") / "any.safetensors"
    path.write_bytes(whole({"w": entry(dtype, tuple(shape), (0, nbytes))}, bytes(nbytes)))
    try:
        file = SafetensorsFile(path)
    except ModelFileError as error:
        assert str(path) in str(error)
    else:
        assert file.raw("w").size == nbytes
        if dtype in ("BF16", "F32"):
            assert file.array("w").shape == tuple(shape)


@given(cut=st.integers(0, len(SOUND) - 1), at=st.integers(0, 10_000), bits=st.integers(0, 255))
def test_L01_no_damage_raises_anything_but_our_error(
    tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, bits: int
) -> None:
    raw = bytearray(SOUND[: len(SOUND) - cut])
    raw[at % len(raw)] ^= bits
    path = tmp_path_factory.mktemp("fuzz") / "damaged.safetensors"
    path.write_bytes(raw)
    try:
        file = SafetensorsFile(path)
    except ModelFileError as error:
        assert str(path) in str(error)
    else:  # harmless: in the data, or in a name
        assert cut == 0
        assert {tensor.nbytes for tensor in file.tensors.values()} == {24, 10}


def test_arrays_are_views_of_the_file_in_its_own_precision(tmp_path: Path) -> None:
    arrays = {
        "single": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.linspace(-2, 2, 8).astype(np.float16),
    }
    path = tmp_path / "model.safetensors"
    save_file(arrays, path)
    file = SafetensorsFile(path)
    for name, array in arrays.items():
        assert file.array(name).dtype == array.dtype
        assert np.array_equal(file.array(name), array)
        assert not file.array(name).flags.owndata
        assert not file.array(name).flags.writeable


def test_K20_bfloat16_comes_as_its_bits(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"w": ("BF16", (2, 2), struct.pack("<4H", 0x3F80, 0xC000, 0x7F80, 0x7FC1))}))
    file = SafetensorsFile(path)
    assert file.array("w").dtype == np.uint16
    assert file.array("w").tolist() == [[0x3F80, 0xC000], [0x7F80, 0x7FC1]]


def test_other_types_are_refused_as_arrays_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"mask": ("BOOL", (3,), bytes(3))}))
    with pytest.raises(ModelFileError, match="'mask' is BOOL; expected F32, F16, BF16"):
        SafetensorsFile(path).array("mask")


def shards(folder: Path, weight_map: dict[str, Any], files: dict[str, dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        (folder / name).write_bytes(safetensors(tensors))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


W = ("F32", (2,), bytes(8))

_recorders: list[list[str]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        for recorder in _recorders:
            recorder.append(str(arguments[0]))


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Every path that this process opens meanwhile, by whichever call."""
    if not _hooked:
        sys.addaudithook(_hook)  # stays for the life of the process: there is no way to take it back
        _hooked.append(True)
    paths: list[str] = []
    _recorders.append(paths)
    try:
        yield paths
    finally:
        _recorders.remove(paths)


_hooked: list[bool] = []


def test_shards_open_as_one(tmp_path: Path) -> None:
    found = open_folder(GOLDEN / "qwen3")
    index = json.loads((GOLDEN / "qwen3" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: file.path.name for name, file in found.items()} == index


def test_L04_all_missing_shards_are_named_before_any_is_opened(tmp_path: Path) -> None:
    folder = shards(
        tmp_path,
        {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"},
        {"model-2.safetensors": {"b": W}},
    )
    (folder / "model-2.safetensors").write_bytes(b"damaged: opening it would be another error")
    with pytest.raises(ModelFileError, match=r"2 of 3 shards missing: model-1\.safetensors, model-3\.safetensors"):
        open_folder(folder)


def test_L04_a_tensor_in_two_shards_or_in_none_is_refused(tmp_path: Path) -> None:
    twice = shards(
        tmp_path / "twice",
        {"a": "1.safetensors", "b": "2.safetensors"},
        {"1.safetensors": {"a": W}, "2.safetensors": {"a": W, "b": W}},
    )
    with pytest.raises(ModelFileError, match=r"'a' is in 1\.safetensors and in 2\.safetensors"):
        open_folder(twice)
    absent = shards(tmp_path / "absent", {"a": "1.safetensors", "gone": "1.safetensors"}, {"1.safetensors": {"a": W}})
    with pytest.raises(ModelFileError, match=r"not in the shard.*'gone'"):
        open_folder(absent)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/hostname",
        "sub/inside.safetensors",
        "..",
        ".",
        "",
        "a\0.safetensors",
        "..\\outside.safetensors",
        "C:x.safetensors",
        "config.json",
        ".hidden.safetensors",
        7,
        None,
        ["a.safetensors"],
    ],
)
def test_X03_names_in_the_index_stay_in_the_folder(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    sound = safetensors({"a": W})
    (tmp_path / "outside.safetensors").write_bytes(sound)
    shards(folder, {"a": name}, {})
    (folder / "sub").mkdir()
    (folder / "sub" / "inside.safetensors").write_bytes(sound)
    (folder / ".hidden.safetensors").write_bytes(sound)
    with opened_files() as opened:
        with pytest.raises(ModelFileError, match="not allowed as a shard"):
            open_folder(folder)
    assert {Path(path).name for path in opened} == {"model.safetensors.index.json"}


def test_L10_a_snapshot_of_links_loads_and_dangling_links_are_told(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").write_bytes(safetensors({"a": W}))
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    assert list(open_folder(snapshot)) == ["a"]
    (blobs / "1234").unlink()
    with pytest.raises(ModelFileError, match=r"file missing \(broken link to \.\./\.\./blobs/1234\)"):
        open_folder(snapshot)


def test_L10_shards_of_links_load_and_dangling_ones_are_named(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "one").write_bytes(safetensors({"a": W}))
    folder = shards(tmp_path / "model", {"a": "1.safetensors", "b": "2.safetensors"}, {"2.safetensors": {"b": W}})
    (folder / "1.safetensors").symlink_to("../blobs/one")
    assert sorted(open_folder(folder)) == ["a", "b"]
    (blobs / "one").unlink()
    with pytest.raises(ModelFileError, match=r"1\.safetensors: file missing \(broken link to \.\./blobs/one\)"):
        open_folder(folder)


class Marker:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "consolidated.00.pth"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_X04_pickles_are_refused_with_the_reason_and_never_loaded(tmp_path: Path, name: str, protocol: int) -> None:
    marker = tmp_path / "marker"
    (tmp_path / name).write_bytes(pickle.dumps(Marker(marker), protocol))
    with pytest.raises(ModelFileError, match="pickles are never loaded"):
        open_folder(tmp_path)
    assert not marker.exists()
    pickle.loads((tmp_path / name).read_bytes())
    assert marker.exists(), "the pickle would have run"


def test_X04_a_zipped_pickle_under_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(ModelFileError, match="pickles are never loaded"):
        open_folder(tmp_path)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_folder(tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"give the path of 'tiny\.gguf' itself"):
        open_folder(tmp_path)
