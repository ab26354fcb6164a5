"""Sends resources to the workers of lanes, reads their answers, and lets workers drop what no request needs any more.

The states of a lane are in its `LaneResources`; `schedule/` lets it want one.
"""

from collections import Counter
from collections.abc import Sequence

from scheduler_svc.core.core import Organ, handles
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import ResourceReady
from scheduler_svc.core.messages.resources import Need
from scheduler_svc.core.state.lane import Lane, may_sample, may_start, prepared
from scheduler_svc.core.state.lane_resources import State
from scheduler_svc.core.state.request import Phase


class Preparations(Organ):
    def tick(self, now: float) -> list[fx.Effect]:
        """Ends the requests of workers that have not answered in time, and drops what no request needs any more."""
        if not self._core.sources.is_used:
            return []
        self._expire(now)
        effects: list[fx.Effect] = []
        for lane in self._lanes.values():
            effects += _drops(lane.worker, lane.resources.take_drops(lane.step - len(lane.in_flight)))
        return effects

    @handles(ResourceReady)
    def answered(self, event: ResourceReady, now: float) -> list[fx.Effect]:
        """Lets requests with the resource go on, or ends those that need it from this worker."""
        lane, need = self._lanes.get(event.worker), Need(event.kind, event.hash)
        if lane is None:
            return [fx.AskRejoin(worker=event.worker)]
        if not lane.resources.answered(need, ok=not event.error):
            # It answers an order that was given up, so the worker has what the core does not count.
            is_left = not event.error and lane.resources.state(need) is State.DROPPED
            return _drops(event.worker, [need]) if is_left else []
        if event.error:
            self._fail(lane, need, event.error, now)
        else:
            prepared(lane)
        return []

    def _expire(self, now: float) -> None:
        """Ends the requests of workers that have not answered in time. Heartbeats cause a Tick often enough."""
        for lane in self._lanes.values():
            for need in lane.resources.overdue(now):
                lane.resources.answered(need, ok=False)
                seconds = need.of_kind.answer_seconds
                self._fail(lane, need, f"worker {lane.worker} has not prepared it within {seconds:g} s", now)

    def _fail(self, lane: Lane, need: Need, error: str, now: float) -> None:
        """Ends the requests with the resource that run on the lane or wait. Those on other lanes go on."""
        for request in list(self._queue):
            if need in request.needs and (request.phase is Phase.WAITING or request.worker == lane.worker):
                what = f"the {need.kind} cannot be used: {error}"
                self._core.end(request, now, failure=fx.Failure(code=fx.FailureCode.INTERNAL, message=what))

    def audit(self) -> None:
        """Checks that sources and lanes have what live requests need, and that no row goes on without its own."""
        users = Counter(need for request in self._queue for need in request.needs)
        self._core.sources.audit(users)
        for lane in self._lanes.values():
            lane.resources.audit(set(users))
            _audit_awaiting(lane)


def _drops(worker: str, needs: Sequence[Need]) -> list[fx.Effect]:
    return [fx.DropResource(worker=worker, hash=need.hash, kind=need.kind) for need in needs]


def _audit_awaiting(lane: Lane) -> None:
    rows = lane.rows
    seated = rows.requests_at(rows.seated())
    awaiting = [request for request in seated if rows.awaits_needs[request.row]]
    assert rows.num_awaiting == rows.awaits_needs.sum() == len(awaiting), "waiting rows are miscounted"
    assert rows.num_constrained == sum(bool(request.constraint) for request in seated)
    for request in seated:
        is_ready = may_sample(lane, request)
        assert is_ready != (request in awaiting), f"row {request.row}: it waits for a resource that is ready"
        assert may_start(lane, request), f"row {request.row} has started too early"
        assert is_ready or not rows.tokens_in_flight[request.row], f"row {request.row} samples too early"
