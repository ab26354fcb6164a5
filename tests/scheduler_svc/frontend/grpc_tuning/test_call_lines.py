"""Calls that arrive together begin together, and a server that stops leaves nothing behind."""

import asyncio
from contextlib import closing
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from scheduler_svc.frontend.grpc_tuning import ends
from scheduler_svc.frontend.grpc_tuning.call_lines import NUM_ASKED, CallLines
from scheduler_svc.frontend.grpc_tuning.event_loop import FrontEndLoop
from scheduler_svc.frontend.grpc_tuning.sockets import network_of
from tests.rigs.raw_http2 import HEADERS, RawConnection, fields
from tests.rigs.waiting import until

SERVICE, METHODS = "a.Service", ("Often", "Seldom")


class CountingLoop(FrontEndLoop):
    num_turns = 0

    def _run_once(self) -> None:
        self.num_turns += 1
        super()._run_once()  # type: ignore[misc]


class Server:
    """Notes the method of each call, and the turn of the event loop in which it begins."""

    def __init__(self, *, has_lines: bool) -> None:
        self.begun: list[tuple[str, int]] = []
        self._has_lines = has_lines
        self.lines: CallLines | None = None

    async def start(self) -> RawConnection:
        self._server = grpc.aio.server()
        handlers = {name: self._handler(name) for name in METHODS}
        cast(Any, self._server).add_registered_method_handlers(SERVICE, handlers)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        if self._has_lines:
            self.lines = CallLines(self._server, {path(name): handler for name, handler in handlers.items()})
        return RawConnection(f"127.0.0.1:{port}")

    async def stop(self) -> None:
        await self._server.stop(0)

    def _handler(self, name: str) -> Any:
        async def serve(_: object, context: Any) -> None:
            self.begun.append((name, cast(CountingLoop, asyncio.get_running_loop()).num_turns))
            context.set_trailing_metadata((("called", name),))

        return cast(Any, grpc).stream_stream_rpc_method_handler(serve)


def path(name: str) -> str:
    return f"/{SERVICE}/{name}"


def until_grpc_has(count: int) -> None:
    """Returns when gRPC's threads have so many calls. The event loop does not run meanwhile."""
    host = network_of("ipv4:127.0.0.1:1")
    until(lambda: sum(ends._open_calls(host).values()) >= count)


@pytest.mark.parametrize("has_lines", [True, False])
def test_calls_that_arrived_together_begin_in_a_few_turns(has_lines: bool) -> None:
    async def test() -> set[int]:
        server = Server(has_lines=has_lines)
        with closing(await server.start()) as caller:
            for _ in range(NUM_ASKED):
                caller.call(path("Often"), b"")
            until_grpc_has(NUM_ASKED)
            await asyncio.to_thread(caller.wait_ends, NUM_ASKED)
            await server.stop()
        return {turn for _, turn in server.begun}

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        turns = runner.run(test())
    assert len(turns) <= 3 if has_lines else len(turns) == NUM_ASKED


def test_each_call_gets_its_method_and_an_end(caplog: pytest.LogCaptureFixture) -> None:
    names = [METHODS[idx % 5 == 4] for idx in range(4 * NUM_ASKED)]

    async def test() -> None:
        server = Server(has_lines=True)
        with closing(await server.start()) as caller:
            numbers = [caller.call(path(name), b"") for name in names]
            frames = await asyncio.to_thread(caller.wait_ends, len(names))
            assert all(frame.kind == HEADERS for frame in frames)
            called = {frame.stream: fields(frame.payload)["called"] for frame in frames}
            assert [called[number] for number in numbers] == names
            await server.stop()
        assert server.lines is not None and not server.lines._tasks

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(test())
    assert not caplog.records
