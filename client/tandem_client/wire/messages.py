"""Turns protobuf messages into the values of `types`.

Owns the mapping. Knows nothing of calls.
"""

from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from typing import Any, TypeVar, cast

from google.protobuf.message import Message
from tandem.v1 import control_pb2, inference_pb2

from tandem_client import types
from tandem_client.errors import ProtocolError

_Value = TypeVar("_Value")
_Word = TypeVar("_Word", bound=StrEnum)


def _reader(cls: type[_Word], enum: Any) -> Callable[[int], _Word]:
    """Returns what makes a value of an enum's number: its name in small letters, or UNKNOWN if the number is newer."""
    (unspecified, _), *others = enum.items()
    prefix = unspecified.removesuffix("UNSPECIFIED")
    known = {number: cls(name.removeprefix(prefix).lower()) for name, number in others}
    return lambda number: known.get(number, cls("unknown"))


_finish_reason = _reader(types.FinishReason, inference_pb2.FinishReason)
_wait_reason = _reader(types.WaitReason, inference_pb2.WaitReason)
_abort_outcome = _reader(types.AbortOutcome, control_pb2.AbortOutcome)
_drain_state = _reader(types.DrainState, control_pb2.DrainState)
_update_state = _reader(types.UpdateState, control_pb2.UpdateState)
_worker_state = _reader(types.WorkerState, control_pb2.WorkerState)


def _value(cls: type[_Value], message: Message, **others: Any) -> _Value:
    """A value of the class: the given fields, and all others from the message's fields of the same names."""
    names = [field.name for field in fields(cast(Any, cls)) if field.name not in others]
    return cls(**{name: getattr(message, name) for name in names}, **others)


def _set(message: Message, field: str) -> Any:
    """The value of a field; None if it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def accepted(message: inference_pb2.Accepted) -> types.Accepted:
    """The value of an Accepted message."""
    sampling = _value(types.Sampling, message.sampling)
    return _value(types.Accepted, message, sampling=sampling, warnings=tuple(message.warnings))


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
        tool_calls=tuple(_value(types.ToolCallDelta, call) for call in message.tool_calls)
        if message.tool_calls
        else (),
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
            f"{count} logprobs with {top_k} alternatives each need {count * top_k} alternatives; the message has"
            f" {len(message.top_token_ids)} token ids and {len(message.top_logprobs)} logprobs of alternatives"
        )
    top = list(zip(message.top_token_ids, message.top_logprobs, strict=True))
    pieces, others = (tuple(map(_piece, each)) for each in (message.pieces, message.top_pieces))
    if pieces and (len(pieces), len(others)) != (count, len(top)):
        raise ProtocolError(
            f"{count} logprobs with {top_k} alternatives each have {len(pieces)} pieces of text, and {len(others)} of"
            " alternatives"
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


def waiting(message: inference_pb2.Waiting) -> types.Waiting:
    """The value of a Waiting message."""
    return _value(types.Waiting, message, reason=_wait_reason(message.reason))


def finished(message: inference_pb2.Finished) -> types.Finished:
    """The value of a Finished message."""
    return _value(
        types.Finished,
        message,
        reason=_finish_reason(message.reason),
        stop_token_id=_set(message, "stop_token_id"),
        stop_string=_set(message, "stop_string"),
    )


def summary(message: inference_pb2.Summary) -> types.Summary:
    """The value of a Summary message."""
    weights = tuple(_value(types.WeightsSpan, span) for span in message.weights)
    usage, timing = _value(types.Usage, message.usage), _value(types.Timing, message.timing)
    return types.Summary(usage=usage, timing=timing, weights=weights)


def model_info(message: control_pb2.GetModelInfoResponse) -> types.ModelInfo:
    """The value of GetModelInfo's answer."""
    limits = None
    if message.HasField("limits"):
        limits = _value(types.RequestLimits, message.limits, max_new_tokens=_set(message.limits, "max_new_tokens"))
    return _value(
        types.ModelInfo,
        message,
        eos_token_ids=tuple(message.eos_token_ids),
        sampling_defaults=_value(types.SamplingDefaults, message.sampling_defaults),
        limits=limits,
        chat_parts=tuple(message.chat_parts),
    )


def rendered_chat(message: inference_pb2.RenderChatResponse) -> types.RenderedChat:
    """The value of RenderChat's answer."""
    return types.RenderedChat(text=message.text, token_ids=tuple(message.token_ids))


def offsets(message: inference_pb2.ResumeRequest) -> tuple[types.SampleOffset, ...]:
    """The offsets of a Resume call."""
    return tuple(_value(types.SampleOffset, offset) for offset in message.offsets)


def load(message: control_pb2.GetLoadResponse) -> types.Load:
    """The value of GetLoad's answer."""
    return _value(
        types.Load,
        message,
        per_worker=tuple(
            _value(types.WorkerLoad, worker, state=_worker_state(worker.state)) for worker in message.per_worker
        ),
        worker_lost_seconds=_set(message, "worker_lost_seconds"),
        incidents=_value(types.Incidents, message.incidents),
        held_pools=_value(types.HeldPools, message.held_pools),
        not_serving_reason=_wait_reason(message.not_serving_reason) if message.not_serving else None,
        not_serving_since=_set(message, "not_serving_since"),
    )


def quarantine(message: control_pb2.ListQuarantineResponse) -> list[types.QuarantinedRequest]:
    """The values of ListQuarantine's answer."""
    return [_value(types.QuarantinedRequest, request) for request in message.requests]


def abort_outcomes(message: control_pb2.AbortResponse) -> dict[str, types.AbortOutcome]:
    """Request id to outcome, in the order of the answer."""
    return {result.request_id: _abort_outcome(result.outcome) for result in message.results}


def drain_progress(message: control_pb2.DrainResponse) -> types.DrainProgress:
    """The value of one of Drain's answers."""
    return _value(types.DrainProgress, message, state=_drain_state(message.state))


def update_progress(message: control_pb2.UpdateWeightsResponse) -> types.UpdateProgress:
    """The value of one of UpdateWeights' answers."""
    return _value(types.UpdateProgress, message, state=_update_state(message.state))
