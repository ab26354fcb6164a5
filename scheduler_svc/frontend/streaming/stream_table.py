"""Owns the set of open streams: deals out what the core says, and bounds what those may hold who do not read.

Knows nothing of text or gRPC. What is pending of a request is at most its samples' max_new_tokens and its prompt; a
reader that stalls is dropped (`StreamLimits`). Wake-ups are spread under load: above `busy_tokens_per_second`, tokens
wait up to `merge_seconds` for company; first tokens and ends never.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
import numpy as np
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.core_link import CoreMessageTooLargeError
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.streaming import logprobs
from scheduler_svc.frontend.streaming.stream import RequestStream, SampleStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """The bounds of one front end's streams."""

    # Samples of all requests, and finished calls whose answers are not taken.
    max_streams: int = 8192
    # A reader is dropped when one write has been blocked so long and more than this is pending,
    stall_seconds: float = 30.0
    max_stalled_bytes: int = 16_384
    # or when one write has been blocked so long, whatever is pending,
    max_stall_seconds: float = 300.0
    # or, while a write is blocked, when more than this is.
    max_pending_bytes: int = 64 * 1024 * 1024
    merge_seconds: float = 0.02
    # A message costs about 40 us of CPU: from a fifth of a core on, merging is worth its delay.
    busy_tokens_per_second: float = 5000.0


class StreamTable:
    """All open streams of this front end.

    `send` hands a message to the core, or says that it cannot. `num_unread`: finished calls whose answers their callers
    have not taken; they count as open.
    """

    def __init__(
        self,
        send: Callable[[frontend_pb2.FrontendToCore], bool],
        limits: StreamLimits,
        num_unread: Callable[[], int] = lambda: 0,
    ) -> None:
        self._send = send
        self._limits = limits
        self._num_unread = num_unread
        # Their order is that of their coming; the samples' numbers are the core's names for them.
        self._open: dict[RequestStream, None] = {}
        self._samples: dict[int, SampleStream] = {}
        self._last_id = 0
        # Samples, one where they are not known yet.
        self._num_reserved = 0
        # Streams whose wake-up waits for company.
        self._late: dict[RequestStream, None] = {}
        self._rate_since = 0.0
        self._num_tokens_since = 0
        self._is_busy = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self) -> RequestStream:
        """A stream for the running task's request. Raises Refusal where there are too many."""
        self._reserve(1)
        stream = RequestStream(asyncio.current_task())
        self._open[stream] = None
        self._idle.clear()
        return stream

    def submit(self, stream: RequestStream, submit: frontend_pb2.Submit) -> None:
        """Names the request's samples and sends it to the core. Raises Refusal where that cannot be."""
        self._reserve(submit.num_samples - 1)
        submit.stream = self._last_id + 1
        self._last_id += submit.num_samples
        stream.begin(submit.stream, submit)
        self._samples.update((sample.id, sample) for sample in stream.samples)
        try:
            is_sent = self._send(frontend_pb2.FrontendToCore(submit=submit))
        except CoreMessageTooLargeError as error:
            raise status.invalid("prompt", f"prompt is too long with what travels beside it: {error}") from None
        if not is_sent:
            raise status.not_ready("the scheduler's core cannot be reached")
        stream.is_submitted = True

    def stop(self, sample: SampleStream, output_tokens: int) -> None:
        """A stop string ended the output after so many tokens; the core's End comes, or is on its way."""
        sample.is_stopped = True
        del sample.pending[:]
        if sample.end is None:
            finish = frontend_pb2.Finish(stream=sample.id, output_tokens=output_tokens)
            self._send(frontend_pb2.FrontendToCore(finish=finish))

    def close(self, stream: RequestStream) -> None:
        """Frees the request in every phase; never waits, and may be called again."""
        if stream not in self._open:
            return
        del self._open[stream]
        self._num_reserved -= max(1, len(stream.samples))
        self._late.pop(stream, None)
        self._cancel(stream)
        for sample in stream.samples:
            self._samples.pop(sample.id, None)
        if not self._open:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once no stream is open."""
        await self._idle.wait()

    def check_room(self, num_samples: int) -> None:
        """Raises Refusal where so many more samples are too many."""
        limit, num_unread = self._limits.max_streams, self._num_unread()
        if self._num_reserved + num_unread + num_samples > limit:
            unread = f", {num_unread} finished answers are not taken by their callers" if num_unread else ""
            message = f"{self._num_reserved} samples of requests are open{unread} and {num_samples} more are asked for"
            raise status.overloaded(f"{message}; the limit is {limit}")

    def _reserve(self, num_samples: int) -> None:
        self.check_room(num_samples)
        self._num_reserved += num_samples

    # What the core says ---------------------------------------------------------------------------------------

    def admitted(self, message: frontend_pb2.Admitted) -> None:
        if sample := self._samples.get(message.stream):
            sample.stream.requests_ahead = message.requests_ahead
            sample.stream.wake()

    def rejected(self, message: frontend_pb2.Rejected) -> None:
        if sample := self._samples.get(message.stream):
            sample.stream.rejected = message
            sample.stream.wake()

    def step_output(self, output: frontend_pb2.StepOutput) -> None:
        """Deals a step's tokens and ends out to their streams; those of closed streams are dropped."""
        num_tokens = len(output.tokens) // 4
        num_bytes = (len(output.streams), len(output.offsets), len(output.tokens))
        if num_bytes != (8 * num_tokens, 4 * num_tokens, 4 * num_tokens):
            logger.error("dropped a step's output: its arrays differ in length")
            return
        self._measure(num_tokens)
        for piece in output.prompt_logprobs:
            self._take_prompt(piece)
        told, told_rows = self._read_logprobs(output)
        streams = np.frombuffer(output.streams, "<u8").tolist()
        offsets = np.frombuffer(output.offsets, "<i4").tolist()
        tokens = np.frombuffer(output.tokens, "<i4").tolist()
        for entry, (sample_id, offset, token) in enumerate(zip(streams, offsets, tokens, strict=True)):
            sample = self._samples.get(sample_id)
            if sample is None or sample.is_stopped or sample.stream.failure:
                continue
            stream = sample.stream
            if offset != sample.num_received or offset >= stream.max_new_tokens:
                due = f"token {sample.num_received} of {stream.max_new_tokens}"
                self._fail_broken(stream, f"token {offset} came where {due} was due")
                continue
            if sample.logprobs is not None:
                row = told_rows.get(entry)
                if told is None or row is None or not sample.logprobs.put(told, slice(row, row + 1)):
                    self._fail_broken(stream, f"token {offset} came without the logprobs that were asked for")
                    continue
            sample.num_received += 1
            sample.pending.append(token)
            if self._is_busy and offset:
                self._wake_late(stream)
            else:
                stream.wake()
        for end in output.ends:
            if sample := self._samples.get(end.stream):
                sample.end = end
                sample.stream.wake()

    def fail(self, stream: RequestStream, failure: status.Refusal) -> None:
        """Ends a stream with `failure`, after what it has received; the core is told, for all samples that it runs."""
        stream.failure = stream.failure or failure
        self._cancel(stream)
        stream.wake()

    def fail_all(self, failure: Callable[[], status.Refusal]) -> None:
        """Ends every stream that the core has not ended: it is gone, or time is up."""
        for stream in list(self._open):
            if not stream.is_ended:
                self.fail(stream, failure())

    def _read_logprobs(self, output: frontend_pb2.StepOutput) -> tuple[logprobs.LogprobRows | None, Mapping[int, int]]:
        """What is told, and the row of it that each entry has."""
        if not output.HasField("logprobs"):
            return None, {}
        try:
            told = logprobs.read(output.logprobs)
            entries = np.frombuffer(output.logprobs.entries, "<i4").tolist()
            return told, dict(zip(entries, range(len(told)), strict=True))
        except ValueError:
            logger.error("dropped a step's logprobs: their arrays do not fit together")
            return None, {}

    def _take_prompt(self, piece: frontend_pb2.PromptLogprobs) -> None:
        sample = self._samples.get(piece.stream)
        if sample is None or sample.stream.failure:
            return
        stream = sample.stream
        try:
            fits = stream.prompt is not None and stream.prompt.put(piece.start, logprobs.read(piece))
        except ValueError:
            fits = False
        if not fits:
            self._fail_broken(stream, f"logprobs of the prompt from token {piece.start} on came where others were due")
        stream.wake()

    # ------------------------------------------------------------------------------------------------------------

    def drop_stalled(self) -> None:
        """Frees the requests of readers that read nothing; to be called every second or so."""
        now, limits = asyncio.get_running_loop().time(), self._limits
        for stream in list(self._open):
            if not stream.blocked_since or stream.failure:
                continue
            blocked_seconds, num_bytes = now - stream.blocked_since, stream.num_bytes
            if num_bytes <= limits.max_pending_bytes:
                is_full = num_bytes > limits.max_stalled_bytes
                if blocked_seconds < (limits.stall_seconds if is_full else limits.max_stall_seconds):
                    continue
            message = (
                f"the reader has read nothing for {blocked_seconds:.0f} s and {num_bytes} bytes wait;"
                f" the limits are {limits.stall_seconds:g} s with {limits.max_stalled_bytes} bytes,"
                f" {limits.max_stall_seconds:g} s, and {limits.max_pending_bytes} bytes"
            )
            logger.warning("request %s dropped: %s", stream.request_id, message)
            self.fail(stream, status.Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
            # Its handler is inside a write that may never end.
            if stream.task is not None:
                stream.task.cancel()

    def _fail_broken(self, stream: RequestStream, message: str) -> None:
        logger.error("request %s: %s", stream.request_id, message)
        self.fail(stream, status.Refusal(grpc.StatusCode.INTERNAL, message))

    def _cancel(self, stream: RequestStream) -> None:
        if stream.is_submitted and stream.rejected is None:
            for sample in stream.samples:
                if sample.end is None:
                    cancel = frontend_pb2.Cancel(stream=sample.id)
                    self._send(frontend_pb2.FrontendToCore(cancel=cancel))
        stream.is_submitted = False

    def _measure(self, num_tokens: int) -> None:
        now = asyncio.get_running_loop().time()
        if (seconds := now - self._rate_since) >= 0.1:
            self._is_busy = self._num_tokens_since > self._limits.busy_tokens_per_second * seconds
            self._rate_since, self._num_tokens_since = now, 0
        self._num_tokens_since += num_tokens

    def _wake_late(self, stream: RequestStream) -> None:
        if not self._late:
            asyncio.get_running_loop().call_later(self._limits.merge_seconds, self._wake_all_late)
        self._late[stream] = None

    def _wake_all_late(self) -> None:
        late, self._late = self._late, {}
        for stream in late:
            stream.wake()
