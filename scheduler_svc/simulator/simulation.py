"""Runs the real core on virtual time: arrivals go in, simulated workers take the plans, results return when due.

Owns the clock, which jumps from one event to the next. The simulation uses the core as the service's loop does: it
hands in the events that are due, then a Tick lets the core plan. Setup and arrivals alone decide a run.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.page_hash import hash_pages, prefix_root
from scheduler_svc.core.messages.reports import Load, StepReport
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulator.tally import Tally
from scheduler_svc.simulator.worker import SLOT_MASK, Setup, SimulatedWorker
from scheduler_svc.simulator.workload.request_source import Arrival

_FRONTEND = "simulator"
# The service draws its root at start. This one is constant, so that runs repeat exactly.
_CACHE_ROOT = b"tandem simulate"
# Wake-ups beyond this time are timeouts, which no virtual worker reaches.
_NEVER = 1e14
_TURNS_PER_LOAD_QUERY = 8
_TURNS_PER_PROGRESS = 256


class Simulation:
    """One run of the core over the arrivals."""

    def __init__(self, setup: Setup, arrivals: Iterator[Arrival], tally: Tally, *, concurrency: int = 0) -> None:
        """If `concurrency` is not 0, requests ignore their times: one is submitted when fewer than that are live."""
        self.now = 0.0
        self.tally = tally
        self._setup = setup
        self._arrivals = arrivals
        self._next_arrival = next(arrivals, None)
        self._concurrency = concurrency or math.inf
        self._is_closed = concurrency > 0
        self.on_step: Callable[[StepReport], None] | None = None
        """Receives the report of every step, if the core's config asks for reports."""
        self._targets: dict[int, int] = {}
        self._core = Scheduler(setup.config)
        self.load: Load | None = None
        """The core's last load report."""
        self.workers = {
            name: SimulatedWorker(name, setup, self._targets)
            for name in (f"worker-{number}" for number in range(1, setup.workers + 1))
        }

    def run(self, on_turn: Callable[["Simulation"], bool] | None = None) -> bool:
        """Runs until the last request has ended. Returns False if `on_turn`, called now and then, returned False."""
        self._handle(ev.FrontendJoined(frontend=_FRONTEND))
        for worker in self.workers.values():
            self._handle(ev.WorkerJoined(worker=worker.name, info=self._setup.info))
        turns, was_idle = 0, True
        while (at := self._next_moment()) is not None:
            self.now = max(self.now, at)
            self._deliver()
            self._submit_due()
            self._handle(ev.Tick())
            turns += 1
            is_idle = not any(worker.results for worker in self.workers.values())
            # The tally holds a load until the next one, so both ends of an idle time need one.
            if is_idle != was_idle or turns % _TURNS_PER_LOAD_QUERY == 0:
                self._handle(ev.LoadQuery(frontend=_FRONTEND, query=0))
            was_idle = is_idle
            if on_turn is not None and turns % _TURNS_PER_PROGRESS == 0 and not on_turn(self):
                return False
        assert not self.tally.live, f"{self.tally.live} requests are live and no event is due"
        self._handle(ev.LoadQuery(frontend=_FRONTEND, query=0))
        return True

    def _next_moment(self) -> float | None:
        """Returns the time of the next event, None if none is due."""
        moments = [worker.results[0][0] for worker in self.workers.values() if worker.results]
        if self._next_arrival is not None and self.tally.live < self._concurrency:
            moments.append(self.now if self._is_closed else self._next_arrival.at)
        wake = self._core.next_wake()
        if wake is not None and wake < _NEVER:
            # The core was already called at this time, so the next call is the smallest step later.
            moments.append(wake if wake > self.now else math.nextafter(self.now, math.inf))
        return min(moments, default=None)

    def _deliver(self) -> None:
        for worker in self.workers.values():
            while worker.results and worker.results[0][0] <= self.now:
                self._handle(worker.results.popleft()[1])

    def _submit_due(self) -> None:
        while (arrival := self._next_arrival) is not None and self.tally.live < self._concurrency:
            if not self._is_closed and arrival.at > self.now:
                return
            self._submit(arrival)
            self._next_arrival = next(self._arrivals, None)

    def _submit(self, arrival: Arrival) -> None:
        setup, info = self._setup, self._setup.info
        prompt = arrival.prompt
        stream = self.tally.enter(self.now, arrival.tenant)
        self._targets[stream & SLOT_MASK] = arrival.output_tokens
        # A request may not ask for more than the model's context holds.
        max_new_tokens = max(arrival.output_tokens, min(setup.ask_tokens, info.max_length - len(prompt)))
        root = _root(arrival.tenant)
        self._handle(
            ev.Submit(
                frontend=_FRONTEND,
                stream=stream,
                request_id=str(stream),
                prompt=prompt,
                sampling=stream.to_bytes(8, "little"),
                max_new_tokens=max_new_tokens,
                min_new_tokens=0,
                stop_token_ids=(),
                ignore_eos=not setup.ask_tokens,
                priority=0,
                max_time_seconds=0.0,
                deadline_seconds=0.0,
                prefix_root=root,
                page_hashes=hash_pages(root, prompt, info.page_size),
                cache_read=setup.shares_prefixes,
                cache_write=setup.shares_prefixes,
            )
        )

    def _handle(self, event: ev.Event) -> None:
        for effect in self._core.handle(event, self.now):
            match effect:
                case fx.SendPlan():
                    self.workers[effect.worker].take(effect.plan, self.now)
                case fx.StepOutput():
                    self.tally.take(effect, self.now)
                case fx.Rejected():
                    self.tally.reject(effect)
                case fx.LoadReply():
                    self.load = effect.load
                    self.tally.observe(effect.load, self.now)
                case StepReport() if self.on_step is not None:
                    self.on_step(effect)
                case _:
                    pass


@cache
def _root(tenant: int) -> bytes:
    return prefix_root(_CACHE_ROOT, f"tenant-{tenant}")
