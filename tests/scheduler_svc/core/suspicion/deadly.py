"""A fleet with workers that die of a token and are replaced, and a log of what ran at each death.

The log is made from the plans alone and not from the core's own records.
"""

from dataclasses import dataclass

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.plan import Plan
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.fleet import Fleet

KILLER = 281


@dataclass(frozen=True, slots=True)
class Death:
    """`streams` had a position in a plan without a result. `tokens` are their numbers of output tokens then."""

    worker: str
    streams: tuple[int, ...]
    tokens: tuple[int, ...]


class DeadlyFleet(Fleet):
    """Each worker that dies of KILLER is replaced after `restart_seconds`."""

    audit_every = 16

    def __init__(
        self,
        shape: Shape,
        workers: int = 1,
        *,
        config: CoreConfig | None = None,
        faults: Faults | None = None,
        restart_seconds: float = 1.0,
    ) -> None:
        super().__init__(config=config)
        self.shape = shape
        self.deaths: list[Death] = []
        self._faults = faults or Faults(kill_token=KILLER)
        self._restart_seconds = restart_seconds
        self._restarts: list[float] = []
        for _ in range(workers):
            self.join_as(shape, self._faults)

    def join_as(self, shape: Shape, faults: Faults | None = None) -> str:
        """Lets a new worker join and returns its name."""
        return super().join_as(shape, faults or self._faults)

    def step(self, seconds: float = 0.005) -> None:
        """Ticks, applies all plans and delivers all results; workers that were poisoned die and are replaced later.

        Without a worker the clock goes on to the next restart.
        """
        if self._restarts and not self.workers:
            seconds = max(seconds, self._restarts[0] - self.now)
        self.tick(seconds)
        while self._restarts and self._restarts[0] <= self.now:
            self._restarts.pop(0)
            self.join_as(self.shape)
        for name in list(self.workers):
            self.apply_plans(name)
            if self.workers[name].is_poisoned:
                # The results of earlier plans have arrived.
                while self.deliver_from(name):
                    pass
                self.die(name)
                continue
            self.deliver_from(name)

    def die(self, name: str) -> None:
        """Kills the worker now; another one joins after the restart time."""
        requests = [request for request in self.core.queue if self.in_flight(name, request.handle)]
        streams = tuple(request.stream for request in requests)
        tokens = tuple(len(self.streams[stream].tokens) for stream in streams)
        self.deaths.append(Death(name, streams, tokens))
        self.lose(name)
        self._restarts.append(self.now + self._restart_seconds)

    def in_flight(self, name: str, handle: int) -> bool:
        """Whether a plan without a result contains the request."""
        return any(handle in record.handles for record in self.lane_of(name).in_flight)

    def run_until_ended(self, max_steps: int = 20_000) -> None:
        """Steps until no request is live. Raises AssertionError after `max_steps`."""
        for _ in range(max_steps):
            if not len(self.core.queue):
                return
            self.step()
        raise AssertionError(f"{len(self.core.queue)} requests are live after {max_steps} steps")


def streams_of(fleet: Fleet, plan: Plan, name: str) -> set[int]:
    """Returns the streams in a plan that is in flight."""
    [record] = [record for record in fleet.lane_of(name).in_flight if record.step == plan.step]
    requests = map(fleet.core.queue.by_handle, record.handles.tolist())
    return {request.stream for request in requests if request is not None}
