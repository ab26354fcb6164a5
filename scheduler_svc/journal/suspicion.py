"""The suspects and the quarantine as records, and the quarantine of an earlier scheduler as an event.

Owns what was written last, to notice changes. A change is written at the end of its turn.
"""

from collections.abc import Callable

import numpy as np
from tandem.internal.v1 import journal_pb2, record_pb2

from scheduler_svc.core.messages.operators import QuarantineEntry, QuarantineRestored
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state.request import Request
from scheduler_svc.wire.arrays import packed


class SuspicionLog:
    """Reads the core."""

    def __init__(self, core: Scheduler, restored: frozenset[int] = frozenset()) -> None:
        """`restored` are the numbers of the earlier scheduler's suspects."""
        self._core = core
        self._restored = restored
        self._suspects: set[int] = set()
        self._revision = 0

    def changes(self, number_of: Callable[[Request], int | None], now: float, unix_now: float) -> list[bytes]:
        """Returns records of what has changed. `number_of` returns a sample's number, None if it is not kept."""
        payloads: list[bytes] = []
        suspects = self._core.suspects.handles
        if suspects != self._suspects:
            self._suspects = suspects
            payloads.append(self._suspects_record(number_of))
        if self._core.convictions.quarantine.revision != self._revision:
            payloads.append(self._quarantine_record(now, unix_now))
        return payloads

    def snapshot(self, number_of: Callable[[Request], int | None], now: float, unix_now: float) -> list[bytes]:
        """Returns records of everything."""
        self._suspects = self._core.suspects.handles
        return [self._suspects_record(number_of), self._quarantine_record(now, unix_now)]

    def _suspects_record(self, number_of: Callable[[Request], int | None]) -> bytes:
        found = [self._core.queue.by_handle(handle) for handle in sorted(self._suspects)]
        numbers = [number for request in found if request and (number := number_of(request)) is not None]
        if self._core.info is None:
            # Restored requests are no suspects before they are queued, when the first worker has been proven.
            numbers += sorted(self._restored)
        suspects = journal_pb2.JournalSuspects(numbers=packed(np.array(numbers, np.uint64)))
        return journal_pb2.JournalRecord(suspects=suspects).SerializeToString()

    def _quarantine_record(self, now: float, unix_now: float) -> bytes:
        self._revision = self._core.convictions.quarantine.revision
        record = journal_pb2.JournalRecord()
        record.quarantine.SetInParent()
        for entry in self._core.convictions.quarantine.entries(now):
            record.quarantine.entries.add(
                key=entry.key,
                request_id=entry.request_id,
                tenant=entry.tenant,
                convicted_at=unix_now - (now - entry.at),
                cause=entry.cause,
            )
        return record.SerializeToString()


def quarantine_event(entry: record_pb2.RestoredQuarantine) -> QuarantineRestored:
    """Returns the core's event."""
    return QuarantineRestored(
        entries=tuple(
            QuarantineEntry(
                key=one.key,
                request_id=one.request_id,
                tenant=one.tenant,
                age_seconds=max(0.0, entry.unix_now - one.convicted_at),
                # The core's setting decides.
                expires_seconds=0.0,
                cause=one.cause,
            )
            for one in entry.quarantine.entries
        )
    )
