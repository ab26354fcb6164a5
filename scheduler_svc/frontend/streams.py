"""Owns the open streams: what the core said of each and its handler has not read yet. Knows nothing of text or gRPC.

A stream has one pending batch of tokens that later ones join in place, and one waiter; never a queue. Pending tokens
take 4 bytes each and are at most max_new_tokens. A reader that stalls is dropped (`StreamLimits`). Wake-ups are spread
under load: above `busy_tokens_per_second`, tokens wait up to `merge_seconds` for company; first tokens and ends never.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import numpy as np
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend import status

logger = logging.getLogger(__name__)

# Of one message: gRPC keeps a message whole while its write is blocked, tens of bytes per token in all its copies.
MAX_DELTA_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """The bounds of one front end's streams."""

    max_streams: int = 8192
    # A reader is dropped when one write has been blocked so long and more tokens than this are pending,
    stall_seconds: float = 30.0
    max_stalled_tokens: int = 4096
    # or when one write has been blocked so long, whatever is pending.
    max_stall_seconds: float = 300.0
    merge_seconds: float = 0.02
    # A message costs about 40 us of CPU: from a fifth of a core on, merging is worth its delay.
    busy_tokens_per_second: float = 5000.0


class Stream:
    """One request between its admission and its end. Written by `Streams`, read by its one handler."""

    __slots__ = (
        "_is_signalled",
        "_waiter",
        "blocked_since",
        "end",
        "failure",
        "id",
        "is_stopped",
        "is_submitted",
        "max_new_tokens",
        "num_received",
        "pending",
        "rejected",
        "requests_ahead",
        "task",
    )

    def __init__(self, stream_id: int, task: "asyncio.Task[object] | None") -> None:
        self.id = stream_id
        self.task = task
        self.is_submitted = False
        self.max_new_tokens = 0
        # What the core said.
        self.requests_ahead: int | None = None
        self.rejected: frontend_pb2.Rejected | None = None
        self.end: frontend_pb2.End | None = None
        # What ended it on this side: the core is gone, the reader stalls, the tokens do not fit together.
        self.failure: status.Refusal | None = None
        # A stop string was found: later tokens are dropped.
        self.is_stopped = False
        self.pending = array("i")
        self.num_received = 0
        # The loop's time when a write began that has not ended; 0 between writes.
        self.blocked_since = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._is_signalled = False

    async def changed(self) -> None:
        """Returns once there is something new, at once where there was something unread."""
        if not self._is_signalled:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_signalled = False

    def take(self) -> list[int]:
        """The pending tokens, as many as one message may carry; `changed` returns at once while more are left."""
        tokens = self.pending[:MAX_DELTA_TOKENS].tolist()
        del self.pending[:MAX_DELTA_TOKENS]
        self._is_signalled |= bool(self.pending)
        return tokens

    def wake(self) -> None:
        self._is_signalled = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Streams:
    """All open streams of this front end. `send` hands a message to the core, or says that it cannot."""

    def __init__(self, send: Callable[[frontend_pb2.FrontendToCore], bool], limits: StreamLimits) -> None:
        self._send = send
        self._limits = limits
        self._open: dict[int, Stream] = {}
        self._last_id = 0
        # Streams whose wake-up waits for company.
        self._late: dict[int, Stream] = {}
        self._rate_since = 0.0
        self._num_tokens_since = 0
        self._is_busy = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self) -> Stream:
        """A stream for the running task's request. Raises Refusal where there are too many."""
        if len(self._open) >= self._limits.max_streams:
            raise status.overloaded(f"{len(self._open)} requests are open; the limit is {self._limits.max_streams}")
        self._last_id += 1
        stream = Stream(self._last_id, asyncio.current_task())
        self._open[stream.id] = stream
        self._idle.clear()
        return stream

    def submit(self, stream: Stream, submit: frontend_pb2.Submit) -> None:
        """Sends the request to the core. Raises Refusal where the core is gone."""
        stream.max_new_tokens = submit.max_new_tokens
        if not self._send(frontend_pb2.FrontendToCore(submit=submit)):
            raise status.not_ready("the scheduler's core cannot be reached")
        stream.is_submitted = True

    def stop(self, stream: Stream, output_tokens: int) -> None:
        """A stop string ended the output after so many tokens; the core's End comes, or is on its way."""
        stream.is_stopped = True
        del stream.pending[:]
        if stream.end is None:
            finish = frontend_pb2.Finish(stream=stream.id, output_tokens=output_tokens)
            self._send(frontend_pb2.FrontendToCore(finish=finish))

    def close(self, stream: Stream) -> None:
        """Frees the request in every phase; never waits, and may be called again."""
        if self._open.pop(stream.id, None) is None:
            return
        self._late.pop(stream.id, None)
        self._cancel(stream)
        if not self._open:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once no stream is open."""
        await self._idle.wait()

    # What the core says ---------------------------------------------------------------------------------------

    def admitted(self, message: frontend_pb2.Admitted) -> None:
        if stream := self._open.get(message.stream):
            stream.requests_ahead = message.requests_ahead
            stream.wake()

    def rejected(self, message: frontend_pb2.Rejected) -> None:
        if stream := self._open.get(message.stream):
            stream.rejected = message
            stream.wake()

    def step_output(self, output: frontend_pb2.StepOutput) -> None:
        """Deals a step's tokens and ends out to their streams; those of closed streams are dropped."""
        num_tokens = len(output.tokens) // 4
        num_bytes = (len(output.streams), len(output.offsets), len(output.tokens))
        if num_bytes != (8 * num_tokens, 4 * num_tokens, 4 * num_tokens):
            logger.error("dropped a step's output: its arrays differ in length")
            return
        self._measure(num_tokens)
        streams = np.frombuffer(output.streams, "<u8").tolist()
        offsets = np.frombuffer(output.offsets, "<i4").tolist()
        tokens = np.frombuffer(output.tokens, "<i4").tolist()
        for stream_id, offset, token in zip(streams, offsets, tokens, strict=True):
            stream = self._open.get(stream_id)
            if stream is None or stream.is_stopped or stream.failure:
                continue
            if offset != stream.num_received or offset >= stream.max_new_tokens:
                self._fail_offset(stream, offset)
                continue
            stream.num_received += 1
            stream.pending.append(token)
            if self._is_busy and offset:
                self._wake_late(stream)
            else:
                stream.wake()
        for end in output.ends:
            if stream := self._open.get(end.stream):
                stream.end = end
                stream.wake()

    def fail_all(self, failure: Callable[[], status.Refusal]) -> None:
        """Ends every stream that has no end yet, after what it has received: the core is gone, or time is up."""
        for stream in list(self._open.values()):
            if stream.end is None and stream.rejected is None:
                self._fail(stream, failure())

    # ------------------------------------------------------------------------------------------------------------

    def drop_stalled(self) -> None:
        """Frees the requests of readers that read nothing; to be called every second or so."""
        now, limits = asyncio.get_running_loop().time(), self._limits
        for stream in list(self._open.values()):
            blocked_seconds = now - stream.blocked_since if stream.blocked_since else 0.0
            is_full = len(stream.pending) > limits.max_stalled_tokens
            if blocked_seconds < (limits.stall_seconds if is_full else limits.max_stall_seconds) or stream.failure:
                continue
            message = (
                f"the reader has read nothing for {blocked_seconds:.0f} s and {len(stream.pending)} tokens wait;"
                f" the limits are {limits.stall_seconds:g} s with {limits.max_stalled_tokens} tokens"
                f" and {limits.max_stall_seconds:g} s"
            )
            logger.warning("stream %d dropped: %s", stream.id, message)
            self._fail(stream, status.Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
            # Its handler is inside a write that may never end.
            if stream.task is not None:
                stream.task.cancel()

    def _fail_offset(self, stream: Stream, offset: int) -> None:
        message = f"token {offset} came where token {stream.num_received} of {stream.max_new_tokens} was due"
        logger.error("stream %d: %s", stream.id, message)
        self._fail(stream, status.Refusal(grpc.StatusCode.INTERNAL, message))

    def _fail(self, stream: Stream, failure: status.Refusal) -> None:
        stream.failure = stream.failure or failure
        self._cancel(stream)
        stream.wake()

    def _cancel(self, stream: Stream) -> None:
        if stream.is_submitted and stream.end is None and stream.rejected is None:
            self._send(frontend_pb2.FrontendToCore(cancel=frontend_pb2.Cancel(stream=stream.id)))
        stream.is_submitted = False

    def _measure(self, num_tokens: int) -> None:
        now = asyncio.get_running_loop().time()
        if (seconds := now - self._rate_since) >= 0.1:
            self._is_busy = self._num_tokens_since > self._limits.busy_tokens_per_second * seconds
            self._rate_since, self._num_tokens_since = now, 0
        self._num_tokens_since += num_tokens

    def _wake_late(self, stream: Stream) -> None:
        if not self._late:
            asyncio.get_running_loop().call_later(self._limits.merge_seconds, self._wake_all_late)
        self._late[stream.id] = stream

    def _wake_all_late(self) -> None:
        late, self._late = self._late, {}
        for stream in late.values():
            stream.wake()
