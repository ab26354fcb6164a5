"""The runtime folder and its key: created once, private, and refused otherwise."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem_contract.files import KEY_NAME, WORKER_SOCKET, KeyFile, endpoint_of, own_runtime_dir


def test_the_folder_is_created_private(tmp_path: Path) -> None:
    own_runtime_dir(tmp_path / "a" / "new")
    assert (tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o700
    own_runtime_dir(tmp_path / "a" / "new")


def test_what_is_no_folder_of_this_user_alone_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for path, problem in (
        (tmp_path / "open", "has mode 0750; it must be 0700"),
        (tmp_path / "link", "is a link; it must be a folder"),
        (tmp_path / "file", "is not a folder"),
        (Path("/tmp/" + "x" * 99), r"with /frontend.sock it has 118 bytes; the limit is 107"),
    ):
        with pytest.raises(ValueError, match=problem):
            own_runtime_dir(path)


def test_workers_connect_below_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert endpoint_of(Path("run"), WORKER_SOCKET) == f"ipc://{tmp_path}/run/worker.sock"


def test_the_first_reader_creates_the_key_and_others_read_it(tmp_path: Path) -> None:
    begin = threading.Barrier(8)

    def read(_: int) -> bytes:
        begin.wait()
        return KeyFile(tmp_path).read()

    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(read, range(8)))
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

    monkeypatch.setattr("tandem_contract.files.time.sleep", pause)
    assert KeyFile(tmp_path).read() == b"k" * 32
    assert len(pauses) == 1


def test_a_key_of_another_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_contract.files.time.sleep", lambda _: None)
    (tmp_path / KEY_NAME).touch(0o600)
    (tmp_path / KEY_NAME).write_bytes(b"k" * 33)
    with pytest.raises(ValueError, match=rf"{tmp_path}/{KEY_NAME} does not have a key of 32 bytes; remove it"):
        KeyFile(tmp_path).read()


@pytest.mark.parametrize("bad", ["mode-0644", "mode-0640", "link", "folder", "pipe"])
def test_a_key_that_another_user_could_read_or_write_is_refused(tmp_path: Path, bad: str) -> None:
    path = tmp_path / KEY_NAME
    if bad.startswith("mode-"):
        KeyFile(tmp_path).read()
        path.chmod(int(bad[5:], 8))
        with pytest.raises(ValueError, match=f"it belongs to user {os.getuid()} and has {bad.replace('-', ' ')}"):
            KeyFile(tmp_path).read()
        return
    if bad == "pipe":
        os.mkfifo(path, 0o600)
        with pytest.raises(ValueError, match=r"must be a file of user"):
            KeyFile(tmp_path).read()
        return
    if bad == "link":
        (tmp_path / "elsewhere").write_bytes(b"k" * 32)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
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


def test_a_key_that_was_replaced_is_restored(tmp_path: Path) -> None:
    key = KeyFile(tmp_path)
    first = key.read()
    key.restore()
    for spoil in (key.path.unlink, lambda: key.path.write_bytes(b"n" * 32), lambda: key.path.chmod(0o666)):
        spoil()
        key.restore()
        assert KeyFile(tmp_path).read() == first and not key.has_changed()
        assert [path.name for path in tmp_path.iterdir()] == [KEY_NAME]
