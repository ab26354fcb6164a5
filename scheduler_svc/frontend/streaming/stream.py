"""Owns one request's stream: the core's output that the request's handler has not read yet, sample by sample.

Knows nothing of text, gRPC or other streams. A sample has one batch of pending tokens, which later tokens join; there
is no queue of messages. Only the request's handler waits for the stream; ordinary tokens are sent without waking it
(`deliver`). A pending token takes 4 bytes, its logprob 4
bytes and each alternative 8 bytes.
"""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.door.tenant import EVERYONE, Caller
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.streaming.logprobs import LogprobQueue, PromptQueue
from scheduler_svc.metrics.front_meter import StreamMeter

# The size of one message: gRPC keeps a whole message, in several copies, while its write is blocked.
MAX_DELTA_BYTES = 4096
MAX_PROMPT_INFO_BYTES = 65_536
BYTES_PER_TOKEN = 4


class SampleStream:
    """One sample of a request. `StreamTable` writes it; the request's handler reads it."""

    __slots__ = ("_max_take", "end", "id", "is_stopped", "logprobs", "num_received", "pending", "stream")

    def __init__(
        self,
        sample_id: int,
        stream: "RequestStream",
        num_top: int | None,
        resumed: frontend_pb2.ResumedSample | None = None,
    ) -> None:
        self.id = sample_id
        self.stream = stream
        # The core's End.
        self.end: frontend_pb2.End | None = None
        # A stop string was found, so later tokens are dropped.
        self.is_stopped = False
        self.pending = array("i")
        # Logprobs of the pending tokens and of tokens that were taken but not sent. None if the caller wants none.
        self.logprobs = None if num_top is None else LogprobQueue(num_top)
        self.num_received = 0
        if resumed is not None:
            self.pending.frombytes(resumed.tokens)
            self.num_received = len(self.pending)
            self.end = resumed.end if resumed.HasField("end") else None
        bytes_each = BYTES_PER_TOKEN + (self.logprobs.bytes_each if self.logprobs is not None else 0)
        self._max_take = max(1, MAX_DELTA_BYTES // bytes_each)

    @property
    def fits_message(self) -> bool:
        """Whether one message can carry all pending tokens."""
        return len(self.pending) <= self._max_take

    @property
    def num_bytes(self) -> int:
        """The size of the pending tokens and logprobs."""
        logprob_bytes = 0 if self.logprobs is None else self.logprobs.num_bytes
        return BYTES_PER_TOKEN * len(self.pending) + logprob_bytes

    def take(self) -> list[int]:
        """The pending tokens, up to the size of one message. If more remain, the stream's `changed` returns at once."""
        if len(self.pending) <= self._max_take:
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
    # Why the request makes no progress, until the caller is told. A newer reason replaces it.
    waiting: "pb.Waiting | None" = None
    # What the caller was told at the end; None and empty before, and if the request failed.
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
        num_top = submit.num_logprobs - 1 if submit.num_logprobs else None
        self.samples = tuple(SampleStream(first_id + idx, self, num_top) for idx in range(submit.num_samples))
        if submit.prompt_logprobs_from:
            num_prompt = len(submit.prompt) // BYTES_PER_TOKEN
            self.prompt = PromptQueue(start=submit.prompt_logprobs_from, end=num_prompt, num_top=num_top or 0)

    def begin_resume(self, first_id: int, request_id: str) -> None:
        """Prepares for the answer to a Resume. Until it comes, one sample stands for all."""
        self.request_id, self.is_resumable = request_id, True
        self.samples = (SampleStream(first_id, self, None),)

    def take_resumed(self, resumed: frontend_pb2.Resumed) -> None:
        """Creates the samples of a request that was resumed, with their output so far."""
        self.description = frontend_pb2.StreamDescription.FromString(resumed.description)
        self.max_new_tokens = self.description.max_new_tokens
        self.samples = tuple(
            SampleStream(resumed.stream + idx, self, None, sample) for idx, sample in enumerate(resumed.samples)
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
        """The size of all pending data."""
        prompt_bytes = 0 if self.prompt is None else self.prompt.num_bytes
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
        """Lets the task tell the caller why the request makes no progress."""
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
