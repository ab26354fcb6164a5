"""The runtime folder and its key: created once, private, and refused otherwise."""

import threading
from pathlib import Path

import pytest

from gpu_worker.link.runtime_dir import KEY_NAME, KeyFile, own_runtime_dir, worker_endpoint


def test_the_folder_is_created_private(tmp_path: Path) -> None:
    own_runtime_dir(tmp_path / "a" / "new")
    assert (tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o700
    own_runtime_dir(tmp_path / "a" / "new")


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    with pytest.raises(ValueError, match="has mode 750; it must be 700"):
        own_runtime_dir(tmp_path / "open")


def test_a_link_or_a_file_is_not_a_runtime_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is a link; it must be a folder"):
        own_runtime_dir(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a folder"):
        own_runtime_dir(tmp_path / "file")


def test_a_path_too_long_for_a_socket_is_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match=r"with /frontend.sock it has 118 bytes; the limit is 107"):
        own_runtime_dir(Path("/tmp/" + "x" * 99))


def test_workers_connect_below_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert worker_endpoint(Path("run")) == f"ipc://{tmp_path}/run/worker.sock"


def test_the_first_reader_creates_the_key_and_others_read_it(tmp_path: Path) -> None:
    keys: list[bytes] = []
    threads = [threading.Thread(target=lambda: keys.append(KeyFile(tmp_path).read())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert set(keys) == {(tmp_path / KEY_NAME).read_bytes()}
    assert len(keys[0]) == 32
    # No temporary file is left.
    assert [path.name for path in tmp_path.iterdir()] == [KEY_NAME]
    assert (tmp_path / KEY_NAME).stat().st_mode & 0o777 == 0o600


def test_a_key_that_is_still_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / KEY_NAME
    path.touch(0o600)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        path.write_bytes(b"k" * 32)

    monkeypatch.setattr("gpu_worker.link.runtime_dir.time.sleep", pause)
    assert KeyFile(tmp_path).read() == b"k" * 32
    assert len(pauses) == 1


def test_a_key_of_another_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.link.runtime_dir.time.sleep", lambda _: None)
    (tmp_path / KEY_NAME).touch(0o600)
    (tmp_path / KEY_NAME).write_bytes(b"k" * 33)
    with pytest.raises(ValueError, match=rf"{tmp_path}/{KEY_NAME} does not contain a key of 32 bytes; delete it"):
        KeyFile(tmp_path).read()


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    KeyFile(tmp_path).read()
    (tmp_path / KEY_NAME).chmod(0o640)
    with pytest.raises(ValueError, match=rf"{tmp_path}/{KEY_NAME} has mode 640; it must be 600"):
        KeyFile(tmp_path).read()


def test_a_key_file_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"k" * 32)
    (tmp_path / KEY_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        KeyFile(tmp_path).read()


def test_a_replaced_or_missing_key_counts_as_changed(tmp_path: Path) -> None:
    key = KeyFile(tmp_path)
    first = key.read()
    assert not key.has_changed()
    (tmp_path / KEY_NAME).write_bytes(b"n" * 32)
    assert key.has_changed()
    (tmp_path / KEY_NAME).unlink()
    assert key.has_changed()
    assert key.read() not in (first, b"n" * 32)
