"""The blocking client, and a completion that is read while the service generates it.

`client_base` has what waits; here is how it blocks instead, so that it runs to its end without a loop.
"""

import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import grpc
from tandem.v1 import inference_pb2

from tandem_client import calls
from tandem_client.calls import Rpc, method_of
from tandem_client.client_base import ClientBase, StreamBase
from tandem_client.connection import ABORT_SECONDS
from tandem_client.errors import TandemError
from tandem_client.peer import explained
from tandem_client.types import Delta, ListedRequest, RequestPage

_Given = ParamSpec("_Given")
_Value = TypeVar("_Value")


def _done(work: Coroutine[Any, Any, _Value]) -> _Value:
    """Runs work that blocks wherever it waits, so that no loop is needed, to its end."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a blocking client waits for an event loop")


def _each(values: AsyncGenerator[_Value]) -> Iterator[_Value]:
    """Yields what such work yields."""
    try:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield _done(anext(values))
    finally:
        _done(values.aclose())


def _blocking(make: Callable[_Given, Rpc[_Value]]) -> Callable[Concatenate[Any, _Given], _Value]:
    return method_of(make, lambda client, call: _done(client._call(call)))


def _progress(make: Callable[_Given, Rpc[_Value]]) -> Callable[Concatenate[Any, _Given], Iterator[_Value]]:
    return method_of(make, lambda client, call: _each(client._progress(call)), Iterator)


def _pages(make: Callable[_Given, Rpc[RequestPage]]) -> Callable[Concatenate[Any, _Given], Iterator[ListedRequest]]:
    return method_of(make, lambda client, call: _each(client._pages(call)), Iterator, ListedRequest)


def _wait_for(aborting: Any) -> None:
    """Waits up to a second for an Abort. If the service cannot be reached, the request ends after its linger time."""
    with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
        aborting.result(timeout=ABORT_SECONDS)


class GenerateStream(StreamBase[threading.Event]):
    """An iterator of deltas; `accepted`, `samples` and `summary` are set as they come.

    Deltas of several samples come mixed, each with its `sample_idx`; `samples` holds what was read, sample by sample.

    The request is sent when this object is made. It is cancelled when the loop over it ends early, when it is closed,
    when its `with` block ends, and when the object is garbage-collected; after its natural end none of these matters.
    """

    _new_event = threading.Event

    def __iter__(self) -> Iterator[Delta]:
        # A generator, so that leaving the loop closes it, and it this stream.
        try:
            while (delta := _done(self._next_delta())) is not None:
                yield delta
        finally:
            self.close()

    def __next__(self) -> Delta:
        delta = _done(self._next_delta())
        if delta is None:
            raise StopIteration
        return delta

    def messages(self) -> Iterator[inference_pb2.GenerateResponse]:
        """Every message as it came, for programs that pass them on. Use either this or the deltas."""
        try:
            while (message := _done(self._next_message())) is not None:
                self._absorb(message)
                yield message
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the call, and waits up to a second until a request that lingers is aborted."""
        aborting = self._cancel()
        if aborting is not None:
            _wait_for(aborting)


class Client(ClientBase[GenerateStream]):
    """Talks to a service. Threads may share it.

    A call is retried, at most `max_retries` times, if the service has not accepted it and gives a retry time.
    Every call takes `timeout`, in seconds, for all its tries together; None: no end.
    """

    _new_stream, _is_of_loop = GenerateStream, False

    tokenize = _blocking(calls.tokenize)
    detokenize = _blocking(calls.detokenize)
    render_chat = _blocking(calls.render_chat)
    abort = _blocking(calls.abort)
    list_requests = _blocking(calls.list_requests)
    all_requests = _pages(calls.list_requests)
    model_info = _blocking(calls.model_info)
    load = _blocking(calls.load)
    health = _blocking(calls.health)
    flush_cache = _blocking(calls.flush_cache)
    quarantine = _blocking(calls.quarantine)
    clear_quarantine = _blocking(calls.clear_quarantine)
    drain = _progress(calls.drain)
    update_weights = _progress(calls.update_weights)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the service is ready; it may be started after this call. Raises DeadlineExceeded."""
        _done(self._wait_ready(timeout))

    def close(self) -> None:
        """Cancels every call and closes the connection, after the Aborts of closed streams.

        A child that fork made leaves the connection to its parent.
        """
        if self._is_closed or self._is_of_parent:
            return
        for aborting in list(self._aborting):
            _wait_for(aborting)
        channel = self._stubs.channel
        self._is_closed = True
        channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _abort_later(self, request_id: str, service: str | None) -> object:
        call = calls.abort(request_id, service=service)
        metadata = (*self._metadata, *call.more)
        aborting = self._stubs.control.Abort.future(call.request, timeout=ABORT_SECONDS, metadata=metadata)
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)
        return aborting

    # How it waits.

    def _begun(self, call: Any) -> Any:
        return iter(call)

    async def _next(self, messages: Any) -> Any:
        return next(messages, None)

    async def _answered(self, call: Any) -> Any:
        return call

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def _is_set(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)

    async def _explained(self, error: TandemError) -> TandemError:
        return explained(error, self._access)
