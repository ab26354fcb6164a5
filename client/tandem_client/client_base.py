"""The part of a client that the blocking and the asynchronous one share: its settings, and the wait for the service."""

import re
import uuid
from collections.abc import Iterable
from typing import Unpack

import grpc
from grpc_health.v1 import health_pb2
from tandem.v1 import inference_pb2

from tandem_client.connection import DEFAULT_ADDRESS, Access, Metadata, TlsSettings, Tries
from tandem_client.errors import DeadlineExceeded, Unavailable
from tandem_client.stream_base import LINGER_SECONDS, Recovery
from tandem_client.types import SampleOffset
from tandem_client.wire.request import (
    AFFINITY_KEY,
    GenerateOptions,
    Prompt,
    affinity_of,
    generate_request,
    resume_request,
)
from tandem_client.wire.rpc_errors import ErrorReader

# The pause before another look at a service that stopped answering.
POLL_SECONDS = 0.05
# W3C Trace Context, version 00.
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class ClientBase:
    """The address, the number of retries and the access, which all calls of a client share."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        max_retries: int = 3,
        token: str | None = None,
        tls: TlsSettings | None = None,
    ) -> None:
        self._access = Access(address=address, token=token, tls=tls)
        self.address = address
        self._metadata = self._access.metadata
        self._max_retries = max_retries

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

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


def resumed_request(
    request_id: str, secret: bytes, offsets: Iterable[SampleOffset], linger_seconds: float
) -> tuple[inference_pb2.GenerateRequest, inference_pb2.ResumeRequest, Recovery | None]:
    """Returns the known part of a request that is resumed, its first Resume call, and its recovery."""
    recovery = Recovery(linger_seconds) if linger_seconds > 0 else None
    resumption = resume_request(request_id, secret, offsets)
    return inference_pb2.GenerateRequest(request_id=request_id), resumption, recovery


class ReadyWait:
    """The state of one `wait_ready`: its time, and the last reason why the service is not ready."""

    def __init__(self, address: str, timeout: float | None) -> None:
        self._tries = Tries(retries_left=0, timeout=timeout)
        self._errors = ErrorReader(address=address, timeout=timeout)
        self._reason = "it has not answered"

    def remaining(self) -> float | None:
        """Returns the seconds that are left, None without a limit."""
        return self._tries.remaining()

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
