"""The core: `handle(event, now) -> effects`, a pure state machine.

`Scheduler` is the shared state (`Core`) and the organs that do the work, in the order of their turns. It uses no
sockets, clocks or randomness: the same events at the same times give the same effects.

`handle` applies one event and returns its effects at once. `Tick` arrives when the inbox is empty. Only on a Tick does
the core expire deadlines and make plans, until each lane has `plans_in_flight` plans in flight or nothing can run. A
result is interpreted with the stored record of its plan (`SentPlan`). A token is emitted only after the result of its
step has arrived, so a failing worker never makes a client see a token twice. A request ends with exactly one terminal
answer, Rejected or End, unless its front end cancels it or disconnects.
"""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from scheduler_svc.core.core import Core, Organ
from scheduler_svc.core.front_ends import FrontEnds, model_of
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.operations.drains import Drains
from scheduler_svc.core.operations.operators import Operators
from scheduler_svc.core.operations.weights import Updates
from scheduler_svc.core.preparations import Preparations
from scheduler_svc.core.recovery.workers import Hung, Standby, Workers
from scheduler_svc.core.requests.acceptance import Requests, restore
from scheduler_svc.core.requests.deadlines import Deadlines
from scheduler_svc.core.requests.lingering import Lingering
from scheduler_svc.core.requests.listing import Listing
from scheduler_svc.core.state.worker_infos import Served
from scheduler_svc.core.steps import Steps
from scheduler_svc.core.suspicion.convictions import Convictions, end_convicted

ORGANS: tuple[type[Organ], ...] = (
    *(Requests, Deadlines, Lingering, Workers, Hung, Standby, Drains, Updates, Convictions, Preparations, Steps),
    *(FrontEnds, Listing, Operators),
)
"""All organs, in the order in which they take their turns in a Tick."""


class Scheduler(Core):
    """The state machine. Only `handle` changes its state; audits and tests read it."""

    def __init__(self, config: CoreConfig, organs: Sequence[type[Organ]] = ORGANS) -> None:
        super().__init__(config)
        self.organs = tuple(organ(self) for organ in organs)
        self._ticks = tuple(organ.tick for organ in self.organs if type(organ).tick is not Organ.tick)
        self._wakes = tuple(organ.next_wake for organ in self.organs if type(organ).next_wake is not Organ.next_wake)
        self._handlers: dict[type, Callable[[Any, float], list[fx.Effect]]] = {ev.Tick: self._tick}
        for organ in self.organs:
            for event, handler in organ.handlers:
                if event in self._handlers:
                    raise ValueError(f"{event.__name__} has a handler already; {type(organ).__name__} brings another")
                self._handlers[event] = MethodType(handler, organ)
        self._seen_revision = self.lanes.worker_infos.revision
        self._sent_served: Served | None = None

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Handles one event at time `now` (seconds, never decreasing); returns the effects in order."""
        effects = self._handlers[type(event)](event, now)
        if self.suspects.convicted:
            effects += end_convicted(self, now)
        if self.lanes.worker_infos.revision != self._seen_revision:
            effects += self._workers_changed(now)
        return effects + self.output.flush(self.frontends)

    def next_wake(self) -> float | None:
        """Time on the core's clock of the next Tick if no event arrives before it; None if nothing is due."""
        times = [at for next_wake in self._wakes if (at := next_wake()) is not None]
        return min(times, default=None)

    def _tick(self, event: ev.Tick, now: float) -> list[fx.Effect]:
        return [effect for tick in self._ticks for effect in tick(now)]

    def _workers_changed(self, now: float) -> list[fx.Effect]:
        """Updates the waits of all requests, and sends front ends the model again if callers see a difference."""
        infos = self.lanes.worker_infos
        self._seen_revision, served = infos.revision, infos.served
        if served is not None:
            restore(self, now)
        for request in self.queue:
            self.update_worker_wait(request, now)
        sent, self._sent_served = self._sent_served, served
        return [] if served is sent else [model_of(frontend, served) for frontend in self.frontends]
