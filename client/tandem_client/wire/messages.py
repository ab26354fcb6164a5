"""Turns protobuf messages into the values of `types`, by the names and the types of their fields.

Owns the mapping. Knows nothing of calls.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from types import UnionType
from typing import Any, TypeVar, cast, get_origin

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from tandem.v1 import control_pb2, inference_pb2

from tandem_client import types
from tandem_client.errors import ProtocolError
from tandem_contract.plural import numbered

_Value = TypeVar("_Value")
_Word = TypeVar("_Word", bound=StrEnum)


def value(cls: type[_Value], message: Message, **given: Any) -> _Value:
    """A value of the class: the given fields, and all others from the message's fields of the same names.

    A field that may be None is None where the message's field is not set. A number of an enum that is newer than this
    client is UNKNOWN.
    """
    for name, may_be_unset, read in _readers(cls, message.DESCRIPTOR):
        if name not in given:
            is_unset = may_be_unset and not message.HasField(name)
            found = None if is_unset else getattr(message, name)
            given[name] = found if is_unset or read is None else read(found)
    return cls(**given)


@cache
def _readers(cls: Any, message: Descriptor) -> list[tuple[str, bool, Callable[[Any], Any] | None]]:
    """Of each field: its name, whether it may be None, and what makes its value of the message's; None: it is that."""
    found: list[tuple[str, bool, Callable[[Any], Any] | None]] = []
    for field in fields(cls):
        kind: Any = field.type
        may_be_unset = isinstance(kind, UnionType)
        kind = kind.__args__[0] if may_be_unset else kind
        found.append((field.name, may_be_unset, _reader(kind, message.fields_by_name[field.name])))
    return found


def _reader(kind: Any, field: FieldDescriptor) -> Callable[[Any], Any] | None:
    if get_origin(kind) is tuple:
        (of, _) = kind.__args__
        return partial(_values, cast(Any, of)) if is_dataclass(of) else tuple
    if is_dataclass(kind):
        return partial(value, cast(Any, kind))
    return _words(kind, cast(EnumDescriptor, field.enum_type)) if issubclass(kind, StrEnum) else None


def _values(cls: type[Any], given: Iterable[Message]) -> tuple[Any, ...]:
    return tuple(value(cls, each) for each in given)


def _words(cls: type[_Word], enum: EnumDescriptor) -> Callable[[int], _Word]:
    """What makes a value of an enum's number: its name in small letters, without the name of the enum."""
    prefix = enum.values[0].name.removesuffix("UNSPECIFIED")
    # The first is "unspecified".
    known = {each.number: cls(each.name.removeprefix(prefix).lower()) for each in enum.values[1:]}
    return lambda number: known.get(number, cls("unknown"))


_wait_reason = _words(types.WaitReason, inference_pb2.WaitReason.DESCRIPTOR)
_abort_outcome = _words(types.AbortOutcome, control_pb2.AbortOutcome.DESCRIPTOR)
accepted, waiting = partial(value, types.Accepted), partial(value, types.Waiting)
finished, summary = partial(value, types.Finished), partial(value, types.Summary)
model_info, rendered_chat = partial(value, types.ModelInfo), partial(value, types.RenderedChat)
drain_progress, update_progress = partial(value, types.DrainProgress), partial(value, types.UpdateProgress)


def load(message: control_pb2.GetLoadResponse) -> types.Load:
    """The value of GetLoad's answer."""
    why = _wait_reason(message.not_serving_reason) if message.not_serving else None
    return value(types.Load, message, not_serving_reason=why)


def request_page(message: control_pb2.ListRequestsResponse) -> types.RequestPage:
    """The value of ListRequests' answer."""
    requests = tuple(
        value(types.ListedRequest, each, wait_reason=_wait_reason(each.wait_reason) if each.wait_reason else None)
        for each in message.requests
    )
    return types.RequestPage(requests=requests, next_page_token=message.next_page_token)


def abort_outcomes(message: control_pb2.AbortResponse) -> types.AbortOutcomes:
    """Request id to outcome, in the order of the answer."""
    outcomes = [(result.request_id, _abort_outcome(result.outcome)) for result in message.results]
    return types.AbortOutcomes(outcomes, {each.request_id: each.detail for each in message.results if each.detail})


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
    pieces, others = (tuple(map(_piece, each)) for each in (message.pieces, message.top_pieces))
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
