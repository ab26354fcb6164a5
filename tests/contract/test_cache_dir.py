"""Where caches are, with and without a home folder, and what counts as this user's alone."""

import os
import tempfile
from pathlib import Path

import pytest

from tandem_contract.files import cache_dir, is_private


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def test_the_variable_wins_over_the_home_folder(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(places))
    assert cache_dir("native") == places / ".cache" / "tandem" / "native"
    assert (places / ".cache" / "tandem").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(places / "x"))
    assert cache_dir("native") == places / "x" / "tandem" / "native"


def test_without_a_home_folder_it_is_a_private_one(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (places / "file").touch()
    monkeypatch.setenv("HOME", str(places / "file"))
    shared = places / "tmp" / f"tandem-cache-{os.getuid()}"
    assert cache_dir("native") == shared / "native" == cache_dir("native")
    assert shared.stat().st_mode & 0o777 == 0o700
    # Somebody else has made it.
    shared.chmod(0o777)
    other = cache_dir("native")
    assert other.parent != shared and other.parent.parent == places / "tmp" and is_private(other.parent)


@pytest.mark.parametrize(("mode", "private"), [(0o600, True), (0o644, True), (0o620, False), (0o602, False)])
def test_what_others_can_write_is_not_private(places: Path, mode: int, private: bool) -> None:
    for path in (places / "file", places / "folder"):
        path.touch() if path.name == "file" else path.mkdir()
        path.chmod(mode | (0o100 if path.is_dir() else 0))
        assert is_private(path) is private
    (places / "link").symlink_to(places / "file")
    assert not is_private(places / "link")
