"""Checks the invariants of constraints; `core/invariants.py` calls it. Raises AssertionError."""

from collections import Counter
from collections.abc import Iterable, Sequence

from scheduler_svc.core.constraints.sources import MAX_SOURCES_BYTES, Sources
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request


def audit_constraints(sources: Sources, requests: Sequence[Request], lanes: Iterable[Lane]) -> None:
    """Checks that sources and lanes have the constraints of live requests, and that no row samples without its own."""
    users = Counter(request.constraint for request in requests if request.constraint)
    assert sources.users() == users, "the users of constraints are miscounted"
    assert sources.num_bytes == sum(len(sources[name]) for name in users) <= MAX_SOURCES_BYTES
    for lane in lanes:
        lane.constraints.audit(set(users))
        _audit_rows(lane)


def _audit_rows(lane: Lane) -> None:
    rows = lane.rows
    seated = rows.requests_at(rows.seated())
    awaiting = [request for request in seated if rows.awaits_constraint[request.row]]
    assert rows.num_awaiting == rows.awaits_constraint.sum() == len(awaiting), "waiting rows are miscounted"
    assert rows.num_constrained == sum(bool(request.constraint) for request in seated)
    for request in seated:
        is_ready = not request.constraint or lane.constraints.is_ready(request.constraint)
        assert is_ready != (request in awaiting), f"row {request.row}: it waits for a constraint that is ready"
        assert is_ready or not rows.tokens_in_flight[request.row], f"row {request.row} samples too early"
