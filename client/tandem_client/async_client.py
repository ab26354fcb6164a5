"""The client for code that runs on an event loop, and a completion that is read while the service generates it.

A client owns a channel and the names of the calls. A stream owns one call from start to end: its messages, its retries,
its cancellation; it belongs to the loop that made it. `request` builds the requests, `messages` reads the answers.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2
from tandem.v1 import inference_pb2

from tandem_client import calls
from tandem_client.calls import Rpc, asynchronous, asynchronous_pages, asynchronous_progress
from tandem_client.client_base import POLL_SECONDS, ClientBase, ReadyWait, StreamBase
from tandem_client.connection import ABORT_SECONDS, Access
from tandem_client.errors import OtherProtocol, TandemError
from tandem_client.peer import explained
from tandem_client.types import Delta
from tandem_client.wire.request import abort_request, to_service
from tandem_client.wire.rpc_errors import ErrorReader

_Value = TypeVar("_Value")


async def _explained(error: TandemError, access: Access) -> TandemError:
    """As `explained`; its connection does not hold up the loop."""
    return await asyncio.to_thread(explained, error, access) if isinstance(error, OtherProtocol) else error


class AsyncGenerateStream(StreamBase[asyncio.Event]):
    """An asynchronous iterator of deltas; `accepted`, `samples` and `summary` are set as they come.

    Deltas of several samples come mixed, each with its `sample_idx`; `samples` holds what was read, sample by sample.

    The request is sent when this object is made. It is cancelled when the loop over it ends early, when it is closed,
    when its `async with` block ends, when the task that reads it is cancelled, and when the object is
    garbage-collected; after its natural end none of these matters.
    """

    _new_event = asyncio.Event

    def __aiter__(self) -> AsyncIterator[Delta]:
        return _Reading(self)

    async def __anext__(self) -> Delta:
        while (message := await self._next_message()) is not None:
            delta = self._absorb(message)
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def messages(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Every message as it came, for programs that pass them on. Use either this or the deltas."""
        try:
            while (message := await self._next_message()) is not None:
                self._absorb(message)
                yield message
        finally:
            self.close()

    async def aclose(self) -> None:
        """Closes the stream; `contextlib.aclosing` calls this name."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        super()._begin()
        self._messages: AsyncIterator[inference_pb2.GenerateResponse] = aiter(self._call)

    async def _next_message(self) -> inference_pb2.GenerateResponse | None:
        while not self._closed.is_set():
            if self._client._is_of_parent:
                self._client._check_open()
            try:
                message = await anext(self._messages)
                if self.accepted is None:
                    self._note_service(await self._call.initial_metadata())
                if self._is_new(message):
                    return message
            except StopAsyncIteration:
                self._end()
            except asyncio.CancelledError:
                # Either the reading task is cancelled, or another one closed the stream or the client meanwhile.
                if self._closed.is_set():
                    break
                self.close()
                task = asyncio.current_task()
                if task is None or not task.cancelling():
                    self._client._check_open()
                raise
            except grpc.RpcError as rpc_error:
                if self._closed.is_set():
                    break
                if self.summary is not None:
                    self._end()
                    break
                try:
                    pause_seconds = self._pause_seconds(rpc_error)
                except TandemError as error:
                    raise await _explained(error, self._client._access) from None
                await self._pause(pause_seconds)
        return None

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._closed.wait(), seconds)
        except TimeoutError:
            self._begin()


class _Reading:
    """One loop over a stream. The end of the loop drops this object, which ends the call at once.

    An async generator would be closed later, by the event loop.
    """

    __slots__ = ("_stream",)

    def __init__(self, stream: AsyncGenerateStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._stream)

    def __del__(self) -> None:
        self._stream.close()


class AsyncClient(ClientBase[AsyncGenerateStream]):
    """Talks to a service, on the event loop that first uses it; may be made before.

    A call is retried, at most `max_retries` times, if the service has not accepted it and gives a retry time.
    Every call takes `timeout`, in seconds, for all its tries together; None: no end.
    """

    _new_stream, _is_of_loop = AsyncGenerateStream, True

    tokenize = asynchronous(calls.tokenize)
    detokenize = asynchronous(calls.detokenize)
    render_chat = asynchronous(calls.render_chat)
    abort = asynchronous(calls.abort)
    list_requests = asynchronous(calls.list_requests)
    all_requests = asynchronous_pages(calls.list_requests)
    model_info = asynchronous(calls.model_info)
    load = asynchronous(calls.load)
    health = asynchronous(calls.health)
    flush_cache = asynchronous(calls.flush_cache)
    quarantine = asynchronous(calls.quarantine)
    clear_quarantine = asynchronous(calls.clear_quarantine)
    drain = asynchronous_progress(calls.drain)
    update_weights = asynchronous_progress(calls.update_weights)

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the service is ready; it may be started after this call. Raises DeadlineExceeded."""
        waiting = ReadyWait(self.address, timeout)
        while True:
            try:
                request = health_pb2.HealthCheckRequest()
                async for response in self._stubs.health.Watch(
                    request, timeout=waiting.remaining(), metadata=self._metadata
                ):
                    if waiting.is_ready(response):
                        return
            except grpc.RpcError as error:
                suspect = waiting.note(error)
                if suspect is not None and (found := await _explained(suspect, self._access)) is not suspect:
                    raise found from None
            waiting.check_time()
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Cancels every call and closes the connection. A child that fork made leaves it to its parent."""
        if self._is_of_parent:
            return
        if self._aborting:
            await asyncio.wait(self._aborting, timeout=ABORT_SECONDS)
        self._is_closed = True
        if self._opened is not None:
            await self._opened.channel.close()
            self._opened = None

    async def __aenter__(self) -> Self:
        # A client may serve one loop after another, each in a block of its own.
        self._is_closed = False
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _abort_later(self, request_id: str, service: str | None) -> None:
        """Sends an Abort without waiting, if a loop runs: a stream may be dropped after its loop has ended."""

        async def send() -> None:
            with contextlib.suppress(grpc.RpcError):
                method: Any = self._stubs.control.Abort
                own = (*self._metadata, *to_service(service))
                await method(abort_request([request_id]), timeout=ABORT_SECONDS, metadata=own)

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        task = loop.create_task(send())
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _call(self, call: Rpc[_Value]) -> _Value:
        method, tries = call.method(self._stubs), self._tries(call.timeout)
        errors = ErrorReader(address=self.address, timeout=call.timeout)
        while True:
            try:
                own = (*self._metadata, *call.more)
                return call.read(await method(call.request, timeout=tries.remaining(), metadata=own))
            except grpc.RpcError as rpc_error:
                error = errors.read(rpc_error, is_late=tries.remaining() == 0)
                pause_seconds = tries.pause_seconds(error)
                if pause_seconds is None:
                    raise await _explained(error, self._access) from None
            await asyncio.sleep(pause_seconds)

    async def _progress(self, call: Rpc[_Value]) -> AsyncIterator[_Value]:
        try:
            async for answer in call.method(self._stubs)(call.request, timeout=call.timeout, metadata=self._metadata):
                yield call.read(answer)
        except grpc.RpcError as error:
            read = ErrorReader(address=self.address, timeout=call.timeout).read(error)
            raise await _explained(read, self._access) from None
