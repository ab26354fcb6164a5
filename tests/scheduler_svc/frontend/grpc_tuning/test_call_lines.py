"""Calls that arrive together begin together, and a server that stops leaves nothing behind."""

import array
import asyncio
import fcntl
import gc
import socket
import sys
import termios
from collections.abc import Callable
from contextlib import closing
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from scheduler_svc.frontend.grpc_tuning import ends
from scheduler_svc.frontend.grpc_tuning.call_lines import NUM_ASKED, CallLine, Lines, server_with_lines
from scheduler_svc.frontend.grpc_tuning.event_loop import QUEUE, FrontEndLoop
from scheduler_svc.frontend.grpc_tuning.sockets import network_of
from tests.rigs.raw_http2 import HEADERS, RawConnection, fields
from tests.rigs.waiting import until

SERVICE, METHODS = "a.Service", ("Often", "Seldom")
HOST = network_of("ipv4:127.0.0.1:1")


class CountingLoop(FrontEndLoop):
    num_turns = 0
    _source: socket.socket

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        if type(getattr(getattr(callback, "func", None), "__self__", None)).__name__ == QUEUE:
            self._source = fd
        super().add_reader(fd, callback, *args)

    def wait_finished(self, num: int) -> None:
        """Returns when gRPC has finished so many operations, while the loop stands still."""
        count = array.array("i", [0])

        def has_finished() -> bool:
            # gRPC's thread writes a byte for each.
            fcntl.ioctl(self._source, termios.FIONREAD, count)
            return count[0] >= num

        until(has_finished)

    def _run_once(self) -> None:
        self.num_turns += 1
        super()._run_once()  # type: ignore[misc]


class Server:
    """Notes the method of each call, and the turn of the event loop in which it begins."""

    def __init__(self, most: Callable[[int, int], int] | None) -> None:
        """`most`: how many begin in a turn, by the turn's number and how many have begun; None: there are no lines."""
        self.begun: list[tuple[str, int]] = []
        self._most = most

    async def start(self) -> RawConnection:
        lines: Lines = {}
        self._server = server_with_lines((), lines)
        handlers = {name: self._handler(name) for name in METHODS}
        cast(Any, self._server).add_registered_method_handlers(SERVICE, handlers)
        port = self._server.add_insecure_port("127.0.0.1:0")
        if (most := self._most) is not None:
            loop = cast(CountingLoop, asyncio.get_running_loop())
            lines |= {
                path(name): (one, lambda: most(loop.num_turns, len(self.begun))) for name, one in handlers.items()
            }
        await self._server.start()
        return RawConnection(f"127.0.0.1:{port}")

    async def stop(self) -> None:
        await self._server.stop(0)

    def _handler(self, name: str) -> Any:
        async def serve(_: object, context: Any) -> None:
            self.begun.append((name, cast(CountingLoop, asyncio.get_running_loop()).num_turns))
            context.set_trailing_metadata((("called", name),))

        return cast(Any, grpc).stream_stream_rpc_method_handler(serve)


def is_of_call(task: asyncio.Task[Any]) -> bool:
    return getattr(task.get_coro(), "__name__", "") == ends.WAITING_COROUTINE


def path(name: str) -> str:
    return f"/{SERVICE}/{name}"


@pytest.mark.parametrize(
    ("most", "longest", "shortest"),
    [
        pytest.param(lambda turn, begun: NUM_ASKED, 3, 1, id="all"),
        pytest.param(lambda turn, begun: 1, NUM_ASKED, NUM_ASKED, id="one in each turn"),
        pytest.param(
            lambda turn, begun: int(turn % 3 == 0), 3 * NUM_ASKED - 2, 3 * NUM_ASKED - 2, id="one in the third turn"
        ),
        pytest.param(lambda turn, begun: 1 if begun < 2 else NUM_ASKED, 6, 3, id="all after two"),
        pytest.param(None, sys.maxsize, 3 * NUM_ASKED, id="no lines"),
    ],
)
def test_calls_that_arrived_together_begin_within_these_turns(
    most: Callable[[int, int], int] | None, longest: int, shortest: int
) -> None:
    async def test() -> list[int]:
        server, spans = Server(most), list[int]()
        with closing(await server.start()) as caller:
            # gRPC is asked again for each call that has begun.
            for _ in range(3):
                server.begun.clear()
                for _ in range(NUM_ASKED):
                    caller.call(path("Often"), b"")
                until(lambda: sum(ends._open_calls(HOST).values()) >= NUM_ASKED)
                cast(CountingLoop, asyncio.get_running_loop()).wait_finished(NUM_ASKED if most else 0)
                await asyncio.to_thread(caller.wait_ends, NUM_ASKED)
                # No operation of these calls is left, which would be counted for one of the next.
                while any(is_of_call(task) for task in asyncio.all_tasks()):
                    await asyncio.sleep(0)
                turns = [turn for _, turn in server.begun]
                spans.append(turns[-1] - turns[0] + 1)
            await server.stop()
        return spans

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        spans = runner.run(test())
    assert all(shortest <= span <= longest for span in spans), spans


@pytest.mark.parametrize("most", [1, NUM_ASKED])
def test_each_call_gets_its_method_and_an_end(caplog: pytest.LogCaptureFixture, most: int) -> None:
    names = [METHODS[idx % 5 == 4] for idx in range(4 * NUM_ASKED)]

    async def test() -> None:
        server = Server(lambda turn, begun: most)
        with closing(await server.start()) as caller:
            numbers = [caller.call(path(name), b"") for name in names]
            frames = await asyncio.to_thread(caller.wait_ends, len(names))
            assert all(frame.kind == HEADERS for frame in frames)
            called = {frame.stream: fields(frame.payload)["called"] for frame in frames}
            assert [called[number] for number in numbers] == names
            await server.stop()
        lines = [
            one for one in gc.get_objects() if isinstance(one, CallLine) and one._loop is asyncio.get_running_loop()
        ]
        assert len(lines) == len(METHODS) and not any(line._tasks or line._arrived for line in lines)

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(test())
    assert not caplog.records
