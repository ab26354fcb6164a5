"""From a journal to the core's events: which requests are still wanted, and for how long. Owns no state."""

from collections.abc import Iterator

from tandem.internal.v1 import journal_pb2, record_pb2

from scheduler_svc.core.messages import events as ev
from scheduler_svc.journal import records
from scheduler_svc.journal.reader import SavedCore
from scheduler_svc.journal.records import SavedRequest


def wanted(saved: SavedCore, unix_now: float) -> Iterator[tuple[SavedRequest, record_pb2.RestoredRequest]]:
    """Yields the requests whose linger is not over, in order, each with its entry for the event log.

    The earlier scheduler may have died long ago. A live request has had no reader since then, and an ended one lingers
    from its end.
    """
    for request in saved.requests:
        ends = [end.at for end in request.ends if end is not None]
        since = max(ends) if len(ends) == len(request.ends) else saved.written_at
        # A clock that was set back makes nothing linger longer.
        left = request.submit.linger_seconds - max(0.0, unix_now - since)
        if left > 0:
            entry = record_pb2.RestoredRequest(
                request=message_of(request),
                linger_seconds=left,
                identity=saved.identity,
                suspects=[i for i, number in enumerate(request.numbers) if number in saved.suspects],
                age_seconds=max(0.0, unix_now - request.accepted_at),
            )
            yield request, entry


def message_of(request: SavedRequest) -> journal_pb2.JournalRequest:
    """Encodes the request."""
    weights = dict(enumerate(request.weights))
    data = records.request_record(
        request.number, request.accepted_at, request.submit, request.outputs, request.ends, weights
    )
    return journal_pb2.JournalRecord.FromString(data).request


def event_of(entry: record_pb2.RestoredRequest) -> ev.Restored:
    """Returns the core's event. Raises WireError if the entry is malformed."""
    request = records.request_of(entry.request)
    return ev.Restored(
        submit=request.submit,
        outputs=request.outputs,
        ends=tuple(None if end is None else end.end for end in request.ends),
        weights=request.weights,
        linger_seconds=entry.linger_seconds,
        identity=entry.identity,
        suspects=tuple(entry.suspects),
        age_seconds=entry.age_seconds,
    )
