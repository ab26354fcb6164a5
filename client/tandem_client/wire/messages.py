"""Turns protobuf messages into the values of `types`.

Owns the mapping. Knows nothing of calls.
"""

from dataclasses import fields
from typing import Any, TypeVar, cast

from google.protobuf.message import Message
from tandem.v1 import chat_pb2, control_pb2, inference_pb2

from tandem_client import types
from tandem_client.errors import ProtocolError

# The value of each number of an enum, without the first, which is "unspecified".
_REASONS = {
    number: types.FinishReason(name.removeprefix("FINISH_REASON_").lower())
    for name, number in inference_pb2.FinishReason.items()[1:]
}
_OUTCOMES = {
    number: types.AbortOutcome(name.removeprefix("ABORT_OUTCOME_").lower())
    for name, number in control_pb2.AbortOutcome.items()[1:]
}
_DRAIN_STATES = {
    number: types.DrainState(name.removeprefix("DRAIN_STATE_").lower())
    for name, number in control_pb2.DrainState.items()[1:]
}
_UPDATE_STATES = {
    number: types.UpdateState(name.removeprefix("UPDATE_STATE_").lower())
    for name, number in control_pb2.UpdateState.items()[1:]
}
_WAIT_REASONS = {
    number: types.WaitReason(name.removeprefix("WAIT_REASON_").lower())
    for name, number in inference_pb2.WaitReason.items()[1:]
}
_WORKER_STATES = {
    number: types.WorkerState(name.removeprefix("WORKER_STATE_").lower())
    for name, number in control_pb2.WorkerState.items()[1:]
}
_Value = TypeVar("_Value")


def _value(cls: type[_Value], message: Message, **others: Any) -> _Value:
    """A value of the class: the given fields, and all others from the message's fields of the same names."""
    names = [field.name for field in fields(cast(Any, cls)) if field.name not in others]
    return cls(**{name: getattr(message, name) for name in names}, **others)


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
        tool_calls=tuple(map(_tool_call_delta, message.tool_calls)) if message.tool_calls else (),
    )


def _tool_call_delta(message: chat_pb2.ToolCallDelta) -> types.ToolCallDelta:
    return _value(types.ToolCallDelta, message)


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
    reason = _WAIT_REASONS.get(message.reason, types.WaitReason.UNKNOWN)
    return types.Waiting(reason=reason, message=message.message, since=message.since)


def finished(message: inference_pb2.Finished) -> types.Finished:
    """The value of a Finished message."""
    matched = message.WhichOneof("matched")
    return _value(
        types.Finished,
        message,
        reason=_REASONS.get(message.reason, types.FinishReason.UNKNOWN),
        stop_token_id=message.stop_token_id if matched == "stop_token_id" else None,
        stop_string=message.stop_string if matched == "stop_string" else None,
    )


def summary(message: inference_pb2.Summary) -> types.Summary:
    """The value of a Summary message."""
    weights = tuple(_value(types.WeightsSpan, span) for span in message.weights)
    usage, timing = _value(types.Usage, message.usage), _value(types.Timing, message.timing)
    return types.Summary(usage=usage, timing=timing, weights=weights)


def model_info(message: control_pb2.GetModelInfoResponse) -> types.ModelInfo:
    """The value of GetModelInfo's answer."""
    defaults = _value(types.SamplingDefaults, message.sampling_defaults)
    eos_token_ids, limits = tuple(message.eos_token_ids), _limits(message) if message.HasField("limits") else None
    parts = {"chat_parts": tuple(message.chat_parts), "sampling_defaults": defaults, "limits": limits}
    return _value(types.ModelInfo, message, eos_token_ids=eos_token_ids, **parts)


def rendered_chat(message: inference_pb2.RenderChatResponse) -> types.RenderedChat:
    """The value of RenderChat's answer."""
    return types.RenderedChat(text=message.text, token_ids=tuple(message.token_ids))


def _limits(message: control_pb2.GetModelInfoResponse) -> types.RequestLimits:
    limits = message.limits
    max_new_tokens = limits.max_new_tokens if limits.HasField("max_new_tokens") else None
    return _value(types.RequestLimits, limits, max_new_tokens=max_new_tokens)


def offsets(message: inference_pb2.ResumeRequest) -> tuple[types.SampleOffset, ...]:
    """The offsets of a Resume call."""
    return tuple(_value(types.SampleOffset, offset) for offset in message.offsets)


def load(message: control_pb2.GetLoadResponse) -> types.Load:
    """The value of GetLoad's answer."""
    lost_seconds = message.worker_lost_seconds if message.HasField("worker_lost_seconds") else None
    per_worker = tuple(
        _value(types.WorkerLoad, worker, state=_WORKER_STATES.get(worker.state, types.WorkerState.UNKNOWN))
        for worker in message.per_worker
    )
    why = _WAIT_REASONS.get(message.not_serving_reason, types.WaitReason.UNKNOWN) if message.not_serving else None
    since = message.not_serving_since if message.HasField("not_serving_since") else None
    incidents, held_pools = _value(types.Incidents, message.incidents), _value(types.HeldPools, message.held_pools)
    parts = {"per_worker": per_worker, "incidents": incidents, "held_pools": held_pools}
    parts |= {"not_serving_reason": why, "not_serving_since": since}
    return _value(types.Load, message, worker_lost_seconds=lost_seconds, **parts)


def quarantine(message: control_pb2.ListQuarantineResponse) -> list[types.QuarantinedRequest]:
    """The values of ListQuarantine's answer."""
    return [_value(types.QuarantinedRequest, request) for request in message.requests]


def abort_outcomes(message: control_pb2.AbortResponse) -> dict[str, types.AbortOutcome]:
    """Request id to outcome, in the order of the answer."""
    return {result.request_id: _OUTCOMES.get(result.outcome, types.AbortOutcome.UNKNOWN) for result in message.results}


def drain_progress(message: control_pb2.DrainResponse) -> types.DrainProgress:
    """The value of one of Drain's answers."""
    return _value(types.DrainProgress, message, state=_DRAIN_STATES.get(message.state, types.DrainState.UNKNOWN))


def update_progress(message: control_pb2.UpdateWeightsResponse) -> types.UpdateProgress:
    """The value of one of UpdateWeights' answers."""
    state = _UPDATE_STATES.get(message.state, types.UpdateState.UNKNOWN)
    return _value(types.UpdateProgress, message, state=state)
