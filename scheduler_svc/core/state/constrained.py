"""What a request's constraint changes on a lane: whether the lane holds the request, and whether its row may sample.

Owns no state; that is in `Rows` and `LaneConstraints`.
"""

from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request


def holds(lane: Lane, request: Request) -> bool:
    """Returns whether the lane's worker can run the request to its end."""
    info = lane.info
    return info.holds(request.total_length) and not (request.constraint and info.constraint_refusal)


def may_sample(lane: Lane, request: Request) -> bool:
    """Returns whether a row with the request could sample now. If not, its constraint is wanted from now on."""
    name = request.constraint
    if not name or lane.constraints.is_ready(name):
        return True
    lane.constraints.want(name)
    return False


def began(lane: Lane, request: Request) -> None:
    """Lets the row of a request that was seated just now wait for its constraint, unless it is ready."""
    if not may_sample(lane, request):
        lane.rows.await_constraint(request.row, True)


def prepared(lane: Lane, name: bytes) -> None:
    """Lets rows with the constraint, which the worker has prepared, sample."""
    for request in lane.rows.requests_at(lane.rows.awaits_constraint.nonzero()[0]):
        if request.constraint == name:
            lane.rows.await_constraint(request.row, False)
