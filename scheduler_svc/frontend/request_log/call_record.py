"""What is known of a call while it runs, for the line at its end. The handler's task finds its own record.

Owns the record. Values that the caller chose are cut to a bounded length here; the log escapes them.
"""

from contextvars import ContextVar
from dataclasses import dataclass

from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.request_log.traceparent import Traceparent
from scheduler_svc.frontend.streaming.stream import RequestStream

# Longer ids are refused; what is shown of them is cut.
_MAX_ID_CHARS = 128


@dataclass(slots=True, eq=False)
class CallRecord:
    """One call of Generate or Resume."""

    # Name of the method.
    method: str
    # The loop's time.
    arrived_at: float
    # What gRPC calls the peer: `ipv4:127.0.0.1:50000`, `unix:…`.
    peer: str
    traceparent: Traceparent | None
    request_id: str = ""
    # Name of the served model.
    model: str = ""
    # From the core's consent on.
    accepted: pb.Accepted | None = None
    # From the moment that the stream is open.
    stream: RequestStream | None = None

    def named(self, request_id: str) -> None:
        """Notes the request's id: the caller's, perhaps not checked yet, or the one that was chosen for it."""
        self.request_id = request_id[:_MAX_ID_CHARS]


_current: ContextVar[CallRecord] = ContextVar("call record")


def begin(record: CallRecord) -> None:
    """Makes the record that of the running task."""
    _current.set(record)


def current() -> CallRecord:
    """Returns the record of the call that the running task serves. Raises LookupError outside Generate and Resume."""
    return _current.get()
