"""Owns the messages that the caller of one admitted request gets: waits, prompt logprobs, deltas, ends, the Summary.

Knows nothing of gRPC except writes that may block. All prompt logprobs leave before the first delta of any sample. If
one sample fails, all of them end, after their received tokens have been sent. Logprobs leave with their tokens: those
of a held token wait with it, and those of a token that is cut off are never sent.

The request's task sends everything that may need several messages. Tokens of a request with one sample are usually one
message, and the task is not woken for it: the code that brings the tokens begins the write (`StreamSender._deliver`). A
write that the task awaits wakes the task, and that costs more than the write's own Python. So a write is a coroutine
that runs beside the task (`grpc_tuning/event_loop.py`).

The Summary is made of the core's usage and timing of each sample, adjusted for stop strings, as inference.proto says.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.core.messages.effects import MAX_COUNT
from scheduler_svc.frontend.grpc_tuning.event_loop import Run, run_here
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.streaming.samples import (
    TOKEN_REASONS,
    WHOLE_REASONS,
    PreparedStream,
    SampleSender,
    make_outputs,
)
from scheduler_svc.frontend.streaming.stream import MAX_PROMPT_INFO_BYTES, RequestStream, add_pieces
from scheduler_svc.frontend.streaming.stream_table import StreamTable
from scheduler_svc.frontend.text.detokenize import Pieces


def summarize(
    ends: Sequence[frontend_pb2.End], num_tokens: Sequence[int], *, prompt_tokens: int, reasoning_tokens: int = 0
) -> pb.Summary:
    """The summary of samples that ended with `ends` and delivered `num_tokens` tokens each."""
    num_sampled = [end.usage.output_tokens + end.usage.discarded_tokens for end in ends]
    usage = pb.Usage(
        prompt_tokens=prompt_tokens,
        output_tokens=sum(num_tokens),
        discarded_tokens=sum(max(0, sampled - sent) for sampled, sent in zip(num_sampled, num_tokens, strict=True)),
        recomputed_tokens=min(sum(end.usage.recomputed_tokens for end in ends), MAX_COUNT),
        # The prompt counts once: the other samples find the pages that the first one computed.
        cached_prompt_tokens=ends[0].usage.cached_prompt_tokens,
        reasoning_tokens=reasoning_tokens,
    )
    timings = [end.timing for end in ends]
    with_tokens = [timing for timing, count in zip(timings, num_sampled, strict=True) if count]
    first = min(with_tokens or timings, key=lambda timing: timing.first_token_seconds)
    last_token_seconds = max(timing.first_token_seconds + timing.decode_seconds for timing in timings)
    timing = pb.Timing(
        queue_seconds=first.queue_seconds,
        prefill_seconds=first.prefill_seconds,
        first_token_seconds=first.first_token_seconds,
        decode_seconds=last_token_seconds - first.first_token_seconds,
        total_seconds=max(timing.total_seconds for timing in timings),
        preemptions=min(sum(timing.preemptions for timing in timings), MAX_COUNT),
        worker_changes=max(timing.worker_changes for timing in timings),
    )
    spans = [
        pb.WeightsSpan(from_token=span.from_token, version=span.version, sample_idx=sample_idx)
        for sample_idx, end in enumerate(ends)
        for span in end.weights
    ]
    return pb.Summary(usage=usage, timing=timing, weights=spans)


Begin = Callable[[Any], Coroutine[Any, Any, None]]


@dataclass(slots=True, eq=False)
class StreamWriter:
    """Writes the messages of a stream by a coroutine function that `_run` runs; calls `_hold` before each."""

    _stream: RequestStream
    _write: Begin
    _hold: Callable[[], None]
    _run: Run = run_here
    _is_writing: bool = field(default=False, init=False)
    # The error of the last write, until it is raised.
    _error: BaseException | None = field(default=None, init=False)
    _waiter: "asyncio.Future[None] | None" = field(default=None, init=False)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop, init=False)

    @property
    def is_idle(self) -> bool:
        """Whether `begin` may be called: no write is under way, and none has failed."""
        return not self._is_writing and self._error is None

    def fail(self, error: BaseException) -> None:
        """Reports an error to the stream's task: its `wait` raises it."""
        self._error = error
        self._stream.wake()

    def begin(self, message: Any) -> None:
        """Begins a write. `wait` raises its error."""
        assert self.is_idle
        self._stream.blocked_since = self._loop.time()
        self._hold()
        self._is_writing = True
        self._run(self._write(message), self._end)

    async def wait(self) -> None:
        """Waits for the end of the write under way, and raises its error. Only one task may wait."""
        if self._is_writing:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    async def write(self, message: Any) -> None:
        """Writes a message after the one under way, and waits for the end."""
        await self.wait()
        self.begin(message)
        await self.wait()

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self.fail(error)
        self._is_writing = False
        self._stream.blocked_since = 0.0
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


# The core counts as hung if it takes longer than this to admit or reject a request, or to confirm a stop string.
ANSWER_SECONDS = 10.0
# The prompt's logprobs in one message if they have pieces of text: about 1 ms of work, 5 us for each piece.
MAX_SPELLED_INFO_BYTES = 2048
# What the fields of an offset count.
_COUNTED = {
    "text_chars": "the sample's number of characters",
    "reasoning_chars": "the sample's number of characters of reasoning",
    "tool_calls": "the sample's number of tool calls",
    "tool_argument_chars": "the number of characters of the arguments of the sample's tool calls",
}


async def _answer(stream: RequestStream) -> None:
    """Waits for the core's answer. Raises Refusal if it rejects the request."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await stream.changed()
    except TimeoutError:
        raise _hung() from None
    if stream.rejected is not None:
        raise status.from_rejected(stream.rejected, stream.request_id)


async def wait_for_admission(stream: RequestStream) -> int:
    """Returns the number of requests that wait before this one. Raises Refusal if the core does not admit it."""
    await _answer(stream)
    if stream.requests_ahead is None:
        assert stream.failure is not None
        raise stream.failure
    # Tokens may have arrived together with the admission.
    stream.wake()
    return stream.requests_ahead


async def wait_for_resumed(stream: RequestStream) -> frontend_pb2.StreamDescription:
    """Returns the description of a resumed stream. Raises Refusal if the core does not give the request."""
    await _answer(stream)
    if stream.failure is not None or stream.description is None:
        raise stream.failure or _hung()
    return stream.description


@dataclass(slots=True, eq=False)
class StreamSender:
    """Sends one request's messages, from the one after Accepted to the Summary."""

    _request: PreparedStream
    _stream: RequestStream
    _streams: StreamTable
    _writer: StreamWriter
    # Reads the prompt's tokens, from the first one with a logprob on.
    _prompt_pieces: Pieces | None = None
    _samples: list[SampleSender] = field(init=False)

    def __post_init__(self) -> None:
        outputs = make_outputs(self._request.description, self._request.model)
        pairs = enumerate(zip(self._stream.samples, outputs, strict=True))
        self._samples = [SampleSender(idx, sample, output, self._request) for idx, (sample, output) in pairs]

    async def replay(self) -> list[pb.GenerateResponse]:
        """Builds the output of a resumed stream so far. Returns the messages that the caller has not received.

        Raises Refusal if the caller claims more text than there is.
        """
        messages: list[pb.GenerateResponse] = []
        for idx, sender in enumerate(self._samples):
            sample = sender.sample
            while not sender.is_ending and (sample.pending or sample.end is not None):
                message = self._next_message(sender)
                if message is not None:
                    messages.append(message)
                # Up to 1,024 tokens at once, so that other streams do not wait.
                await asyncio.sleep(0)
            for descriptor, num_left in sender.to_skip.ListFields():
                field, num_claimed = f"offsets[{idx}].{descriptor.name}", getattr(sender.received, descriptor.name)
                limit = f"{num_claimed - num_left}, {_COUNTED[descriptor.name]} so far"
                raise status.invalid(field, f"{field} is {num_claimed}; the limit is {limit}")
        self._stream.wake()
        return messages

    async def run(self) -> None:
        """Sends messages until every sample has ended. Raises Refusal if the request fails."""
        if (meter := self._stream.meter) is not None:
            for sender in self._samples:
                sender.measure(meter.sample())
        if len(self._samples) == 1 and self._stream.prompt is None:
            self._stream.deliver = self._deliver
        while not all(sender.is_over for sender in self._samples):
            await self._stream.changed()
            await self._writer.wait()
            if (waiting := self._stream.waiting) is not None:
                self._stream.waiting = None
                await self._writer.write(pb.GenerateResponse(waiting=waiting))
            if await self._send_prompt():
                for sender in self._samples:
                    if not sender.is_over:
                        await self._send_sample(sender)
        self._stream.deliver = None
        await self._wait_for_ends()
        ends = [sample.end for sample in self._stream.samples if sample.end is not None]
        num_tokens = [sender.output.num_tokens for sender in self._samples]
        reasoning_tokens = sum(sender.output.reasoning_tokens for sender in self._samples)
        prompt_tokens = self._request.description.accepted.prompt_tokens
        summary = summarize(ends, num_tokens, prompt_tokens=prompt_tokens, reasoning_tokens=reasoning_tokens)
        if meter is not None:
            # Before the caller sees the Summary, so that the next report counts all that it has seen.
            meter.finished(summary, [sender.reason for sender in self._samples])
        self._stream.summary = summary
        self._stream.reasons = tuple(sender.reason for sender in self._samples)
        await self._writer.write(pb.GenerateResponse(summary=summary))

    async def _send_prompt(self) -> bool:
        """Sends the prompt logprobs that have arrived. Returns whether those were all."""
        prompt = self._stream.prompt
        if prompt is None:
            return True
        is_over, has_pieces = self._stream.is_prompt_over, self._request.spelled is not None
        while info := prompt.take(MAX_SPELLED_INFO_BYTES if has_pieces else MAX_PROMPT_INFO_BYTES):
            self._add_prompt_pieces(info)
            await self._writer.write(pb.GenerateResponse(prompt_info=info))
        return is_over

    def _add_prompt_pieces(self, info: pb.PromptInfo) -> None:
        prompt, pieces = self._request.spelled, self._prompt_pieces
        if prompt is None:
            return
        if pieces is None:
            pieces = self._prompt_pieces = self._request.pieces_at(0 if info.start == 1 else info.start)
            if info.start == 1:
                info.first.text, info.first.data = pieces.push(prompt[0])
        end = info.start + len(info.logprobs.logprobs)
        add_pieces(info.logprobs, prompt[info.start : end], pieces, is_end=end == len(prompt))

    def _deliver(self) -> bool:
        """Begins to write the new tokens of the only sample. Returns False if the task has to go on."""
        [sender] = self._samples
        sample = sender.sample
        if sample.end is not None or self._stream.failure is not None:
            return False
        if not (self._writer.is_idle and sample.fits_message):
            return False
        try:
            message = self._next_message(sender)
            if message is not None:
                self._writer.begin(message)
        except Exception as error:
            # The task fails with it, not the owner of the tokens.
            self._writer.fail(error)
        return not sender.is_ending

    def _next_message(self, sender: SampleSender) -> pb.GenerateResponse | None:
        """The delta of a sample's new tokens. Returns None if it would be empty."""
        sample, output, end = sender.sample, sender.output, sender.sample.end
        tokens = sample.take()
        if sample.pending or (end is None and self._stream.failure is None):
            piece = output.push(tokens)
        elif end is None and self._stream.is_resumable:
            # Held text may still change. The stream that continues this one sends it.
            piece = output.push(tokens)
            sender.is_ending = True
        else:
            stop_token_id = end.stop_token_id if end is not None and end.reason in TOKEN_REASONS else None
            is_cut = end is None or end.reason not in WHOLE_REASONS
            piece = output.finish(tokens, stop_token_id=stop_token_id, is_cut=is_cut)
            sender.is_ending = True
        if piece.stop_string:
            sender.is_ending, sender.stop_string = True, piece.stop_string
            self._streams.stop(sample, output.num_tokens)
        return sender.next_delta(piece)

    async def _send_sample(self, sender: SampleSender) -> None:
        """Sends a sample's new tokens and, if it has ended, its end."""
        if not sender.is_ending and (message := self._next_message(sender)) is not None:
            await self._writer.write(message)
        if not sender.is_ending:
            return
        sender.is_over = True
        if sender.meter is not None:
            sender.meter.over(sender.output.num_tokens)
        end = sender.sample.end
        if sender.stop_string or (end is not None and not end.HasField("failure")):
            await self._writer.write(pb.GenerateResponse(finished=sender.finished()))
        elif end is not None:
            self._streams.give_up(self._stream, status.from_failure(end.failure, self._stream.request_id))

    async def _wait_for_ends(self) -> None:
        """Waits until the core has ended every sample. Raises Refusal if the request fails."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while self._stream.failure is None and not self._stream.is_ended:
                    await self._stream.changed()
        except TimeoutError:
            raise _hung() from None
        if self._stream.failure is not None:
            raise self._stream.failure


def _hung() -> status.Refusal:
    return status.not_ready(f"the scheduler's core has not answered for {ANSWER_SECONDS:g} s")
