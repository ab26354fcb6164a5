"""Owns InferenceService: one request read forwards, from the caller's message to the Summary.

Generate: gate, wire (validate), text (ids), streams (to the core), delivery (text, stops, messages). Decides nothing
about who waits or runs. The gate is asked before the message is read, before it is parsed, and before its prompt is
tokenized and hashed, so that a full queue costs no work; what only an admitted request needs is made once the core has
admitted it. A coroutine handler whose caller leaves gets CancelledError or an InternalError, and context.cancelled()
stays False (grpc.aio 1.85.1); so the request is freed in `finally`, without waiting.
"""

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import grpc
import grpc.aio
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.readiness import Gate
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.parsing import MAX_SMALL_BYTES
from scheduler_svc.frontend.streaming.delivery import Delivery, Job, admission
from scheduler_svc.frontend.streaming.stream import Stream
from scheduler_svc.frontend.streaming.streams import Streams
from scheduler_svc.frontend.text.detokenize import Detokenizer
from scheduler_svc.frontend.text.output import Output
from scheduler_svc.frontend.text.stop_strings import StopFinder
from scheduler_svc.frontend.validate import request as wire
from scheduler_svc.frontend.validate.sampling import without_lists

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

    GenerateContext: TypeAlias = ServicerContext[pb.GenerateRequest, pb.GenerateResponse]

logger = logging.getLogger(__name__)

# Prompt tokens that the first output token is decoded with.
NUM_CONTEXT_TOKENS = 8
# Of a character in UTF-8, and of a token id as a varint.
MAX_CHAR_BYTES = 4
MAX_ID_BYTES = 5


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers callers that want text or tokens."""

    def __init__(self, gate: Gate, streams: Streams, *, max_message_bytes: int) -> None:
        self._gate = gate
        self._streams = streams
        self._max_message_bytes = max_message_bytes

    def admit_generate(self) -> int:
        """The most bytes of a request. Raises Refusal where no request would be admitted."""
        self._gate.admit()
        self._streams.check_room(1)
        return self._max_message_bytes

    def admit_tokenize(self) -> int:
        """The most bytes of a request: what the longest text may have. Raises Refusal without a model."""
        model = self._gate.model()
        max_chars = model.max_length * model.text.max_chars_per_token if model.text is not None else 0
        return min(self._max_message_bytes, MAX_SMALL_BYTES + MAX_CHAR_BYTES * max_chars)

    def admit_detokenize(self) -> int:
        """The most bytes of a request: what the longest list may have. Raises Refusal without a model."""
        return min(self._max_message_bytes, MAX_SMALL_BYTES + MAX_ID_BYTES * self._gate.model().max_length)

    # A coroutine that writes, where the stub expects a generator: a reader that stalls inside a write can be dropped
    # with a status of its own, a generator would only be closed.
    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.GenerateRequest, context: "GenerateContext"
    ) -> None:
        """Streams one completion."""
        seconds_left(context)
        model = self._gate.admit()
        stream = self._streams.open()
        try:
            job = await self._prepare(request, context, model)
            # Prompts are large and streams are long.
            request.Clear()
            await self._run(job, stream, context)
        except asyncio.CancelledError:
            if stream.failure is None:
                raise
            raise stream.failure from None
        except grpc.aio.InternalError:
            logger.debug("request %s: its caller left inside a write", stream.request_id)
            raise
        finally:
            self._streams.close(stream)

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: "ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse]"
    ) -> pb.TokenizeResponse:
        """The ids that Generate would make of the text."""
        model = self._gate.model()
        model.check_name(request.model)
        return pb.TokenizeResponse(token_ids=await wire.text_ids("text", request.text, model))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: "ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse]"
    ) -> pb.DetokenizeResponse:
        """The text of the ids."""
        model = self._gate.model()
        model.check_name(request.model)
        text = wire.check_detokenize(request, model)
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        return pb.DetokenizeResponse(text=await text.decode(request.token_ids, skip_special_tokens=skip))

    async def _prepare(self, request: pb.GenerateRequest, context: "GenerateContext", model: Model) -> Job:
        checked = wire.check_request(request, model)
        token_ids = await wire.prompt_ids(request, model)
        # A long text takes its time, in which the queue may have filled.
        self._gate.admit()
        submit = await wire.make_submit(checked, token_ids, model, deadline_seconds=seconds_left(context))
        accepted = pb.Accepted(
            request_id=checked.request_id,
            sampling=without_lists(checked.sampling),
            prompt_tokens=len(token_ids),
            max_new_tokens=wire.new_tokens_in_force(submit.max_new_tokens, len(token_ids), model),
        )
        return Job(
            submit=submit,
            accepted=accepted,
            make_outputs=functools.partial(make_outputs, checked, token_ids[-NUM_CONTEXT_TOKENS:], model),
            want_text=checked.want_text,
            want_token_ids=checked.want_token_ids,
        )

    async def _run(self, job: Job, stream: Stream, context: "GenerateContext") -> None:
        async def write(message: pb.GenerateResponse) -> None:
            stream.blocked_since = asyncio.get_running_loop().time()
            await context.write(message)
            stream.blocked_since = 0.0

        self._streams.submit(stream, job.submit)
        job.submit.Clear()
        job.accepted.requests_ahead = await admission(stream)
        # From here on callers' automatic retries are over.
        # Metadata is ASCII; ids that are not are told in Accepted alone.
        request_id = stream.request_id
        await context.send_initial_metadata((("x-request-id", request_id),) if request_id.isascii() else ())
        await write(pb.GenerateResponse(accepted=job.accepted))
        await Delivery(job, stream, self._streams, write).run()


def seconds_left(context: "GenerateContext") -> float:
    """Until the caller's deadline, 0 for none. Raises Refusal where it is past."""
    # None without a deadline, whatever the stubs say.
    seconds = cast(float | None, context.time_remaining())
    if seconds is None:
        return 0.0
    if seconds <= 0:
        raise status.deadline_passed("the deadline was past before the request was admitted")
    return seconds


def make_outputs(checked: wire.Checked, context: Sequence[int], model: Model) -> tuple[Output, ...]:
    """An output for each sample: with text where the caller wants it or a stop string needs it.

    `context`: the prompt's last tokens.
    """
    stop, strings, decode = checked.stop, checked.stop_strings, None
    if model.text is not None and (checked.want_text or strings):
        decode = model.text.decoder(skip_special_tokens=checked.skip_special_tokens)
    stop_finder = StopFinder(strings, include_stop=stop.include_stop) if strings else None
    model_stops = frozenset[int]() if stop.ignore_eos else model.eos_token_ids
    return tuple(
        Output(
            detokenizer=Detokenizer(decode, list(context)) if decode is not None else None,
            stop_finder=stop_finder.fork() if stop_finder is not None else None,
            stop_token_ids=model_stops | frozenset(stop.stop_token_ids),
            min_new_tokens=stop.min_new_tokens,
            include_stop=stop.include_stop,
        )
        for _ in range(checked.sampling.num_samples)
    )
