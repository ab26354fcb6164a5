"""The part of a client that the blocking and the asynchronous one share: settings, streams, the wait for a service."""

import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar, Unpack, cast

import grpc
from grpc_health.v1 import health_pb2
from tandem.v1 import inference_pb2

from tandem_client.calls import Stubs
from tandem_client.connection import DEFAULT_ADDRESS, Access, Metadata, TlsSettings, Tries
from tandem_client.errors import DeadlineExceeded, Unavailable
from tandem_client.stream_base import LINGER_SECONDS, Recovery
from tandem_client.types import SampleOffset
from tandem_client.wire.request import (
    AFFINITY_KEY,
    FIELD_KEYWORDS,
    RESUME_KEYWORDS,
    GenerateOptions,
    Prompt,
    affinity_of,
    generate_request,
    resume_request,
    to_service,
)
from tandem_client.wire.rpc_errors import ErrorReader

_Stream = TypeVar("_Stream")
# The pause before another look at a service that stopped answering.
POLL_SECONDS = 0.05
# W3C Trace Context, version 00.
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class ClientBase(Generic[_Stream]):
    """The address, the number of retries and the access, which all calls of a client share.

    A call is retried, at most `max_retries` times, if the service has not accepted it and gives a retry time.
    Every call takes `timeout`, in seconds, for all its tries together; None: no end.
    """

    # The class of the streams, and whether a channel belongs to the event loop that runs when it is made.
    _new_stream: Callable[..., _Stream]
    _is_of_loop: bool

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        max_retries: int = 3,
        token: str | None = None,
        tls: TlsSettings | None = None,
    ) -> None:
        """Raises ValueError if the token would be sent in plaintext to another machine; OSError for files of `tls`."""
        self._access = Access(address=address, token=token, tls=tls)
        self.address = address
        self._metadata = self._access.metadata
        self._max_retries = max_retries
        # A channel of a loop is made at first use.
        self._opened: Stubs | None = None if self._is_of_loop else Stubs(self._access.channel())
        # Aborts of requests that linger and whose streams were closed. What is dropped is cancelled.
        self._aborting: set[Any] = set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        timeout: float | None = None,
        resume: bool = False,
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> _Stream:
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
        offsets: Iterable[SampleOffset] = (),
        linger_seconds: float = 0.0,
        service: str | None = None,
        timeout: float | None = None,
    ) -> _Stream:
        """Continues the stream of a request that lingers, which this or another program began; iterate over it.

        `request_id` and `secret` are those of its Accepted (`request_id`, `resume_secret`). `offsets` tells what was
        received of each sample (`stream.offsets`); the stream has only what lies beyond. A sample without an offset
        is sent from its start. `service` is the first stream's, by which a proxy in front of several finds it.
        This reader replaces an earlier one, which gets Replaced. NotFound: no such request is kept, or the secret is
        wrong. If the stream is lost, it is continued for `linger_seconds`; 0: it raises.
        Leaving it early aborts the request, as with `generate`.
        """
        recovery = Recovery(linger_seconds) if linger_seconds > 0 else None
        resumption = resume_request(request_id, secret, offsets)
        # The known part of the request.
        request = inference_pb2.GenerateRequest(request_id=request_id)
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
    ) -> _Stream:
        def start(request: inference_pb2.GenerateRequest, remaining: float | None) -> Any:
            return self._stubs.inference.Generate(request, timeout=remaining, metadata=metadata)

        def start_again(request: inference_pb2.ResumeRequest, remaining: float | None, at: str | None) -> Any:
            return self._stubs.inference.Resume(request, timeout=remaining, metadata=(*metadata, *to_service(at)))

        return self._new_stream(
            request,
            start=start,
            tries=self._tries(timeout),
            errors=ErrorReader(address=self.address, timeout=timeout, keywords=keywords),
            resume=start_again,
            abort=self._abort_later,
            recovery=recovery,
            resumption=resumption,
            service=service,
        )

    @property
    def _stubs(self) -> Stubs:
        """The calls on the client's channel."""
        if self._opened is None:
            self._opened = Stubs(cast(Any, self._access.aio_channel()))
        return self._opened

    def _abort_later(self, request_id: str, service: str | None) -> object:
        """Sends an Abort without waiting; what is returned can be waited for."""
        raise NotImplementedError

    def _metadata_of(self, request: inference_pb2.GenerateRequest, traceparent: str | None) -> Metadata:
        """Returns the metadata of a call in this trace. Raises ValueError if the traceparent is malformed."""
        metadata = (*self._metadata, (AFFINITY_KEY, affinity_of(request)))
        if traceparent is None:
            return metadata
        if _TRACEPARENT.fullmatch(traceparent) is None:
            raise ValueError("traceparent must have the form 00-<32 digits>-<16 digits>-<2 digits>, hexadecimal")
        return (*metadata, ("traceparent", traceparent))

    def _tries(self, timeout: float | None) -> Tries:
        return Tries(retries_left=self._max_retries, timeout=timeout)


def lingering_request(
    prompt: Prompt | None, *, resume: bool, **options: Unpack[GenerateOptions]
) -> tuple[inference_pb2.GenerateRequest, Recovery | None]:
    """Returns the request of a stream, and the recovery of one that is resumed by itself.

    A request that lingers gets an id, so that it can be aborted before the service has answered.
    """
    request = generate_request(prompt, **options)
    if resume and options.get("linger_seconds") is None:
        request.resume.linger_seconds = LINGER_SECONDS
    if request.resume.linger_seconds and not request.request_id:
        request.request_id = uuid.uuid4().hex
    return request, Recovery(request.resume.linger_seconds) if resume else None


class ReadyWait:
    """The state of one `wait_ready`: its time, and the last reason why the service is not ready."""

    def __init__(self, address: str, timeout: float | None) -> None:
        # Gives the seconds that are left, None without a limit.
        self.remaining = Tries(retries_left=0, timeout=timeout).remaining
        self._errors = ErrorReader(address=address, timeout=timeout)
        self._reason = "it has not answered"

    def is_ready(self, response: health_pb2.HealthCheckResponse) -> bool:
        """Reads one answer of the health service."""
        self._reason = "it answers, but does not serve yet"
        return response.status == health_pb2.HealthCheckResponse.SERVING

    def note(self, rpc_error: grpc.RpcError) -> None:
        """Reads the error that ended a watch. Raises it unless the service may still become ready."""
        error = self._errors.read(rpc_error)
        if isinstance(error, DeadlineExceeded):
            raise self._errors.not_ready(self._reason) from None
        if not isinstance(error, Unavailable):
            raise error from None
        self._reason = error.message

    def check_time(self) -> None:
        """Raises DeadlineExceeded if no time is left."""
        if self.remaining() == 0:
            raise self._errors.not_ready(self._reason)
