"""How a channel is set up and when a call may be tried again.

Owns channel options and the rule for retries. Knows nothing of what is called.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from client.errors import TandemError, Unavailable

DEFAULT_ADDRESS = "127.0.0.1:50051"
# One message of either direction. The service's own limit (4 MiB by default) is lower and answers with its number.
MAX_MESSAGE_BYTES = 64 * 2**20
_RECONNECT_FIRST_MS = 100
_RECONNECT_LAST_MS = 1_000
# For TCP, and for the service to say the first word of HTTP/2: gRPC's own default.
CONNECT_TIMEOUT_MS = 20_000
_LOCAL_HOSTS = ("127.", "localhost:", "[::1]:", "unix:")


def channel_options(address: str) -> Sequence[tuple[str, int]]:
    """Bounds for messages, quick reconnects, and no proxy on the way to this machine itself."""
    return [
        # A connection of its own, where gRPC would have all clients of a process share one: behind one port there may
        # be several front ends, and a connection stays with the one that took it.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_FIRST_MS),
        # Despite its name this is how long gRPC lets one attempt to connect take.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_LAST_MS),
        ("grpc.enable_http_proxy", 0 if address.startswith(_LOCAL_HOSTS) else 1),
    ]


@dataclass(slots=True, kw_only=True)
class Tries:
    """How often, and until when, one call may be tried again.

    Only a service that is not ready and says when to come back is asked again: it has not taken the request, so nothing
    runs twice. A full queue is left to the caller, who knows what else could wait.
    """

    retries_left: int
    # Seconds for all tries together; None: no end.
    timeout: float | None
    _started: float = field(default_factory=time.monotonic)

    def remaining(self) -> float | None:
        """Seconds left of the timeout, for the next try."""
        return None if self.timeout is None else max(0.0, self.timeout - (time.monotonic() - self._started))

    def pause_seconds(self, error: TandemError) -> float | None:
        """How long to wait before the next try; None where there is none. Counts the try."""
        if not isinstance(error, Unavailable) or error.retry_after_seconds is None or self.retries_left <= 0:
            return None
        remaining = self.remaining()
        if remaining is not None and remaining <= error.retry_after_seconds:
            return None
        self.retries_left -= 1
        return error.retry_after_seconds
