"""Owns the messages of one sample: its deltas and its end. Knows nothing of writes, other samples or the core.

A resumed stream is built again from its first token. What its caller has received already is left out here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.streaming.stream import SampleStream
from scheduler_svc.frontend.text.output import OutputPiece, SampleOutput
from scheduler_svc.metrics.front_meter import SampleMeter

TOKEN_REASONS = (pb.FINISH_REASON_EOS, pb.FINISH_REASON_STOP_TOKEN)


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


class SampleSender:
    """The messages of one sample: its pending delta and its end."""

    __slots__ = (
        "_has_text_only",
        "_idx",
        "_num_sent",
        "_request",
        "_skips",
        "_unsent_from",
        "chars_to_skip",
        "is_ending",
        "is_over",
        "meter",
        "output",
        "reason",
        "sample",
        "stop_string",
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
        self._idx = idx
        received = request.received[idx] if idx < len(request.received) else pb.SampleOffset()
        # The caller of a resumed stream has the token ids before this one, and this many characters of text that is
        # built again.
        self._unsent_from = received.token_ids
        self.chars_to_skip = received.text_chars
        self._skips = bool(received.token_ids or received.text_chars)
        self._has_text_only = bool(received.text_chars and not received.token_ids)
        # The offset of the next delta.
        self._num_sent = received.token_ids

    def next_delta(self, piece: OutputPiece) -> pb.GenerateResponse | None:
        """The message with the delta that `piece` makes. Returns None if the delta would be empty."""
        wants, logprobs = self._request, self.sample.logprobs
        token_ids = piece.token_ids if wants.want_token_ids else ()
        text = piece.text if wants.want_text else ""
        if self._skips:
            token_ids, text = self._beyond_received(piece, token_ids, text)
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

    def _beyond_received(self, piece: OutputPiece, token_ids: Sequence[int], text: str) -> tuple[Sequence[int], str]:
        """Returns the part of a piece that the caller of a resumed stream has not received."""
        num_tokens = self.output.num_tokens
        start = num_tokens - len(piece.token_ids)
        num_skipped = min(len(text), self.chars_to_skip)
        self.chars_to_skip -= num_skipped
        self._skips = num_tokens < self._unsent_from or self.chars_to_skip > 0
        if num_skipped == len(text) and not self._request.want_token_ids:
            self._num_sent = num_tokens
        return token_ids[max(0, self._unsent_from - start) :], text[num_skipped:]

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
