"""Owns one request's stream: what the core said of it and its handler has not read yet, sample by sample.

Knows nothing of text, gRPC or other streams. A sample has one pending batch of tokens that later ones join in place,
and the stream one waiter; never a queue of messages. A pending token takes 4 bytes, its logprobs 4 and 8 for each
alternative.
"""

import asyncio
from array import array

from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.streaming.logprobs import BYTES_PER_LOGPROB, BYTES_PER_TOP, LogprobQueue, PromptQueue

# Of one message: gRPC keeps a message whole while its write is blocked, several times that in all its copies.
MAX_DELTA_BYTES = 4096
MAX_PROMPT_INFO_BYTES = 65_536
BYTES_PER_TOKEN = 4


class SampleStream:
    """One completion of a request. Written by `StreamTable`, read by its stream's one handler."""

    __slots__ = ("_max_take", "end", "id", "is_stopped", "logprobs", "num_received", "pending", "stream")

    def __init__(self, sample_id: int, stream: "RequestStream", num_top: int | None) -> None:
        self.id = sample_id
        self.stream = stream
        # What the core said.
        self.end: frontend_pb2.End | None = None
        # A stop string was found: later tokens are dropped.
        self.is_stopped = False
        self.pending = array("i")
        # Of the pending tokens, and of those that were taken and are not told yet; None: not asked for.
        self.logprobs = None if num_top is None else LogprobQueue(num_top)
        self.num_received = 0
        logprob_bytes = 0 if num_top is None else BYTES_PER_LOGPROB + BYTES_PER_TOP * num_top
        self._max_take = max(1, MAX_DELTA_BYTES // (BYTES_PER_TOKEN + logprob_bytes))

    @property
    def num_bytes(self) -> int:
        """What is pending."""
        of_logprobs = 0 if self.logprobs is None else self.logprobs.num_bytes
        return BYTES_PER_TOKEN * len(self.pending) + of_logprobs

    def take(self) -> list[int]:
        """The pending tokens, as many as one message may carry; the stream's `changed` returns at once if more wait."""
        tokens = self.pending[: self._max_take].tolist()
        del self.pending[: self._max_take]
        if self.pending:
            self.stream.wake()
        return tokens


class RequestStream:
    """One request between its arrival and its end."""

    __slots__ = (
        "_is_signalled",
        "_waiter",
        "blocked_since",
        "failure",
        "is_submitted",
        "max_new_tokens",
        "prompt",
        "rejected",
        "request_id",
        "requests_ahead",
        "samples",
        "task",
    )

    def __init__(self, task: "asyncio.Task[object] | None") -> None:
        self.task = task
        self.is_submitted = False
        self.request_id = ""
        self.max_new_tokens = 0
        # None before the request is submitted.
        self.samples: tuple[SampleStream, ...] = ()
        # None where the prompt's logprobs are not asked for.
        self.prompt: PromptQueue | None = None
        # What the core said.
        self.requests_ahead: int | None = None
        self.rejected: frontend_pb2.Rejected | None = None
        # What ended it badly: one of its samples failed, the core is gone, the reader stalls, tokens are missing.
        self.failure: status.Refusal | None = None
        # The loop's time when a write began that has not ended; 0 between writes.
        self.blocked_since = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._is_signalled = False

    def begin(self, first_id: int, submit: frontend_pb2.Submit) -> None:
        """The request is known: its samples are `first_id` and those that follow."""
        self.request_id = submit.request_id
        self.max_new_tokens = submit.max_new_tokens
        num_top = submit.num_logprobs - 1 if submit.num_logprobs else None
        self.samples = tuple(SampleStream(first_id + idx, self, num_top) for idx in range(submit.num_samples))
        if submit.prompt_logprobs_from:
            num_prompt = len(submit.prompt) // BYTES_PER_TOKEN
            self.prompt = PromptQueue(start=submit.prompt_logprobs_from, end=num_prompt, num_top=num_top or 0)

    @property
    def is_ended(self) -> bool:
        """Whether the core owes nothing more."""
        return self.rejected is not None or (
            bool(self.samples) and all(sample.end is not None for sample in self.samples)
        )

    @property
    def is_prompt_over(self) -> bool:
        """Whether no logprobs of the prompt will come any more."""
        return (
            self.prompt is None
            or self.prompt.is_complete
            or self.samples[0].end is not None
            or self.failure is not None
        )

    @property
    def num_bytes(self) -> int:
        """What is pending."""
        of_prompt = 0 if self.prompt is None else self.prompt.num_bytes
        return of_prompt + sum(sample.num_bytes for sample in self.samples)

    async def changed(self) -> None:
        """Returns once there is something new, at once where there was something unread."""
        if not self._is_signalled:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_signalled = False

    def wake(self) -> None:
        self._is_signalled = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
