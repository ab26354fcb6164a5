"""An address that is held for front ends: they share it, and other programs can neither bind nor share it."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from scheduler_svc.processes import address
from scheduler_svc.processes.address import HeldAddress, ListenError, taken
from tests.rigs.waiting import TIMEOUT_SECONDS


@contextmanager
def bound(port: int, *, share: bool, listen: bool = True, address: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A socket as another program or a front end binds it: like gRPC, with SO_REUSEADDR."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(share))
        other.bind((address, port))
        if listen:
            other.listen()
        yield other


@pytest.fixture
def held() -> Iterator[HeldAddress]:
    address = HeldAddress("127.0.0.1:0")
    yield address
    address.close()


def port_of(address: HeldAddress) -> int:
    return int(address.listen.rpartition(":")[2])


def test_front_ends_share_the_address_and_get_every_connection(held: HeldAddress) -> None:
    port = port_of(held)
    # In place of port 0.
    assert held.listen == f"127.0.0.1:{port}" and port > 0
    with bound(port, share=True) as first, bound(port, share=True) as second, ExitStack() as stack:
        for listener in (first, second):
            listener.setblocking(False)
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS))
        counts: list[int] = []
        for listener in (first, second):
            counts.append(0)
            while True:
                try:
                    connection, _ = listener.accept()
                except BlockingIOError:
                    break
                connection.close()
                counts[-1] += 1
        # No connection went to the held socket, and all 64 go to one front end once in 2^63 runs.
        assert sum(counts) == 64
        assert min(counts) > 0


def test_a_program_that_shares_ports_is_refused_after_sharing(held: HeldAddress) -> None:
    port = port_of(held)
    with bound(port, share=True) as front_end:
        held.share(is_on=False)
        for address in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(OSError, match="in use"), bound(port, share=True, address=address):
                pass
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS):
            front_end.accept()[0].close()
    # It is refused also while no front end runs.
    with pytest.raises(OSError, match="in use"), bound(port, share=True):
        pass
    held.share(is_on=True)
    with bound(port, share=True), pytest.raises(OSError, match="in use"), bound(port, share=False):
        pass


def test_a_held_address_refuses_connections_before_a_front_end_listens(held: HeldAddress) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port_of(held)), timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("share", [False, True])
def test_holding_a_port_that_another_program_uses_fails(share: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        bound(port, share=share),
        pytest.raises(ListenError, match=f"the port is taken.* cannot listen on 127.0.0.1:{port}$"),
    ):
        HeldAddress(f"127.0.0.1:{port}")


@pytest.mark.parametrize("num_listening", [0, 1])
def test_a_second_service_cannot_hold_the_same_address(held: HeldAddress, num_listening: int) -> None:
    with ExitStack() as stack:
        for _ in range(num_listening):
            stack.enter_context(bound(port_of(held), share=True))
        with pytest.raises(ListenError, match="taken"):
            HeldAddress(held.listen)
    # The same is true while all front ends are dead and are restarted.
    with pytest.raises(ListenError, match="taken"):
        HeldAddress(held.listen)


@pytest.mark.parametrize("listen", [False, True])
def test_a_program_that_does_not_share_ports_is_refused(held: HeldAddress, listen: bool) -> None:
    with pytest.raises(OSError, match="in use"), bound(port_of(held), share=False, listen=listen):
        pass


def test_an_address_with_old_connections_can_be_held() -> None:
    """A service that closed its connections and ended can be started again at once."""
    with bound(0, share=True) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS) as client:
            connection, _ = listener.accept()
            connection.close()
            assert client.recv(1) == b""
    with pytest.raises(OSError, match="in use"), socket.socket() as plain:
        plain.bind(("127.0.0.1", port))
    HeldAddress(f"127.0.0.1:{port}").close()


def test_the_address_is_free_after_close() -> None:
    first = HeldAddress("127.0.0.1:0")
    first.close()
    HeldAddress(first.listen).close()


def test_localhost_binds_every_address_of_that_name() -> None:
    address = HeldAddress("localhost:0")
    with pytest.raises(OSError, match="in use"), bound(port_of(address), share=False):
        pass
    address.close()


@pytest.mark.parametrize(("code", "reason"), [(errno.EADDRINUSE, "the port is taken"), (errno.EMFILE, "Too many open")])
def test_the_message_about_a_failed_bind_names_the_cause(code: int, reason: str) -> None:
    message = str(taken("127.0.0.1:1", OSError(code, os.strerror(code))))
    assert message.startswith(reason)
    assert message.endswith("cannot listen on 127.0.0.1:1")


def test_outside_linux_an_address_is_checked_and_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "CAN_SHARE", False)
    checked = HeldAddress("127.0.0.1:0")
    checked.share(is_on=False)
    with bound(port_of(checked), share=False) as other, pytest.raises(ListenError, match="the port is taken"):
        HeldAddress(f"127.0.0.1:{other.getsockname()[1]}")
    with pytest.raises(ListenError, match="on Linux only"):
        HeldAddress("127.0.0.1:0", num_sharing=2)
