"""A fake service with answers that a test sets: parsed chats and single tokens. It also records its callers."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy

import grpc
from tandem.v1 import chat_pb2, inference_pb2

from tests.client.fake_service import Ending, FakeService, accepted, finished, sending, summary, two_samples

Stream = Iterator[inference_pb2.GenerateResponse]


class ToldService(FakeService):
    """FakeService with what the gateway needs."""

    # The text of token ids; None: each is a byte.
    text_of: Callable[[list[int]], str] | None = None

    def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        if not request.separately and self.text_of is None:
            return super().Detokenize(request, context)
        self.requests.append(request)
        if self.text_of is not None:
            return inference_pb2.DetokenizeResponse(text=self.text_of(list(request.token_ids)))
        return inference_pb2.DetokenizeResponse(texts=[f"<{token_id}>" for token_id in request.token_ids])

    def RenderChat(
        self, request: inference_pb2.RenderChatRequest, context: grpc.ServicerContext
    ) -> inference_pb2.RenderChatResponse:
        self.requests.append(request)
        text = "".join(f"<{message.role}>{''.join(message.content)}" for message in request.chat.messages)
        return inference_pb2.RenderChatResponse(text=text, token_ids=text.encode())

    @property
    def generated(self) -> inference_pb2.GenerateRequest:
        """The newest request of Generate."""
        return next(each for each in reversed(self.requests) if isinstance(each, inference_pb2.GenerateRequest))

    def metadata(self, key: str) -> list[str | bytes]:
        """Values of the newest Generate call's metadata."""
        return [value for name, value in self.endings[-1].context.invocation_metadata() if name == key]


def piece(text: str = "", **more: object) -> inference_pb2.GenerateResponse:
    """A delta of a chat."""
    return inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=text, **more))  # pyright: ignore[reportArgumentType]


def call_piece(index: int, arguments: str, call_id: str = "", name: str = "") -> inference_pb2.GenerateResponse:
    """A delta with a part of a tool call."""
    made = chat_pb2.ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments)
    return inference_pb2.GenerateResponse(delta=inference_pb2.Delta(tool_calls=[made]))


# Reasoning, content, and two tool calls with arguments in pieces.
thoughts_and_calls = sending(
    piece(reasoning="hm"),
    piece(reasoning="m."),
    piece("Let me "),
    piece("see."),
    call_piece(0, '{"city": "Par', "abcdefgh1", "weather"),
    call_piece(0, 'is"}'),
    call_piece(1, "{}", "abcdefgh2", "clock"),
    finished(9, inference_pb2.FINISH_REASON_EOS),
    inference_pb2.GenerateResponse(
        summary=inference_pb2.Summary(
            usage=inference_pb2.Usage(prompt_tokens=7, output_tokens=9, cached_prompt_tokens=4, reasoning_tokens=3)
        )
    ),
)


def warned_and_cut(request: inference_pb2.GenerateRequest, ending: Ending) -> Stream:
    """A warning, and a tool call that the length cuts off."""
    ending.context.send_initial_metadata((("x-tandem-warning", "the schema of tool 'weather'"),))
    first = accepted(request)
    first.accepted.warnings.append("the schema of tool 'weather'")
    yield first
    yield call_piece(0, '{"city": "Par', "abcdefgh1", "weather")
    yield finished(9, inference_pb2.FINISH_REASON_LENGTH)
    yield summary(1)


def as_asked(request: inference_pb2.GenerateRequest, ending: Ending) -> Stream:
    """Each sample gets its own number as text."""
    yield accepted(request)
    for i in range(request.sampling.num_samples or 1):
        yield piece(f"sample {i}", sample_idx=i)
        yield finished(1, inference_pb2.FINISH_REASON_EOS, sample_idx=i)
    yield summary(request.sampling.num_samples or 1)


def two_scored(request: inference_pb2.GenerateRequest, ending: Ending) -> Stream:
    """Two samples; the text of a token is its id between angle brackets."""
    for message in map(deepcopy, two_samples(request, ending)):
        if message.HasField("prompt_info"):
            info = message.prompt_info
            if info.start == 1 and request.HasField("token_ids"):
                info.first.CopyFrom(_piece(request.token_ids.ids[0]))
            _add_pieces(request, info.logprobs, request.token_ids.ids[info.start :])
        elif message.HasField("delta"):
            _add_pieces(request, message.delta.logprobs, message.delta.token_ids)
        yield message


def _add_pieces(
    request: inference_pb2.GenerateRequest, logprobs: inference_pb2.Logprobs, token_ids: Sequence[int]
) -> None:
    if request.output.logprob_pieces:
        logprobs.pieces.extend(map(_piece, token_ids[: len(logprobs.logprobs)]))
        logprobs.top_pieces.extend(map(_piece, logprobs.top_token_ids))


def _piece(token_id: int) -> inference_pb2.TokenPiece:
    return inference_pb2.TokenPiece(text=f"<{token_id}>", data=f"<{token_id}>".encode())
