"""Owns InferenceService.

Readiness is checked before a message is read, before it is parsed, and before its prompt is hashed, so that a full
queue costs no work. Objects that only an admitted request needs are created after the core has admitted it. If the
caller leaves, a coroutine handler gets CancelledError or an InternalError and context.cancelled() stays False (grpc.aio
1.85.1), so `finally` frees the request, without waiting.

The calls that convert text, chats and token ids touch no request. They ask the served model alone, so they work while
the queue is full and while the service drains.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

from scheduler_svc.door.tenant import Caller
from scheduler_svc.frontend import validate
from scheduler_svc.frontend.constraints.door import NO_CONSTRAINT, ConstraintDoor
from scheduler_svc.frontend.entrance import caller
from scheduler_svc.frontend.grpc_tuning.event_loop import run_as_task, run_here
from scheduler_svc.frontend.grpc_tuning.sockets import Connection, Corks
from scheduler_svc.frontend.grpc_tuning.tuning import ON, Tuning
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.prompt import read_prompt, render_chat, text_ids
from scheduler_svc.frontend.readiness import Readiness
from scheduler_svc.frontend.request_log import current
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.calls import MAX_SMALL_BYTES
from scheduler_svc.frontend.sizes import MAX_CHAR_BYTES
from scheduler_svc.frontend.streaming.samples import PreparedStream, describe, serialized
from scheduler_svc.frontend.streaming.sender import StreamSender, StreamWriter, wait_for_admission, wait_for_resumed
from scheduler_svc.frontend.streaming.stream import RequestStream
from scheduler_svc.frontend.streaming.stream_table import StreamTable
from scheduler_svc.frontend.validate import without_lists
from scheduler_svc.metrics.front_meter import FrontMeter

# The most bytes of a token id as a varint.
MAX_ID_BYTES = 5
SECRET_BYTES = 32
# All warnings in the initial metadata together; callers take 8 KiB of it.
MAX_WARNING_CHARS = 1024


@dataclass(eq=False)
class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves callers that request text or tokens, or want to convert them."""

    readiness: Readiness
    streams: StreamTable
    constraints: ConstraintDoor
    _: KW_ONLY
    max_message_bytes: int
    tuning: InitVar[Tuning] = ON
    meter: FrontMeter | None = None

    def __post_init__(self, tuning: Tuning) -> None:
        self._corks = Corks(is_on=tuning.corks)
        self._run_write = run_here if tuning.writes else run_as_task

    def admit_generate(self) -> int:
        """The size limit of a request in bytes. Raises Refusal if no request is admitted now."""
        self.readiness.admit()
        self.streams.places.check(caller().tenant)
        return self.max_message_bytes

    def admit_resume(self) -> int:
        """The size limit of a Resume in bytes. Raises Refusal without a model, or if too many streams are open."""
        self.readiness.model()
        self.streams.places.check(caller().tenant)
        return MAX_SMALL_BYTES

    def admit_tokenize(self) -> int:
        """The size limit of a request in bytes, which fits the longest text. Raises Refusal without a model."""
        max_chars = self.readiness.model().sizes.text_chars
        return min(self.max_message_bytes, MAX_SMALL_BYTES + MAX_CHAR_BYTES * max_chars)

    def admit_detokenize(self) -> int:
        """The size limit of a request in bytes, which fits the longest list. Raises Refusal without a model."""
        return min(self.max_message_bytes, MAX_SMALL_BYTES + MAX_ID_BYTES * self.readiness.model().sizes.length)

    # A coroutine that writes, where the stub expects a generator: a coroutine that stalls in a write can be ended with
    # its own status, while a generator would only be closed.
    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.GenerateRequest, context: Any
    ) -> None:
        record = current()
        record.named(request.request_id)
        record.meter = None if self.meter is None else self.meter.stream()
        status.seconds_left(context)
        model = self.readiness.admit()
        record.model = model.info.model

        async def begin(stream: RequestStream) -> PreparedStream:
            submit, prepared = await self._prepare(request, context, model, caller())
            # Frees the prompt, which may be large, before the stream, which may be long.
            request.Clear()
            record.named(submit.request_id)
            submit.traceparent = record.traceparent or ""
            self.streams.submit(stream, submit)
            submit.Clear()
            prepared.description.accepted.requests_ahead = await wait_for_admission(stream)
            return prepared

        await self._stream(begin, context)

    async def Resume(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.ResumeRequest, context: Any
    ) -> None:
        """Streams the rest of a completion after its stream was lost. A full queue and a drain do not refuse it."""
        record = current()
        record.named(request.request_id)
        record.meter = None if self.meter is None else self.meter.stream(is_resumed=True)
        status.seconds_left(context)
        validate.check_resume(request)
        model = self.readiness.model()
        record.model = model.info.model

        async def begin(stream: RequestStream) -> PreparedStream:
            secret_hash = hashlib.sha256(request.resume_secret).digest()
            self.streams.resume(stream, request.request_id, secret_hash, caller().tenant)
            description = await wait_for_resumed(stream)
            record.named(stream.request_id)
            validate.check_offsets(list(request.offsets), [sample.num_received for sample in stream.samples])
            description.accepted.resume_secret = request.resume_secret
            return PreparedStream(description=description, model=model, received=request.offsets)

        await self._stream(begin, context)

    async def _stream(self, begin: Callable[[RequestStream], Awaitable[PreparedStream]], context: Any) -> None:
        """Runs one stream from its opening to its end. `begin` gets the core's consent."""
        stream, record = self.streams.open(caller()), current()
        stream.meter, record.stream = record.meter, stream
        try:
            prepared = await begin(stream)
            record.accepted = prepared.description.accepted
            connection = self._corks.join(context)
            try:
                await self._run(prepared, stream, context, connection)
            finally:
                self._corks.leave(connection)
        except (asyncio.CancelledError, status.Refusal) as error:
            failure = stream.failure if isinstance(error, asyncio.CancelledError) else error
            if failure is None:
                raise
            failure.ends_answer = record.accepted is not None
            raise failure from None
        finally:
            self.streams.close(stream)

    async def _prepare(
        self, request: pb.GenerateRequest, context: Any, model: Model, who: Caller
    ) -> tuple[frontend_pb2.Submit, PreparedStream]:
        checked = validate.check_request(request, model, who.limits)
        is_chat = request.HasField("chat")
        constraint = NO_CONSTRAINT if is_chat else await self.constraints.accept(request, model, who.tenant)
        prompt = await read_prompt(request, model, who.tenant)
        if prompt.chat is not None:
            # The grammar of its answer depends on what the template wrote.
            constraint = await self.constraints.accept_chat(request, *prompt.chat, model, who.tenant)
            if prompt.parsing is not None:
                prompt.parsing.marks_are_tokens = bool(constraint.source)
                prompt.parsing.has_constraint = request.HasField("constraint")
        # The queue may have filled while a long text was tokenized.
        self.readiness.admit()
        token_ids, left = prompt.token_ids, status.seconds_left(context)
        submit = await validate.make_submit(checked, token_ids, model, who, deadline_seconds=left)
        submit.constraint, submit.constraint_hash = constraint.source, constraint.hash
        accepted = pb.Accepted(
            request_id=checked.request_id,
            sampling=without_lists(checked.sampling),
            prompt_tokens=len(token_ids),
            max_new_tokens=validate.new_tokens_in_force(submit.max_new_tokens, len(token_ids), model),
            warnings=constraint.warnings,
        )
        description = describe(checked, accepted, prompt, submit.max_new_tokens)
        if request.resume.linger_seconds:
            secret = secrets.token_bytes(SECRET_BYTES)
            submit.linger_seconds = request.resume.linger_seconds
            submit.secret_hash = hashlib.sha256(secret).digest()
            submit.description = serialized(description)
            description.accepted.resume_secret = secret
        spelled = token_ids if request.output.logprob_pieces and model.tokenizer is not None else None
        return submit, PreparedStream(description=description, model=model, spelled=spelled)

    async def _run(self, prepared: PreparedStream, stream: RequestStream, context: Any, connection: Connection) -> None:
        accepted = prepared.description.accepted
        writer = StreamWriter(stream, context.write, connection.hold, self._run_write)
        sender = StreamSender(prepared, stream, self.streams, writer)
        missed = await sender.replay() if stream.description is not None else ()
        # It must be ASCII, so another request id is only in Accepted, and warnings are escaped.
        metadata = [("x-request-id", stream.request_id)] if stream.request_id.isascii() else []
        if accepted.warnings:
            text = "; ".join(accepted.warnings).encode("unicode_escape").decode("ascii")
            metadata.append(("x-tandem-warning", text[:MAX_WARNING_CHARS]))
        # After the initial metadata the caller's gRPC does not retry on its own.
        await context.send_initial_metadata(tuple(metadata))
        if stream.meter is not None:
            stream.meter.accepted(accepted.prompt_tokens, caller().tenant)
        # The caller may have the secret, and leave, before the write returns.
        stream.is_resumable = bool(accepted.resume_secret)
        await writer.write(pb.GenerateResponse(accepted=accepted))
        for message in missed:
            await writer.write(message)
        await sender.run()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Returns the ids that Generate would make of the text."""
        model = self.readiness.model()
        model.check_name(request.model)
        token_ids = await text_ids(request, model, caller().tenant)
        return pb.TokenizeResponse(token_ids=token_ids)

    async def RenderChat(self, request: pb.RenderChatRequest, context: Any) -> pb.RenderChatResponse:
        """Returns the prompt that Generate would make of the chat."""
        model = self.readiness.model()
        model.check_name(request.model)
        _, rendered = await render_chat(request.chat, model, caller().tenant)
        return pb.RenderChatResponse(text=rendered.text, token_ids=rendered.token_ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Returns the text of the ids, or of each of them."""
        model = self.readiness.model()
        model.check_name(request.model)
        tokenizer = validate.check_detokenize(request, model)
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        if request.separately:
            return pb.DetokenizeResponse(
                texts=await tokenizer.decode_each(request.token_ids, caller().tenant, skip_special_tokens=skip)
            )
        text = await tokenizer.decode(request.token_ids, caller().tenant, skip_special_tokens=skip)
        return pb.DetokenizeResponse(text=text)
