"""What the service answers, as frozen values that need no protobuf to read.

Owns the mapping from messages to values. Knows nothing of calls.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.message import Message
from tandem.v1 import control_pb2, inference_pb2


class FinishReason(StrEnum):
    """Why a stream ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    ABORTED = "aborted"
    # A reason that is newer than this client.
    UNKNOWN = "unknown"


class AbortOutcome(StrEnum):
    """What became of one id of an Abort."""

    ABORTED = "aborted"
    NOT_FOUND = "not_found"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings in force."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request is in; tokens follow."""

    request_id: str
    sampling: Sampling
    prompt_tokens: int
    max_new_tokens: int
    requests_ahead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new: tokens, and text that may lag behind them."""

    token_offset: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How the stream ended."""

    reason: FinishReason
    stop_token_id: int | None
    stop_string: str | None
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens, counted."""

    prompt_tokens: int
    output_tokens: int
    discarded_tokens: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, and what happened on the way."""

    queue_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    total_seconds: float
    preemptions: int
    worker_changes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The last message of a stream."""

    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What unset sampling fields become."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is served, its limits and defaults."""

    model: str
    identity: str
    vocab_size: int
    max_length: int
    page_size: int
    num_pages: int
    max_rows: int
    token_budget: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    default_max_new_tokens: int
    max_waiting: int
    has_tokenizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the service is."""

    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    workers: int
    steps: int
    step_ms: float
    preemptions: int
    lane_resets: int
    output_tokens: int
    worker_pid: int


_Flat = TypeVar("_Flat", Sampling, SamplingDefaults, Usage, Timing, Load)


def _flat(cls: type[_Flat], message: Message) -> _Flat:
    """A value whose fields are named and typed as the message's are."""
    values: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(cls)}
    return cls(**values)


def accepted(message: inference_pb2.Accepted) -> Accepted:
    """The value of an Accepted message."""
    return Accepted(
        request_id=message.request_id,
        sampling=_flat(Sampling, message.sampling),
        prompt_tokens=message.prompt_tokens,
        max_new_tokens=message.max_new_tokens,
        requests_ahead=message.requests_ahead,
    )


def delta(message: inference_pb2.Delta) -> Delta:
    """The value of a Delta message."""
    return Delta(token_offset=message.token_offset, token_ids=tuple(message.token_ids), text=message.text)


def finished(message: inference_pb2.Finished) -> Finished:
    """The value of a Finished message."""
    matched = message.WhichOneof("matched")
    return Finished(
        reason=_REASONS.get(message.reason, FinishReason.UNKNOWN),
        stop_token_id=message.stop_token_id if matched == "stop_token_id" else None,
        stop_string=message.stop_string if matched == "stop_string" else None,
        output_tokens=message.output_tokens,
    )


def summary(message: inference_pb2.Summary) -> Summary:
    """The value of a Summary message."""
    return Summary(usage=_flat(Usage, message.usage), timing=_flat(Timing, message.timing))


def model_info(message: control_pb2.GetModelInfoResponse) -> ModelInfo:
    """The value of GetModelInfo's answer."""
    values: dict[str, Any] = {
        field.name: getattr(message, field.name)
        for field in fields(ModelInfo)
        if field.name not in ("eos_token_ids", "sampling_defaults")
    }
    return ModelInfo(
        **values,
        eos_token_ids=tuple(message.eos_token_ids),
        sampling_defaults=_flat(SamplingDefaults, message.sampling_defaults),
    )


def load(message: control_pb2.GetLoadResponse) -> Load:
    """The value of GetLoad's answer."""
    return _flat(Load, message)


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
}
_OUTCOMES: dict[int, AbortOutcome] = {
    control_pb2.ABORT_OUTCOME_ABORTED: AbortOutcome.ABORTED,
    control_pb2.ABORT_OUTCOME_NOT_FOUND: AbortOutcome.NOT_FOUND,
}
