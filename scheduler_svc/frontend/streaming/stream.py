"""Owns one request's stream: the core's output that the request's handler has not read yet, sample by sample.

Knows nothing of text, gRPC or other streams. A sample has one batch of pending tokens, which later tokens join,
and no queue of messages. Only the request's handler waits for the stream; ordinary tokens are sent without waking it
(`deliver`).

Logprobs enter and leave in the order of their tokens, and always as many as tokens leave, so they stay aligned even if
tokens are held back or cut off.

Owns also the bounds of one front end's streams, and the decision to drop a reader.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.door.tenant import EVERYONE, Caller
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.text.detokenize import Pieces
from scheduler_svc.metrics.front_meter import StreamMeter
from tandem_contract.plural import numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    # Samples of all requests, plus finished calls with unread answers.
    max_streams: int = 8192
    # A reader is dropped if a write has been blocked for `stall_seconds` and more than `max_stalled_bytes` are pending,
    stall_seconds: float = 30.0
    max_stalled_bytes: int = 16_384
    # or if a write has been blocked for this long, with any number of bytes pending,
    max_stall_seconds: float = 300.0
    # or if more bytes than this are pending while a write is blocked, for any time.
    max_pending_bytes: int = 64 * 1024 * 1024
    # Under load, the tokens of a stream wait for this time, so that one message carries several. The rest of the 20 ms
    # that callers are promised is for the messages of other streams that are due at the same time.
    merge_seconds: float = 0.015
    # The load from which tokens are merged. A message costs about 40 us of CPU, so this is a fifth of a core.
    busy_tokens_per_second: float = 5000.0
    # Under load, arriving tokens are passed to their streams together, this often.
    sort_seconds: float = 0.006
    # Streams that get their messages in one turn of the event loop, some 0.8 ms of work, so that a first token or a new
    # output of the core waits no longer. The messages of a turn to one connection are one packet.
    streams_per_turn: int = 16

    def stall(self, blocked_seconds: float, num_bytes: int) -> str:
        """Why the reader of a write that has been blocked for this time is dropped; empty if it is kept."""
        if num_bytes <= self.max_pending_bytes:
            is_full = num_bytes > self.max_stalled_bytes
            if blocked_seconds < (self.stall_seconds if is_full else self.max_stall_seconds):
                return ""
        return (
            f"the reader has read nothing for {blocked_seconds:.0f} s and {numbered(num_bytes, 'byte', 'are')} pending;"
            f" the limits are {self.stall_seconds:g} s with {numbered(self.max_stalled_bytes, 'byte')},"
            f" {self.max_stall_seconds:g} s, and {numbered(self.max_pending_bytes, 'byte')}"
        )


logger = logging.getLogger(__name__)

# A logprob; and an id and a logprob for each alternative.
BYTES_PER_LOGPROB = 4
BYTES_PER_TOP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """The core's logprobs of m tokens, with k alternatives for each."""

    # float32[m].
    logprobs: NDArray[np.float32]
    # int32[m, k] and float32[m, k].
    top_token_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @property
    def top_k(self) -> int:
        return self.top_token_ids.shape[1]

    def __len__(self) -> int:
        return len(self.logprobs)


def read_logprobs(message: frontend_pb2.TokenLogprobs | frontend_pb2.PromptLogprobs) -> LogprobRows:
    """The rows in a message of the core. Raises ValueError if the sizes of its arrays disagree."""
    logprobs = np.frombuffer(message.logprobs, "<f4")
    shape = (len(logprobs), message.top_k)
    return LogprobRows(
        logprobs=logprobs,
        top_token_ids=np.frombuffer(message.top_token_ids, "<i4").reshape(shape),
        top_logprobs=np.frombuffer(message.top_logprobs, "<f4").reshape(shape),
    )


def read_step_logprobs(output: frontend_pb2.StepOutput) -> tuple[LogprobRows | None, Mapping[int, int]]:
    """The step's logprobs and the row of each entry that has some."""
    if not output.HasField("logprobs"):
        return None, {}
    try:
        received = read_logprobs(output.logprobs)
        entries = np.frombuffer(output.logprobs.entries, "<i4").tolist()
        return received, dict(zip(entries, range(len(received)), strict=True))
    except ValueError:
        logger.error("dropped a step's logprobs: the sizes of their arrays disagree")
        return None, {}


def add_pieces(logprobs: pb.Logprobs, token_ids: Iterable[int], pieces: Pieces, *, is_end: bool = False) -> None:
    """Adds what these tokens, and the alternatives of each, add to the text. `is_end`: the text ends with them."""
    top_k = logprobs.top_k
    for idx, token_id in enumerate(token_ids):
        for top_id in logprobs.top_token_ids[idx * top_k : (idx + 1) * top_k]:
            text, data = pieces.peek(top_id)
            logprobs.top_pieces.add(text=text, data=data)
        text, data = pieces.push(token_id)
        logprobs.pieces.add(text=text, data=data)
    if is_end:
        # A token that is left out of the text has a name and no bytes.
        last = next((piece for piece in reversed(logprobs.pieces) if piece.data or not piece.text), None)
        if last is not None:
            text, data = pieces.rest()
            last.text, last.data = last.text + text, last.data + data


class LogprobQueue:
    """Logprobs that were received and not sent, each with its `num_top` alternatives."""

    __slots__ = ("_logprobs", "_top_logprobs", "_top_token_ids", "bytes_each", "num_top")

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self.bytes_each = BYTES_PER_LOGPROB + BYTES_PER_TOP * num_top
        self._logprobs = array("f")
        self._top_token_ids = array("i")
        self._top_logprobs = array("f")

    def __len__(self) -> int:
        return len(self._logprobs)

    @property
    def num_bytes(self) -> int:
        return len(self._logprobs) * self.bytes_each

    def put(self, received: LogprobRows, rows: slice) -> bool:
        """Appends these rows. Returns False if they have too few alternatives."""
        if received.top_k < self.num_top:
            return False
        self._logprobs.frombytes(received.logprobs[rows].astype("f4").tobytes())
        if self.num_top:
            self._top_token_ids.frombytes(received.top_token_ids[rows, : self.num_top].astype("i4").tobytes())
            self._top_logprobs.frombytes(received.top_logprobs[rows, : self.num_top].astype("f4").tobytes())
        return True

    def take(self, count: int) -> pb.Logprobs:
        """Removes and returns the logprobs of the first `count` tokens."""
        num_top = count * self.num_top
        message = pb.Logprobs(
            logprobs=self._logprobs[:count],
            top_k=self.num_top,
            top_token_ids=self._top_token_ids[:num_top],
            top_logprobs=self._top_logprobs[:num_top],
        )
        del self._logprobs[:count], self._top_token_ids[:num_top], self._top_logprobs[:num_top]
        return message


class PromptQueue:
    """Logprobs of the prompt's positions `start` to `end` - 1, which arrive in consecutive pieces."""

    __slots__ = ("_end", "_start", "queue")

    def __init__(self, *, start: int, end: int, num_top: int) -> None:
        # The position of the first logprob in the queue.
        self._start = start
        self._end = end
        self.queue = LogprobQueue(num_top)

    @property
    def is_complete(self) -> bool:
        """Whether all have been received; some may not have been sent."""
        return self._next_position == self._end

    @property
    def _next_position(self) -> int:
        return self._start + len(self.queue)

    def put(self, start: int, received: LogprobRows) -> bool:
        """Appends the piece that begins at `start`. Returns False if another position was expected."""
        if start != self._next_position or start + len(received) > self._end:
            return False
        return self.queue.put(received, slice(None))

    def take(self, max_bytes: int) -> pb.PromptInfo | None:
        """Removes and returns the next logprobs, about `max_bytes` at most; None if there are none."""
        if not len(self.queue):
            return None
        count = min(len(self.queue), max(1, max_bytes // self.queue.bytes_each))
        info = pb.PromptInfo(start=self._start, logprobs=self.queue.take(count))
        self._start += count
        return info


# The size of one message: gRPC keeps a whole message, in several copies, while its write is blocked.
MAX_DELTA_BYTES = 4096
MAX_PROMPT_INFO_BYTES = 65_536
BYTES_PER_TOKEN = 4


@dataclass(slots=True, eq=False)
class SampleStream:
    """One sample of a request. `StreamTable` writes it; the request's handler reads it."""

    id: int
    stream: "RequestStream"
    # Logprobs of the pending tokens and of tokens that were taken but not sent. None if the caller wants none.
    logprobs: LogprobQueue | None = None
    end: frontend_pb2.End | None = None
    pending: "array[int]" = field(default_factory=lambda: array("i"))
    num_received: int = field(init=False)
    # A stop string was found, so later tokens are dropped.
    is_stopped: bool = False
    _max_take: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_received = len(self.pending)
        bytes_each = BYTES_PER_TOKEN + (0 if self.logprobs is None else self.logprobs.bytes_each)
        self._max_take = max(1, MAX_DELTA_BYTES // bytes_each)

    @property
    def fits_message(self) -> bool:
        """Whether one message can carry all pending tokens."""
        return len(self.pending) <= self._max_take

    @property
    def num_bytes(self) -> int:
        logprob_bytes = 0 if self.logprobs is None else self.logprobs.num_bytes
        return BYTES_PER_TOKEN * len(self.pending) + logprob_bytes

    def take(self) -> list[int]:
        """The pending tokens, up to the size of one message. If more remain, the stream's `changed` returns at once."""
        if len(self.pending) <= self._max_take:
            # Without a copy, because it runs for every message.
            tokens = self.pending.tolist()
            del self.pending[:]
            return tokens
        tokens = self.pending[: self._max_take].tolist()
        del self.pending[: self._max_take]
        self.stream.wake()
        return tokens


@dataclass(slots=True, eq=False)
class RequestStream:
    """One request from its arrival to its end."""

    task: "asyncio.Task[object] | None"
    caller: Caller = EVERYONE
    is_submitted: bool = False
    # Whether the caller may come back, so that the core keeps the request if this stream breaks. Not before the caller
    # has the secret.
    is_resumable: bool = False
    request_id: str = ""
    max_new_tokens: int = 0
    # Empty until the request is submitted.
    samples: tuple[SampleStream, ...] = ()
    # None if the caller wants no logprobs of the prompt.
    prompt: PromptQueue | None = None
    # The core's answer to the Submit: one of the two is set.
    requests_ahead: int | None = None
    rejected: frontend_pb2.Rejected | None = None
    # The core's answer to a Resume, unless it is rejected.
    description: frontend_pb2.StreamDescription | None = None
    # The first failure: a sample failed, the core is gone, the reader stalls, or tokens are missing.
    failure: status.Refusal | None = None
    # Why the request makes no progress, until it is sent to the caller. A newer reason replaces it.
    waiting: "pb.Waiting | None" = None
    # What the caller got at the end; None and empty before, and if the request failed.
    summary: pb.Summary | None = None
    reasons: "tuple[pb.FinishReason.ValueType, ...]" = ()
    # The loop's time at which the current write began; 0 between writes.
    blocked_since: float = 0.0
    # Begins to send new tokens, in the caller's turn. Returns False if the request's task has to go on.
    deliver: "Callable[[], bool] | None" = None
    # None without a metrics page.
    meter: "StreamMeter | None" = None
    _is_changed: bool = False
    _waiter: "asyncio.Future[None] | None" = None

    def begin(self, first_id: int, submit: frontend_pb2.Submit) -> None:
        """Creates the samples of a request that is about to be submitted, numbered from `first_id` on."""
        self.request_id = submit.request_id
        self.max_new_tokens = submit.max_new_tokens
        num_top = max(0, submit.num_logprobs - 1)
        self.samples = tuple(
            SampleStream(first_id + idx, self, LogprobQueue(num_top) if submit.num_logprobs else None)
            for idx in range(submit.num_samples)
        )
        if submit.prompt_logprobs_from:
            num_prompt = len(submit.prompt) // BYTES_PER_TOKEN
            self.prompt = PromptQueue(start=submit.prompt_logprobs_from, end=num_prompt, num_top=num_top)

    def begin_resume(self, first_id: int, request_id: str) -> None:
        """Prepares for the answer to a Resume. Until it comes, one sample stands for all."""
        self.request_id, self.is_resumable = request_id, True
        self.samples = (SampleStream(first_id, self),)

    def take_resumed(self, resumed: frontend_pb2.Resumed) -> None:
        """Creates the samples of a request that was resumed, with their output so far."""
        self.description = frontend_pb2.StreamDescription.FromString(resumed.description)
        self.request_id = self.description.accepted.request_id
        self.max_new_tokens = self.description.max_new_tokens
        self.samples = tuple(
            SampleStream(
                resumed.stream + idx, self, None, one.end if one.HasField("end") else None, array("i", one.tokens)
            )
            for idx, one in enumerate(resumed.samples)
        )

    @property
    def is_ended(self) -> bool:
        """Whether the core will send nothing more."""
        return self.rejected is not None or (
            bool(self.samples) and all(sample.end is not None for sample in self.samples)
        )

    @property
    def is_prompt_over(self) -> bool:
        """Whether the core will send no more logprobs of the prompt."""
        return (
            self.prompt is None
            or self.prompt.is_complete
            or self.samples[0].end is not None
            or self.failure is not None
        )

    @property
    def has_pending(self) -> bool:
        """Whether a sample has tokens that are not sent."""
        # A loop, because it runs for every message.
        for sample in self.samples:  # noqa: SIM110
            if sample.pending:
                return True
        return False

    @property
    def num_bytes(self) -> int:
        prompt_bytes = 0 if self.prompt is None else self.prompt.queue.num_bytes
        return prompt_bytes + sum(sample.num_bytes for sample in self.samples)

    async def changed(self) -> None:
        """Waits for a change. Returns at once if there was one since the last call."""
        # An asyncio.Event would take 700 bytes per stream and a queue of waiters; only one task waits.
        if not self._is_changed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_changed = False

    def tell(self, waiting: pb.Waiting) -> None:
        """Lets the task send the caller the reason why the request makes no progress."""
        self.waiting = waiting
        self._wake_task()

    def wake(self) -> None:
        """Reports a change: sends the new tokens at once, or wakes the task."""
        is_waiting = self._waiter is not None and not self._waiter.done()
        if is_waiting and self.deliver is not None and self.deliver():
            return
        self._wake_task()

    def _wake_task(self) -> None:
        self._is_changed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
