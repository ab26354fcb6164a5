"""Writes one line for each ended call of Generate and Resume, and counts those that fail. Owns what is known of a call.

The line has names, numbers, times, and reasons from fixed lists; never text, token ids, the resume secret or a bearer
token. A message of a refusal may quote the caller, so it is left out. Values that the caller chose are cut to a bounded
length here; the log escapes them.

The W3C trace context of a call (Trace Context, level 1) is the `traceparent` of its metadata. As the standard says, a
malformed one is ignored: the call goes on as if it had none. `tracestate` is not read.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import grpc
from google.rpc import error_details_pb2  # pyright: ignore[reportMissingTypeStubs]
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.entrance import caller_name
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.streaming.sender import summarize
from scheduler_svc.frontend.streaming.stream import RequestStream
from scheduler_svc.metrics.front_meter import FrontMeter, StreamMeter
from tandem_contract.logs import log_fields

KEY = "traceparent"
# Later versions may append fields, of which nothing is read.
_MAX_CHARS = 256
_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


def find_traceparent(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Returns the traceparent of a call's metadata. None without one, with more than one, or if it is malformed.

    It is written as version 00, which is what a service that knows no later version passes on.
    """
    values = [value for key, value in metadata if key == KEY]
    if len(values) != 1 or not isinstance(values[0], str) or len(values[0]) > _MAX_CHARS:
        return None
    match = _FORM.fullmatch(values[0])
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    return f"00-{match[2]}-{match[3]}-{int(match[4], 16) & _SAMPLED:02x}"


# Longer ids are refused; what is shown of them is cut.
_MAX_ID_CHARS = 128


@dataclass(slots=True, eq=False)
class CallRecord:
    # Name of the method.
    method: str
    # The loop's time.
    arrived_at: float
    # What gRPC calls the peer: `ipv4:127.0.0.1:50000`, `unix:…`.
    peer: str
    traceparent: str | None
    request_id: str = ""
    # Name of the served model.
    model: str = ""
    # From the core's consent on.
    accepted: pb.Accepted | None = None
    # From the moment that the stream is open.
    stream: RequestStream | None = None
    # From the call's message on; None without a metrics page.
    meter: StreamMeter | None = None

    def named(self, request_id: str) -> None:
        """Notes the request's id: the caller's, perhaps not checked yet, or the one that was chosen for it."""
        self.request_id = request_id[:_MAX_ID_CHARS]


_current: ContextVar[CallRecord] = ContextVar("call record")


def current() -> CallRecord:
    """Returns the record of the call that the running task serves. Raises LookupError outside Generate and Resume."""
    return _current.get()


Fields = dict[str, object]
# An index, or the token id that is a key of a map.
_BRACKETS = re.compile(r"\[.*?\]")


def outcome_of(stream: RequestStream | None, ending: status.Refusal | grpc.StatusCode | None) -> tuple[str, str]:
    """Returns the outcome and our word for the reason: finish reasons and "", or a gRPC code and the cause.

    `ending` is the refusal or code that the call ended with, None if it was served to its end.
    """
    if ending is None:
        # The reasons of all samples, each once: `length`, `eos,length`.
        reasons = () if stream is None else stream.reasons
        names = [pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower() for reason in reasons]
        return ",".join(dict.fromkeys(names)), ""
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
        _, values["trace_id"], values["parent_id"], _ = record.traceparent.split("-")
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


REPORT_SECONDS = 10.0
LINES_EACH = 10
# Kinds that are counted apart; the others share one count. A kind may contain the name of a field.
_MAX_KINDS = 64

Kind = tuple[str, str]
OTHER: Kind = ("others", "")


class RefusalCounts:
    def __init__(self) -> None:
        self._counts: Counter[Kind] = Counter()
        self._report_at = 0.0

    def add(self, kind: Kind) -> bool:
        """Counts a refusal. Returns whether it gets a line: the first ones of its kind since the last report do."""
        if kind not in self._counts and len(self._counts) >= _MAX_KINDS:
            kind = OTHER
        self._counts[kind] += 1
        return self._counts[kind] <= LINES_EACH

    def due(self, now: float) -> Iterator[tuple[Kind, int]]:
        """Yields every ten seconds the kinds with unlogged refusals, and their number; then counts from zero."""
        if now < self._report_at:
            return
        counts, self._counts = self._counts, Counter()
        self._report_at = now + REPORT_SECONDS
        for kind, count in counts.items():
            if count > LINES_EACH:
                yield kind, count - LINES_EACH


# Whether lines are written, and whether they have the caller's address.
LogRequests = Literal["on", "off", "address"]

logger = logging.getLogger(__name__)


class RequestLog:
    def __init__(self, mode: LogRequests, meter: FrontMeter | None) -> None:
        self._mode, self._meter = mode, meter
        self._refusals = RefusalCounts()

    def begin(self, method: str, context: Any) -> CallRecord:
        """Notes a call's arrival; `current` returns the record in the running task."""
        record = CallRecord(
            method=method,
            arrived_at=asyncio.get_running_loop().time(),
            peer=context.peer(),
            traceparent=find_traceparent(context.invocation_metadata() or ()),
        )
        _current.set(record)
        return record

    def refused(self, record: CallRecord, refusal: status.Refusal) -> None:
        """Counts a call that was refused, or accepted and ended with an error."""
        if record.meter is not None:
            record.meter.refused(refusal.code.name)
        elif self._meter is not None and record.method == "Generate":
            self._meter.rejected(refusal.code.name)

    def end(self, record: CallRecord, ending: status.Refusal | grpc.StatusCode | None) -> None:
        """Writes the call's line. `ending` is its refusal or its gRPC code, None if it was served to its end."""
        if record.meter is not None and ending is grpc.StatusCode.CANCELLED:
            record.meter.refused(ending.name)
        if self._mode == "off" or not logger.isEnabledFor(logging.INFO):
            return
        outcome, reason = outcome_of(record.stream, ending)
        is_refused = ending is not None and record.accepted is None
        if is_refused and not self._refusals.add((outcome, reason)):
            return
        seconds = asyncio.get_running_loop().time() - record.arrived_at
        fields = request_fields(record, caller_name(), outcome, reason, seconds)
        if self._mode == "address":
            fields["address"] = record.peer
        level = logging.WARNING if outcome == grpc.StatusCode.INTERNAL.name else logging.INFO
        log_fields(logger, level, "request refused" if is_refused else "request ended", fields)

    def report(self, now: float) -> None:
        """Writes every ten seconds how many refusals got no line. The owner calls it about once a second."""
        for (outcome, reason), count in self._refusals.due(now):
            why = {"outcome": outcome, "reason": reason} if reason else {"outcome": outcome}
            fields = why | {"count": count, "seconds": REPORT_SECONDS}
            log_fields(logger, logging.INFO, "more requests refused", fields)
