"""Owns the writes of one stream: at most one is under way, and the event loop finishes it without a task.

A write that a task awaits wakes the task, and that costs more than the write's own Python. So a write is a coroutine
that this module runs itself: it begins in the caller's turn, and every future that it waits for continues it. Knows
nothing of tokens or of the messages' content.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from scheduler_svc.frontend.streaming.stream import RequestStream

Begin = Callable[[Any], Coroutine[Any, Any, None]]


class StreamWriter:
    """Writes the messages of `stream` by `write`, a coroutine function. Calls `hold` before each write."""

    __slots__ = ("_coroutine", "_error", "_hold", "_loop", "_stream", "_waiter", "_write")

    def __init__(self, stream: RequestStream, write: Begin, hold: Callable[[], None]) -> None:
        self._stream = stream
        self._write = write
        self._hold = hold
        self._loop = asyncio.get_running_loop()
        # The write under way.
        self._coroutine: Coroutine[Any, Any, None] | None = None
        # The error of the last write, until it is raised.
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether `begin` may be called: no write is under way, and none has failed."""
        return self._coroutine is None and self._error is None

    def fail(self, error: BaseException) -> None:
        """Reports an error to the stream's task: its `wait` raises it."""
        self._error = error
        self._stream.wake()

    def begin(self, message: Any) -> None:
        """Begins a write. `wait` raises its error."""
        assert self.is_idle
        self._stream.blocked_since = self._loop.time()
        self._hold()
        self._coroutine = self._write(message)
        self._continue()

    async def wait(self) -> None:
        """Waits for the end of the write under way, and raises its error. Only one task may wait."""
        if self._coroutine is not None:
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

    def _continue(self, _: object = None) -> None:
        """Runs the coroutine to the next future that it waits for, or to its end."""
        assert self._coroutine is not None
        try:
            future = self._coroutine.send(None)
        except StopIteration:
            pass
        except (Exception, asyncio.CancelledError) as error:
            self.fail(error)
        else:
            # As a task does: the future then knows that it is waited for.
            future._asyncio_future_blocking = False
            future.add_done_callback(self._continue)
            return
        self._coroutine = None
        self._stream.blocked_since = 0.0
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
