"""Checks the invariants of readers and of kept requests. It is slow; `invariants.audit` calls it."""

from collections.abc import Mapping

from scheduler_svc.core.lingering.kept_requests import KeptRequests
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request


def audit_reader(
    request: Request, queue: RequestQueue, kept: KeptRequests, lanes: Mapping[str, Lane], frontends: Mapping[str, int]
) -> None:
    """Checks that a live request has a connected front end, or lingers."""
    frontend, name, entry = request.frontend, request.request_id, kept.by_id(request.request_id)
    assert queue.by_stream(frontend, request.stream) is request, f"{name}: its stream is another's"
    if request.row:
        rows = lanes[request.worker].rows
        reader = int(rows.stream[request.row]), int(rows.frontend_idx[request.row])
        assert reader == (request.stream, frontends.get(frontend, 0)), f"row {request.row} has another reader"
    assert (entry is not None) == request.lingers, f"{name} lingers, and is not kept"
    if entry is None or entry.reader is not None:
        assert frontend in frontends, f"{name} belongs to a front end that is gone"
    if entry is not None:
        first = entry.reader or ("", entry.first_handle)
        assert (frontend, request.stream - request.sample_idx) == first, f"{name} has another reader"


def audit_kept(kept: KeptRequests, queue: RequestQueue) -> None:
    """Checks the requests that linger: each is live or expires, and the size of those that ended is right."""
    size = 0
    for entry in kept.all:
        live = queue.by_request_id(entry.request_id)
        assert entry.awaits_worker or len(live) == entry.num_live, f"{entry.request_id}: live samples are miscounted"
        assert not any(request.sample_idx in entry.answers for request in live), f"{entry.request_id} ended and lives"
        assert entry.expires_at is not None or (entry.num_live and entry.reader), f"{entry.request_id} never expires"
        size += 0 if entry.num_live else entry.num_bytes
    assert size == kept.ended_bytes, "the size of the kept answers is miscounted"
