"""Runs the real core on virtual time: arrivals go in, simulated workers take the plans, results return when due.

Owns the clock, which jumps from one event to the next. The simulation uses a core as the service's loop does: it hands
in the events that are due, then a Tick lets the core plan. Setup and arrivals alone decide a run.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.page_hash import hash_pages, prefix_root
from scheduler_svc.core.messages.reports import Load
from scheduler_svc.simulator.cell import FRONTEND, Cell
from scheduler_svc.simulator.tally import Tally
from scheduler_svc.simulator.worker import SLOT_MASK, Setup
from scheduler_svc.simulator.workload import Arrival, Router

# The service draws its root at start. This one is constant, so that runs repeat exactly.
_CACHE_ROOT = b"tandem simulate"
_TURNS_PER_PROGRESS = 256


class Simulation:
    """One run of the core over the arrivals, or of several cores."""

    def __init__(self, setup: Setup, arrivals: Iterator[Arrival], tally: Tally, *, concurrency: int = 0) -> None:
        """If `concurrency` is not 0, requests ignore their times: one is submitted when fewer than that are live."""
        self.now = 0.0
        self.tally = tally
        self._setup = setup
        self._arrivals = arrivals
        self._next_arrival = next(arrivals, None)
        self._concurrency = concurrency or math.inf
        self._is_closed = concurrency > 0
        self._targets: dict[int, int] = {}
        self.cells = [Cell(setup, self._targets, tally, 1 + number * setup.workers) for number in range(setup.cells)]
        self._router = Router(setup.spread, setup.cells, setup.seed)
        self._homes = [(number, name) for number, cell in enumerate(self.cells) for name in cell.workers]
        # When each cell has something to do. Only cells that did something have another time.
        self._moments = [math.inf] * setup.cells
        self.num_deaths = 0
        self.num_submitted = [0] * setup.cells
        """Requests, by cell."""
        self.workers = {name: worker for cell in self.cells for name, worker in cell.workers.items()}

    @property
    def load(self) -> Load | None:
        """The last load reports of all cores together."""
        loads = [cell.load for cell in self.cells if cell.load is not None]
        if not loads:
            return None
        sums = {name: sum(int(getattr(load, name)) for load in loads) for name in _SUMMED}
        return replace(loads[0], **sums)

    def run(self, on_turn: Callable[["Simulation"], bool] | None = None) -> bool:
        """Runs until the last request has ended. Returns False if `on_turn`, called now and then, returned False."""
        for number, cell in enumerate(self.cells):
            cell.begin()
            self._look(number)
        turns = 0
        while (at := self._next_moment()) < math.inf:
            self.now = max(self.now, at)
            self._kill_due()
            self._turn()
            turns += 1
            if on_turn is not None and turns % _TURNS_PER_PROGRESS == 0 and not on_turn(self):
                return False
        assert not self.tally.live, f"{self.tally.live} requests are live and no event is due"
        for cell in self.cells:
            cell.report_load(self.now)
        self._observe()
        return True

    def _turn(self) -> None:
        """The cores and front ends that have something to do do it."""
        looked_at = {number for number, moment in enumerate(self._moments) if moment <= self.now}
        due: set[int] = set()
        for number in sorted(looked_at):
            for front_end in self.cells[number].front_ends:
                front_end.advance(self.now)
            if self.cells[number].is_due(self.now):
                due.add(number)
                self.cells[number].deliver(self.now)
        looked_at |= self._submit_due()
        for number in sorted(looked_at):
            cell = self.cells[number]
            if number in due or cell.is_due(self.now):
                before = cell.load
                cell.plan(self.now)
                if cell.load is not before:
                    self._observe()
            self._look(number)

    def _look(self, number: int) -> None:
        self._moments[number] = self.cells[number].next_moment()

    def _observe(self) -> None:
        if (load := self.load) is not None:
            self.tally.observe(load, self.now)

    def _next_moment(self) -> float:
        """Returns the time of the next event on the simulation's clock, inf if none is due."""
        moments = [*self._moments, self._next_death]
        if self._next_arrival is not None and self.tally.live < self._concurrency:
            moments.append(self.now if self._is_closed else self._next_arrival.at)
        return min(moments)

    @property
    def _next_death(self) -> float:
        """The time of the next death; inf without requests, so that the run ends."""
        is_over = not self.tally.live and self._next_arrival is None
        return math.inf if is_over or not self._setup.kill_seconds else (self.num_deaths + 1) * self._setup.kill_seconds

    def _kill_due(self) -> None:
        """Kills the workers one after the other, at equal times."""
        while self._next_death <= self.now:
            number, name = self._homes[self.num_deaths % len(self._homes)]
            self.num_deaths += 1
            self.cells[number].kill(name, self.now)
            self._look(number)

    def _submit_due(self) -> set[int]:
        """Submits the requests that have arrived. Returns the numbers of their cells."""
        chosen: set[int] = set()
        while (arrival := self._next_arrival) is not None and self.tally.live < self._concurrency:
            if not self._is_closed and arrival.at > self.now:
                break
            cell = self._router.choose(arrival.prompt, arrival.tenant, [cell.live for cell in self.cells])
            self.cells[cell].submit(self._request(arrival), self.now)
            self.num_submitted[cell] += 1
            chosen.add(cell)
            self._next_arrival = next(self._arrivals, None)
        return chosen

    def _request(self, arrival: Arrival) -> ev.Submit:
        setup, info = self._setup, self._setup.info
        prompt = arrival.prompt
        stream = self.tally.enter(self.now, arrival.tenant)
        self._targets[stream & SLOT_MASK] = arrival.output_tokens
        # A request may not ask for more than the model's context holds.
        max_new_tokens = max(arrival.output_tokens, min(setup.ask_tokens, info.max_length - len(prompt)))
        root = _root(arrival.tenant)
        return ev.Submit(
            frontend=FRONTEND,
            stream=stream,
            request_id=str(stream),
            prompt=prompt,
            sampling=stream.to_bytes(8, "little"),
            max_new_tokens=max_new_tokens,
            ignore_eos=not setup.ask_tokens,
            prefix_root=root,
            page_hashes=hash_pages(root, prompt, info.page_size),
            cache_read=setup.shares_prefixes,
            cache_write=setup.shares_prefixes,
        )


# The figures of a load that the report and the tally read.
_SUMMED = ("running", "waiting", "pages_used", "pages_cached", "preemptions")


@cache
def _root(tenant: int) -> bytes:
    return prefix_root(_CACHE_ROOT, f"tenant-{tenant}")
