"""The fields of a request's line, from the record of its call and from its stream.

Knows which values may be logged: names, numbers, times, and reasons from fixed lists. A message of a refusal may quote
the caller, so it is left out.
"""

import re
from collections.abc import Sequence

import grpc
from google.rpc import error_details_pb2  # pyright: ignore[reportMissingTypeStubs]
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.request_log.call_record import CallRecord
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.streaming.stream import RequestStream
from scheduler_svc.frontend.streaming.summary import summarize

Fields = dict[str, object]
# An index, or the token id that is a key of a map.
_BRACKETS = re.compile(r"\[.*?\]")


def outcome_of(stream: RequestStream | None, ending: status.Refusal | grpc.StatusCode | None) -> tuple[str, str]:
    """Returns the outcome and our word for the reason: finish reasons and "", or a gRPC code and the cause.

    `ending` is the refusal or code that the call ended with, None if it was served to its end.
    """
    if ending is None:
        return _finish_reasons(stream), ""
    if isinstance(ending, grpc.StatusCode):
        is_detached = stream is not None and stream.is_resumable and ending is grpc.StatusCode.CANCELLED
        return ending.name, "detached" if is_detached else ""
    return ending.code.name, _field(ending) or _core_reason(stream) or ending.reason


def request_fields(record: CallRecord, tenant: str, outcome: str, reason: str, seconds: float) -> Fields:
    """Returns the fields of a line in order, without those that are unknown. `seconds`: how long the call lasted."""
    values: Fields = {
        "request_id": record.request_id or None,
        "tenant": tenant or None,
        "outcome": outcome,
        "reason": reason or None,
        "method": record.method,
        "model": record.model or None,
    }
    if record.accepted is not None and record.stream is not None:
        values |= _numbers(record.accepted, record.stream)
    values["call_seconds"] = round(seconds, 6)
    values["peer"] = "unix" if record.peer.startswith("unix") else "tcp"
    if record.traceparent is not None:
        values |= {"trace_id": record.traceparent.trace_id, "parent_id": record.traceparent.parent_id}
    return {name: value for name, value in values.items() if value is not None}


def _numbers(accepted: pb.Accepted, stream: RequestStream) -> Fields:
    """Tokens and times: those of the Summary, or of the ends that the core has sent."""
    summary = stream.summary
    ends = [sample.end for sample in stream.samples if sample.end is not None]
    if summary is None and ends:
        summary = summarize(ends, [end.usage.output_tokens for end in ends], prompt_tokens=accepted.prompt_tokens)
    values: Fields = {"samples": len(stream.samples), "prompt_tokens": accepted.prompt_tokens}
    if summary is None:
        return values | {"output_tokens": sum(sample.num_received for sample in stream.samples)}
    usage, timing = summary.usage, summary.timing
    return values | {
        "cached_tokens": usage.cached_prompt_tokens,
        "output_tokens": usage.output_tokens,
        "recomputed_tokens": usage.recomputed_tokens,
        "queue_seconds": round(timing.queue_seconds, 6),
        "first_token_seconds": round(timing.first_token_seconds, 6),
        "total_seconds": round(timing.total_seconds, 6),
        "preemptions": timing.preemptions,
        "worker_changes": timing.worker_changes,
    }


def _finish_reasons(stream: RequestStream | None) -> str:
    """The reasons of all samples, each once: `length`, `eos,length`."""
    reasons: Sequence[pb.FinishReason.ValueType] = () if stream is None else stream.reasons
    names = [pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower() for reason in reasons]
    return ",".join(dict.fromkeys(names))


def _core_reason(stream: RequestStream | None) -> str:
    """The core's word for the rejection or the failure of a request; "" if it named none."""
    if stream is None:
        return ""
    if stream.rejected is not None:
        return frontend_pb2.RejectCode.Name(stream.rejected.code).removeprefix("REJECT_CODE_").lower()
    for sample in stream.samples:
        if sample.end is not None and sample.end.HasField("failure"):
            return frontend_pb2.FailureCode.Name(sample.end.failure.code).removeprefix("FAILURE_CODE_").lower()
    return ""


def _field(refusal: status.Refusal) -> str:
    """The field at fault, without indices; "" if the refusal is not about a field."""
    for detail in refusal.details:
        if isinstance(detail, error_details_pb2.BadRequest) and detail.field_violations:
            return _BRACKETS.sub("", detail.field_violations[0].field)
    return ""
