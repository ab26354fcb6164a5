"""A completion that is read while the service generates it, for code that runs on an event loop.

Owns one call from start to end: its messages, its retries, its cancellation. Belongs to the loop that made it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol, Self, cast

import grpc
from grpc_health.v1 import health_pb2_grpc
from tandem.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc

from tandem_client.credentials import Access
from tandem_client.stream_base import Cancellable, StreamBase
from tandem_client.types import Delta


class AsyncCall(Cancellable, Protocol):
    """The part of a gRPC call that a stream uses."""

    def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]: ...

    async def initial_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...


class AsyncGenerateStream(StreamBase[AsyncCall, asyncio.Event]):
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
            delta = self._transcript.absorb(message)
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def messages(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Every message as it came, for programs that pass them on. Use either this or the deltas."""
        try:
            while (message := await self._next_message()) is not None:
                self._transcript.absorb(message)
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
        self._messages = aiter(self._call)

    async def _next_message(self) -> inference_pb2.GenerateResponse | None:
        while not self._closed.is_set():
            try:
                message = await anext(self._messages)
                if self.accepted is None:
                    self._note_service(await self._call.initial_metadata())
                if self._is_new(message):
                    return message
            except StopAsyncIteration:
                self._end()
            except asyncio.CancelledError:
                # Either the reading task is cancelled, or another one closed the stream meanwhile.
                if self._closed.is_set():
                    break
                self.close()
                raise
            except grpc.RpcError as rpc_error:
                if self._closed.is_set():
                    break
                if self.summary is not None:
                    self._end()
                    break
                await self._pause(self._pause_seconds(rpc_error))
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


class AsyncStubs:
    """A channel and the calls on it."""

    def __init__(self, access: Access) -> None:
        self.channel = access.aio_channel()
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.control = control_pb2_grpc.ControlServiceStub(self.channel)
        # This stub has no types.
        self.health = cast(Any, health_pb2_grpc.HealthStub(self.channel))
