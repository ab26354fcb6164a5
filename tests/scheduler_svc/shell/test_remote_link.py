"""The link to workers on other hosts, on real sockets: admitted and removed keys, strangers, lost connections."""

import logging
import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.utils.monitor

from scheduler_svc.remote import ADMITTED, RemoteListener, make
from scheduler_svc.shell.inbound import Inbound
from scheduler_svc.shell.links import PeerLostError, RemoteLink, RouterLink, link_of, with_remote
from scheduler_svc.shell.loop import Loop
from tandem_contract.settings import SettingError
from tests.rigs.waiting import TIMEOUT_SECONDS, until

PEERS = ["w-1@far", "w-2@other"]


class Site:
    """A scheduler's link and workers that connect to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make(folder, ["far", "other"])
        self.listener = RemoteListener("tcp://127.0.0.1:0", folder)
        self.listener.start()
        self.link = RemoteLink(self.listener, max_frame_bytes=1 << 20)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.opened = list[zmq.Socket[bytes]]()

    def dealer(self) -> "zmq.Socket[bytes]":
        dealer = self.context.socket(zmq.DEALER)
        self.opened.append(dealer)
        return dealer

    def monitor(self, of: "zmq.Socket[bytes]", events: int) -> "zmq.Socket[bytes]":
        monitor = of.get_monitor_socket(events)
        self.opened.append(monitor)
        return monitor

    def worker(self, name: str, key: str) -> "zmq.Socket[bytes]":
        dealer = self.dealer()
        secret = (self.folder / "workers" / key / "worker.secret").read_bytes().strip()
        dealer.curve_serverkey = (self.folder / "scheduler.public").read_bytes().strip()
        dealer.curve_secretkey, dealer.curve_publickey = secret, zmq.curve_public(secret)
        dealer.setsockopt(zmq.ROUTING_ID, name.encode())
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self.link.endpoint)
        return dealer

    def two(self) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
        """The workers w-1@far and w-2@other, which have said hello."""
        worker, other = self.worker("w-1", "far"), self.worker("w-2", "other")
        for each in (worker, other):
            each.send(b"hello")
        assert sorted(peer for peer, _ in self.frames(2)) == PEERS
        return worker, other

    def frames(self, count: int) -> list[tuple[str, bytes | None]]:
        found = list[tuple[str, bytes | None]]()
        until(lambda: found.extend(self.link.receive(count)) or len(found) >= count)
        return found

    @property
    def port(self) -> int:
        return int(self.link.endpoint.rpartition(":")[2])


def is_routable(link: RemoteLink, peer: str) -> bool:
    try:
        link.send(peer, b"")
    except PeerLostError:
        return False
    return True


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "keys")
    yield site
    site.link.close()
    for each in site.opened:
        each.close(0)
    site.context.destroy(linger=0)
    site.listener.context.term()


def test_a_worker_is_named_by_its_key_and_gets_answers(site: Site) -> None:
    worker = site.worker("w-1", "far")
    worker.send(b"hello")
    assert site.frames(1) == [("w-1@far", b"hello")]
    assert site.link.host_of("w-1@far") == "far"
    site.link.send("w-1@far", b"answer")
    assert worker.poll(1000 * TIMEOUT_SECONDS) and worker.recv() == b"answer"
    worker.send_multipart([b"two", b"parts"])
    assert site.frames(1) == [("w-1@far", None)]


def test_a_connection_that_ends_is_known_by_name_even_if_it_is_there_again(site: Site) -> None:
    worker, _ = site.two()
    worker.close()
    until(site.link.has_disconnects)
    # libzmq frees the routing id when the socket is used; until then it would ignore the new connection.
    until(lambda: not list(site.link.receive(1)) and not is_routable(site.link, "w-1@far"))
    again = site.worker("w-1", "far")
    again.send(b"hello")
    assert site.frames(1) == [("w-1@far", b"hello")]
    assert site.link.unreachable(PEERS) == [("w-1@far", "its connection ended")]
    assert site.link.unreachable(PEERS) == []
    # It may have the same descriptor as before.
    again.close()
    until(site.link.has_disconnects)
    assert ("w-1@far", "its connection ended") in site.link.unreachable(PEERS)


def test_a_removed_key_ends_its_connection_and_no_other(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.core")
    worker, other = site.two()
    monitor = site.monitor(worker, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    assert site.link.check(PEERS, 0.0) == []
    public = site.folder / ADMITTED / "far.public"
    public.rename(site.folder / "away")
    lost = list[tuple[str, str]]()
    until(lambda: lost.extend(site.link.check(PEERS, 0.0)) or lost)
    assert lost == [("w-1@far", "its key is no longer admitted")]
    # libzmq connects again by itself and is refused.
    events = [zmq.utils.monitor.recv_monitor_message(monitor)["event"] for _ in range(2)]
    assert events == [zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_AUTH]
    other.send(b"still here")
    assert site.frames(1) == [("w-2@other", b"still here")]
    until(site.link.has_disconnects)
    until(lambda: not is_routable(site.link, "w-1@far"))
    assert "refused a worker at 127.0.0.1: its public key " in caplog.text


def test_a_frame_with_a_removed_key_is_dropped_and_ends_its_connection(site: Site) -> None:
    worker = site.worker("w-1", "far")
    monitor = site.monitor(worker, zmq.EVENT_DISCONNECTED)
    worker.send(b"hello")
    assert site.frames(1) == [("w-1@far", b"hello")]
    # The core has no lane of this worker, so nothing is known of its connection.
    assert site.link.check([], 0.0) == []
    (site.folder / ADMITTED / "far.public").unlink()
    until(lambda: "far" not in site.listener.admitted.names.values())
    worker.send(b"hello again")
    until(lambda: not list(site.link.receive(8)) and monitor.poll(1))


def test_strangers_cost_one_line_and_no_probe(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(30):
        with socket.create_connection(("127.0.0.1", site.port), 10) as stranger:
            stranger.sendall(os.urandom(64 + number))
    plain = site.dealer()
    plain.connect(site.link.endpoint)
    plain.send(b"without keys")
    seen: list[bool] = []
    # The descriptor of a connection is reported when libzmq has closed it.
    until(lambda: seen.append(site.link.has_disconnects()) or site.link._num_strangers >= 30)
    assert not any(seen)
    assert list(site.link.receive(8)) == []
    site.link.check([], 0.0)
    site.link.check([], 1.0)
    [line] = [record.getMessage() for record in caplog.records if "ended before a worker joined" in record.message]
    assert line.endswith(f" connections to {site.link.endpoint} ended before a worker joined")


def test_a_taken_port_is_refused_and_leaves_nothing_open(site: Site) -> None:
    listener = RemoteListener(site.link.endpoint, site.folder)
    with ExitStack() as stack, pytest.raises(SettingError, match="cannot be bound: Address already in use"):
        with_remote(site.link, listener, max_frame_bytes=1 << 20, stack=stack)


def test_a_frame_above_the_limit_ends_its_connection_alone(site: Site) -> None:
    worker, other = site.two()
    worker.send(bytes(1 << 21))
    until(site.link.has_disconnects)
    assert site.link.unreachable(PEERS) == [("w-1@far", "its connection ended")]
    other.send(bytes(1 << 19))
    assert site.frames(1) == [("w-2@other", bytes(1 << 19))]


def test_the_log_names_few_of_many_refused_keys(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    public = (site.folder / "scheduler.public").read_bytes().strip()
    monitors = list[zmq.Socket[bytes]]()
    for _ in range(20):
        dealer = site.dealer()
        dealer.curve_serverkey = public
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        monitors.append(site.monitor(dealer, zmq.EVENT_HANDSHAKE_FAILED_AUTH))
        dealer.connect(site.link.endpoint)
    assert all(monitor.poll(1000 * TIMEOUT_SECONDS) for monitor in monitors)
    assert caplog.text.count("is not in the folder of admitted keys") == 8


def test_local_and_remote_workers_are_kept_apart(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"ipc://{tmp_path}/w"
    own = RouterLink(site.context, endpoint, max_frame_bytes=1 << 20)
    links = own, site.link
    nothing: Any = SimpleNamespace(receive=lambda limit: (), unreachable=lambda peers: [], monitor_fds=())
    dispatcher: Any = SimpleNamespace(workers=links, frontends=nothing, lost_peers=deque())
    core: Any = SimpleNamespace(lanes=("w-1", "w-1@far", "gone"), frontends=())
    found = list[tuple[RouterLink, str, bytes | None]]()
    monkeypatch.setattr(Inbound, "_from_worker", lambda _, *arrived: found.append(arrived) or [])
    inbound = Inbound(
        core=core, handle=_none, dispatcher=dispatcher, credentials=nothing, on_frontend_lost=_none, tokens=None
    )
    local, forger = site.dealer(), site.dealer()
    for dealer, name in ((local, b"w-1"), (forger, b"w-1@far")):
        dealer.setsockopt(zmq.ROUTING_ID, name)
        dealer.connect(endpoint)
        dealer.send(b"here")
    remote = site.worker("w-1", "far")
    remote.send(b"there")
    until(lambda: inbound.receive() or len(found) >= 2)
    assert sorted(found, key=lambda arrived: arrived[1]) == [
        (own, "w-1", b"here"),
        (site.link, "w-1@far", b"there"),
    ]
    assert [link_of(peer, links).host_of(peer) for peer in ("w-1", "w-1@far")] == ["", "far"]
    link_of("w-1", links).send("w-1", b"to the local one")
    link_of("w-1@far", links).send("w-1@far", b"to the remote one")
    assert local.poll(1000 * TIMEOUT_SECONDS) and local.recv() == b"to the local one"
    assert remote.poll(1000 * TIMEOUT_SECONDS) and remote.recv() == b"to the remote one"
    assert not forger.poll(0)
    loop: Any = SimpleNamespace(
        _links=(*links, nothing), _workers=links, _frontends=nothing, _core=core, _dispatcher=dispatcher,
        _probe_at=0.0, _probe_until=2.0,
    )  # fmt: skip
    Loop._find_lost_peers(loop, (), 1.0)
    assert list(dispatcher.lost_peers) == [(own, "gone", "its connection is gone")]
    own.close()


def _none(*_: object) -> Any:
    return []
