"""The sockets of a group on several hosts, over the loopback address: which peers get frames, and which are refused."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from gpu_worker.group.wires import Wires, name_of
from gpu_worker.link.connection import CurveKeys, read_keys
from gpu_worker.process.ranks import Ranks
from tandem_contract.files import own_runtime_dir
from tandem_contract.settings import SettingError
from tests.gpu_worker.link.test_remote import make_keys
from tests.rigs.waiting import TIMEOUT_SECONDS

# Ranks 0 and 1 are on one host, 2 and 3 on another.
RANKS = [Ranks(rank=rank, size=4, local_rank=rank % 2, local_size=2) for rank in range(4)]
WAIT_MS = 1000 * TIMEOUT_SECONDS
SILENT_MS = 300


class Meeting:
    """Stands for the collective calls of some ranks, each in a thread."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_SECONDS)
        self._said: dict[int, list[float]] = {}

    def of(self, rank: int) -> "Voice":
        return Voice(self, rank)

    def all_of(self, rank: int, values: Sequence[float]) -> dict[int, list[float]]:
        self._said[rank] = list(values)
        self._barrier.wait()
        said = dict(self._said)
        self._barrier.wait()
        return said


class Voice:
    """One rank's `Together`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def least(self, values: list[int]) -> list[int]:
        said = self._meeting.all_of(self._rank, values)
        return [int(min(each)) for each in zip(*said.values(), strict=True)]

    def of_leader(self, value: float) -> float:
        return self._meeting.all_of(self._rank, [value])[0][0]


@pytest.fixture(autouse=True)
def leader_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture
def keys(tmp_path: Path) -> CurveKeys:
    return read_keys(make_keys(tmp_path / "keys", zmq.curve_keypair()[0]), "tcp://h:1")


def on_all(make: Callable[[Ranks, Voice], Wires]) -> dict[int, Wires | Exception]:
    """What each rank gets, in a thread of its own."""
    meeting = Meeting(len(RANKS))

    def run(each: Ranks) -> Wires | Exception:
        try:
            return make(each, meeting.of(each.rank))
        except SettingError as error:
            return error

    with ThreadPoolExecutor(len(RANKS)) as pool:
        return dict(enumerate(pool.map(run, RANKS)))


def close(found: dict[int, Wires | Exception]) -> None:
    for each in found.values():
        if isinstance(each, Wires):
            each.frames.close(0)
            each.signs.close(0)
            each.close()


def test_frames_reach_ranks_of_this_host_over_ipc_and_of_others_over_tcp(tmp_path: Path, keys: CurveKeys) -> None:
    found = on_all(lambda ranks, voice: Wires(ranks, voice, tmp_path, "g", keys=keys))
    wires = [found[rank] for rank in range(4)]
    assert all(isinstance(each, Wires) for each in wires)
    for purpose in ("frames", "signs"):
        leader, *others = (getattr(each, purpose) for each in wires)
        for other in others:
            other.send(b"hello")
        assert leader.poll(WAIT_MS)
        assert sorted(leader.recv_multipart() for _ in others) == [[name_of(rank), b"hello"] for rank in (1, 2, 3)]
        ends = [other.getsockopt_string(zmq.LAST_ENDPOINT).split(":")[0] for other in others]
        assert ends == ["ipc", "tcp", "tcp"]
        assert [other.getsockopt(zmq.MECHANISM) for other in others] == [zmq.NULL, zmq.CURVE, zmq.CURVE]
        for rank, other in enumerate(others, 1):
            leader.send_multipart([name_of(rank), b"%d" % rank])
            assert other.poll(WAIT_MS) and other.recv() == b"%d" % rank
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.sock")} == {0o600}
    close(found)
    assert not list(tmp_path.glob("*.sock"))


@pytest.mark.parametrize("stranger", ["another key", "no key"])
def test_a_stranger_who_knows_the_address_and_the_public_key_reaches_nobody(
    stranger: str, tmp_path: Path, keys: CurveKeys, caplog: pytest.LogCaptureFixture
) -> None:
    found = on_all(lambda ranks, voice: Wires(ranks, voice, tmp_path, "g", keys=keys))
    [leader, far] = (found[rank] for rank in (0, 3))
    assert isinstance(leader, Wires) and isinstance(far, Wires)
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        public, secret = zmq.curve_keypair()
        if stranger == "another key":
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.connect(far.frames.getsockopt_string(zmq.LAST_ENDPOINT))
        socket.send(b"hello")
        assert not leader.frames.poll(SILENT_MS)
    close(found)
    refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert bool(refused) == (stranger == "another key")
    assert all(public.decode() in line for line in refused)


def test_hosts_with_different_keys_or_models_are_refused_on_each(tmp_path: Path, keys: CurveKeys) -> None:
    other = read_keys(make_keys(tmp_path / "other", zmq.curve_keypair()[0]), "tcp://h:1")

    def with_keys(ranks: Ranks, voice: Voice) -> Wires:
        return Wires(ranks, voice, tmp_path, "g", keys=keys if ranks.rank < 2 else other)

    def with_models(ranks: Ranks, voice: Voice) -> Wires:
        return Wires(ranks, voice, tmp_path, "g", keys=keys, identity=f"model {ranks.rank // 2}")

    for make, here in ((with_keys, [str(keys.folder), str(other.folder)]), (with_models, ["model 0", "model 1"])):
        found = on_all(make)
        for rank, error in found.items():
            assert isinstance(error, SettingError)
            assert f"do not have the same one (here {here[rank // 2]})" in str(error)


@pytest.mark.parametrize("group", ["-tandem-4194304", "29500-hosts-" + "a long name " * 9, "29500-hosts-\udcff"])
def test_sockets_fit_into_every_runtime_folder_that_is_short_enough(group: str, tmp_path: Path) -> None:
    # With /frontend.sock, the name that is checked, it has 107 bytes.
    folder = tmp_path / ("x" * (92 - len(str(tmp_path))))
    own_runtime_dir(folder)
    pair = [Ranks(rank=rank, size=2, local_rank=rank, local_size=2) for rank in (0, 1)]
    leader, follower = (Wires(ranks, Meeting(2).of(0), folder, group) for ranks in pair)
    for purpose in ("frames", "signs"):
        getattr(follower, purpose).send(b"hello")
        assert getattr(leader, purpose).poll(WAIT_MS)
    other = Wires(pair[0], Meeting(2).of(0), folder, f"{group}2")
    assert len(list(folder.glob("*.sock"))) == 4
    close({0: leader, 1: follower, 2: other})


def test_a_group_on_one_host_agrees_on_nothing_and_has_no_port(tmp_path: Path) -> None:
    pair = [Ranks(rank=rank, size=2, local_rank=rank, local_size=2) for rank in (0, 1)]
    os.environ.pop("MASTER_ADDR")
    # A rank that waited for the other one would wait for ever.
    voice = Meeting(2).of(0)
    leader, follower = (Wires(ranks, voice, tmp_path, "g") for ranks in pair)
    assert leader.frames.getsockopt_string(zmq.LAST_ENDPOINT).startswith("ipc:")
    follower.frames.send(b"hello")
    assert leader.frames.poll(WAIT_MS) and leader.frames.recv_multipart() == [name_of(1), b"hello"]
    close({0: leader, 1: follower})
