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
from typing import Any, cast

import zmq
import zmq.asyncio
from google.protobuf.message import DecodeError
from tandem.internal.v1 import frontend_pb2
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)

# In frames. The core reads thousands at once; a core that leaves this many unread is gone.
HIGH_WATER_MARK = 65_536
# A ModelState contains a tokenizer.json, which has tens of MiB for large vocabularies.
MAX_FRAME_BYTES = 256 * 1024 * 1024
RECONNECT_SECONDS = 0.1
# The core's limit of a frame from a front end. A larger frame ends the connection and every stream.
MAX_FRAME_TO_CORE_BYTES = 64 * 1024 * 1024

OnMessage = Callable[[frontend_pb2.CoreToFrontend], None]


class CoreMessageTooLargeError(Exception):
    """The message is larger than the core accepts. Nothing was sent."""


class CoreLink:
    """Connects to `endpoint` while `run` runs. `secret` proves to the core that it started this front end."""

    def __init__(self, endpoint: str, secret: bytes = b"") -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._given_up = asyncio.Event()

    def send(self, message: frontend_pb2.FrontendToCore) -> bool:
        """Sends without waiting. Returns False if no core is connected. Raises CoreMessageTooLargeError."""
        if self._socket is None:
            return False
        frame = message.SerializeToString()
        if len(frame) > MAX_FRAME_TO_CORE_BYTES:
            raise CoreMessageTooLargeError(
                f"the message to the core has {len(frame):,} bytes; the limit is {MAX_FRAME_TO_CORE_BYTES:,}"
            )
        # With NOBLOCK the asyncio socket sends before it returns; the future only has the outcome.
        sent = cast(asyncio.Future[Any], self._socket.send(frame, zmq.NOBLOCK))
        if sent.done() and sent.exception() is None:
            return True
        logger.error("the core has not read %d frames; the connection is closed", HIGH_WATER_MARK)
        self._given_up.set()
        return False

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
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"f-{os.getpid()}-{secrets.token_hex(4)}".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(self._endpoint)
        self._socket = socket
        self._given_up.clear()
        self.send(frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello(secret=self._secret)))
        receiver = asyncio.create_task(_receive(socket, on_message))
        ends = [asyncio.create_task(_wait_for_disconnect(monitor)), asyncio.create_task(self._given_up.wait())]
        try:
            await asyncio.wait([receiver, *ends], return_when=asyncio.FIRST_COMPLETED)
            if receiver.done():
                receiver.result()
        finally:
            self._socket = None
            for task in (receiver, *ends):
                task.cancel()
            await asyncio.gather(receiver, *ends, return_exceptions=True)
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)


async def _receive(socket: zmq.asyncio.Socket, on_message: OnMessage) -> None:
    while True:
        frame = await socket.recv()
        # The core sends empty frames to check that the front end is connected.
        if not frame:
            continue
        try:
            message = frontend_pb2.CoreToFrontend.FromString(frame)
        except DecodeError:
            logger.error("dropped a malformed frame of %d bytes from the core", len(frame))
            continue
        on_message(message)


async def _wait_for_disconnect(monitor: zmq.asyncio.Socket) -> None:
    event = parse_monitor_message(await monitor.recv_multipart())
    assert event["event"] == zmq.EVENT_DISCONNECTED
