"""Credentials of peers, the worker key, the watched folder, and the cost of a flood of malformed frames."""

import os
import threading
from pathlib import Path

import pytest

from scheduler_svc.flags import SettingError
from scheduler_svc.processes import worker_key
from scheduler_svc.processes.runtime_dir import RuntimeDir
from scheduler_svc.shell.peers import Credentials, DroppedFrames


def test_only_the_right_key_and_secret_are_accepted() -> None:
    credentials = Credentials(worker_key=b"k" * 32, key_path=Path("/run/worker.key"), frontend_secret=b"s" * 32)
    assert credentials.is_worker_key(b"k" * 32)
    assert credentials.is_frontend_secret(b"s" * 32)
    for wrong in (b"", b"k", b"s" * 31, b"x" * 32, b"k" * 33):
        assert not credentials.is_worker_key(wrong)
        assert not credentials.is_frontend_secret(wrong)
    assert "/run/worker.key" in credentials.refusal


def test_a_flood_of_malformed_frames_gives_a_line_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    dropped = DroppedFrames()
    dropped.report(100.0)
    assert [dropped.add("worker w-1", "malformed") for _ in range(1000)] == [True] + [False] * 999
    dropped.report(109.9)
    assert caplog.messages == ["worker w-1: dropped a frame: malformed"]
    dropped.report(110.0)
    assert caplog.messages[1:] == ["dropped 999 more frames in 10 s; most came from worker w-1: 999"]
    assert dropped.add("worker w-1", "malformed")
    assert dropped.total == 1001


def test_peers_that_change_their_names_are_counted_together(caplog: pytest.LogCaptureFixture) -> None:
    dropped = DroppedFrames()
    dropped.report(0.0)
    answered = sum(dropped.add(f"worker w-{number}", "malformed") for number in range(10_000))
    assert answered == len(caplog.messages) == 16
    dropped.report(10.0)
    assert len(caplog.messages) == 17
    assert caplog.messages[-1].startswith("dropped 9984 more frames")
    dropped.report(20.0)
    assert len(caplog.messages) == 17


def test_concurrent_programs_create_one_key_and_read_the_same(tmp_path: Path) -> None:
    keys: list[bytes] = []
    begin = threading.Barrier(8)

    def read() -> None:
        begin.wait()
        keys.append(worker_key.read_or_create(tmp_path))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_key_stays_after_the_scheduler_ends(tmp_path: Path) -> None:
    before = RuntimeDir(tmp_path / "run").worker_key
    os.close(os.open(tmp_path / "run" / "scheduler.lock", os.O_RDONLY))
    assert worker_key.read_or_create(tmp_path / "run") == before


@pytest.mark.parametrize("bad", ["mode-0644", "link", "folder", "pipe"])
def test_a_key_that_another_user_could_have_written_is_refused(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "worker.key"
    if bad == "mode-0644":
        path.write_bytes(b"k" * 32)
        path.chmod(0o644)
        with pytest.raises(SettingError, match=r"with mode 0600; it belongs to user \d+ and has mode 0644"):
            worker_key.read_or_create(tmp_path)
        return
    if bad == "pipe":
        os.mkfifo(path, 0o600)
        with pytest.raises(SettingError, match=r"must be a file of user"):
            worker_key.read_or_create(tmp_path)
        return
    if bad == "link":
        (tmp_path / "elsewhere").write_bytes(b"k" * 32)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(OSError):
        worker_key.read_or_create(tmp_path)


def test_an_empty_key_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_key, "_PAUSE_SECONDS", 0)
    (tmp_path / "worker.key").touch(0o600)
    with pytest.raises(SettingError, match=r"worker\.key does not have 32 bytes; remove it"):
        worker_key.read_or_create(tmp_path)


def test_the_watch_logs_once_that_a_folder_is_removed_and_that_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RuntimeDir(tmp_path / "run")
    folder.watch()
    for name in ("worker.sock", "frontend.sock"):
        (tmp_path / "run" / name).touch()
    folder.sockets_bound()
    folder.watch()
    assert caplog.messages == []
    (tmp_path / "run").rename(tmp_path / "gone")
    for _ in range(3):
        folder.watch()
    [said] = caplog.messages
    assert said.startswith(f"{tmp_path}/run was removed or replaced: connected workers and front ends continue")
    assert said.endswith("move it back, or restart the service")
    (tmp_path / "gone").rename(tmp_path / "run")
    for _ in range(3):
        folder.watch()
    assert caplog.messages[1:] == [f"{tmp_path}/run is back: workers can join again"]
    (tmp_path / "run" / "worker.sock").unlink()
    folder.watch()
    (tmp_path / "run" / "worker.sock").touch()
    folder.watch()
    assert len(caplog.messages) == 3
    assert caplog.messages[-1].startswith(f"{tmp_path}/run/worker.sock was removed")
