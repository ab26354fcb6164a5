"""One service of a simulation: a core, its workers, and the time that the core takes.

Owns the events that wait for the core. A core that takes time (`Setup.core_seconds`) handles one event after the other,
and what it sends leaves when it has handled the event.
"""

import heapq
import math
from collections.abc import Callable

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import Load, StepReport
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulator.front_ends import FrontEnds
from scheduler_svc.simulator.tally import Tally
from scheduler_svc.simulator.worker import Setup, SimulatedWorker

FRONTEND = "simulator"
# Wake-ups beyond this time are timeouts, which no virtual worker reaches.
_NEVER = 1e14
_TURNS_PER_LOAD_QUERY = 8


class Cell:
    """A core and `setup.workers` workers."""

    def __init__(self, setup: Setup, targets: dict[int, int], tally: Tally, first_worker: int) -> None:
        self.live = 0
        """Requests that were submitted here and have not ended."""
        self.load: Load | None = None
        """The core's last load report."""
        self.core_seconds = 0.0
        """The time that the core has taken."""
        self.on_step: Callable[[StepReport], None] | None = None
        self._setup, self._tally = setup, tally
        self._core = Scheduler(setup.config)
        self.front_ends = FrontEnds(setup.front_ends, tally) if setup.front_ends else None
        # Requests on their way to the core: when each arrives, their number, the request.
        self._waiting: list[tuple[float, int, ev.Submit]] = []
        self._num_submitted = 0
        # The core is busy until then.
        self._free_at = 0.0
        self._ticked_at = -math.inf
        self._turns, self._was_idle = 0, True
        # Workers that were killed, and when each joins again.
        self._away: dict[str, float] = {}
        names = (f"worker-{number}" for number in range(first_worker, first_worker + setup.workers))
        self.workers = {name: SimulatedWorker(name, setup, targets) for name in names}

    def begin(self) -> None:
        """The front end and the workers join."""
        self._handle(ev.FrontendJoined(frontend=FRONTEND), 0.0)
        for name in self.workers:
            self._handle(ev.WorkerJoined(worker=name, info=self._setup.info), 0.0)

    def submit(self, request: ev.Submit, now: float) -> None:
        """A request arrives; the core takes it at its next turn, or when a front end has passed it on."""
        at = now if self.front_ends is None else self.front_ends.admit(request.stream, now)
        self._num_submitted += 1
        heapq.heappush(self._waiting, (at, self._num_submitted, request))
        self.live += 1

    def kill(self, name: str, now: float) -> None:
        """A worker dies; it joins again after `restart_seconds`. What it computes is lost."""
        if name in self._away:
            return
        self._away[name] = now + self._setup.restart_seconds
        self.workers[name].results.clear()
        self._handle(ev.WorkerLost(worker=name, reason="killed"), now)

    def next_moment(self) -> float | None:
        """The time at which its core or a front end has something to do; None if nothing is due."""
        front = None if self.front_ends is None else self.front_ends.next_moment()
        core = self._core_moment()
        return core if front is None else front if core is None else min(core, front)

    def _core_moment(self) -> float | None:
        moments = [worker.results[0][0] for worker in self.workers.values() if worker.results]
        moments += self._away.values()
        if self._waiting:
            moments.append(self._waiting[0][0])
        wake = self._core.next_wake()
        if wake is not None and wake < _NEVER:
            # If the core was already called at that time, the next call is the smallest step later.
            moments.append(wake if wake > self._ticked_at else math.nextafter(self._ticked_at, math.inf))
        return max(min(moments), self._free_at) if moments else None

    def is_due(self, now: float) -> bool:
        """Whether its core has something to do."""
        moment = self._core_moment()
        return moment is not None and moment <= now

    def send(self, now: float) -> None:
        """The front ends send what is due."""
        if self.front_ends is not None:
            self.front_ends.advance(now)

    def deliver(self, now: float) -> None:
        """The core handles the results that have arrived; workers join again."""
        for worker in self.workers.values():
            while worker.results and worker.results[0][0] <= now:
                self._take_time(now)
                self._handle(worker.results.popleft()[1], now)
        for name in [name for name, at in self._away.items() if at <= now]:
            del self._away[name]
            self._handle(ev.WorkerJoined(worker=name, info=self._setup.info), now)

    def plan(self, now: float) -> None:
        """The core handles the requests that have arrived, and plans."""
        while self._waiting and self._waiting[0][0] <= now:
            self._take_time(now)
            self._handle(heapq.heappop(self._waiting)[2], now)
        self._handle(ev.Tick(), now)
        self._ticked_at = now
        self._turns += 1
        is_idle = not any(worker.results for worker in self.workers.values())
        # The tally holds a load until the next one, so both ends of an idle time need one.
        if is_idle != self._was_idle or self._turns % _TURNS_PER_LOAD_QUERY == 0:
            self.report_load(now)
        self._was_idle = is_idle

    def report_load(self, now: float) -> None:
        """Sets `load`."""
        self._handle(ev.LoadQuery(frontend=FRONTEND, query=0), now)

    def _take_time(self, now: float) -> None:
        self._free_at = max(self._free_at, now) + self._setup.core_seconds
        self.core_seconds += self._setup.core_seconds

    def _handle(self, event: ev.Event, now: float) -> None:
        leaves = max(now, self._free_at)
        for effect in self._core.handle(event, now):
            match effect:
                case fx.SendPlan():
                    self.workers[effect.worker].take(effect.plan, leaves)
                case fx.StepOutput():
                    self.live -= len(effect.ends)
                    (self.front_ends or self._tally).take(effect, leaves)
                case fx.Rejected():
                    self.live -= 1
                    self._tally.reject(effect)
                case fx.LoadReply():
                    self.load = effect.load
                case StepReport() if self.on_step is not None:
                    self.on_step(effect)
                case _:
                    pass
