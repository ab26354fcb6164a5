"""Sends constraints to the workers of lanes, reads their answers, and lets workers drop what no request has any more.

The states of a lane are in its `LaneConstraints`; `schedule/` lets it want one.
"""

from collections import Counter

from scheduler_svc.core.core import Organ, handles
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import ConstraintReady
from scheduler_svc.core.state.lane import Lane, prepared
from scheduler_svc.core.state.lane_constraints import ANSWER_SECONDS
from scheduler_svc.core.state.request import Phase


class Preparations(Organ):
    def tick(self, now: float) -> list[fx.Effect]:
        """Ends the requests whose workers have not answered in time, and drops what no request has any more."""
        if not self._core.sources.is_used:
            return []
        self._expire(now)
        effects: list[fx.Effect] = []
        for lane in self._lanes.values():
            names = lane.constraints.take_drops(lane.step - len(lane.in_flight))
            effects += [fx.DropConstraint(worker=lane.worker, hash=name) for name in names]
        return effects

    @handles(ConstraintReady)
    def answered(self, event: ConstraintReady, now: float) -> list[fx.Effect]:
        """Lets rows with the constraint sample, or ends the requests that need it from this worker."""
        lane = self._lanes.get(event.worker)
        if lane is None:
            return [fx.AskRejoin(worker=event.worker)]
        if not lane.constraints.answered(event.hash, ok=not event.error):
            # It answers an order that was given up, so the worker has what the core does not count.
            is_left = not event.error and not lane.constraints.knows(event.hash)
            return [fx.DropConstraint(worker=event.worker, hash=event.hash)] if is_left else []
        if event.error:
            self._fail(lane, event.hash, event.error, now)
        else:
            prepared(lane, event.hash)
        return []

    def _expire(self, now: float) -> None:
        """Ends the requests whose workers have not answered in time. Heartbeats cause a Tick often enough."""
        for lane in self._lanes.values():
            for name in lane.constraints.overdue(now):
                lane.constraints.answered(name, ok=False)
                what = f"worker {lane.worker} has not prepared it within {ANSWER_SECONDS:g} s"
                self._fail(lane, name, what, now)

    def _fail(self, lane: Lane, name: bytes, error: str, now: float) -> None:
        """Ends the requests with the constraint that run on the lane or wait. Those on other lanes go on."""
        for request in list(self._queue):
            if request.constraint == name and (request.phase is Phase.WAITING or request.worker == lane.worker):
                what = f"the constraint cannot be used: {error}"
                self._core.end(request, now, failure=fx.Failure(code=fx.FailureCode.INTERNAL, message=what))

    def audit(self) -> None:
        """Checks that sources and lanes have what live requests use, and that no row samples without its constraint."""
        users = Counter(request.constraint for request in self._queue if request.constraint)
        self._core.sources.audit(users)
        for lane in self._lanes.values():
            lane.constraints.audit(set(users))
            _audit_awaiting(lane)


def _audit_awaiting(lane: Lane) -> None:
    rows = lane.rows
    seated = rows.requests_at(rows.seated())
    awaiting = [request for request in seated if rows.awaits_constraint[request.row]]
    assert rows.num_awaiting == rows.awaits_constraint.sum() == len(awaiting), "waiting rows are miscounted"
    assert rows.num_constrained == sum(bool(request.constraint) for request in seated)
    for request in seated:
        is_ready = not request.constraint or lane.constraints.is_ready(request.constraint)
        assert is_ready != (request in awaiting), f"row {request.row}: it waits for a constraint that is ready"
        assert is_ready or not rows.tokens_in_flight[request.row], f"row {request.row} samples too early"
