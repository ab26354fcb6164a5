"""Owns the socket to the core: sends, receives, notices that the core is gone, and starts over. Knows no requests.

A connection is one DEALER with a routing id of its own; its first frame is Hello. When the monitor reports that the
connection ended, what had come has been dealt out (frames come before the end; reading does not pause between them);
the socket is closed with all that was not sent, and a new one takes its place: no frame of an old connection ever
reaches a new core.
"""

import asyncio
import logging
import os
import secrets
from typing import Any, Protocol, cast

import zmq
import zmq.asyncio
from google.protobuf.message import DecodeError
from tandem.internal.v1 import frontend_pb2
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)

# Frames. The core reads thousands at once; one that lets so many lie is gone.
HIGH_WATER_MARK = 65_536
# A ModelState carries a tokenizer.json, tens of MiB in large vocabularies.
MAX_FRAME_BYTES = 256 * 1024 * 1024
RECONNECT_SECONDS = 0.1
# The core's limit of a frame from here; a larger one ends the connection, and with it every stream.
MAX_FRAME_TO_CORE_BYTES = 64 * 1024 * 1024


class CoreMessageTooLargeError(Exception):
    """The message is larger than the core takes. Nothing was sent."""


class CoreListener(Protocol):
    """Whoever acts on what the core says. None of these may wait."""

    def on_message(self, message: frontend_pb2.CoreToFrontend) -> None: ...

    def on_lost(self) -> None: ...


class CoreLink:
    """Connects to `endpoint` for as long as `run` runs. `secret` proves to the core that this is a front end of its."""

    def __init__(self, endpoint: str, secret: bytes = b"") -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._given_up = asyncio.Event()

    def send(self, message: frontend_pb2.FrontendToCore) -> bool:
        """Hands the message over at once; False where there is no core to take it. Never waits.

        Raises CoreMessageTooLargeError.
        """
        if self._socket is None:
            return False
        frame = message.SerializeToString()
        if len(frame) > MAX_FRAME_TO_CORE_BYTES:
            raise CoreMessageTooLargeError(
                f"the message to the core has {len(frame):,} bytes; the limit is {MAX_FRAME_TO_CORE_BYTES:,}"
            )
        # With NOBLOCK the asyncio socket sends before it returns; the future only tells how that went.
        sent = cast(asyncio.Future[Any], self._socket.send(frame, zmq.NOBLOCK))
        if sent.done() and sent.exception() is None:
            return True
        logger.error("the core has left %d frames unread: the connection is given up", HIGH_WATER_MARK)
        self._given_up.set()
        return False

    async def run(self, listener: CoreListener) -> None:
        """Connects, and connects again, until cancelled."""
        try:
            while True:
                await self._connection(listener)
                logger.warning("the core is gone; connecting again")
                listener.on_lost()
                await asyncio.sleep(RECONNECT_SECONDS)
        finally:
            self._context.destroy(linger=0)

    async def _connection(self, listener: CoreListener) -> None:
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
        receiver = asyncio.create_task(self._receive(socket, listener))
        ends = [asyncio.create_task(self._disconnected(monitor)), asyncio.create_task(self._given_up.wait())]
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

    async def _receive(self, socket: zmq.asyncio.Socket, listener: CoreListener) -> None:
        while True:
            self._deal_out(await socket.recv(), listener)

    async def _disconnected(self, monitor: zmq.asyncio.Socket) -> None:
        event = parse_monitor_message(await monitor.recv_multipart())
        assert event["event"] == zmq.EVENT_DISCONNECTED

    def _deal_out(self, frame: bytes, listener: CoreListener) -> None:
        # Empty frames are the core's way to see whether somebody is here.
        if not frame:
            return
        message = frontend_pb2.CoreToFrontend()
        try:
            message.ParseFromString(frame)
        except DecodeError:
            logger.error("dropped a malformed frame of %d bytes from the core", len(frame))
            return
        listener.on_message(message)
