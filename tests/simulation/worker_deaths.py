"""What was in flight when a worker died or a step failed, taken from the plans in flight and not from the suspects.

The callers use it to check each conviction: the request must have met two deaths alone, at the same number of tokens.
"""

from collections.abc import Mapping

from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.scheduler import Scheduler
from tests.simulation.callers import Caller

_Key = tuple[str, int]


class Deaths:
    """Call `before` and `after` around each event, before its effects reach the callers."""

    def __init__(self, core: Scheduler, callers: Mapping[_Key, Caller]) -> None:
        self._core = core
        self._callers = callers
        # By worker: generation, the streams in its plans in flight (None for one that has ended), and in the oldest.
        self._seen: dict[str, tuple[int, set[_Key | int], set[_Key | int]]] = {}

    def before(self, event: ev.Event) -> None:
        """Notes what is in flight, if the event may end a generation of a lane."""
        self._seen.clear()
        if isinstance(event, ev.WorkerLost | ev.Tick) or (
            isinstance(event, ev.StepDone) and event.status is ev.StepStatus.FAILED
        ):
            for worker, lane in self._core.lanes.items():
                keys = [{self._key(handle) for handle in plan.handles.tolist()} for plan in lane.in_flight]
                if keys:
                    self._seen[worker] = lane.generation, set[_Key | int]().union(*keys), keys[0]

    def after(self, event: ev.Event) -> None:
        """Counts the death or failed step for the stream that it met alone."""
        for worker, (generation, in_flight, oldest) in self._seen.items():
            lane = self._core.lanes.get(worker)
            if lane is not None and lane.generation == generation:
                continue
            met = oldest if isinstance(event, ev.StepDone) else in_flight
            for key in met if len(met) == 1 else ():
                if isinstance(key, tuple) and key in self._callers:
                    caller = self._callers[key]
                    caller.lone_deaths[len(caller.tokens)] += 1

    def _key(self, handle: int) -> _Key | int:
        request = self._core.queue.by_handle(handle)
        return handle if request is None else (request.frontend, request.stream)
