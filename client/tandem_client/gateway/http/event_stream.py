"""Streams of server-sent events, and what keeps a silent one alive. `protocol` ends one whose reader stalls.

One clock serves all streams, so that a message costs none.
"""

import asyncio
from collections.abc import Mapping
from typing import NoReturn

from starlette.types import Send

# nginx would keep events back.
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no",
}  # fmt: skip
# Proxies cut streams that are silent for a minute or less. Clients ignore lines that begin with a colon.
PING = b": ping\n\n"
_TICKS_PER_PING = 3


class EventStream:
    """One answer."""

    __slots__ = ("_has_sent", "_is_over", "_is_writing", "_quiet_ticks", "_send")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_sent = self._is_writing = self._is_over = False
        self._quiet_ticks = 0

    async def open(self, headers: Mapping[str, str]) -> None:
        """Sends the headers, with those of all streams."""
        lines = [(name.encode(), value.encode()) for name, value in (_HEADERS | {**headers}).items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": lines})

    async def write(self, data: bytes) -> None:
        """Sends events. Waits while the reader is slow."""
        self._is_writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_writing = False
        self._has_sent = True

    async def close(self, data: bytes) -> None:
        """Sends the last events."""
        self._is_over = True
        await self._send({"type": "http.response.body", "body": data})

    async def ping(self) -> None:
        """Sends a ping, unless the stream has ended since it was due."""
        if not self._is_over:
            await self.write(PING)

    def tick(self) -> bool:
        """Notes that time has passed. Returns whether a ping is due."""
        if self._has_sent:
            self._has_sent = False
            self._quiet_ticks = 0
        elif not self._is_writing:
            self._quiet_ticks += 1
            if self._quiet_ticks >= _TICKS_PER_PING:
                self._quiet_ticks = 0
                return True
        return False


class Pulse:
    """The clock of all open streams."""

    def __init__(self, ping_seconds: float) -> None:
        """`ping_seconds`: of silence, after which a stream gets a ping."""
        self._streams: dict[EventStream, None] = {}
        self._tick_seconds = ping_seconds / _TICKS_PER_PING
        self._pings: set[asyncio.Task[None]] = set()

    def add(self, stream: EventStream) -> None:
        """Looks after a stream."""
        self._streams[stream] = None

    def remove(self, stream: EventStream) -> None:
        """Looks after it no more."""
        self._streams.pop(stream, None)

    async def run(self) -> NoReturn:
        """Ticks for ever."""
        while True:
            await asyncio.sleep(self._tick_seconds)
            for stream in list(self._streams):
                if stream.tick():
                    task = asyncio.create_task(stream.ping())
                    self._pings.add(task)
                    task.add_done_callback(self._pings.discard)
