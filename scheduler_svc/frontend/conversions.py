"""Owns the calls of InferenceService that convert text, chats and token ids, and touch no request.

They ask the served model alone, so they work while the queue is full and while the service drains.
"""

from typing import Any

from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

from scheduler_svc.frontend.door.entrance import caller
from scheduler_svc.frontend.prompt import render_chat, text_ids
from scheduler_svc.frontend.readiness import Readiness
from scheduler_svc.frontend.rpc.parsing import MAX_SMALL_BYTES
from scheduler_svc.frontend.sizes import MAX_CHAR_BYTES
from scheduler_svc.frontend.validate import check_detokenize

# The most bytes of a token id as a varint.
MAX_ID_BYTES = 5


class Conversions(inference_pb2_grpc.InferenceServiceServicer):
    """Tokenize, Detokenize and RenderChat."""

    def __init__(self, readiness: Readiness, max_message_bytes: int) -> None:
        self._readiness = readiness
        self._max_message_bytes = max_message_bytes

    def admit_tokenize(self) -> int:
        """The size limit of a request in bytes, which fits the longest text. Raises Refusal without a model."""
        max_chars = self._readiness.model().sizes.text_chars
        return min(self._max_message_bytes, MAX_SMALL_BYTES + MAX_CHAR_BYTES * max_chars)

    def admit_detokenize(self) -> int:
        """The size limit of a request in bytes, which fits the longest list. Raises Refusal without a model."""
        return min(self._max_message_bytes, MAX_SMALL_BYTES + MAX_ID_BYTES * self._readiness.model().max_length)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Returns the ids that Generate would make of the text."""
        model = self._readiness.model()
        model.check_name(request.model)
        token_ids = await text_ids(request, model, caller().tenant)
        return pb.TokenizeResponse(token_ids=token_ids)

    async def RenderChat(self, request: pb.RenderChatRequest, context: Any) -> pb.RenderChatResponse:
        """Returns the prompt that Generate would make of the chat."""
        model = self._readiness.model()
        model.check_name(request.model)
        rendered = (await render_chat(request.chat, model, caller().tenant)).rendered
        return pb.RenderChatResponse(text=rendered.text, token_ids=rendered.token_ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Returns the text of the ids, or of each of them."""
        model = self._readiness.model()
        model.check_name(request.model)
        tokenizer = check_detokenize(request, model)
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        if request.separately:
            return pb.DetokenizeResponse(
                texts=await tokenizer.decode_each(request.token_ids, caller().tenant, skip_special_tokens=skip)
            )
        text = await tokenizer.decode(request.token_ids, caller().tenant, skip_special_tokens=skip)
        return pb.DetokenizeResponse(text=text)
