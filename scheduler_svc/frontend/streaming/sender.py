"""Owns the messages that the caller of one admitted request gets: prompt logprobs, deltas, ends, and the Summary.

Knows nothing of gRPC except writes that may block. All prompt logprobs leave before the first delta of any sample.
If one sample fails, all of them end, after their received tokens have been sent. Logprobs leave with their tokens:
those of a held token wait with it, and those of a token that is cut off are never sent.

The request's task sends everything that may need several messages. Tokens of a request with one sample are usually one
message, and the task is not woken for it: whoever brings the tokens begins the write (`StreamSender._deliver`).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.streaming.stream import MAX_PROMPT_INFO_BYTES, RequestStream, SampleStream
from scheduler_svc.frontend.streaming.stream_table import StreamTable
from scheduler_svc.frontend.streaming.summary import summarize
from scheduler_svc.frontend.streaming.writer import StreamWriter
from scheduler_svc.frontend.text.output import OutputPiece, SampleOutput

logger = logging.getLogger(__name__)

# The core counts as hung if it takes longer than this to admit or reject a request, or to confirm a stop string.
ANSWER_SECONDS = 10.0

TOKEN_REASONS = (pb.FINISH_REASON_EOS, pb.FINISH_REASON_STOP_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that is ready for the core: its Submit, its Accepted, and what its stream carries."""

    submit: frontend_pb2.Submit
    accepted: pb.Accepted
    # Creates one output for each sample. Takes up to 10 ms for the largest set of stop strings.
    make_outputs: Callable[[], tuple[SampleOutput, ...]]
    want_text: bool
    want_token_ids: bool


async def wait_for_admission(stream: RequestStream) -> int:
    """Returns the number of requests that wait before this one. Raises Refusal if the core does not admit it."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await stream.changed()
    except TimeoutError:
        raise _hung() from None
    if stream.rejected is not None:
        raise status.from_rejected(stream.rejected, stream.request_id)
    if stream.requests_ahead is None:
        assert stream.failure is not None
        raise stream.failure
    # Tokens may have arrived together with the admission.
    stream.wake()
    return stream.requests_ahead


class SampleSender:
    """The messages of one sample: its pending delta and its end."""

    __slots__ = ("_idx", "_num_sent", "_request", "is_ending", "is_over", "output", "reason", "sample", "stop_string")

    def __init__(self, idx: int, sample: SampleStream, output: SampleOutput, request: PreparedRequest) -> None:
        self.sample = sample
        self.output = output
        # All tokens have been taken; the sample's end may remain to be sent.
        self.is_ending = False
        # The stop string that ended the sample, or "".
        self.stop_string = ""
        self.is_over = False
        self.reason = pb.FINISH_REASON_UNSPECIFIED
        self._request = request
        self._idx = idx
        # The offset of the next delta.
        self._num_sent = 0

    def next_delta(self, piece: OutputPiece) -> pb.GenerateResponse | None:
        """The message with the delta that `piece` makes. Returns None if the delta would be empty."""
        wants, logprobs = self._request, self.sample.logprobs
        token_ids = piece.token_ids if wants.want_token_ids else ()
        text = piece.text if wants.want_text else ""
        has_logprobs = logprobs is not None and bool(piece.token_ids)
        if not (token_ids or text or has_logprobs):
            # Tokens without ids and text wait for the delta that shows them.
            return None
        # The message of every token, so it is filled in place: a Delta of its own would be copied.
        message = pb.GenerateResponse()
        delta = message.delta
        delta.sample_idx, delta.token_offset, delta.text = self._idx, self._num_sent, text
        if token_ids:
            delta.token_ids.extend(token_ids)
        if logprobs is not None and has_logprobs:
            delta.logprobs.CopyFrom(logprobs.take(len(piece.token_ids)))
        self._num_sent = self.output.num_tokens
        return message

    def finished(self) -> pb.Finished:
        """How the sample ended: at a stop string, else as the core's End says."""
        message = pb.Finished(sample_idx=self._idx, output_tokens=self.output.num_tokens)
        if self.stop_string:
            message.reason, message.stop_string = pb.FINISH_REASON_STOP_STRING, self.stop_string
        else:
            assert self.sample.end is not None
            message.reason = self.sample.end.reason
            if message.reason in TOKEN_REASONS:
                message.stop_token_id = self.sample.end.stop_token_id
        self.reason = message.reason
        return message


class StreamSender:
    """Sends one request's messages, from the one after Accepted to the Summary."""

    def __init__(
        self, request: PreparedRequest, stream: RequestStream, streams: StreamTable, writer: StreamWriter
    ) -> None:
        self._request = request
        self._stream = stream
        self._streams = streams
        self._writer = writer
        pairs = zip(stream.samples, request.make_outputs(), strict=True)
        self._samples = [SampleSender(idx, sample, output, request) for idx, (sample, output) in enumerate(pairs)]

    async def run(self) -> None:
        """Sends messages until every sample has ended. Raises Refusal if the request fails."""
        if len(self._samples) == 1 and self._stream.prompt is None:
            self._stream.deliver = self._deliver
        while not all(sender.is_over for sender in self._samples):
            await self._stream.changed()
            await self._writer.wait()
            if await self._send_prompt():
                for sender in self._samples:
                    if not sender.is_over:
                        await self._send_sample(sender)
        self._stream.deliver = None
        await self._wait_for_ends()
        ends = [sample.end for sample in self._stream.samples if sample.end is not None]
        num_tokens = [sender.output.num_tokens for sender in self._samples]
        summary = summarize(ends, num_tokens, prompt_tokens=self._request.accepted.prompt_tokens)
        await self._writer.write(pb.GenerateResponse(summary=summary))
        reasons = (pb.FinishReason.Name(sender.reason).removeprefix("FINISH_REASON_") for sender in self._samples)
        logger.info("request %s: %s after %d tokens", self._stream.request_id, ", ".join(reasons), sum(num_tokens))

    async def _send_prompt(self) -> bool:
        """Sends the prompt logprobs that have arrived. Returns whether those were all."""
        prompt = self._stream.prompt
        if prompt is None:
            return True
        is_over = self._stream.is_prompt_over
        while info := prompt.take(MAX_PROMPT_INFO_BYTES):
            await self._writer.write(pb.GenerateResponse(prompt_info=info))
        return is_over

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
        else:
            stop_token_id = end.stop_token_id if end is not None and end.reason in TOKEN_REASONS else None
            piece = output.finish(tokens, stop_token_id=stop_token_id)
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
        end = sender.sample.end
        if sender.stop_string or (end is not None and not end.HasField("failure")):
            await self._writer.write(pb.GenerateResponse(finished=sender.finished()))
        elif end is not None:
            self._streams.fail(self._stream, status.from_failure(end.failure, self._stream.request_id))

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
