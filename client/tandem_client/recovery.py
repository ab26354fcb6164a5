"""The rule by which a stream is continued after it was lost: which errors, for how long, and with which pauses.

Owns it for both streams. Knows nothing of calls or messages.
"""

import random
import time
from collections.abc import Callable

import grpc

from tandem_client.errors import AlreadyExists, NothingAnswers, QueueFull, TandemError, Unavailable

# The linger time of a request with `resume=True` that names none.
LINGER_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
# The statuses that gRPC's own library reports if a connection breaks during a call.
_OF_A_CONNECTION = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)


class Recovery:
    """The losses of one stream, which may be continued for `linger_seconds` after each."""

    def __init__(self, linger_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._linger_seconds = linger_seconds
        self._clock = clock
        self._lost_at = 0.0
        self._num_tries = 0
        # The error that lost the stream; None while it is not lost.
        self.cause: TandemError | None = None

    def pause_seconds(self, error: TandemError) -> float | None:
        """Returns the pause before the next try; None if there will not be another."""
        if not self._is_loss(error):
            return None
        if self.cause is None:
            self.cause, self._lost_at, self._num_tries = error, self._clock(), 0
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**self._num_tries) * random.uniform(0.75, 1.25)
        self._num_tries += 1
        return pause if self._clock() + pause < self._lost_at + self._linger_seconds else None

    def continued(self) -> None:
        """Records that the stream goes on."""
        self.cause = None

    def _is_loss(self, error: TandemError) -> bool:
        """Whether the stream broke, and not the request. Before the request is accepted, fewer errors are a loss."""
        if error.request_ended:
            return False
        if self.cause is None and not error.stream_began:
            # Nothing was sent if nobody answers, and a service that is not ready has refused the request.
            return isinstance(error, Unavailable) and not isinstance(error, NothingAnswers) and not error.is_refusal
        if isinstance(error, Unavailable | QueueFull):
            return True
        if isinstance(error, AlreadyExists):
            # The first try of a request that is sent again has not been aborted yet.
            return not error.stream_began
        return error.code in _OF_A_CONNECTION and not error.is_refusal
