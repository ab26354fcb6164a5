"""Turns protobuf messages into the values of `types`.

Owns the mapping. Knows nothing of calls.
"""

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message
from tandem.v1 import control_pb2, inference_pb2

from tandem_client.errors import ProtocolError
from tandem_client.types import (
    AbortOutcome,
    Accepted,
    Delta,
    Finished,
    FinishReason,
    Load,
    ModelInfo,
    PromptInfo,
    Sampling,
    SamplingDefaults,
    Summary,
    Timing,
    TokenLogprob,
    Usage,
    WorkerLoad,
)

_Value = TypeVar("_Value", Accepted, Finished, Load, ModelInfo, Sampling, SamplingDefaults, Usage, Timing, WorkerLoad)


def _value(cls: type[_Value], message: Message, **others: Any) -> _Value:
    """A value of the class: the given fields, and all others from the message's fields of the same names."""
    values: dict[str, Any] = {
        field.name: getattr(message, field.name) for field in fields(cls) if field.name not in others
    }
    return cls(**values, **others)


def accepted(message: inference_pb2.Accepted) -> Accepted:
    """The value of an Accepted message."""
    return _value(Accepted, message, sampling=_value(Sampling, message.sampling))


def delta(message: inference_pb2.Delta) -> Delta:
    """The value of a Delta message. Raises ProtocolError if its parts do not match."""
    return Delta(
        token_offset=message.token_offset,
        token_ids=tuple(message.token_ids),
        text=message.text,
        sample_idx=message.sample_idx,
        logprobs=_logprobs(message.logprobs),
    )


def prompt_info(message: inference_pb2.PromptInfo) -> PromptInfo:
    """The value of a PromptInfo message. Raises ProtocolError if its parts do not match."""
    return PromptInfo(start=message.start, logprobs=_logprobs(message.logprobs))


def _logprobs(message: inference_pb2.Logprobs) -> tuple[TokenLogprob, ...]:
    count, top_k = len(message.logprobs), message.top_k
    if not len(message.top_token_ids) == len(message.top_logprobs) == count * top_k:
        raise ProtocolError(
            f"{count} logprobs with {top_k} alternatives each need {count * top_k} alternatives; the message has"
            f" {len(message.top_token_ids)} token ids and {len(message.top_logprobs)} logprobs of alternatives"
        )
    top = list(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return tuple(
        TokenLogprob(logprob=logprob, top=tuple(top[idx * top_k : (idx + 1) * top_k]))
        for idx, logprob in enumerate(message.logprobs)
    )


def finished(message: inference_pb2.Finished) -> Finished:
    """The value of a Finished message."""
    matched = message.WhichOneof("matched")
    return _value(
        Finished,
        message,
        reason=_REASONS.get(message.reason, FinishReason.UNKNOWN),
        stop_token_id=message.stop_token_id if matched == "stop_token_id" else None,
        stop_string=message.stop_string if matched == "stop_string" else None,
    )


def summary(message: inference_pb2.Summary) -> Summary:
    """The value of a Summary message."""
    return Summary(usage=_value(Usage, message.usage), timing=_value(Timing, message.timing))


def model_info(message: control_pb2.GetModelInfoResponse) -> ModelInfo:
    """The value of GetModelInfo's answer."""
    defaults = _value(SamplingDefaults, message.sampling_defaults)
    return _value(ModelInfo, message, eos_token_ids=tuple(message.eos_token_ids), sampling_defaults=defaults)


def load(message: control_pb2.GetLoadResponse) -> Load:
    """The value of GetLoad's answer."""
    lost_seconds = message.worker_lost_seconds if message.HasField("worker_lost_seconds") else None
    per_worker = tuple(_value(WorkerLoad, worker) for worker in message.per_worker)
    return _value(Load, message, worker_lost_seconds=lost_seconds, per_worker=per_worker)


def abort_outcomes(message: control_pb2.AbortResponse) -> dict[str, AbortOutcome]:
    """Request id to outcome, in the order of the answer."""
    return {result.request_id: _OUTCOMES.get(result.outcome, AbortOutcome.UNKNOWN) for result in message.results}


_REASONS: dict[int, FinishReason] = {
    inference_pb2.FINISH_REASON_EOS: FinishReason.EOS,
    inference_pb2.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
    inference_pb2.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_TIME_LIMIT: FinishReason.TIME_LIMIT,
    inference_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
    inference_pb2.FINISH_REASON_CONTEXT_FULL: FinishReason.CONTEXT_FULL,
}
_OUTCOMES: dict[int, AbortOutcome] = {
    control_pb2.ABORT_OUTCOME_ABORTED: AbortOutcome.ABORTED,
    control_pb2.ABORT_OUTCOME_NOT_FOUND: AbortOutcome.NOT_FOUND,
}
