"""Writes of one stream run without a task: one at a time, with their errors raised in the stream's own task."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from scheduler_svc.frontend.grpc_tuning.event_loop import run_as_task, run_here
from scheduler_svc.frontend.streaming.sender import StreamWriter
from scheduler_svc.frontend.streaming.stream import RequestStream


class Call:
    """A call; each of its writes waits for two futures. `finish` ends the oldest one that waits."""

    def __init__(self, run: Any = run_here) -> None:
        self.written: list[str] = []
        self.held: list[str] = []
        self._futures: list[asyncio.Future[None]] = []
        self.stream = RequestStream(None)
        self.writer = StreamWriter(self.stream, self._write, lambda: self.held.append("held"), run)

    async def _write(self, message: str) -> None:
        for _ in range(2):
            future = asyncio.get_running_loop().create_future()
            self._futures.append(future)
            await future
        self.written.append(message)

    async def finish(self, error: BaseException | None = None) -> None:
        for _ in range(1 if error else 2):
            # A task begins in the next turn.
            while not self._futures:
                await asyncio.sleep(0)
            future = self._futures.pop(0)
            if error:
                future.set_exception(error)
            else:
                future.set_result(None)
            await asyncio.sleep(0)
        while not error and not self.writer.is_idle and not self._futures:
            await asyncio.sleep(0)


async def test_a_write_begins_at_once_and_needs_no_task() -> None:
    call = Call()
    call.writer.begin("a")
    assert call.held == ["held"] and not call.writer.is_idle and call.stream.blocked_since
    await call.finish()
    assert call.written == ["a"] and call.writer.is_idle and not call.stream.blocked_since


# As it is elsewhere, and in a task where Python's futures are not those of C.
each_way = pytest.mark.parametrize("run", [run_here, run_as_task])


@each_way
async def test_a_write_waits_for_the_one_before(run: Any) -> None:
    call = Call(run)
    call.writer.begin("a")
    later = asyncio.create_task(call.writer.write("b"))
    await asyncio.sleep(0)
    assert call.held == ["held"]
    await call.finish()
    await asyncio.sleep(0)
    assert call.written == ["a"] and not later.done()
    await call.finish()
    await later
    assert call.written == ["a", "b"]


@each_way
@pytest.mark.parametrize("error", [grpc.aio.InternalError("gone"), asyncio.CancelledError()])
async def test_the_error_of_a_write_wakes_the_streams_task_and_is_raised_there_once(run: Any, error: Any) -> None:
    call = Call(run)
    changed = asyncio.create_task(call.stream.changed())
    await asyncio.sleep(0)
    call.writer.begin("a")
    await call.finish(error)
    await changed
    assert not call.writer.is_idle and not call.stream.blocked_since
    with pytest.raises(type(error)):
        await call.writer.wait()
    await call.writer.wait()
    assert call.writer.is_idle and not call.written


@each_way
async def test_a_cancelled_task_leaves_the_write_to_end_by_itself(run: Any) -> None:
    call = Call(run)
    waiting = asyncio.create_task(call.writer.write("a"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() and not call.writer.is_idle
    await call.finish()
    assert call.written == ["a"] and call.writer.is_idle


async def test_a_write_that_fails_at_once_is_raised_by_wait() -> None:
    async def refuse(_: object) -> None:
        raise grpc.aio.UsageError("the call is over")

    writer = StreamWriter(Call().stream, refuse, lambda: None)
    writer.begin("a")
    with pytest.raises(grpc.aio.UsageError):
        await writer.wait()
