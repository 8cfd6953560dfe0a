"""Models in several GGUF files: any part stands for the whole, and what does not fit is refused."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import gguf as public
import numpy as np
import pytest
from model_files import I32, LLAMA_CONFIG, STRING, U16, U32, gguf_model, llama_gguf, llama_weights, write_folder

from cupaged.errors import ModelFileError
from cupaged.model.checkpoint import open_checkpoint
from cupaged.model.gguf_file import GGUFFile

COUNT = 5


def name(number: int, count: int = COUNT, stem: str = "model") -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def write_parts(folder: Path, small_first: bool = False) -> list[Path]:
    """A llama of 21 tensors in five files, by the public package's writer (in six with an empty first one)."""
    metadata, tensors = llama_gguf(llama_weights())
    writer = public.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=5, small_first_shard=small_first)
    for key, (kind, value) in metadata.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, public.GGUFValueType(kind))
    for tensor, (_, shape, raw) in tensors.items():
        writer.add_tensor(tensor, np.frombuffer(raw, np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def test_any_part_stands_for_the_whole(tmp_path: Path) -> None:
    whole = open_checkpoint(write_folder(tmp_path / "hub", llama_weights(), LLAMA_CONFIG))
    parts = write_parts(tmp_path)
    assert [part.name for part in parts] == [name(number) for number in range(1, COUNT + 1)]
    for part in parts:
        checkpoint = open_checkpoint(part)
        assert checkpoint.path == part
        assert checkpoint.config.num_layers == 2
        assert set(checkpoint.tensors) == set(whole.tensors)
        for key, weight in checkpoint.tensors.items():
            rows = weight.shape[0]
            assert weight.float32(0, rows).tobytes() == whole.tensors[key].float32(0, rows).tobytes(), key


def test_a_first_part_without_tensors(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, small_first=True)
    assert len(parts) == COUNT + 1
    for part in (parts[0], parts[3]):
        assert len(GGUFFile(part).tensors) == 21


def test_all_missing_parts_are_listed(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[1].unlink()
    parts[4].unlink()
    with pytest.raises(ModelFileError, match=f"2 of 5 parts are missing in its folder: {name(2)}, {name(5)}$"):
        GGUFFile(parts[0])


def test_a_part_behind_a_link_is_found_by_the_links_name(tmp_path: Path) -> None:
    """As in a Hub cache: names in the snapshot, contents elsewhere. A broken link is told as such."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, part in enumerate(write_parts(tmp_path)):
        blob = tmp_path / "blobs" / f"{number:064x}"
        shutil.move(part, blob)
        (snapshot / part.name).symlink_to(Path("../blobs") / blob.name)
    assert len(GGUFFile(snapshot / name(2)).tensors) == 21
    with pytest.raises(ModelFileError, match=r"its name must end in -00003-of-00005\.gguf"):
        GGUFFile(tmp_path / "blobs" / f"{2:064x}")
    (tmp_path / "blobs" / f"{3:064x}").unlink()
    with pytest.raises(ModelFileError, match=f"{name(4)}: cannot be read"):
        GGUFFile(snapshot / name(2))


def pair_of_parts(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> Path:
    """Two parts, one tensor in each; `first` and `second` are changes to their metadata (None removes a key)."""
    folder.mkdir(exist_ok=True)
    for number, changes in enumerate((first, second)):
        metadata = {
            "split.no": (U16, number),
            "split.count": (U16, 2),
            "split.tensors.count": (I32, 2),
            "general.architecture": (STRING, "llama"),
            **changes,
        }
        kept = {key: value for key, value in metadata.items() if value is not None and key != "tensor"}
        tensor = changes.get("tensor", f"t{number}")
        (folder / name(number + 1, 2)).write_bytes(gguf_model(kept, {tensor: (0, (8,), bytes(range(32)))}))
    return folder / name(1, 2)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({}, {"split.count": (U16, 3)}, r"00002\.gguf: by its metadata it is part 2 of 3, not 2 of 2"),
        ({}, {"split.no": (U16, 0)}, r"00002\.gguf: by its metadata it is part 1 of 2, not 2 of 2"),
        ({}, {"split.count": None}, "by its metadata it is part 1 of 1, not 2 of 2"),
        ({}, {"split.no": None}, r"split\.no is missing"),
        ({"split.no": (U16, 2)}, {}, r"split\.no is 2; it must be an integer from 0 to 1"),
        ({"split.no": (U16, 1)}, {}, r"its name must end in -00002-of-00002\.gguf"),
        ({"split.count": (U32, 100_000)}, {}, r"split\.count is 100000; it must be an integer from 0 to 99999"),
        ({"split.count": (STRING, "2")}, {}, r"split\.count is '2'"),
        ({"split.tensors.count": (I32, 3)}, {"split.tensors.count": (I32, 3)}, "is 3, the parts hold 2"),
        ({}, {"split.tensors.count": (I32, 3)}, r"'split\.tensors\.count' is 3, in .*00001-of-00002\.gguf it is 2"),
        ({}, {"general.architecture": (STRING, "qwen2")}, "is 'qwen2', in .* it is 'llama'"),
        ({}, {"tensor": "t0"}, "tensor 't0' lies in two of the parts"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], reason: str
) -> None:
    assert len(GGUFFile(pair_of_parts(tmp_path / "sound", {}, {})).tensors) == 2
    path = pair_of_parts(tmp_path / "odd", first, second)
    with pytest.raises(ModelFileError, match=reason) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value)


def test_what_only_a_later_part_says_counts_too(tmp_path: Path) -> None:
    path = pair_of_parts(tmp_path, {}, {"general.name": (STRING, "x"), "general.architecture": None})
    assert GGUFFile(path).metadata["general.name"] == "x"
    assert GGUFFile(tmp_path / name(2, 2)).metadata["general.architecture"] == "llama"
    assert GGUFFile(tmp_path / name(2, 2)).metadata["split.no"] == 0


def test_a_count_of_one_or_none_is_a_whole_file(tmp_path: Path) -> None:
    for count in (0, 1):
        path = tmp_path / f"any{count}.gguf"
        path.write_bytes(gguf_model({"split.count": (U16, count)}, {"t": (0, (8,), bytes(32))}))
        assert set(GGUFFile(path).tensors) == {"t"}


def test_a_hostile_count_costs_little(tmp_path: Path) -> None:
    path = tmp_path / name(1, 99_999)
    path.write_bytes(gguf_model({"split.count": (U32, 99_999), "split.no": (U16, 0)}, {}))
    start = time.process_time()
    with pytest.raises(ModelFileError, match=r"99998 of 99999 parts are missing.* and 99798 more$") as caught:
        GGUFFile(path)
    assert time.process_time() - start < 1
    assert len(str(caught.value)) < 10_000


def test_names_with_line_ends_and_patterns_are_names(tmp_path: Path) -> None:
    for stem in ("a\nb", "[x]*(y)", "", "m-00001-of-00002"):
        parts = write_parts(tmp_path)
        for number, part in enumerate(parts):
            part.rename(tmp_path / name(number + 1, stem=stem))
        assert len(GGUFFile(tmp_path / name(3, stem=stem)).tensors) == 21, re.escape(stem)
        for number in range(COUNT):
            (tmp_path / name(number + 1, stem=stem)).unlink()
