"""The blocking client, and a completion that is read while the service generates it.

A client owns a channel and the names of the calls. A stream owns one call from start to end: its messages, its retries,
its cancellation. `request` builds the requests, `messages` reads the answers.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, Self, TypeVar, Unpack, cast

import grpc
from grpc_health.v1 import health_pb2
from tandem.v1 import inference_pb2

from tandem_client import calls, types
from tandem_client.calls import Rpc, Stubs, blocking, blocking_progress
from tandem_client.client_base import POLL_SECONDS, ClientBase, ReadyWait, lingering_request, resumed_request
from tandem_client.connection import ABORT_SECONDS, DEFAULT_ADDRESS, Metadata, TlsSettings
from tandem_client.stream_base import Cancellable, Recovery, StreamBase
from tandem_client.types import Delta
from tandem_client.wire.request import (
    FIELD_KEYWORDS,
    RESUME_KEYWORDS,
    GenerateOptions,
    Prompt,
    abort_request,
    to_service,
)
from tandem_client.wire.rpc_errors import ErrorReader

_Value = TypeVar("_Value")


class Call(Cancellable, Protocol):
    """The part of a gRPC call that a stream uses."""

    def __iter__(self) -> Iterator[inference_pb2.GenerateResponse]: ...

    def initial_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...


class Aborting(Protocol):
    """The part of an Abort under way that its client uses."""

    def result(self, timeout: float | None = None) -> object: ...


def wait_for(aborting: Aborting) -> None:
    """Waits up to a second for an Abort. If the service cannot be reached, the request ends after its linger time."""
    with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
        aborting.result(timeout=ABORT_SECONDS)


class GenerateStream(StreamBase[Call, threading.Event]):
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
                self._transcript.absorb(message)
                yield message
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the call, and waits up to a second until a request that lingers is aborted."""
        aborting = cast(Aborting | None, self._cancel())
        if aborting is not None:
            wait_for(aborting)

    def _begin(self) -> None:
        super()._begin()
        self._messages = iter(self._call)

    def _next_delta(self) -> Delta | None:
        while (message := self._next_message()) is not None:
            delta = self._transcript.absorb(message)
            if delta is not None:
                return delta
        return None

    def _next_message(self) -> inference_pb2.GenerateResponse | None:
        while not self._closed.is_set():
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
                if not self._closed.wait(self._pause_seconds(rpc_error)):
                    self._begin()
        return None


class Client(ClientBase):
    """Talks to a service. Threads may share it.

    A call is retried, at most `max_retries` times, if the service has not accepted it and gives a retry time.
    Every call takes `timeout`, in seconds, for all its tries together; None: no end.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        max_retries: int = 3,
        token: str | None = None,
        tls: TlsSettings | None = None,
    ) -> None:
        """Raises ValueError if the token would be sent in plaintext to another machine; OSError for files of `tls`."""
        super().__init__(address, max_retries=max_retries, token=token, tls=tls)
        self._channel = self._access.channel()
        self._stubs = Stubs(self._channel)
        # Aborts of requests that linger and whose streams were closed.
        self._aborting: set[Aborting] = set()

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        timeout: float | None = None,
        resume: bool = False,
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateStream:
        """Starts a completion of a text or of token ids, or with `chat` an answer; iterate over the stream.

        Options as in `GenerateOptions`.
        With `resume`, the stream goes on by itself after its connection or its front end was lost. The service logs the
        ids of `traceparent`, a W3C trace context.
        """
        request, recovery = lingering_request(prompt, resume=resume, **options)
        return self._stream(request, FIELD_KEYWORDS, timeout, recovery, self._metadata_of(request, traceparent))

    def resume(
        self,
        request_id: str,
        secret: bytes,
        *,
        offsets: Iterable[types.SampleOffset] = (),
        linger_seconds: float = 0.0,
        service: str | None = None,
        timeout: float | None = None,
    ) -> GenerateStream:
        """Continues the stream of a request that lingers, which this or another program began; iterate over it.

        `request_id` and `secret` are those of its Accepted (`request_id`, `resume_secret`). `offsets` tells what was
        received of each sample (`stream.offsets`); the stream has only what lies beyond. A sample without an offset
        is sent from its start. `service` is the first stream's, by which a proxy in front of several finds it.
        This reader replaces an earlier one, which gets Replaced. NotFound: no such request is kept, or the secret is
        wrong. If the stream is lost, it is continued for `linger_seconds`; 0: it raises.
        Leaving it early aborts the request, as with `generate`.
        """
        request, resumption, recovery = resumed_request(request_id, secret, offsets, linger_seconds)
        return self._stream(request, RESUME_KEYWORDS, timeout, recovery, self._metadata, resumption, service)

    def _stream(
        self,
        request: inference_pb2.GenerateRequest,
        keywords: Mapping[str, str],
        timeout: float | None,
        recovery: Recovery | None,
        metadata: Metadata,
        resumption: inference_pb2.ResumeRequest | None = None,
        service: str | None = None,
    ) -> GenerateStream:
        def start(request: inference_pb2.GenerateRequest, remaining: float | None) -> Call:
            return self._stubs.inference.Generate(request, timeout=remaining, metadata=metadata)

        def start_again(request: inference_pb2.ResumeRequest, remaining: float | None, at: str | None) -> Call:
            return self._stubs.inference.Resume(request, timeout=remaining, metadata=(*metadata, *to_service(at)))

        def abort(request_id: str, at: str | None) -> object:
            own = (*self._metadata, *to_service(at))
            aborting = self._stubs.control.Abort.future(
                abort_request([request_id]), timeout=ABORT_SECONDS, metadata=own
            )
            # A call whose future is dropped is cancelled.
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)
            return aborting

        return GenerateStream(
            request,
            start=start,
            tries=self._tries(timeout),
            errors=ErrorReader(address=self.address, timeout=timeout, keywords=keywords),
            resume=start_again,
            abort=abort,
            recovery=recovery,
            resumption=resumption,
            service=service,
        )

    tokenize = blocking(calls.tokenize)
    detokenize = blocking(calls.detokenize)
    render_chat = blocking(calls.render_chat)
    abort = blocking(calls.abort)
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
                waiting.note(error)
            waiting.check_time()
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Cancels every call and closes the connection, after the Aborts of closed streams."""
        for aborting in list(self._aborting):
            wait_for(aborting)
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, call: Rpc[_Value]) -> _Value:
        method, tries = call.method(self._stubs), self._tries(call.timeout)
        errors = ErrorReader(address=self.address, timeout=call.timeout)
        while True:
            try:
                own = (*self._metadata, *call.more)
                return call.read(method(call.request, timeout=tries.remaining(), metadata=own))
            except grpc.RpcError as rpc_error:
                error = errors.read(rpc_error)
                pause_seconds = tries.pause_seconds(error)
                if pause_seconds is None:
                    raise error from None
            time.sleep(pause_seconds)

    def _progress(self, call: Rpc[_Value]) -> Iterator[_Value]:
        answers = call.method(self._stubs)(call.request, timeout=call.timeout, metadata=self._metadata)
        try:
            yield from map(call.read, answers)
        except grpc.RpcError as error:
            raise ErrorReader(address=self.address, timeout=call.timeout).read(error) from None
        finally:
            answers.cancel()
