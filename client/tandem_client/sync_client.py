"""The blocking client, and a completion that is read while the service generates it.

A client owns a channel and the names of the calls. A stream owns one call from start to end: its messages, its retries,
its cancellation. `request` builds the requests, `messages` reads the answers.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2
from tandem.v1 import inference_pb2

from tandem_client import calls
from tandem_client.calls import Rpc, blocking, blocking_pages, blocking_progress
from tandem_client.client_base import POLL_SECONDS, ClientBase, ReadyWait, StreamBase
from tandem_client.connection import ABORT_SECONDS
from tandem_client.errors import TandemError
from tandem_client.peer import explained
from tandem_client.types import Delta
from tandem_client.wire.request import abort_request, to_service
from tandem_client.wire.rpc_errors import ErrorReader

_Value = TypeVar("_Value")


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
            while (delta := self._next_delta()) is not None:
                yield delta
        finally:
            self.close()

    def __next__(self) -> Delta:
        delta = self._next_delta()
        if delta is None:
            raise StopIteration
        return delta

    def messages(self) -> Iterator[inference_pb2.GenerateResponse]:
        """Every message as it came, for programs that pass them on. Use either this or the deltas."""
        try:
            while (message := self._next_message()) is not None:
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

    def _begin(self) -> None:
        super()._begin()
        self._messages: Iterator[inference_pb2.GenerateResponse] = iter(self._call)

    def _next_delta(self) -> Delta | None:
        while (message := self._next_message()) is not None:
            delta = self._absorb(message)
            if delta is not None:
                return delta
        return None

    def _next_message(self) -> inference_pb2.GenerateResponse | None:
        while not self._closed.is_set():
            if self._client._is_of_parent:
                self._client._check_open()
            try:
                message = next(self._messages)
                if self.accepted is None:
                    self._note_service(self._call.initial_metadata())
                if self._is_new(message):
                    return message
            except StopIteration:
                self._end()
            except grpc.RpcError as rpc_error:
                if self._closed.is_set():
                    break
                if self.summary is not None:
                    self._end()
                    break
                try:
                    pause_seconds = self._pause_seconds(rpc_error)
                except TandemError as error:
                    raise explained(error, self._client._access) from None
                if not self._closed.wait(pause_seconds):
                    self._begin()
        return None


class Client(ClientBase[GenerateStream]):
    """Talks to a service. Threads may share it.

    A call is retried, at most `max_retries` times, if the service has not accepted it and gives a retry time.
    Every call takes `timeout`, in seconds, for all its tries together; None: no end.
    """

    _new_stream, _is_of_loop = GenerateStream, False

    tokenize = blocking(calls.tokenize)
    detokenize = blocking(calls.detokenize)
    render_chat = blocking(calls.render_chat)
    abort = blocking(calls.abort)
    list_requests = blocking(calls.list_requests)
    all_requests = blocking_pages(calls.list_requests)
    model_info = blocking(calls.model_info)
    load = blocking(calls.load)
    health = blocking(calls.health)
    flush_cache = blocking(calls.flush_cache)
    quarantine = blocking(calls.quarantine)
    clear_quarantine = blocking(calls.clear_quarantine)
    drain = blocking_progress(calls.drain)
    update_weights = blocking_progress(calls.update_weights)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the service is ready; it may be started after this call. Raises DeadlineExceeded."""
        waiting = ReadyWait(self.address, timeout)
        while True:
            try:
                for response in self._stubs.health.Watch(
                    health_pb2.HealthCheckRequest(), timeout=waiting.remaining(), metadata=self._metadata
                ):
                    if waiting.is_ready(response):
                        return
            except grpc.RpcError as error:
                suspect = waiting.note(error)
                if suspect is not None and (found := explained(suspect, self._access)) is not suspect:
                    raise found from None
            waiting.check_time()
            time.sleep(POLL_SECONDS)

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
        own = (*self._metadata, *to_service(service))
        request = abort_request([request_id])
        aborting = self._stubs.control.Abort.future(request, timeout=ABORT_SECONDS, metadata=own)
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)
        return aborting

    def _call(self, call: Rpc[_Value]) -> _Value:
        method, tries = call.method(self._stubs), self._tries(call.timeout)
        errors = ErrorReader(address=self.address, timeout=call.timeout)
        while True:
            try:
                own = (*self._metadata, *call.more)
                return call.read(method(call.request, timeout=tries.remaining(), metadata=own))
            except grpc.RpcError as rpc_error:
                error = errors.read(rpc_error, is_late=tries.remaining() == 0)
                pause_seconds = tries.pause_seconds(error)
                if pause_seconds is None:
                    raise explained(error, self._access) from None
            time.sleep(pause_seconds)

    def _progress(self, call: Rpc[_Value]) -> Iterator[_Value]:
        answers = call.method(self._stubs)(call.request, timeout=call.timeout, metadata=self._metadata)
        try:
            yield from map(call.read, answers)
        except grpc.RpcError as error:
            read = ErrorReader(address=self.address, timeout=call.timeout).read(error)
            raise explained(read, self._access) from None
        finally:
            answers.cancel()
