"""Owns one admitted request's way to its caller: prompt logprobs, deltas, how each sample ended, the Summary.

Knows nothing of gRPC but a `write` that may block. Nothing of any sample is told before the prompt's logprobs are. A
sample that fails ends them all, after what had come. Logprobs leave with their tokens: those of a token held back wait
with it, those of a token cut off are never told.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.streaming.stream import MAX_PROMPT_INFO_BYTES, RequestStream, SampleStream
from scheduler_svc.frontend.streaming.stream_table import StreamTable
from scheduler_svc.frontend.streaming.summary import summarize
from scheduler_svc.frontend.text.output import OutputPiece, SampleOutput

logger = logging.getLogger(__name__)

# How long the core may take to admit or reject a request, or to confirm a stop string, before it counts as hung.
ANSWER_SECONDS = 10.0

TOKEN_REASONS = (pb.FINISH_REASON_EOS, pb.FINISH_REASON_STOP_TOKEN)

Write = Callable[[pb.GenerateResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that the core may have: what its stream carries, and what was promised in Accepted."""

    submit: frontend_pb2.Submit
    accepted: pb.Accepted
    # Makes one per sample. Up to 10 ms of work for the largest set of stop strings.
    make_outputs: Callable[[], tuple[SampleOutput, ...]]
    want_text: bool
    want_token_ids: bool


async def wait_for_admission(stream: RequestStream) -> int:
    """The requests that wait before this one. Raises Refusal where it was not admitted."""
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
    # Tokens may have come along with the admission.
    stream.wake()
    return stream.requests_ahead


class SampleSender:
    """What one sample's caller has been told."""

    __slots__ = ("delta", "finished", "is_over", "output", "sample")

    def __init__(self, idx: int, sample: SampleStream, output: SampleOutput) -> None:
        self.sample = sample
        self.output = output
        # What is to be told next.
        self.delta = pb.Delta(sample_idx=idx)
        self.finished = pb.Finished(sample_idx=idx)
        self.is_over = False

    def add(self, piece: OutputPiece, job: PreparedRequest) -> None:
        """Joins what is new to the next delta."""
        if job.want_token_ids:
            self.delta.token_ids.extend(piece.token_ids)
        if job.want_text:
            self.delta.text += piece.text
        if self.sample.logprobs is not None and piece.token_ids:
            # What brings logprobs is told at once, so there is nothing to join.
            self.delta.logprobs.CopyFrom(self.sample.logprobs.take(len(piece.token_ids)))

    def next_delta(self) -> pb.Delta | None:
        """The delta to be told now; None while there is nothing in it."""
        delta = self.delta
        if not (delta.token_ids or delta.text or delta.HasField("logprobs")):
            return None
        # What was neither shown nor sent is covered by the next one.
        self.delta = pb.Delta(sample_idx=delta.sample_idx, token_offset=self.output.num_tokens)
        return delta


class StreamSender:
    """Tells one request's outcome, from behind Accepted to the Summary."""

    def __init__(self, job: PreparedRequest, stream: RequestStream, streams: StreamTable, write: Write) -> None:
        self._job = job
        self._stream = stream
        self._streams = streams
        self._write = write
        pairs = zip(stream.samples, job.make_outputs(), strict=True)
        self._tellings = [SampleSender(idx, sample, output) for idx, (sample, output) in enumerate(pairs)]

    async def run(self) -> None:
        """Raises Refusal where the request fails."""
        while not all(telling.is_over for telling in self._tellings):
            await self._stream.changed()
            if await self._tell_prompt():
                for telling in self._tellings:
                    await self._tell(telling)
        await self._confirmed()
        ends = [sample.end for sample in self._stream.samples if sample.end is not None]
        num_tokens = [telling.output.num_tokens for telling in self._tellings]
        summary = summarize(ends, num_tokens, prompt_tokens=self._job.accepted.prompt_tokens)
        await self._write(pb.GenerateResponse(summary=summary))
        reasons = [pb.FinishReason.Name(telling.finished.reason) for telling in self._tellings]
        named = ", ".join(reason.removeprefix("FINISH_REASON_") for reason in reasons)
        logger.info("request %s: %s after %d tokens", self._stream.request_id, named, sum(num_tokens))

    async def _tell_prompt(self) -> bool:
        """Tells what has come of the prompt's logprobs; whether that was all."""
        prompt = self._stream.prompt
        if prompt is None:
            return True
        is_over = self._stream.is_prompt_over
        while info := prompt.take(MAX_PROMPT_INFO_BYTES):
            await self._write(pb.GenerateResponse(prompt_info=info))
        return is_over

    async def _tell(self, telling: SampleSender) -> None:
        """Tells what is new of a sample, and its end."""
        sample, output = telling.sample, telling.output
        if telling.is_over:
            return
        tokens = sample.take()
        is_over = (sample.end is not None or self._stream.failure is not None) and not sample.pending
        piece = _finish(output, tokens, sample.end) if is_over else output.push(tokens)
        telling.add(piece, self._job)
        if piece.stop_string:
            self._streams.stop(sample, output.num_tokens)
        if delta := telling.next_delta():
            await self._write(pb.GenerateResponse(delta=delta))
        telling.is_over = is_over or bool(piece.stop_string)
        if telling.is_over:
            await self._tell_end(telling, piece.stop_string)

    async def _tell_end(self, telling: SampleSender, stop_string: str) -> None:
        end, finished = telling.sample.end, telling.finished
        finished.output_tokens = telling.output.num_tokens
        if stop_string:
            finished.reason = pb.FINISH_REASON_STOP_STRING
            finished.stop_string = stop_string
        elif end is None:
            # The stream has failed.
            return
        elif end.HasField("failure"):
            self._streams.fail(self._stream, status.from_failure(end.failure, self._stream.request_id))
            return
        else:
            finished.reason = end.reason
            if end.reason in TOKEN_REASONS:
                finished.stop_token_id = end.stop_token_id
        await self._write(pb.GenerateResponse(finished=finished))

    async def _confirmed(self) -> None:
        """Returns once the core has ended every sample."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while self._stream.failure is None and not self._stream.is_ended:
                    await self._stream.changed()
        except TimeoutError:
            raise _hung() from None
        if self._stream.failure is not None:
            raise self._stream.failure


def _finish(output: SampleOutput, tokens: list[int], end: frontend_pb2.End | None) -> OutputPiece:
    """The last piece of an output that ended with `end`, or without one."""
    is_token = end is not None and end.reason in TOKEN_REASONS
    return output.finish(tokens, stop_token_id=end.stop_token_id if end is not None and is_token else None)


def _hung() -> status.Refusal:
    return status.not_ready(f"the scheduler's core has not answered for {ANSWER_SECONDS:g} s")
