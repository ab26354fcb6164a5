"""One connection to a scheduler: a DEALER, its limits, and what ends a wait for its frames.

Such are the monitor, which reports when the connection begins and ends, and the signals that ask for a stop, because a
signal does not end a poll. Owns these sockets, and the handlers while in use. A connection never opens again after it
ended, because libzmq does not reconnect a DEALER after a frame above MAXMSGSIZE; the link replaces this object, with a
new routing id each time. Owns, too, the way to a scheduler on another host: the setting `connect`, the worker's CURVE
keys, and why a connection was refused. Knows nothing of messages.
"""

import logging
import os
import re
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.monitor

from tandem_contract.files import (
    HANDSHAKE_MS,
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    SCHEDULER_PUBLIC,
    WORKER_SECRET,
    KeyFileError,
    read_key,
)
from tandem_contract.needed import NeededThread
from tandem_contract.stopping import STOP, STOP_NOW, Asked, StopRequests, stop_signals

log = logging.getLogger(__name__)

HOW_TO_MAKE = "`tandem keys DIR NAME` on the scheduler's host makes keys"
_WILDCARDS = ("0.0.0.0", "[::]", "*")
_ADDRESS = re.compile(r"tcp://(?P<host>[^\s:/]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})")
# The kernel repeats its own attempts after pauses that grow to a minute.
_CONNECT_MS = 1000
# There are a few to a few thousand plans and results per second; a longer queue means that the peer is gone.
HIGH_WATER_MARK = 64
MAX_FRAME_BYTES = 64 << 20
# As numbers, because operators of pyzmq's flags make an enum member in Python at each call.
_READABLE, _AT_ONCE = int(zmq.POLLIN), int(zmq.NOBLOCK)
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@contextmanager
def signals_wake(stop: Callable[[], None]) -> Iterator[socket.socket]:
    """A signal that asks for a stop calls `stop` and makes the yielded socket readable, so that a poll returns.

    A thread hears it also while the main thread loads weights or compiles. Asked to stop now, the process ends at once,
    with the status that a shell gives for that signal.
    """
    (wake, waker), (heard, hears) = socket.socketpair(), socket.socketpair()
    for end in (wake, waker, hears):
        end.setblocking(False)
    thread = NeededThread(target=lambda: _hear(heard, stop, waker), name="signals")
    previous_fd = signal.set_wakeup_fd(hears.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda *_: None) for number in stop_signals()}
    thread.start()
    try:
        yield wake
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number in set(previous) - {STOP, STOP_NOW}:
            signal.signal(number, previous[number])
        hears.close()
        thread.join()
        for end in (wake, waker, heard):
            end.close()


def _hear(heard: socket.socket, stop: Callable[[], None], waker: socket.socket) -> None:
    """Reads the numbers of signals from their socket until its other end is closed."""
    requests = StopRequests()
    while numbers := heard.recv(64):
        for number in sorted(set(numbers) & set(stop_signals())):
            requests.heard(number)
            if requests.asked == Asked.STOP_NOW:
                os._exit(128 + number)
        if requests.announce():
            log.info(
                "stopping: a scheduler that is there moves this worker's requests; a second signal ends it at once"
            )
            stop()
            waker.send(b"\0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """The keys of a connection, Z85."""

    scheduler: bytes
    public: bytes
    secret: bytes = field(repr=False)
    folder: Path

    def configure(self, socket: "zmq.Socket[bytes]") -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.scheduler)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)

    def why_refused(self, *, by_scheduler: bool) -> str:
        """Returns why a handshake failed. `by_scheduler`: it refused this worker's key."""
        if by_scheduler:
            return (
                f"it does not admit this worker's public key {self.public.decode('ascii')}; put the key into a file "
                "NAME.public of its folder admitted/"
            )
        return (
            f"the handshake failed: {self.folder / SCHEDULER_PUBLIC} may be the key of another scheduler, or the port "
            "that of another program"
        )


def check_address(connect: str) -> None:
    """Raises ValueError unless the address is tcp://HOST:PORT."""
    matched = _ADDRESS.fullmatch(connect)
    if matched is None or not 0 < int(matched["port"]) < 1 << 16:
        raise ValueError(f"connect is {connect}; it must be tcp://HOST:PORT with a port from 1 to 65535")
    if matched["host"] in _WILDCARDS:
        raise ValueError(
            f"connect is {connect}, every address of a machine; name one at which the scheduler listens, such as "
            f"tcp://127.0.0.1:{matched['port']} on this machine"
        )


def read_keys(folder: Path | None, connect: str) -> CurveKeys:
    """The keys in the folder. Raises ValueError."""
    if folder is None:
        raise ValueError(f"connect is {connect} and keys is not set; over TCP a worker needs keys: {HOW_TO_MAKE}")
    try:
        secret = read_key(folder / WORKER_SECRET, is_secret=True)
        scheduler = read_key(folder / SCHEDULER_PUBLIC, is_secret=False)
    except KeyFileError as error:
        raise ValueError(f"keys: {error}; {HOW_TO_MAKE}") from None
    return CurveKeys(scheduler=scheduler, public=zmq.curve_public(secret), secret=secret, folder=folder)


class Connection:
    """Connects at once, and retries until a scheduler answers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve: CurveKeys | None = None) -> None:
        """curve: the keys for a scheduler on another host."""
        self._curve = curve
        self.socket = context.socket(zmq.DEALER)
        host = "" if curve is None else f"{socket.gethostname()[:64]}-"
        self.socket.setsockopt(zmq.ROUTING_ID, f"w-{host}{os.getpid()}-{secrets.token_hex(4)}".encode())
        if curve is not None:
            curve.configure(self.socket)
            # Not for names: libzmq would try the first address alone, which is ::1 for localhost.
            self.socket.setsockopt(zmq.IPV6, "[" in endpoint)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # Without a scheduler nothing is queued, because the next one must not read frames for the previous one.
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKES
        )
        # Polled instead of the monitor's socket, for which libzmq makes additional system calls at every poll.
        self.monitor_fd = int(self.monitor.getsockopt(zmq.FD))
        # Whether a scheduler is connected, and whether the connection has ended.
        self.is_open, self.has_ended = False, False
        # Why the scheduler and the worker did not agree on a connection.
        self.refusal = ""
        self.socket.connect(endpoint)
        # The descriptor becomes readable only after the monitor was once read until it was empty.
        self.read_monitor()

    def read_monitor(self) -> None:
        """Reads the monitor's events; cheap if there are none."""
        while int(self.monitor.getsockopt(zmq.EVENTS)) & _READABLE:
            event = zmq.utils.monitor.recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_open = True
                continue
            if self._curve is not None and not self.is_open and not self.refusal:
                self.refusal = self._curve.why_refused(by_scheduler=event == zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            self.is_open, self.has_ended = False, True

    def poller(self, wake: socket.socket) -> zmq.Poller:
        """A poller that wakes for frames, for the monitor's events, and for `wake`."""
        poller = zmq.Poller()
        for readable in (self.socket, self.monitor_fd, wake):
            poller.register(readable, zmq.POLLIN)
        return poller

    def receive(self) -> bytes | None:
        """Returns the next frame, or None without waiting."""
        # Cheaper than the exception of a receive from an empty socket.
        if not int(self.socket.getsockopt(zmq.EVENTS)) & _READABLE:
            return None
        return self.socket.recv(_AT_ONCE)

    def send(self, frame: bytes) -> bool:
        """Returns False without a scheduler that reads; the monitor or a Rejoin reports that later."""
        try:
            self.socket.send(frame, _AT_ONCE)
        except zmq.Again:
            return False
        return True

    def close(self, *, linger_ms: int) -> None:
        """Closes both sockets; unsent frames have `linger_ms` to leave."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
