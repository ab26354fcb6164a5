"""Runs one request of `/v1/completions` or `/v1/chat/completions`: the calls of the service and the answer.

Owns the order of one request: all its calls are accepted before the first byte of the answer, an error before that has
its own status, and an error after it is an event.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

from google.protobuf.message import Message
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tandem.v1 import inference_pb2

from tandem_client.connection import Metadata
from tandem_client.gateway.errors import HttpError, unavailable
from tandem_client.gateway.exchange import Answer, EventStream, header
from tandem_client.gateway.metrics import Meter
from tandem_client.gateway.openai.answers import AnswerWriter, Chunks, ShownPrompt
from tandem_client.gateway.openai.wanted import Wanted
from tandem_client.gateway.service import Service, ServiceCall
from tandem_client.wire.request import service_in

# Characters of the caller's own id that are kept; the service takes 128.
_KEPT_ID_CHARS = 80
_ID_HEADER, _WARNING_HEADER, _SERVICE_HEADER = "x-request-id", "x-tandem-warning", "x-tandem-service"
_LAST_WORD_SECONDS = 0.5


class Generation(Response):
    """The answer to one request, which is made while it is sent."""

    def __init__(
        self, wanted: Wanted, request: Request, metadata: Metadata, service: Service, meter: Meter, ping_seconds: float
    ) -> None:
        super().__init__()
        self._wanted, self._metadata = wanted, metadata
        self._service, self._meter, self._ping_seconds = service, meter, ping_seconds
        # The caller's own id, so that it can be found in the service's log, and a part that is new.
        given, new = header(request, _ID_HEADER), uuid.uuid4().hex
        is_kept = given and given.isascii() and given.isprintable()
        self._request_id = f"{given[:_KEPT_ID_CHARS]}-{new[:12]}" if is_kept else new
        # The headers of the answer.
        self._lines = {_ID_HEADER: self._request_id}
        self._has_token = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers. Raises HttpError while nothing is sent, and ClientDisconnect if the client leaves."""
        self._scope, self._receive, self._send = scope, receive, send
        await _while_present(receive, self._run())

    async def _run(self) -> None:
        wanted, calls = self._wanted, list[ServiceCall]()
        model = wanted.requests[0].model or await self._service.model_name(self._metadata)
        try:
            for i, request in enumerate(wanted.requests):
                request.request_id = self._request_id if i == 0 else f"{self._request_id}-{i}"
                calls.append(ServiceCall(self._service, request, self._metadata, wanted.names))
            prompts = [ShownPrompt() for _ in calls]
            shown = [self._shown(prompt, request) for prompt, request in zip(prompts, wanted.requests, strict=True)]
            await together([*(call.begin() for call in calls), *shown])
            answer = (Chunks if wanted.is_stream else AnswerWriter)(
                wanted=wanted, request_id=self._request_id, model=model, prompts=prompts,
                prompt_lengths=[call.accepted.prompt_tokens for call in calls],
            )  # fmt: skip
            said = [await call.metadata() for call in calls]
            # Only the service's answer to a chat has a warning, and a chat is one call. It is in ASCII.
            if calls[0].accepted.warnings and (warning := dict(said[0]).get(_WARNING_HEADER)):
                self._lines[_WARNING_HEADER] = warning
            if named := list(filter(None, map(service_in, said))):
                # Several prompts name each service once.
                self._lines[_SERVICE_HEADER] = ", ".join(dict.fromkeys(named))
            if isinstance(answer, Chunks):
                await self._stream(answer, calls)
            else:
                await together([self._pump(i, call, answer) for i, call in enumerate(calls)])
                await Answer(answer.closing(), headers=self._lines)(self._scope, self._receive, self._send)
            self._meter.add("prompt_tokens", answer.prompt_tokens)
            self._meter.add("output_tokens", answer.output_tokens)
        finally:
            for call in calls:
                call.end()

    async def _stream(self, chunks: Chunks, calls: Sequence[ServiceCall]) -> None:
        stream = EventStream(self._send)
        pinging = asyncio.create_task(stream.keep_alive(self._ping_seconds))
        try:
            self._scope["state"]["status"] = 200
            await stream.open(self._lines)
            if opening := chunks.opening():
                await stream.write(opening)
            await together([self._pump(i, call, chunks, stream) for i, call in enumerate(calls)])
            last = chunks.closing()
        except HttpError as error:
            last = b"data: " + error.body() + b"\n\n"
        except asyncio.CancelledError:
            # The process stops, or the client has left and does not read this.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_LAST_WORD_SECONDS):
                    error = unavailable("the gateway ended the request, because it stops")
                    await stream.close(b"data: " + error.body() + b"\n\n")
            raise
        finally:
            pinging.cancel()
        await stream.close(last)

    async def _pump(self, idx: int, call: ServiceCall, answer: AnswerWriter, stream: EventStream | None = None) -> None:
        """Gives the messages of one call to the answer, to its end, and what it says of them to its stream."""
        echo_due = self._wanted.is_echo
        while (message := await call.next()) is not None:
            self._meter.add("messages")
            data, is_output = b"", not message.HasField("waiting")
            if echo_due and is_output and not message.HasField("prompt_info"):
                # The prompt's logprobs are complete, and its text is the first.
                echo_due, data = False, answer.prompt(idx)
            data += answer.message(idx, message)
            if stream is None or not data:
                continue
            if is_output and not self._has_token:
                self._has_token = True
                self._meter.first_token(time.perf_counter() - self._scope["state"]["began_at"])
            await stream.write(data)

    async def _shown(self, prompt: ShownPrompt, request: inference_pb2.GenerateRequest) -> None:
        """Asks for what the answer shows of a prompt."""
        wanted, service, kind = self._wanted, self._service, request.WhichOneof("prompt")
        needs_ids = wanted.num_prompt_top is not None

        async def answer(method: Any, asked: Message) -> Any:
            return await service.ask(method, asked, self._metadata, wanted.names)

        if needs_ids and kind == "chat":
            asked = inference_pb2.RenderChatRequest(model=request.model, chat=request.chat)
            prompt.token_ids = (await answer(service.inference.RenderChat, asked)).token_ids
        elif needs_ids and kind == "text":
            adds = request.add_special_tokens if request.HasField("add_special_tokens") else None
            asked = inference_pb2.TokenizeRequest(model=request.model, text=request.text, add_special_tokens=adds)
            prompt.token_ids = (await answer(service.inference.Tokenize, asked)).token_ids
        elif needs_ids:
            prompt.token_ids = request.token_ids.ids
        if wanted.is_echo and kind == "token_ids":
            asked = inference_pb2.DetokenizeRequest(model=request.model, token_ids=request.token_ids.ids)
            prompt.text = (await answer(service.inference.Detokenize, asked)).text
        elif wanted.is_echo:
            prompt.text = request.text


async def together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Does all of it at once. Raises the first error, after it has cancelled the rest."""
    if len(works) == 1:
        # No task: this is how nearly all streams are read.
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _while_present(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work until the client leaves. Raises ClientDisconnect then, after the work was cancelled."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        presence.reschedule(0.0)

    presence = asyncio.timeout(None)
    try:
        async with presence:
            watching = asyncio.create_task(watch())
            try:
                await work
            finally:
                watching.cancel()
    except TimeoutError:
        if not presence.expired():
            raise
        raise ClientDisconnect from None
