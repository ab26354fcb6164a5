"""Owns the messages of one sample: its deltas and its end. Knows nothing of writes, other samples or the core.

A resumed stream is built again from its first token. What its caller has received already is left out here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.streaming.logprobs import add_pieces
from scheduler_svc.frontend.streaming.stream import SampleStream
from scheduler_svc.frontend.text.detokenize import PiecesOfRequest
from scheduler_svc.frontend.text.output import CallPiece, OutputPiece, SampleOutput
from scheduler_svc.metrics.front_meter import SampleMeter

TOKEN_REASONS = (pb.FINISH_REASON_EOS, pb.FINISH_REASON_STOP_TOKEN)
# The output is what the model, or its constraint, has made of it.
WHOLE_REASONS = (*TOKEN_REASONS, pb.FINISH_REASON_CONSTRAINT_COMPLETE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStream:
    """What a stream carries: its Accepted, and what its other messages depend on."""

    accepted: pb.Accepted
    # Creates one output for each sample. Takes up to 10 ms for the largest set of stop strings.
    make_outputs: Callable[[], tuple[SampleOutput, ...]]
    want_text: bool
    want_token_ids: bool
    # What the caller of a resumed stream has received of each sample already. Missing ones stand for nothing.
    received: Sequence[pb.SampleOffset] = ()
    # None: logprobs have no pieces of text.
    pieces: PiecesOfRequest | None = None


class SampleSender:
    """The messages of one sample: its pending delta and its end."""

    __slots__ = (
        "_has_text_only",
        "_idx",
        "_num_sent",
        "_pieces",
        "_request",
        "_skips",
        "_unsent_from",
        "is_ending",
        "is_over",
        "meter",
        "output",
        "reason",
        "sample",
        "stop_string",
        "to_skip",
    )

    def __init__(self, idx: int, sample: SampleStream, output: SampleOutput, request: PreparedStream) -> None:
        self.sample = sample
        self.output = output
        # All tokens have been taken; the sample's end may remain to be sent.
        self.is_ending = False
        # The stop string that ended the sample, or "".
        self.stop_string = ""
        self.is_over = False
        # None without a metrics page, and while a resumed stream is built again.
        self.meter: SampleMeter | None = None
        self.reason = pb.FINISH_REASON_UNSPECIFIED
        self._request = request
        self._pieces = request.pieces.at(request.accepted.prompt_tokens) if request.pieces is not None else None
        if self._pieces is not None:
            # So that the last token of the text is sent together with its end.
            output.may_grow = self._pieces.may_grow
        self._idx = idx
        received = request.received[idx] if idx < len(request.received) else pb.SampleOffset()
        # The caller of a resumed stream has the token ids before this one, and this much of the text that is built
        # again.
        self._unsent_from = received.token_ids
        self.to_skip = pb.SampleOffset()
        self.to_skip.CopyFrom(received)
        self.to_skip.token_ids = 0
        self._skips = received.ByteSize() > 0
        self._has_text_only = self.to_skip.ByteSize() > 0 and not received.token_ids
        # The offset of the next delta.
        self._num_sent = received.token_ids

    def next_delta(self, piece: OutputPiece) -> pb.GenerateResponse | None:
        """The message with the delta that `piece` makes. Returns None if the delta would be empty."""
        wants, logprobs = self._request, self.sample.logprobs
        if not wants.want_text:
            piece = piece._replace(text="", reasoning="", calls=())
        token_ids = list[int]() if not wants.want_token_ids else piece.token_ids
        if self._skips:
            token_ids, piece = self._beyond_received(piece, token_ids)
        has_logprobs = logprobs is not None and bool(piece.token_ids)
        if not (token_ids or piece.text or has_logprobs or piece.reasoning or piece.calls):
            # Tokens without ids and text wait for the delta that shows them.
            return None
        # The message of every token, so it is filled in place: a Delta of its own would be copied.
        message = pb.GenerateResponse()
        delta = message.delta
        delta.sample_idx, delta.token_offset, delta.text = self._idx, self._num_sent, piece.text
        if piece.reasoning:
            delta.reasoning = piece.reasoning
        for call in piece.calls:
            delta.tool_calls.add(index=call.idx, id=call.id, name=call.name, arguments=call.arguments)
        if token_ids:
            delta.token_ids.extend(token_ids)
        if logprobs is not None and has_logprobs:
            delta.logprobs.CopyFrom(logprobs.take(len(piece.token_ids)))
            if self._pieces is not None:
                is_end = self.is_ending and not self.stop_string
                add_pieces(delta.logprobs, piece.token_ids, self._pieces, is_end=is_end)
        if self._num_sent < self.output.num_tokens:
            self._num_sent = self.output.num_tokens
        if self.meter is not None:
            self.meter.sent(self.output.num_tokens)
        return message

    def measure(self, meter: SampleMeter) -> None:
        """Measures the sample from now on."""
        if num_built := self.output.num_tokens:
            # Of a resumed stream. A caller of text alone does not say how many tokens it has.
            meter.skip(num_built, num_received=num_built if self._has_text_only else min(num_built, self._unsent_from))
        self.meter = meter

    def _beyond_received(self, piece: OutputPiece, token_ids: list[int]) -> tuple[list[int], OutputPiece]:
        """Returns the part of a piece that the caller of a resumed stream has not received."""
        num_tokens, skip = self.output.num_tokens, self.to_skip
        start = num_tokens - len(piece.token_ids)
        num_text = min(len(piece.text), skip.text_chars)
        num_reasoning = min(len(piece.reasoning), skip.reasoning_chars)
        skip.text_chars -= num_text
        skip.reasoning_chars -= num_reasoning
        left = [call for each in piece.calls if (call := self._call_beyond_received(each)) is not None]
        self._skips = num_tokens < self._unsent_from or skip.ByteSize() > 0
        piece = piece._replace(text=piece.text[num_text:], reasoning=piece.reasoning[num_reasoning:], calls=left)
        if not (piece.text or piece.reasoning or left or self._request.want_token_ids):
            self._num_sent = num_tokens
        return token_ids[max(0, self._unsent_from - start) :], piece

    def _call_beyond_received(self, call: CallPiece) -> CallPiece | None:
        num_chars = min(len(call.arguments), self.to_skip.tool_argument_chars)
        self.to_skip.tool_argument_chars -= num_chars
        if not call.id:
            return call._replace(arguments=call.arguments[num_chars:]) if len(call.arguments) > num_chars else None
        if not self.to_skip.tool_calls:
            return call._replace(arguments=call.arguments[num_chars:])
        self.to_skip.tool_calls -= 1
        rest = call.arguments[num_chars:]
        return CallPiece(call.idx, "", "", rest) if rest else None

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
