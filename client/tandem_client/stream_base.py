"""The part of a stream that the blocking and the asynchronous one share: its state, its results, its retries.

Owns one call, and the rule by which a stream is continued after it was lost: which errors, for how long, with which
pauses. The two streams own how its messages are read.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import grpc
from tandem.v1 import inference_pb2

from tandem_client.connection import Tries
from tandem_client.errors import AlreadyExists, NotFound, NothingAnswers, QueueFull, TandemError, Unavailable
from tandem_client.types import Finished, SampleOffset
from tandem_client.wire import messages
from tandem_client.wire.request import service_in
from tandem_client.wire.rpc_errors import ErrorReader
from tandem_client.wire.transcript import Transcript

_Event = TypeVar("_Event", threading.Event, asyncio.Event)
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


class StreamBase(Transcript, Generic[_Event]):
    """A call that is sent when this object is made, and what has been read of it."""

    # The class of the event that is set when the stream is closed or has ended.
    _new_event: Callable[[], _Event]

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        start: Callable[[inference_pb2.GenerateRequest, float | None], Any],
        tries: Tries,
        errors: ErrorReader,
        resume: Callable[[inference_pb2.ResumeRequest, float | None, str | None], Any],
        abort: Callable[[str, str | None], object],
        recovery: Recovery | None,
        resumption: inference_pb2.ResumeRequest | None = None,
        service: str | None = None,
    ) -> None:
        """`abort` sends an Abort without waiting. A lost stream is continued if `recovery` is not None.

        Both get the service of the request, if it is known.

        With a `resumption` this call is sent to `service` instead of the request, of which only the id is known.
        """
        super().__init__(request, None if resumption is None else messages.offsets(resumption))
        self._request = request
        self._resume = resume
        self._abort = abort
        self._recovery = recovery
        self._start = start
        self._tries = tries
        self._errors = errors
        self._resumption = resumption
        self._closed = self._new_event()
        # The service that has the request, for `resume` and `abort` in another process, as a proxy in front of several
        # names it. None without one, and before the first message.
        self.service = service
        self._begin()

    def __repr__(self) -> str:
        return self._face(closed=self._closed.is_set())

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._cancel()

    @property
    def offsets(self) -> tuple[SampleOffset, ...]:
        """What has been read of each sample, as `resume` takes it."""
        return tuple(sample.offset for sample in self.samples)

    @property
    def finished(self) -> Finished | None:
        """How the completion, or the first of several, ended; None before that."""
        return self.samples[0].finished

    def close(self) -> None:
        """Cancels the call; the service frees the request at once. A second call has no effect."""
        self._cancel()

    def _cancel(self) -> object:
        """Cancels the call. Returns what `abort` returned if the request would go on without its reader, else None."""
        was_open = not self._closed.is_set()
        self._closed.set()
        self._call.cancel()
        lingers = self._resumption is not None or self._request.resume.linger_seconds > 0
        return self._send_abort() if was_open and lingers else None

    def _send_abort(self) -> object:
        return self._abort(self._request.request_id, self.service)

    def _begin(self) -> None:
        resumption = self._resumption if self.accepted is None else self._rest_request()
        if resumption is None:
            self._call = self._start(self._request, self._tries.remaining())
        else:
            self._call = self._resume(resumption, self._tries.remaining(), self.service)

    def _note_service(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Reads the metadata that came with the first message."""
        self.service = service_in(metadata) or self.service

    def _end(self) -> None:
        """The call has ended, or its connection was lost after the Summary: then nothing was missed."""
        self._closed.set()
        self._check_end()

    def _is_new(self, message: inference_pb2.GenerateResponse) -> bool:
        """Whether a message was not read before the stream was lost."""
        if self._recovery is None:
            return True
        self._recovery.continued()
        return not self._is_repeated(message)

    def _pause_seconds(self, rpc_error: grpc.RpcError) -> float:
        """Returns the pause before the next try. Closes the stream and raises if the call may not be retried."""
        why = "" if self.waiting is None else f"; it was waiting: {self.waiting.message}"
        error = self._errors.read(rpc_error, stream_began=self.accepted is not None, why_late=why)
        pause_seconds = None if error.stream_began else self._tries.pause_seconds(error)
        if pause_seconds is None and self._recovery is not None:
            pause_seconds = self._recovery.pause_seconds(error)
            cause = self._recovery.cause
            if pause_seconds is None and cause is not None and isinstance(error, NotFound):
                # The service does not have the request any more. What the caller must know is how it was lost.
                error = cause
            elif pause_seconds is not None and not error.stream_began and self._resumption is None:
                # Whether the service has accepted the request is not known, so it must not run a second time.
                self._send_abort()
        if pause_seconds is None or self._tries.remaining() == 0:
            self._closed.set()
            raise error from None
        return pause_seconds
