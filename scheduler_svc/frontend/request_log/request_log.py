"""Writes one line for each ended call of Generate and Resume. Owns begin and end of a call's record."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import grpc

from scheduler_svc.frontend.door.entrance import caller_name
from scheduler_svc.frontend.request_log import call_record, traceparent
from scheduler_svc.frontend.request_log.call_record import CallRecord
from scheduler_svc.frontend.request_log.fields import outcome_of, request_fields
from scheduler_svc.frontend.rpc import status
from tandem_contract.logs import log_fields

REPORT_SECONDS = 10.0
LINES_EACH = 10
# Kinds that are counted apart; the others share one count. A kind may contain the name of a field.
_MAX_KINDS = 64

Kind = tuple[str, str]
OTHER: Kind = ("others", "")


class RefusalCounts:
    """Counts refusals by code and reason."""

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
        """Yields every ten seconds the kinds with refusals that got no line, and their number; then starts anew."""
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
