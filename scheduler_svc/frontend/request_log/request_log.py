"""Writes one line for each ended call of Generate and Resume. Owns begin and end of a call's record."""

import asyncio
import logging
from typing import Any, Literal

import grpc

from scheduler_svc.frontend.door.entrance import caller_name
from scheduler_svc.frontend.request_log import call_record, traceparent
from scheduler_svc.frontend.request_log.call_record import CallRecord
from scheduler_svc.frontend.request_log.fields import outcome_of, request_fields
from scheduler_svc.frontend.request_log.refusals import REPORT_SECONDS, RefusalCounts
from scheduler_svc.frontend.rpc import status
from tandem_contract.logs import log_fields

# Whether lines are written, and whether they have the caller's address.
LogRequests = Literal["on", "off", "address"]

logger = logging.getLogger(__name__)


class RequestLog:
    """The lines of one front end's requests."""

    def __init__(self, mode: LogRequests) -> None:
        self._mode = mode
        self._refusals = RefusalCounts()

    def begin(self, method: str, context: Any) -> CallRecord:
        """Notes a call's arrival; `call_record.current` returns the record in the running task."""
        record = CallRecord(
            method=method,
            arrived_at=asyncio.get_running_loop().time(),
            peer=context.peer(),
            traceparent=traceparent.find(context.invocation_metadata() or ()),
        )
        call_record.begin(record)
        return record

    def end(self, record: CallRecord, ending: status.Refusal | grpc.StatusCode | None) -> None:
        """Writes the call's line. `ending` is its refusal or its gRPC code, None if it was served to its end."""
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
