"""The event loop that takes many of gRPC's wake-ups at once."""

import asyncio
import functools
import socket

import grpc
import grpc.aio

from scheduler_svc.frontend.grpc_tuning.event_loop import FrontEndLoop


class PollerCompletionQueue:
    """Reads one byte per call, as gRPC's class of this name does."""

    def __init__(self, source: socket.socket) -> None:
        self.source = source
        self.num_calls = 0

    def handle(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self.source.recv(1) == b"1"
        self.num_calls += 1


def test_one_call_takes_all_wake_ups_and_other_readers_see_every_byte():
    async def test() -> None:
        source, sink = socket.socketpair()
        with source, sink:
            source.setblocking(False)
            queue, loop = PollerCompletionQueue(source), asyncio.get_running_loop()
            loop.add_reader(source, functools.partial(queue.handle, loop))
            for num_bytes in (1, 2, 500):
                sink.send(b"1" * num_bytes)
                await asyncio.sleep(0.01)
            assert queue.num_calls == 3
            found = list[bytes]()
            loop.add_reader(source, lambda: found.append(source.recv(1)))
            sink.send(b"abc")
            while len(found) < 3:
                await asyncio.sleep(0)
            loop.remove_reader(source)
            assert found == [b"a", b"b", b"c"]

    with asyncio.Runner(loop_factory=FrontEndLoop) as runner:
        runner.run(test())


def test_grpc_registers_the_callback_that_the_loop_knows():
    """Fails if another grpcio has other names; the loop would then be an ordinary one."""
    registered: list[str] = []

    class Noting(FrontEndLoop):
        def add_reader(self, fd, callback, *args):
            registered.append(type(getattr(getattr(callback, "func", None), "__self__", None)).__name__)
            super().add_reader(fd, callback, *args)

    async def test() -> None:
        server = grpc.aio.server()
        await server.start()
        await server.stop(0)

    # gRPC keeps the first loop of a process, so this one may be the second.
    with asyncio.Runner(loop_factory=Noting) as runner:
        runner.run(test())
    assert registered == ["PollerCompletionQueue"]
