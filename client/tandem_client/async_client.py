"""The client for code that runs on an event loop, and a completion that is read while the service generates it.

`client_base` has what waits; here is how it is used on a loop. A stream belongs to the loop that made it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from tandem.v1 import inference_pb2

from tandem_client import calls
from tandem_client.calls import Rpc, method_of
from tandem_client.client_base import ClientBase, StreamBase
from tandem_client.connection import ABORT_SECONDS
from tandem_client.errors import TandemError
from tandem_client.types import Delta, ListedRequest, RequestPage

_Given = ParamSpec("_Given")
_Value = TypeVar("_Value")


def _asynchronous(
    make: Callable[_Given, Rpc[_Value]],
) -> Callable[Concatenate[Any, _Given], Coroutine[Any, Any, _Value]]:
    return method_of(make, lambda client, call: client._call(call), is_coroutine=True)


def _progress(make: Callable[_Given, Rpc[_Value]]) -> Callable[Concatenate[Any, _Given], AsyncIterator[_Value]]:
    return method_of(make, lambda client, call: client._progress(call), AsyncIterator)


def _pages(
    make: Callable[_Given, Rpc[RequestPage]],
) -> Callable[Concatenate[Any, _Given], AsyncIterator[ListedRequest]]:
    return method_of(make, lambda client, call: client._pages(call), AsyncIterator, ListedRequest)


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
        delta = await self._next_delta()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def messages(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Every message as it came, for programs that pass them on. Use either this or the deltas."""
        try:
            while (message := await self._next_message()) is not None:
                self._absorb(message)
                yield message
        finally:
            self.close()

    def close(self) -> None:
        """Cancels the call; the service frees the request at once. A second call has no effect."""
        self._cancel()

    async def aclose(self) -> None:
        """Closes the stream; `contextlib.aclosing` calls this name."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


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

    tokenize = _asynchronous(calls.tokenize)
    detokenize = _asynchronous(calls.detokenize)
    render_chat = _asynchronous(calls.render_chat)
    abort = _asynchronous(calls.abort)
    list_requests = _asynchronous(calls.list_requests)
    all_requests = _pages(calls.list_requests)
    model_info = _asynchronous(calls.model_info)
    load = _asynchronous(calls.load)
    health = _asynchronous(calls.health)
    flush_cache = _asynchronous(calls.flush_cache)
    quarantine = _asynchronous(calls.quarantine)
    clear_quarantine = _asynchronous(calls.clear_quarantine)
    drain = _progress(calls.drain)
    update_weights = _progress(calls.update_weights)

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the service is ready; it may be started after this call. Raises DeadlineExceeded."""
        await self._wait_ready(timeout)

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
            with contextlib.suppress(TandemError):
                await self._call(calls.abort(request_id, service=service, timeout=ABORT_SECONDS))

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        task = loop.create_task(send())
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)
