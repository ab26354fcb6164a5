"""Owns the description of a stream, and the messages of one sample: its deltas and its end.

The description is everything that the messages of a stream depend on besides the tokens. The front end that accepts a
request makes it. The core keeps it for a request that lingers, so that another front end can build the same stream,
again from its first token. What the caller has received already is left out here. Knows nothing of writes, of other
samples or of the core.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.core.messages.events import MAX_DESCRIPTION_BYTES
from scheduler_svc.frontend.chat.answer import ChatOutput
from scheduler_svc.frontend.chat.bodies import marked, marking
from scheduler_svc.frontend.chat.conversation import levels
from scheduler_svc.frontend.chat.served import make_parser
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.prompt import Prompt
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.streaming.stream import SampleStream, add_pieces
from scheduler_svc.frontend.text.detokenize import MAX_CONTEXT_TOKENS, Decode, Detokenizer, Pieces
from scheduler_svc.frontend.text.output import CallPiece, OutputPiece, SampleOutput, StopFinder
from scheduler_svc.frontend.text.tokenizer import Tokenizer
from scheduler_svc.frontend.validate import Checked
from scheduler_svc.metrics.front_meter import SampleMeter
from tandem_contract.plural import numbered


def describe(
    checked: Checked, accepted: pb.Accepted, prompt: Prompt, max_new_tokens: int
) -> frontend_pb2.StreamDescription:
    stop, output = checked.request.stop, checked.request.output
    return frontend_pb2.StreamDescription(
        accepted=accepted,
        stop=stop,
        max_new_tokens=max_new_tokens,
        want_text=checked.want_text,
        want_token_ids=not output.HasField("want_token_ids") or output.want_token_ids,
        skip_special_tokens=not output.HasField("skip_special_tokens") or output.skip_special_tokens,
        context=np.asarray(prompt.token_ids[-MAX_CONTEXT_TOKENS:], "<i4").tobytes(),
        # Without text and stop strings there is nothing to parse.
        chat=prompt.parsing if checked.want_text or stop.stop_strings else None,
    )


def serialized(description: frontend_pb2.StreamDescription) -> bytes:
    """The bytes that the core keeps. Raises Refusal if they are more than it takes."""
    data = description.SerializeToString()
    if len(data) > MAX_DESCRIPTION_BYTES:
        message = (
            f"resume.linger_seconds is set, and what is kept to resume the request has "
            f"{numbered(len(data), 'byte')}, most of them "
            f"types of tools' arguments or stop strings; the limit is {MAX_DESCRIPTION_BYTES}"
        )
        raise status.invalid("resume.linger_seconds", message)
    return data


def make_outputs(description: frontend_pb2.StreamDescription, model: Model) -> tuple[SampleOutput, ...]:
    """Returns one output for each sample, with text if the caller wants it or a stop string needs it.

    Takes up to 10 ms for the largest set of stop strings.
    """
    stop, decode, hidden = description.stop, None, None
    # The control tokens that a grammar writes where the response template has their texts.
    controls = dict[int, str]()
    if description.chat.marks_are_tokens and model.chat.renderer is not None:
        controls = _in_template(description.chat, {idx: text for text, idx in model.chat.renderer.marks.items()})
    strings = tuple(dict.fromkeys(stop.stop_strings))
    if model.tokenizer is not None and description.HasField("chat"):
        decode, hidden = _decoder_of_chat(description, model.tokenizer, controls)
    elif model.tokenizer is not None and (description.want_text or strings):
        decode = model.tokenizer.decoder(skip_special_tokens=description.skip_special_tokens)
    context = np.frombuffer(description.context, "<i4").tolist()
    anchor, replacements = (), ()
    if model.tokenizer is not None:
        anchor, replacements = model.tokenizer.token_bytes.anchor, model.tokenizer.replacements
    stop_finder = StopFinder(strings, include_stop=stop.include_stop) if strings else None
    model_stops = frozenset[int]() if stop.ignore_eos else model.eos_token_ids

    def make(sample_idx: int) -> SampleOutput:
        parts: dict[str, Any] = {
            "detokenizer": Detokenizer(decode, context, anchor, replacements) if decode is not None else None,
            "stop_finder": stop_finder.fork() if stop_finder is not None else None,
            "stop_token_ids": model_stops | frozenset(stop.stop_token_ids),
            "min_new_tokens": stop.min_new_tokens,
            "include_stop": stop.include_stop,
        }
        if not description.HasField("chat"):
            return SampleOutput(**parts)
        parser = make_parser(
            description.chat, description.accepted.request_id, sample_idx, frozenset(controls.values())
        )
        return ChatOutput(**parts, parser=parser, hidden=hidden)

    return tuple(make(idx) for idx in range(description.accepted.sampling.num_samples))


def _decoder_of_chat(
    description: frontend_pb2.StreamDescription, tokenizer: Tokenizer, controls: Mapping[int, str]
) -> tuple[Decode, re.Pattern[str] | None]:
    """Returns (the decode function, the special tokens that the caller does not see although the parser does).

    `controls` are marked, so that text that reads the same is not taken for one.
    """
    special = tokenizer.special_tokens if description.skip_special_tokens else dict[int, str]()
    seen = _in_template(description.chat, special)
    decode = tokenizer.decoder_without(special.keys() - seen.keys())
    texts = sorted(seen.values(), key=len, reverse=True)
    if controls:
        written = frozenset(controls.values())
        decode, texts = marking(decode, controls), [marked(text) if text in written else text for text in texts]
    return decode, re.compile("|".join(map(re.escape, texts))) if texts else None


def _in_template(chat: frontend_pb2.ChatParsing, tokens: Mapping[int, str]) -> dict[int, str]:
    """Those of the tokens with a text in the response template."""
    values = chain.from_iterable(levels(json.loads(chat.response_template_json)["fields"]))
    marks = "\n".join(value for value in values if isinstance(value, str))
    return {idx: text for idx, text in tokens.items() if text in marks or re.escape(text) in marks}


TOKEN_REASONS = (pb.FINISH_REASON_EOS, pb.FINISH_REASON_STOP_TOKEN)
# The output is what the model, or its constraint, has made of it.
WHOLE_REASONS = (*TOKEN_REASONS, pb.FINISH_REASON_CONSTRAINT_COMPLETE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStream:
    """What the messages of a stream depend on."""

    description: frontend_pb2.StreamDescription
    model: Model
    # What the caller of a resumed stream has received of each sample already. Missing ones stand for nothing.
    received: Sequence[pb.SampleOffset] = ()
    # The prompt, if logprobs have pieces of text.
    spelled: Sequence[int] | None = None

    def pieces_at(self, position: int) -> Pieces:
        """Reads what follows this number of the tokens of `spelled`."""
        assert self.spelled is not None and self.model.tokenizer is not None
        context = self.spelled[max(0, position - MAX_CONTEXT_TOKENS) : position]
        return self.model.tokenizer.pieces(context, skip_special_tokens=self.description.skip_special_tokens)


@dataclass(slots=True, eq=False)
class SampleSender:
    """The messages of one sample: its pending delta and its end."""

    _idx: int
    sample: SampleStream
    output: SampleOutput
    _request: PreparedStream
    # All tokens have been taken; the sample's end may remain to be sent.
    is_ending: bool = False
    # The stop string that ended the sample, or "".
    stop_string: str = ""
    is_over: bool = False
    # None without a metrics page, and while a resumed stream is built again.
    meter: SampleMeter | None = None
    reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    # What the caller of a resumed stream has, and how much of it, besides the token ids, is still to be built again.
    received: pb.SampleOffset = field(init=False)
    to_skip: pb.SampleOffset = field(default_factory=pb.SampleOffset)
    _skips: bool = False
    # The offset of the next delta.
    _num_sent: int = 0
    _pieces: Pieces | None = None

    def __post_init__(self) -> None:
        request = self._request
        if request.spelled is not None:
            self._pieces = request.pieces_at(request.description.accepted.prompt_tokens)
            # So that the last token of the text is sent together with its end.
            self.output.may_grow = self._pieces.may_grow
        self.received = request.received[self._idx] if self._idx < len(request.received) else pb.SampleOffset()
        self._num_sent = self.received.token_ids
        self.to_skip.CopyFrom(self.received)
        self.to_skip.token_ids = 0
        self._skips = self.received.ByteSize() > 0

    def next_delta(self, piece: OutputPiece) -> pb.GenerateResponse | None:
        """The message with the delta that `piece` makes. Returns None if the delta would be empty."""
        wants, logprobs = self._request.description, self.sample.logprobs
        if not wants.want_text:
            piece = piece._replace(text="", reasoning="", calls=())
        token_ids = piece.token_ids if wants.want_token_ids else []
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
            # The stream is resumed. A caller of text alone does not say how many tokens it has.
            has_text_only = self.received.ByteSize() and not self.received.token_ids
            meter.skip(num_built, num_received=num_built if has_text_only else min(num_built, self.received.token_ids))
        self.meter = meter

    def _beyond_received(self, piece: OutputPiece, token_ids: list[int]) -> tuple[list[int], OutputPiece]:
        """Returns the part of a piece that the caller of a resumed stream has not received."""
        num_tokens, skip = self.output.num_tokens, self.to_skip
        start = num_tokens - len(piece.token_ids)
        num_text = min(len(piece.text), skip.text_chars)
        num_reasoning = min(len(piece.reasoning), skip.reasoning_chars)
        skip.text_chars -= num_text
        skip.reasoning_chars -= num_reasoning
        left = [rest for call in piece.calls if (rest := self._call_beyond_received(call)) is not None]
        self._skips = num_tokens < self.received.token_ids or skip.ByteSize() > 0
        piece = piece._replace(text=piece.text[num_text:], reasoning=piece.reasoning[num_reasoning:], calls=left)
        if not (piece.text or piece.reasoning or left or self._request.description.want_token_ids):
            self._num_sent = num_tokens
        return token_ids[max(0, self.received.token_ids - start) :], piece

    def _call_beyond_received(self, call: CallPiece) -> CallPiece | None:
        num_chars = min(len(call.arguments), self.to_skip.tool_argument_chars)
        self.to_skip.tool_argument_chars -= num_chars
        call = call._replace(arguments=call.arguments[num_chars:])
        if call.id and not self.to_skip.tool_calls:
            return call
        if call.id:
            self.to_skip.tool_calls -= 1
        return CallPiece(call.idx, "", "", call.arguments) if call.arguments else None

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
