"""A channel to several cells, for code on an event loop; see `sync_channel`.

Owns the channels to the cells. Belongs to the loop that made it.
"""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from tandem.v1 import control_pb2, control_pb2_grpc

from tandem_client.cells import calls
from tandem_client.cells.router import LOOK_SECONDS, Router
from tandem_client.cells.ways import GenerateWay, ResumeWay, worst
from tandem_client.errors import TandemError
from tandem_client.wire.rpc_errors import ErrorReader

_Way = GenerateWay | ResumeWay


class AsyncCellsChannel:
    """The part of grpc.aio.Channel that generated stubs and a client use."""

    def __init__(self, addresses: Sequence[str], channels: Sequence[grpc.aio.Channel]) -> None:
        self.addresses, self._channels = addresses, channels
        self.router = Router(addresses)
        self.errors = [ErrorReader(address=address, timeout=None) for address in addresses]
        self._loads: list[Any] = [control_pb2_grpc.ControlServiceStub(channel).GetLoad for channel in channels]
        self._looks: set[asyncio.Task[None]] = set()

    def unary_unary(self, method: str, *serializers: Any, **more: Any) -> Any:
        """The call to one cell or to several."""
        inner = [channel.unary_unary(method, *serializers, **more) for channel in self._channels]
        match calls.name_of(method):
            case calls.ABORT:
                return functools.partial(self._abort, inner)
            case calls.CHECK:
                return functools.partial(self._check, inner)
            case name if name in calls.OF_ANY_CELL:
                return functools.partial(self._any, inner)
            case _:
                return functools.partial(self._refuse, method)

    def unary_stream(self, method: str, *serializers: Any, **more: Any) -> Any:
        """The call to the cell of the request."""
        inner = [channel.unary_stream(method, *serializers, **more) for channel in self._channels]
        match calls.name_of(method):
            case calls.GENERATE:
                return functools.partial(self._generate, inner)
            case calls.RESUME:
                return functools.partial(self._resume, inner)
            case calls.WATCH:
                return self._watch
            case _:
                return functools.partial(self._refuse, method)

    async def close(self) -> None:
        """Closes the connections to all cells."""
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def _refuse(self, method: str, *_: object, **__: object) -> Any:
        raise calls.of_one_cell(method, self.addresses)

    def _generate(self, inner: Sequence[Any], request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
        if self.router.is_look_due(time.monotonic()):
            own = tuple((name, value) for name, value in metadata or () if name == "authorization")
            for number in range(len(inner)):
                look = asyncio.get_running_loop().create_task(self._look(number, own))
                # The loop itself keeps no reference.
                self._looks.add(look)
                look.add_done_callback(self._looks.discard)
        return AsyncCellsCall(
            self, inner, GenerateWay(self.router, request, metadata or ()), request, timeout, metadata
        )

    def _resume(self, inner: Sequence[Any], request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
        return AsyncCellsCall(self, inner, ResumeWay(self.router, len(inner), request), request, timeout, metadata)

    async def _look(self, number: int, metadata: Sequence[tuple[str, str]]) -> None:
        request = control_pb2.GetLoadRequest()
        try:
            load = await self._loads[number](request, timeout=LOOK_SECONDS, metadata=metadata)
            calls.note_load(self.router, number, load, time.monotonic())
        except grpc.RpcError as error:
            calls.note_no_load(self.router, number, self.errors[number].read(error), time.monotonic())

    async def _any(self, inner: Sequence[Any], request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
        """Asks one cell after the other until one answers."""
        failed: list[grpc.RpcError] = []
        read: list[TandemError] = []
        for call, errors in zip(inner, self.errors, strict=True):
            try:
                return await call(request, timeout=timeout, metadata=metadata)
            except grpc.RpcError as error:
                failed.append(error)
                read.append(errors.read(error))
                if not calls.try_next(read[-1]):
                    raise
        raise worst(failed, read)

    async def _check(
        self, inner: Sequence[Any], request: Any, timeout: float | None = None, metadata: Any = None
    ) -> health_pb2.HealthCheckResponse:
        """Asks all cells at once whether they serve."""
        limit = calls.CHECK_SECONDS if timeout is None else min(timeout, calls.CHECK_SECONDS)
        answers, failed = await _results([call(request, timeout=limit, metadata=metadata) for call in inner])
        if (answer := calls.serving(answers)) is None:
            raise failed[0]
        return answer

    async def _watch(
        self, request: Any, timeout: float | None = None, metadata: Any = None
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Looks at all cells until the caller leaves; a client that waits takes the first that serves."""
        check = self.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        until = None if timeout is None else time.monotonic() + timeout
        while until is None or time.monotonic() < until:
            yield await check(request, timeout=None if until is None else until - time.monotonic(), metadata=metadata)
            await asyncio.sleep(calls.WATCH_SECONDS)

    async def _abort(
        self,
        inner: Sequence[Any],
        request: control_pb2.AbortRequest,
        timeout: float | None = None,
        metadata: Any = None,
    ) -> control_pb2.AbortResponse:
        """Aborts at the cells that have the requests, and at all those of which nobody knows."""
        parts = calls.split_abort(request, self.router, len(inner))
        answers, failed = await _results(
            [
                inner[number](control_pb2.AbortRequest(request_ids=ids), timeout=timeout, metadata=metadata)
                for number, ids in parts.items()
            ]
        )
        merged = calls.merged_abort(request, answers)
        if failed and not calls.are_all_aborted(request, merged):
            raise failed[0]
        return merged


class AsyncCellsCall:
    """A stream of messages from the first cell that accepts the request."""

    def __init__(
        self,
        channel: AsyncCellsChannel,
        inner: Sequence[Any],
        way: _Way,
        request: Any,
        timeout: float | None,
        metadata: Any,
    ) -> None:
        self._channel, self._inner, self._way = channel, inner, way
        self._request, self._metadata = request, metadata
        self._until = None if timeout is None else time.monotonic() + timeout
        self._began = self._cancelled = False
        self._failed: list[grpc.RpcError] = []
        self._read: list[TandemError] = []
        self._start()

    def _start(self) -> bool:
        """Sends the request to the next cell. Returns whether there is one."""
        number = self._way.next_cell()
        if number is None:
            return False
        left = None if self._until is None else max(0.0, self._until - time.monotonic())
        self._number = number
        self._call = self._inner[number](self._request, timeout=left, metadata=self._metadata)
        self._messages = aiter(self._call)
        return True

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                message = await anext(self._messages)
            except StopAsyncIteration:
                self._way.ended()
                raise
            except grpc.RpcError as error:
                self._go_on(error)
                continue
            if not self._began:
                self._began = True
                self._way.began()
            return message

    def _go_on(self, error: grpc.RpcError) -> None:
        """Starts the call at another cell, or raises."""
        if self._began or self._cancelled:
            self._way.ended()
            raise error
        self._failed.append(error)
        self._read.append(self._channel.errors[self._number].read(error))
        if not self._way.goes_on(self._read[-1]):
            raise error
        if not self._start():
            raise worst(self._failed, self._read)

    async def initial_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Nothing, because no proxy has chosen the cell."""
        return ()

    def cancel(self) -> bool:
        """Ends the call."""
        self._cancelled = True
        self._way.ended()
        return self._call.cancel()


async def _results(under_way: Iterable[Awaitable[Any]]) -> tuple[list[Any], list[grpc.RpcError]]:
    """The answers of several calls, and the errors."""

    async def one(call: Awaitable[Any]) -> Any:
        try:
            return await call
        except grpc.RpcError as error:
            return error

    found = await asyncio.gather(*map(one, under_way))
    answers = [each for each in found if not isinstance(each, grpc.RpcError)]
    return answers, [each for each in found if isinstance(each, grpc.RpcError)]
