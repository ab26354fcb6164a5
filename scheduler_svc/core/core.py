"""The state that all organs of the scheduler share, and what an organ is.

`Core` owns what more than one organ reads or changes, and it alone removes and ends requests. An `Organ` is one part of
the scheduler's work, and keeps to itself what only this part needs.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.operators import Weights
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.queue.kept_requests import Accepted, KeptRequests
from scheduler_svc.core.queue.request_queue import DeadlineKind, RequestQueue
from scheduler_svc.core.schedule.endings import Ending, stats_of
from scheduler_svc.core.schedule.results import OutputCollector
from scheduler_svc.core.sources import Sources
from scheduler_svc.core.state.request import Move, Phase, Request
from scheduler_svc.core.status import Availability
from scheduler_svc.core.suspicion.quarantine import Quarantine
from scheduler_svc.core.waits import Waits


class Core:
    """All shared state."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.queue = queue = RequestQueue()
        self.lanes = lanes = Lanes(config, queue)
        self.suspects, self.held_pools, self.counters = lanes.suspects, lanes.held_pools, lanes.counters
        self.quarantine = Quarantine(config.quarantine_seconds)
        self.availability = Availability(lanes)
        self.waits = Waits(queue, lanes, self.availability)
        self.sources = Sources(lanes)
        self.kept = KeptRequests(max_ended=config.max_kept_requests, max_bytes=config.max_kept_bytes)
        self.accepted = Accepted(queue, self.kept)
        self.output = OutputCollector(report_detached=config.report_detached)
        self.frontends: dict[str, int] = {}
        """Index of each connected front end, by name; an index is never used twice."""
        self.weights: Weights | None = None
        """The newest weights that a worker has loaded; None for those that workers are started with."""
        self.is_stopping = False
        """Whether the service takes no more requests, because it stops."""
        self.is_stop_wanted = False
        """Whether an operator has drained the service, so that the shell must stop it."""
        self.stop_at: float | None = None
        """Time on the core's clock when the requests of the service end, if an operator has set one."""

    @property
    def info(self) -> WorkerInfo | None:
        """The largest worker that serves; if none serves, the last one that did. None until a worker is proven."""
        served = self.lanes.worker_infos.served
        return None if served is None else served.info

    def end(
        self,
        request: Request,
        now: float,
        *,
        reason: fx.EndReason | None = None,
        failure: fx.Failure | None = None,
        stop_token_id: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Ends a live request in any phase: frees its row and pages, removes it, and adds its one terminal answer."""
        in_flight = self.remove(request, now)
        delivered = request.num_outputs
        kept = delivered if output_tokens is None else min(output_tokens, delivered)
        stats = stats_of(request, now=now, output_tokens=kept, discarded_tokens=in_flight + delivered - kept)
        end = fx.End(stream=request.stream, reason=reason, failure=failure, stop_token_id=stop_token_id, stats=stats)
        self.kept.ended(request, end, kept, now)
        self.output.add(request.frontend, end)

    def remove(self, request: Request, now: float) -> int:
        """Removes a live request without an answer; returns its tokens that are still in flight."""
        if request.phase is Phase.RUNNING:
            self.lanes[request.worker].unseat(request, Move.END)
        else:
            request.move(Move.END)
            self.queue.withdraw(request)
        self.queue.remove(request)
        if (account := self.queue.account_of(request)) is not None:
            account.give_back(request.unmade, now)
        self.suspects.forget(request)
        self.sources.removed(request)
        return request.pending_tokens

    def apply(self, ending: Ending, now: float) -> None:
        """Ends a request as its last step says, or lets it leave a worker that it has outgrown."""
        request = ending.request
        if ending.failure is not None:
            self.end(request, now, failure=ending.failure)
        elif ending.outgrew:
            self.lanes.send_on(request)
            self.update_worker_wait(request, now)
        else:
            request.last_token_at = now
            self.end(request, now, reason=ending.reason, stop_token_id=ending.stop_token_id)

    def update_worker_wait(self, request: Request, now: float) -> None:
        """Starts or ends the request's wait for a worker that can hold it."""
        longest = self.lanes.worker_infos.longest_present_for(request.needs)
        if request.phase is Phase.RUNNING or request.least_length(request.known) <= longest:
            request.worker_wait_since = None
        elif request.worker_wait_since is None:
            request.worker_wait_since = now
            if not request.has_wait_deadline:
                request.has_wait_deadline = True
                self.queue.add_deadline(now + self.config.max_worker_wait_seconds, request, DeadlineKind.WORKER_WAIT)


Handler = Callable[[Any, Any, float], list[fx.Effect]]
Method = TypeVar("Method", bound=Handler)


def handles(*events: type[Any]) -> Callable[[Method], Method]:
    """Makes a method of an organ the handler of these types of events."""

    def mark(method: Method) -> Method:
        method.__dict__["handles"] = events
        return method

    return mark


class Organ:
    """One part of the scheduler's work. What a class does not define, it does not do."""

    handlers: tuple[tuple[type[Any], Handler], ...] = ()
    """Types of events, each with the method that handles it. A type has one handler in all organs."""

    def __init_subclass__(cls) -> None:
        handlers = [(event, method) for method in vars(cls).values() for event in getattr(method, "handles", ())]
        cls.handlers = (*cls.handlers, *handlers)

    def __init__(self, core: Core) -> None:
        self._core, self._config, self._queue = core, core.config, core.queue
        self._lanes, self._frontends = core.lanes, core.frontends

    def tick(self, now: float) -> list[fx.Effect]:
        """Does what is due at each Tick."""
        return []

    def next_wake(self) -> float | None:
        """Returns the time on the core's clock when the next Tick must come at the latest, None if nothing is due."""
        return None

    def audit(self) -> None:
        """Checks the organ's invariants. Raises an AssertionError at the first one that is broken."""
