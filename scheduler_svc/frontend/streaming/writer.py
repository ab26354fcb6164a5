"""Owns the writes of one stream: at most one is under way, and the event loop finishes it without a task.

A write that the stream's task awaits wakes the task, and that costs more than the write's own Python. So a write is a
coroutine that runs beside the task (`grpc_tuning/writes.py`). Knows nothing of tokens or of the messages' content.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from scheduler_svc.frontend.grpc_tuning.writes import Run, run_here
from scheduler_svc.frontend.streaming.stream import RequestStream

Begin = Callable[[Any], Coroutine[Any, Any, None]]


class StreamWriter:
    """Writes the messages of `stream` by `write`, a coroutine function that `run` runs; calls `hold` before each."""

    __slots__ = ("_error", "_hold", "_is_writing", "_loop", "_run", "_stream", "_waiter", "_write")

    def __init__(self, stream: RequestStream, write: Begin, hold: Callable[[], None], run: Run = run_here) -> None:
        self._stream = stream
        self._write = write
        self._hold = hold
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._is_writing = False
        # The error of the last write, until it is raised.
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether `begin` may be called: no write is under way, and none has failed."""
        return not self._is_writing and self._error is None

    def fail(self, error: BaseException) -> None:
        """Reports an error to the stream's task: its `wait` raises it."""
        self._error = error
        self._stream.wake()

    def begin(self, message: Any) -> None:
        """Begins a write. `wait` raises its error."""
        assert self.is_idle
        self._stream.blocked_since = self._loop.time()
        self._hold()
        self._is_writing = True
        self._run(self._write(message), self._end)

    async def wait(self) -> None:
        """Waits for the end of the write under way, and raises its error. Only one task may wait."""
        if self._is_writing:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    async def write(self, message: Any) -> None:
        """Writes a message after the one under way, and waits for the end."""
        await self.wait()
        self.begin(message)
        await self.wait()

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self.fail(error)
        self._is_writing = False
        self._stream.blocked_since = 0.0
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
