"""Finds plans and results that were lost on the way, from what a worker's heartbeats say about its last plan.

A connection delivers frames in order or ends. But it may end and be opened again so fast that nobody is told, and then
neither side knows that frames are missing. Without this the lane would wait until the deadline of the step.
"""

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import ResetCause
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.workers.lanes import Lanes

# A plan may be this old and still on its way to the worker: ZeroMQ's heartbeats end a connection that stalls longer.
_PLAN_SECONDS = 2.0


class LostFrames:
    """Resets the lanes whose frames are missing."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def heard(self, event: ev.WorkerAlive, now: float) -> list[fx.Effect]:
        """Handles a heartbeat. An unknown worker is asked to join."""
        lane = self._lanes.by_worker.get(event.worker)
        if lane is None:
            return [fx.AskRejoin(worker=event.worker)]
        lane.clock.heard(now)
        if not (lost := _what_was_lost(lane, event, now)):
            return []
        return self._lanes.reset_or_refuse(lane, lost, now, ResetCause.OUT_OF_SYNC, 0)


def _what_was_lost(lane: Lane, event: ev.WorkerAlive, now: float) -> str:
    """Returns which frame is missing, or an empty string."""
    if not lane.in_flight or event.done is None:
        return ""
    oldest = lane.in_flight[0]
    generation, step = event.done
    if generation == lane.generation and step >= oldest.step:
        return f"the result of step {oldest.step} was lost: the worker has sent it, and its heartbeat came first"
    age = now - lane.clock.began_at(oldest)
    if not event.num_in_flight and age > _PLAN_SECONDS:
        return f"the plan of step {oldest.step} was lost: the worker does not have it after {age:.1f} s"
    return ""
