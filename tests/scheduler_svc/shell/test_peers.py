"""Credentials of peers, the worker key, the watched folder, and the cost of a flood of malformed frames."""

import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import zmq

from scheduler_svc.processes.runtime_dir import RuntimeDir
from scheduler_svc.shell.inbound import Credentials, DroppedFrames
from scheduler_svc.shell.links import RouterLink
from tandem_contract.files import KeyFile
from tandem_contract.settings import SettingError

SOCKETS = ("worker.sock", "frontend.sock")


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


def test_the_key_stays_after_the_scheduler_ends(tmp_path: Path) -> None:
    before = RuntimeDir(tmp_path / "run").worker_key
    os.close(os.open(tmp_path / "run" / "scheduler.lock", os.O_RDONLY))
    assert KeyFile(tmp_path / "run").read() == before


class Bound:
    """A runtime folder and the number of times that each socket was bound."""

    def __init__(self, path: Path) -> None:
        self.folder = RuntimeDir(path)
        self.num_binds: Counter[str] = Counter()
        for name in SOCKETS:
            self.bind(name)
        self.folder.sockets_bound(*(partial(self.bind, name) for name in SOCKETS))

    def bind(self, name: str) -> None:
        """As libzmq does: a file in the way is removed."""
        self.num_binds[name] += 1
        path = self.folder.path / name
        path.unlink(missing_ok=True)
        path.touch()


@pytest.mark.parametrize("removed", ["", "worker.sock", "frontend.sock", "worker.key", "scheduler.lock"])
def test_what_is_removed_of_the_folder_is_made_again_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, removed: str
) -> None:
    bound = Bound(tmp_path / "run")
    folder = bound.folder
    folder.watch()
    assert caplog.messages == []
    path = folder.path / removed
    for number in (1, 2):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        for _ in range(3):
            folder.watch()
        assert len(caplog.messages) == number
        assert caplog.messages[-1].startswith(f"{path} was removed or replaced, and was made again")
        assert {each.name for each in folder.path.iterdir()} == {*SOCKETS, "worker.key", "scheduler.lock"}
        assert folder.path.stat().st_mode & 0o777 == 0o700
        # Workers that have the key keep it, and another scheduler finds the folder taken.
        assert KeyFile(folder.path).read() == folder.worker_key
        with pytest.raises(SettingError, match=rf"another scheduler \(process {os.getpid()}\) holds"):
            RuntimeDir(folder.path)
    # A socket that is there is not bound again: its listener of before would stay open for nothing.
    is_all = not removed
    assert bound.num_binds == {name: 3 if is_all or name == removed else 1 for name in SOCKETS}


def test_a_folder_that_a_worker_or_another_scheduler_made_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bound = Bound(tmp_path / "run")
    folder = bound.folder
    # A worker that starts makes folder and key.
    shutil.rmtree(folder.path)
    folder.path.mkdir(mode=0o700)
    assert KeyFile(folder.path).read() != folder.worker_key
    folder.watch()
    assert KeyFile(folder.path).read() == folder.worker_key
    assert [message.split(" was ")[2].split(":")[0] for message in caplog.messages] == ["made again"]
    # Another scheduler has it: nothing of it is touched.
    shutil.rmtree(folder.path)
    other = Bound(folder.path)
    for _ in range(3):
        folder.watch()
    assert len(caplog.messages) == 2
    assert f"cannot be made again: another scheduler (process {os.getpid()}) holds runtime_dir" in caplog.messages[-1]
    assert bound.num_binds == dict.fromkeys(SOCKETS, 2)
    other.folder.watch()
    assert len(caplog.messages) == 2


def test_a_folder_that_is_removed_for_ever_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bound = Bound(tmp_path / "run")
    for _ in range(100):
        shutil.rmtree(bound.folder.path, ignore_errors=True)
        bound.folder.watch()
    assert len(caplog.messages) == 65
    assert "this happened 64 times; restart the service" in caplog.messages[-1]


def test_a_router_that_is_bound_again_keeps_its_peers_and_gets_new_ones(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    endpoint = f"ipc://{tmp_path}/run/worker.sock"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = RouterLink(context, endpoint, max_frame_bytes=1 << 20)
    dealers: dict[str, zmq.Socket[bytes]] = {}

    def join(name: str) -> None:
        dealers[name] = context.socket(zmq.DEALER)
        dealers[name].setsockopt(zmq.ROUTING_ID, name.encode())
        dealers[name].connect(endpoint)
        dealers[name].send(b"join")
        assert link.socket.poll(10_000)
        assert list(link.receive(1)) == [(name, b"join")]

    join("before")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir(mode=0o700)
    link.bind_again()
    join("after")
    for name in dealers:
        link.send(name, name.encode())
        assert dealers[name].poll(10_000)
        assert dealers[name].recv() == name.encode()
    for dealer in dealers.values():
        dealer.close(0)
    link.close()
    context.term()
