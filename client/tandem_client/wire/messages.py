"""Turns protobuf messages into the values of `types`, by the names and the types of their fields.

Owns the mapping. Knows nothing of calls.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter, methodcaller
from types import UnionType
from typing import Any, TypeVar, cast, get_origin

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from tandem.v1 import control_pb2, inference_pb2

from tandem_client import types
from tandem_client.errors import ProtocolError
from tandem_client.wire.parts import numbers_of
from tandem_contract.plural import numbered

_Value = TypeVar("_Value")
_Word = TypeVar("_Word", bound=StrEnum)


def value(cls: type[_Value], message: Message) -> _Value:
    """A value of the class, from the message's fields of the same names.

    A field that may be None is None where the message's field is not set. A number of an enum of a newer version than
    this client is UNKNOWN.
    """
    return cls(**{name: read(message) for name, read in _readers(cls, message.DESCRIPTOR)})


@cache
def _readers(cls: Any, message: Descriptor) -> list[tuple[str, Callable[[Any], Any]]]:
    """The name of each field, and what makes its value of a message."""
    return [(field.name, _reader(field.type, message.fields_by_name[field.name])) for field in fields(cls)]


def _reader(kind: Any, field: FieldDescriptor) -> Callable[[Any], Any]:
    if isinstance(kind, UnionType):
        read = _reader(kind.__args__[0], field)
        # A number of an enum is set if it is not the first one, "unspecified".
        is_set = methodcaller("HasField", field.name) if field.has_presence else attrgetter(field.name)
        return lambda message: read(message) if is_set(message) else None
    get, make = attrgetter(field.name), _maker(kind, field)
    return get if make is None else lambda message: make(get(message))


def _maker(kind: Any, field: FieldDescriptor) -> Callable[[Any], Any] | None:
    """What makes the value of the field's; None: it is that."""
    if get_origin(kind) is tuple:
        (of, _) = kind.__args__
        return (lambda items: tuple(value(cast(Any, of), item) for item in items)) if is_dataclass(of) else tuple
    if is_dataclass(kind):
        return partial(value, cast(Any, kind))
    return _words(kind, cast(EnumDescriptor, field.enum_type)) if issubclass(kind, StrEnum) else None


def _words(cls: type[_Word], enum: EnumDescriptor) -> Callable[[int], _Word]:
    """What makes a value of an enum's number."""
    words = {number: cls(word) for word, number in numbers_of(enum).items()}
    return lambda number: words.get(number, cls("unknown"))


_abort_outcome = _words(types.AbortOutcome, control_pb2.AbortOutcome.DESCRIPTOR)
accepted, waiting = partial(value, types.Accepted), partial(value, types.Waiting)
finished, summary = partial(value, types.Finished), partial(value, types.Summary)
model_info, rendered_chat = partial(value, types.ModelInfo), partial(value, types.RenderedChat)
load, request_page = partial(value, types.Load), partial(value, types.RequestPage)
drain_progress, update_progress = partial(value, types.DrainProgress), partial(value, types.UpdateProgress)


def abort_outcomes(message: control_pb2.AbortResponse) -> types.AbortOutcomes:
    """Request id to outcome, in the order of the answer."""
    outcomes = [(result.request_id, _abort_outcome(result.outcome)) for result in message.results]
    return types.AbortOutcomes(
        outcomes, {result.request_id: result.detail for result in message.results if result.detail}
    )


def delta(message: inference_pb2.Delta) -> types.Delta:
    """The value of a Delta message. Raises ProtocolError if its parts do not match."""
    # The message of every token, so without a loop over its fields.
    return types.Delta(
        token_offset=message.token_offset,
        token_ids=tuple(message.token_ids),
        text=message.text,
        sample_idx=message.sample_idx,
        logprobs=_logprobs(message.logprobs) if message.HasField("logprobs") else (),
        reasoning=message.reasoning,
        tool_calls=tuple(value(types.ToolCallDelta, call) for call in message.tool_calls) if message.tool_calls else (),
    )


def prompt_info(message: inference_pb2.PromptInfo) -> types.PromptInfo:
    """The value of a PromptInfo message. Raises ProtocolError if its parts do not match."""
    first = _piece(message.first) if message.HasField("first") else None
    return types.PromptInfo(start=message.start, logprobs=_logprobs(message.logprobs), first=first)


def _piece(message: inference_pb2.TokenPiece) -> types.TokenPiece:
    return types.TokenPiece(text=message.text, data=message.data)


def _logprobs(message: inference_pb2.Logprobs) -> tuple[types.TokenLogprob, ...]:
    count, top_k = len(message.logprobs), message.top_k
    if not len(message.top_token_ids) == len(message.top_logprobs) == count * top_k:
        raise ProtocolError(
            f"{numbered(count, 'logprob')} and {numbered(top_k, 'alternative')} of each need"
            f" {numbered(count * top_k, 'alternative')}; the message has"
            f" {numbered(len(message.top_token_ids), 'token id')} and "
            f"{numbered(len(message.top_logprobs), 'logprob')} of alternatives"
        )
    top = list(zip(message.top_token_ids, message.top_logprobs, strict=True))
    pieces, others = (tuple(map(_piece, some)) for some in (message.pieces, message.top_pieces))
    if pieces and (len(pieces), len(others)) != (count, len(top)):
        raise ProtocolError(
            f"{numbered(count, 'logprob')} and {numbered(top_k, 'alternative')} of each have"
            f" {numbered(len(pieces), 'piece')} of text, and {len(others)} of alternatives"
        )
    return tuple(
        types.TokenLogprob(
            logprob=logprob,
            top=tuple(top[idx * top_k : (idx + 1) * top_k]),
            piece=pieces[idx] if pieces else None,
            top_pieces=others[idx * top_k : (idx + 1) * top_k] if pieces else (),
        )
        for idx, logprob in enumerate(message.logprobs)
    )
