"""The blocking client.

Owns a channel and the names of the calls. `request` builds the requests, `messages` reads the answers, `sync_stream`
reads a completion.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2
from tandem.v1 import inference_pb2

from tandem_client import calls, types
from tandem_client.calls import Rpc, Stubs, blocking, blocking_progress
from tandem_client.client_base import POLL_SECONDS, ClientBase, ReadyWait, lingering_request, resumed_request
from tandem_client.connection import ABORT_SECONDS, DEFAULT_ADDRESS
from tandem_client.credentials import Metadata, TlsSettings
from tandem_client.recovery import Recovery
from tandem_client.sync_stream import Aborting, Call, GenerateStream, wait_for
from tandem_client.wire.request import (
    FIELD_KEYWORDS,
    RESUME_KEYWORDS,
    GenerateOptions,
    Prompt,
    abort_request,
)
from tandem_client.wire.routing import to_service
from tandem_client.wire.rpc_errors import ErrorReader

_Value = TypeVar("_Value")


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
