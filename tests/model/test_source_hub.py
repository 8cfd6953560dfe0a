"""`--weights ORG/NAME`: repositories of a Hub on this machine, and caches without a Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_hub import COMMIT, OLDER, FakeHub

from cupaged.errors import DownloadError, ModelFileError
from cupaged.model import hub_source
from cupaged.model.checkpoint import open_checkpoint
from cupaged.model.hub_source import hub_name
from cupaged.model.source import resolve_weights

LLAMA = Path(__file__).resolve().parent.parent / "golden_data" / "llama"
SMALL = {"config.json": b"{}", "tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "chat_template.jinja": b"{{x}}"}
LARGE = {
    **SMALL,
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "modeling_evil.py": b"raise SystemExit",
    "onnx/model.onnx": b"another copy",
    "README.md": b"# A model",
    "model.Q8_0.gguf": b"GGUF a second format",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub without repositories; huggingface_hub asks it, and has an empty cache."""
    from huggingface_hub import constants

    server = FakeHub()
    for name, value in (
        ("ENDPOINT", server.address),
        ("HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_CACHE", str(tmp_path / "hub")),
        ("HF_HUB_OFFLINE", False),
        ("HF_TOKEN_PATH", str(tmp_path / "token")),
    ):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    yield server
    server.close()


@pytest.fixture
def offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return hub


def cached(root: Path, files: dict[str, bytes], repo: str = "o/m", revision: str = "main") -> Path:
    """A cache as huggingface_hub keeps it: blobs, a snapshot of links to them, a reference. Returns the snapshot."""
    home = root / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    for number, (name, data) in enumerate(files.items()):
        blob = home / "blobs" / f"{number:040x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (home / "refs").mkdir()
    (home / "refs" / revision).write_text(COMMIT)
    return snapshot


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def refusal(spec: str, **options: bool) -> str:
    """The one line that `spec` is refused with."""
    with pytest.raises(DownloadError) as caught:
        resolve_weights(spec, **options)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 600 and spec in line
    return line


def test_only_what_a_model_is_loaded_from_is_fetched_and_once(
    hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add("o/m", LARGE)
    lines: list[str] = []
    folder = resolve_weights("o/m", lines.append)
    assert folder == tmp_path / "hub" / "models--o--m" / "snapshots" / COMMIT
    assert names_in(folder) == {*SMALL, "model.safetensors"}
    assert (folder / "model.safetensors").is_symlink() and (folder / "model.safetensors").read_bytes() == b"weights"
    assert lines[0] == "looking up o/m on the Hub" and lines[-1] == "fetching model.safetensors (0.0 MB) from o/m"
    assert len(lines) == 1 + len(SMALL) + 1
    asked = len(hub.fetched)
    assert resolve_weights("o/m", lines.append) == folder
    assert lines[-1] == "looking up o/m on the Hub" and len(hub.fetched) == asked
    assert capfd.readouterr() == ("", "")  # the library's own bars and warnings are off


def test_L10_a_snapshot_of_links_is_loaded(hub: FakeHub) -> None:
    hub.add("o/m", {file.name: file.read_bytes() for file in LLAMA.iterdir() if file.name != "expected.safetensors"})
    checkpoint = open_checkpoint(resolve_weights("o/m"))
    assert checkpoint.config == open_checkpoint(LLAMA).config


def test_a_branch_that_moved_is_fetched_anew(hub: FakeHub) -> None:
    hub.add("o/m", LARGE, commit=OLDER)
    assert resolve_weights("o/m").name == OLDER
    hub.add("o/m", {**LARGE, "model.safetensors": b"newer"})
    folder = resolve_weights("o/m")
    assert folder.name == COMMIT and (folder / "model.safetensors").read_bytes() == b"newer"


def test_revisions(hub: FakeHub) -> None:
    hub.add("o/m", LARGE)
    hub.add("o/m", {**LARGE, "model.safetensors": b"older"}, "v1.0", OLDER)
    assert resolve_weights("o/m@v1.0").name == OLDER
    assert refusal("o/m@v2").endswith("the repository has no revision v2")
    assert resolve_weights(f"o/m@{OLDER}").name == OLDER
    before = list(hub.asked)
    assert (resolve_weights(f"o/m@{OLDER}") / "model.safetensors").read_bytes() == b"older"
    assert hub.asked == before  # a commit does not move: what the cache holds of it needs no network


def test_shards_of_an_index(hub: FakeHub) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": b"part" for n in (1, 2)}
    index = json.dumps({"weight_map": {"a": next(iter(shards)), "b": list(shards)[1]}}).encode()
    hub.add("o/m", {**SMALL, **shards, "model.safetensors.index.json": index, "x-00001-of-00001.safetensors": b"?"})
    assert names_in(resolve_weights("o/m")) == {*SMALL, *shards, "model.safetensors.index.json"}


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/hostname", "sub/a.safetensors", "a\0.safetensors", 3, "x.bin"]
)
def test_X03_an_index_that_leads_elsewhere_is_refused(hub: FakeHub, shard: object) -> None:
    hub.add("o/m", {**SMALL, "model.safetensors.index.json": json.dumps({"weight_map": {"a": shard}}).encode()})
    assert "model.safetensors.index.json names" in refusal("o/m")
    assert {"config.json", "model.safetensors.index.json"} >= set(hub.fetched)


def test_L04_shards_that_are_not_there_are_named_before_any_is_fetched(hub: FakeHub) -> None:
    index = json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "c": "c.safetensors"}}).encode()
    hub.add("o/m", {**SMALL, "a.safetensors": b"a", "model.safetensors.index.json": index})
    assert "lacks b.safetensors, c.safetensors, which" in refusal("o/m")
    assert "a.safetensors" not in hub.fetched


def test_the_one_gguf_of_a_repository_that_has_nothing_else(hub: FakeHub) -> None:
    hub.add("o/m", {"README.md": b"#", "config.json": b"{}", "M.Q8_0.gguf": b"GGUF", "mmproj-M.gguf": b"GGUF"})
    path = resolve_weights("o/m")
    assert path.name == "M.Q8_0.gguf" and hub.fetched == ["M.Q8_0.gguf"]
    assert path.read_bytes() == b"GGUF"


def test_several_ggufs_are_listed_and_one_is_named(hub: FakeHub) -> None:
    hub.add("o/m", {"M.Q4_0.gguf": b"GGUF4", "big/M.Q8_0.gguf": b"GGUF8"})
    assert refusal("o/m").endswith("holds 2 .gguf models; name one as o/m/FILE.gguf: M.Q4_0.gguf, big/M.Q8_0.gguf")
    assert resolve_weights("o/m/M.Q4_0.gguf").read_bytes() == b"GGUF4"
    assert resolve_weights("o/m/big/M.Q8_0.gguf@main").read_bytes() == b"GGUF8"
    assert refusal("o/m/x.gguf").endswith("holds no x.gguf; its .gguf files: M.Q4_0.gguf, big/M.Q8_0.gguf")
    assert hub.fetched == ["M.Q4_0.gguf", "big/M.Q8_0.gguf"]


def test_a_split_gguf_is_one_model(hub: FakeHub) -> None:
    parts = [f"M-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    hub.add("o/m", {part: part.encode() for part in parts})
    assert resolve_weights("o/m").name == parts[0] and hub.fetched == parts
    hub.add("o/n", dict.fromkeys(parts[:2], b"GGUF"))
    assert "holds 2 of the 3 parts of M" in refusal("o/n")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({**SMALL, "pytorch_model.bin": b"pickle"}, "only pytorch_model.bin; pickles are never loaded"),
        ({"README.md": b"#"}, "holds no model: no config.json and no model.safetensors, and no .gguf"),
        ({"model.safetensors": b"x"}, "holds no model: no config.json, and no .gguf"),
    ],
)
def test_X04_a_repository_without_a_usable_model_is_refused_unfetched(
    hub: FakeHub, files: dict[str, bytes], message: str
) -> None:
    hub.add("o/m", files)
    assert message in refusal("o/m")
    assert hub.fetched == []


def test_the_tokenizer_alone_leaves_the_weights(hub: FakeHub) -> None:
    hub.add("o/m", LARGE)
    assert names_in(resolve_weights("o/m", tokenizer_only=True)) == set(SMALL)
    hub.add("o/g", {"M.gguf": b"GGUF"})
    assert resolve_weights("o/g", tokenizer_only=True).name == "M.gguf"
    hub.add("o/old", {"config.json": b"{}", "model.safetensors": b"x", "tokenizer.model": b"spm", "vocab.json": b""})
    assert names_in(resolve_weights("o/old", tokenizer_only=True)) == {"config.json", "tokenizer.model"}


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "RepoNotFound", "no such local file or folder, and no such repository on the Hub, or a private one"),
        (404, "RepoNotFound", "no such local file or folder, and no such repository on the Hub, or a private one"),
        (403, "GatedRepo", "the repository is gated: accept its terms on the Hub's page of o/m and give a token"),
        (403, "", r"the Hub refuses access (HTTP 403); give a token (HF_TOKEN, or `hf auth login`)"),
        (418, "", "HfHubHTTPError: "),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: FakeHub, status: int, code: str, message: str) -> None:
    hub.refusals["o/m"] = (status, code)
    assert refusal("o/m").startswith(f"weights 'o/m': {message}")


def test_U04_offline_and_not_in_the_cache_is_one_line(offline: FakeHub, tmp_path: Path) -> None:
    line = refusal("o/m@v1")
    assert line == (
        "weights 'o/m@v1': no such local file or folder, HF_HUB_OFFLINE is set, and o/m at v1 is not in the cache "
        f"{tmp_path / 'hub'}"
    )
    assert offline.asked == []


def test_offline_the_cache_serves(offline: FakeHub, tmp_path: Path) -> None:
    folder = cached(tmp_path / "hub", LARGE)
    assert resolve_weights("o/m") == resolve_weights("o/m@main") == resolve_weights(f"o/m@{COMMIT}") == folder
    assert resolve_weights("o/m/model.Q8_0.gguf") == folder / "model.Q8_0.gguf"
    assert "o/m at other is not in the cache" in refusal("o/m@other")
    cached(tmp_path / "hub", SMALL, "o/part")
    assert resolve_weights("o/part", tokenizer_only=True)
    assert "HF_HUB_OFFLINE is set, and the copy in" in refusal("o/part")
    assert offline.asked == []


def test_a_hub_that_cannot_be_reached_leaves_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    hub.refusals["o/m"] = (404, "RevisionNotFound")
    folder = cached(tmp_path / "hub", LARGE)
    assert "no revision" in refusal("o/m")  # an answer is an answer, whatever the cache holds
    hub.close()
    hub.close = lambda: None  # type: ignore[method-assign]
    lines: list[str] = []
    assert resolve_weights("o/m", lines.append) == folder
    assert lines[-1] == "the Hub cannot be reached; using the copy of o/m in the cache"
    assert "the Hub cannot be reached (offline?), and o/other is not in the cache" in refusal("o/other")


def test_L10_a_broken_link_in_the_cache_is_told_when_it_is_opened(offline: FakeHub, tmp_path: Path) -> None:
    folder = cached(tmp_path / "hub", LARGE)
    (folder / "config.json").resolve().unlink()
    with pytest.raises(ModelFileError, match=r"config\.json: file missing \(broken link to "):
        open_checkpoint(resolve_weights("o/m"))


def test_a_local_path_of_the_same_name_wins_and_says_so(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("o/m", LARGE)
    (tmp_path / "o" / "m").mkdir(parents=True)
    lines: list[str] = []
    assert resolve_weights("o/m", lines.append) == Path("o/m")
    assert lines == ["using the local o/m, not a repository of that name"] and hub.asked == []
    (tmp_path / "o" / "n").symlink_to("nowhere")
    with pytest.raises(ModelFileError, match="broken link"):
        resolve_weights("o/n")


def test_a_model_larger_than_the_disk_is_refused_with_both_numbers(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("o/m", {"M.gguf": b"GGUF" * 10})
    monkeypatch.setattr(hub_source.shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    assert "needs 40 bytes in" in refusal("o/m") and hub.fetched == []


def test_without_huggingface_hub_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refusal("o/m").endswith("huggingface_hub is missing; pip install huggingface_hub")


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("org/Model-1.5B", ("org/Model-1.5B", None, None)),
        ("org/m@v1.0", ("org/m", None, "v1.0")),
        ("org/m@refs/pr/1", ("org/m", None, "refs/pr/1")),
        ("org/m-GGUF/m.Q4_0.gguf", ("org/m-GGUF", "m.Q4_0.gguf", None)),
        ("org/m/sub/m.gguf@main", ("org/m", "sub/m.gguf", "main")),
    ],
)
def test_names_of_repositories(spec: str, parts: tuple[str, str | None, str | None]) -> None:
    name = hub_name(spec)
    assert name is not None and (name.repo, name.file, name.revision) == parts


@pytest.mark.parametrize(
    "spec",
    [
        "", "model", "./o/m", "../o/m", "/o/m", "~/o/m", "o/m/", "o//m", "o/m/config.json", "o/m.gguf", "a/b/c",
        "o/m@", "o/m@../x", "o/..", "o/m--x", "o m/x", "o/m\n", "-o/m", "o/m@-x", "hf:o/m", "o/" + "x" * 200, "é/m",
    ],
)  # fmt: skip
def test_names_that_are_no_repository(spec: str) -> None:
    assert hub_name(spec) is None


def test_the_environment_of_huggingface_hub_is_honoured(tmp_path: Path, checkout_env: dict[str, str]) -> None:
    """HF_HOME and HF_HUB_OFFLINE in a process of its own; the second repository is not there."""
    folder = cached(tmp_path / "home" / "hub", LARGE)
    code = """
import sys
from cupaged.errors import DownloadError
from cupaged.model.source import resolve_weights
assert "huggingface_hub" not in sys.modules
print(resolve_weights("o/m"))
try: resolve_weights("o/other")
except DownloadError as error: print(error)
"""
    env = {key: value for key, value in checkout_env.items() if not key.startswith("HF_")}
    env |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert first == str(folder) and second.endswith(f"o/other is not in the cache {tmp_path / 'home' / 'hub'}")
    assert done.stderr == "" and done.returncode == 0
