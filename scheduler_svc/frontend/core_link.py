"""Owns the socket to the core: sends, receives, notices that the core is gone, and reconnects. Knows no requests.

A connection is one DEALER socket with its own routing id; its first frame is Hello. When the monitor reports the end of
the connection, every received frame has been handled: frames come before the end, and reading does not pause between
them. The link then closes the socket with all unsent frames and opens a new one, so no frame of an old connection ever
reaches a new core.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable

import zmq
from google.protobuf.message import DecodeError
from tandem.internal.v1 import frontend_pb2
from zmq.utils.monitor import parse_monitor_message

from tandem_contract.plural import numbered

logger = logging.getLogger(__name__)

# In frames. The core reads thousands at once; a core that leaves this many unread is gone.
HIGH_WATER_MARK = 65_536
# A ModelState contains a tokenizer.json, which has tens of MiB for large vocabularies.
MAX_FRAME_BYTES = 256 * 1024 * 1024
RECONNECT_SECONDS = 0.1
# The core's limit of a frame from a front end. A larger frame ends the connection and every stream.
MAX_FRAME_TO_CORE_BYTES = 64 * 1024 * 1024

_POLLIN = int(zmq.POLLIN)

OnMessage = Callable[[frontend_pb2.CoreToFrontend], None]


class CoreMessageTooLargeError(Exception):
    """The message is larger than the core accepts. Nothing was sent."""


class CoreLink:
    """Connects to `endpoint` while `run` runs. `secret` proves to the core that it started this front end."""

    def __init__(self, endpoint: str, secret: bytes = b"") -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection: _Connection | None = None

    def send(self, message: frontend_pb2.FrontendToCore) -> bool:
        """Sends without waiting. Returns False if no core is connected. Raises CoreMessageTooLargeError."""
        if self._connection is None:
            return False
        frame = message.SerializeToString()
        if len(frame) > MAX_FRAME_TO_CORE_BYTES:
            raise CoreMessageTooLargeError(
                f"the message to the core has {len(frame):,} bytes; the limit is {MAX_FRAME_TO_CORE_BYTES:,}"
            )
        return self._connection.send(frame)

    async def run(self, on_message: OnMessage, on_lost: Callable[[], None]) -> None:
        """Connects, and reconnects, until cancelled. Calls `on_lost` when a core is gone. Neither callable may wait."""
        try:
            while True:
                await self._run_connection(on_message)
                logger.warning("the connection to the core ended; connecting again")
                on_lost()
                await asyncio.sleep(RECONNECT_SECONDS)
        finally:
            self._context.destroy(linger=0)

    async def _run_connection(self, on_message: OnMessage) -> None:
        connection = _Connection(self._context, self._endpoint, on_message)
        self._connection = connection
        try:
            self.send(frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello(secret=self._secret)))
            await connection.ended.wait()
        finally:
            self._connection = None
            connection.close()
        if connection.failure is not None:
            raise connection.failure


class _Connection:
    """One DEALER socket and its monitor, read by callbacks of the running event loop until `ended` is set.

    ZeroMQ's file becomes readable when a socket's state may have changed, and stays so only until the socket is used,
    also by a send. So both callbacks read everything, and a send is followed by a look at what may be read.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, on_message: OnMessage) -> None:
        self.ended = asyncio.Event()
        # What `on_message` raised.
        self.failure: Exception | None = None
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"f-{os.getpid()}-{secrets.token_hex(4)}".encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self._loop.add_reader(int(self._socket.getsockopt(zmq.FD)), self._read)
        self._loop.add_reader(int(self._monitor.getsockopt(zmq.FD)), self._read_monitor)
        self._loop.call_soon(self._read)
        self._loop.call_soon(self._read_monitor)

    def send(self, frame: bytes) -> bool:
        """Sends without waiting. Returns False, and ends the connection, if the queue to the core is full."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            logger.error("the core has not read %d frames; the connection is closed", HIGH_WATER_MARK)
            self.ended.set()
            return False
        if _is_readable(self._socket):
            self._loop.call_soon(self._read)
        return True

    def close(self) -> None:
        """Closes the socket with all unsent frames."""
        self.ended.set()
        for one in (self._socket, self._monitor):
            self._loop.remove_reader(int(one.getsockopt(zmq.FD)))
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _read(self) -> None:
        while not self.ended.is_set() and _is_readable(self._socket):
            frame = self._socket.recv(zmq.NOBLOCK)
            # The core sends empty frames to check that the front end is connected.
            if not frame:
                continue
            try:
                message = frontend_pb2.CoreToFrontend.FromString(frame)
            except DecodeError:
                logger.error("dropped a malformed frame of %s from the core", numbered(len(frame), "byte"))
                continue
            try:
                self._on_message(message)
            except Exception as error:
                self.failure = error
                self.ended.set()

    def _read_monitor(self) -> None:
        """Ends the connection if the core is gone, after every frame of it."""
        if not self.ended.is_set() and _is_readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            assert event["event"] == zmq.EVENT_DISCONNECTED
            self._read()
            self.ended.set()


def _is_readable(one: zmq.Socket[bytes]) -> bool:
    # As a number, because flags are slow and this is asked for every frame.
    return bool(int(one.getsockopt(zmq.EVENTS)) & _POLLIN)
