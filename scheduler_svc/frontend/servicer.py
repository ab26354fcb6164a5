"""Owns InferenceService: one request read forwards, from the caller's message to the Summary.

Generate: gate, wire (validate), text (ids), streams (to the core), output (text and stops), messages. Decides nothing
about who waits or runs. Facts of grpc.aio that shape it (tried on 1.85.1): a coroutine handler whose caller leaves
gets CancelledError while it waits and ExecuteBatchError (an InternalError) inside a write, and context.cancelled()
stays False; so the request is freed in `finally`, without waiting.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import grpc
import grpc.aio
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

from scheduler_svc.frontend import status, wire
from scheduler_svc.frontend.detokenize import Detokenizer
from scheduler_svc.frontend.gate import Gate
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.output import Output, Piece
from scheduler_svc.frontend.stops import StopFinder
from scheduler_svc.frontend.streams import Stream, Streams

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

    GenerateContext: TypeAlias = ServicerContext[pb.GenerateRequest, pb.GenerateResponse]

logger = logging.getLogger(__name__)

# How long the core may take to admit or reject a request, or to confirm a stop string, before it counts as hung.
ANSWER_SECONDS = 10.0
# Prompt tokens that the first output token is decoded with.
NUM_CONTEXT_TOKENS = 8

TOKEN_REASONS = (pb.FINISH_REASON_EOS, pb.FINISH_REASON_STOP_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that the core may have: what its stream carries, and what was promised in Accepted."""

    request_id: str
    submit: frontend_pb2.Submit
    accepted: pb.Accepted
    output: Output
    want_text: bool
    want_token_ids: bool


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers those who want text or tokens."""

    def __init__(self, gate: Gate, streams: Streams) -> None:
        self._gate = gate
        self._streams = streams

    # A coroutine that writes, where the stub expects a generator: a reader that stalls inside a write can be dropped
    # with a status of its own, a generator would only be closed.
    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.GenerateRequest, context: "GenerateContext"
    ) -> None:
        """Streams one completion."""
        async with status.Answering(context):
            seconds_left(context)
            model = self._gate.admit()
            stream = self._streams.open()
            await self._generate(request, context, model, stream)

    async def _generate(
        self, request: pb.GenerateRequest, context: "GenerateContext", model: Model, stream: Stream
    ) -> None:
        try:
            job = await self._prepare(request, context, model, stream)
            # Prompts are large and streams are long.
            request.Clear()
            await self._run(job, stream, context)
        except asyncio.CancelledError:
            if stream.failure is None:
                raise
            raise stream.failure from None
        except grpc.aio.InternalError:
            logger.debug("stream %d: its caller left inside a write", stream.id)
        finally:
            self._streams.close(stream)

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: "ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse]"
    ) -> pb.TokenizeResponse:
        """The ids that Generate would make of the text."""
        async with status.Answering(context):
            wire.check_known(request)
            model = self._gate.model()
            model.check_name(request.model)
            return pb.TokenizeResponse(token_ids=await wire.text_ids("text", request.text, model))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: "ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse]"
    ) -> pb.DetokenizeResponse:
        """The text of the ids."""
        async with status.Answering(context):
            wire.check_known(request)
            model = self._gate.model()
            model.check_name(request.model)
            text = wire.check_detokenize(request, model)
            skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
            return pb.DetokenizeResponse(text=await text.decode(request.token_ids, skip_special_tokens=skip))

    async def _prepare(
        self, request: pb.GenerateRequest, context: "GenerateContext", model: Model, stream: Stream
    ) -> Job:
        checked = wire.check_request(request, model)
        token_ids = await wire.prompt_ids(request, model)
        deadline_seconds = seconds_left(context)
        submit = wire.make_submit(checked, token_ids, model, stream=stream.id, deadline_seconds=deadline_seconds)
        accepted = pb.Accepted(
            request_id=checked.request_id,
            sampling=checked.sampling,
            prompt_tokens=len(token_ids),
            max_new_tokens=submit.max_new_tokens,
        )
        return Job(
            request_id=checked.request_id,
            submit=submit,
            accepted=accepted,
            output=make_output(checked, token_ids, model),
            want_text=checked.want_text,
            want_token_ids=checked.want_token_ids,
        )

    async def _run(self, job: Job, stream: Stream, context: "GenerateContext") -> None:
        self._streams.submit(stream, job.submit)
        job.submit.Clear()
        await self._admission(job, stream)
        # From here on callers' automatic retries are over.
        # Metadata is ASCII; ids that are not are told in Accepted alone.
        await context.send_initial_metadata((("x-request-id", job.request_id),) if job.request_id.isascii() else ())
        await self._write(pb.GenerateResponse(accepted=job.accepted), stream, context)
        stop_string = await self._deliver(job, stream, context)
        num_tokens = job.output.num_tokens
        if stop_string:
            self._streams.stop(stream, num_tokens)
            finished = pb.Finished(
                reason=pb.FINISH_REASON_STOP_STRING, stop_string=stop_string, output_tokens=num_tokens
            )
            await self._write(pb.GenerateResponse(finished=finished), stream, context)
            end = await self._end(stream)
        else:
            end = await self._end(stream)
            finished = pb.Finished(reason=end.reason, output_tokens=num_tokens)
            if end.reason in TOKEN_REASONS:
                finished.stop_token_id = end.stop_token_id
            await self._write(pb.GenerateResponse(finished=finished), stream, context)
        await self._write(pb.GenerateResponse(summary=summarize(job, end)), stream, context)
        logger.info(
            "request %s: %s after %d tokens",
            job.request_id,
            pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_"),
            num_tokens,
        )

    async def _admission(self, job: Job, stream: Stream) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await stream.changed()
        except TimeoutError:
            raise status.not_ready(f"the scheduler's core has not answered for {ANSWER_SECONDS:g} s") from None
        if stream.rejected is not None:
            raise status.from_rejected(stream.rejected, job.request_id)
        if stream.requests_ahead is None:
            assert stream.failure is not None
            raise stream.failure
        job.accepted.requests_ahead = stream.requests_ahead
        # Tokens may have come along with the admission.
        stream.wake()

    async def _deliver(self, job: Job, stream: Stream, context: "GenerateContext") -> str:
        """Writes deltas until the output ends; returns the stop string that ended it, or ""."""
        delta = pb.Delta()
        while True:
            await stream.changed()
            tokens = stream.take()
            is_over = (stream.end is not None or stream.failure is not None) and not stream.pending
            piece = finish_output(job.output, tokens, stream.end) if is_over else job.output.push(tokens)
            if job.want_token_ids:
                delta.token_ids.extend(piece.token_ids)
            if job.want_text:
                delta.text += piece.text
            if delta.token_ids or delta.text:
                await self._write(pb.GenerateResponse(delta=delta), stream, context)
                # What was neither shown nor sent is covered by the next delta.
                delta = pb.Delta(token_offset=job.output.num_tokens)
            if piece.stop_string:
                return piece.stop_string
            if is_over:
                break
        if stream.end is None:
            assert stream.failure is not None
            raise stream.failure
        if stream.end.HasField("failure"):
            raise status.from_failure(stream.end.failure, job.request_id)
        return ""

    async def _end(self, stream: Stream) -> frontend_pb2.End:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while stream.end is None:
                    if stream.failure is not None:
                        raise stream.failure
                    await stream.changed()
        except TimeoutError:
            raise status.not_ready(f"the scheduler's core has not answered for {ANSWER_SECONDS:g} s") from None
        return stream.end

    async def _write(self, message: pb.GenerateResponse, stream: Stream, context: "GenerateContext") -> None:
        stream.blocked_since = asyncio.get_running_loop().time()
        await context.write(message)
        stream.blocked_since = 0.0


def seconds_left(context: "GenerateContext") -> float:
    """Until the caller's deadline, 0 for none. Raises Refusal where it is past."""
    # None without a deadline, whatever the stubs say.
    seconds = cast(float | None, context.time_remaining())
    if seconds is None:
        return 0.0
    if seconds <= 0:
        raise status.deadline_passed("the deadline was past before the request was admitted")
    return seconds


def make_output(checked: wire.Checked, token_ids: Sequence[int], model: Model) -> Output:
    """The output of a checked request: with text where the caller wants it or a stop string needs it."""
    stop, detokenizer = checked.stop, None
    if model.text is not None and (checked.want_text or checked.stop_strings):
        decode = model.text.decoder(skip_special_tokens=checked.skip_special_tokens)
        detokenizer = Detokenizer(decode, list(token_ids[-NUM_CONTEXT_TOKENS:]))
    stop_finder = StopFinder(checked.stop_strings, include_stop=stop.include_stop) if checked.stop_strings else None
    model_stops = frozenset[int]() if stop.ignore_eos else model.eos_token_ids
    return Output(
        detokenizer=detokenizer,
        stop_finder=stop_finder,
        stop_token_ids=model_stops | frozenset(stop.stop_token_ids),
        min_new_tokens=stop.min_new_tokens,
        include_stop=stop.include_stop,
    )


def finish_output(output: Output, tokens: list[int], end: frontend_pb2.End | None) -> Piece:
    """The last piece of an output that ended with `end`, or without one."""
    is_token = end is not None and end.reason in TOKEN_REASONS
    return output.finish(tokens, stop_token_id=end.stop_token_id if end is not None and is_token else None)


def summarize(job: Job, end: frontend_pb2.End) -> pb.Summary:
    """The core's usage and timing, with the output cut where a stop string cut it."""
    summary = pb.Summary(usage=end.usage, timing=end.timing)
    num_sampled = end.usage.output_tokens + end.usage.discarded_tokens
    summary.usage.prompt_tokens = job.accepted.prompt_tokens
    summary.usage.output_tokens = job.output.num_tokens
    summary.usage.discarded_tokens = max(0, num_sampled - job.output.num_tokens)
    return summary
