"""Sends constraints to the workers of lanes, reads their answers, and lets workers drop what no request has any more.

The states of a lane are in its `LaneConstraints`; `schedule/` lets it want one.
"""

from dataclasses import dataclass, field

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import ConstraintReady, Submit
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.schedule.endings import End
from scheduler_svc.core.sources import Sources
from scheduler_svc.core.state.lane import Lane, prepared
from scheduler_svc.core.state.lane_constraints import ANSWER_SECONDS
from scheduler_svc.core.state.request import Phase, Request


@dataclass(slots=True)
class Preparations:
    """`_end` ends a live request."""

    _queue: RequestQueue
    _lanes: Lanes
    _end: End
    sources: Sources = field(default_factory=Sources)
    # Whether a request has had a constraint. Without one, nothing here costs time.
    _is_used: bool = False

    # Requests ------------------------------------------------------------------------------------------------------

    def accepted(self, submit: Submit, count: int) -> None:
        """Counts `count` new requests with the constraint of the Submit, if it has one."""
        name = submit.constraint_hash
        if not name:
            return
        self._is_used = True
        for _ in range(count):
            self.sources.use(name, submit.constraint, submit.tenant)
        for lane in self._lanes.values():
            lane.constraints.used(name)

    def removed(self, request: Request) -> None:
        """Counts a request as ended."""
        if request.constraint and self.sources.release(request.constraint):
            for lane in self._lanes.values():
                lane.constraints.unused(request.constraint, lane.step)

    # Orders --------------------------------------------------------------------------------------------------------

    def orders(self, lane: Lane, now: float) -> list[fx.Effect]:
        """Returns the orders to prepare what the lane wants."""
        names = lane.constraints.take_wanted(now)
        return [fx.PrepareConstraint(worker=lane.worker, hash=name, source=self.sources[name]) for name in names]

    def drops(self) -> list[fx.Effect]:
        """Returns the orders to drop what no request has any more."""
        if not self._is_used:
            return []
        effects: list[fx.Effect] = []
        for lane in self._lanes.values():
            names = lane.constraints.take_drops(lane.step - len(lane.in_flight))
            effects += [fx.DropConstraint(worker=lane.worker, hash=name) for name in names]
        return effects

    # Answers -------------------------------------------------------------------------------------------------------

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

    def expire(self, now: float) -> None:
        """Ends the requests whose workers have not answered in time. Heartbeats cause a Tick often enough."""
        if not self._is_used:
            return
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
                self._end(request, now, failure=fx.Failure(code=fx.FailureCode.INTERNAL, message=what))
