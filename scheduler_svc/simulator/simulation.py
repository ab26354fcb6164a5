"""Runs the real core on virtual time: arrivals in, plans to simulated workers, results back when they would come.

Owns the clock, which jumps from one thing that happens to the next. The core is used as the service's loop uses it:
what has come is handed in, then a Tick lets it plan. A run is decided by its setup and its arrivals alone.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.page_hash import hash_pages, prefix_root
from scheduler_svc.core.messages.reports import Load, StepReport
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulator.cost.step_cost import CostModel
from scheduler_svc.simulator.report.tally import Tally
from scheduler_svc.simulator.worker import SLOT_MASK, SimulatedWorker, Targets
from scheduler_svc.simulator.workload.request_source import Arrival

_FRONTEND = "simulator"
# Drawn at start in the service; here the same always, so that runs are.
_CACHE_ROOT = b"tandem simulate"
# Later is never: no virtual worker loses patience.
_NEVER = 1e14
_LOOK_EVERY_TURNS = 8
_REPORT_EVERY_TURNS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What serves. `ask_tokens`: callers ask for so many and end by EOS before; 0: they ask for exactly what they get.

    `token_multiple`: tokens of a step are padded to it. `shares_prefixes`: kept pages are found, and kept.
    """

    config: CoreConfig
    info: WorkerInfo
    cost: CostModel
    workers: int = 1
    link_seconds: float = 100e-6
    token_multiple: int = 1
    ask_tokens: int = 0
    shares_prefixes: bool = True


class Simulation:
    """One run."""

    def __init__(
        self,
        setup: Setup,
        arrivals: Iterator[Arrival],
        tally: Tally,
        *,
        concurrency: int = 0,
    ) -> None:
        """`concurrency`: the next request comes when fewer live, whatever its time; 0: it comes at its time."""
        self.now = 0.0
        self.tally = tally
        self._setup = setup
        self._arrivals = arrivals
        self._coming = next(arrivals, None)
        self._concurrency = concurrency or math.inf
        self._is_closed = concurrency > 0
        self.on_step: Callable[[StepReport], None] | None = None
        """Hears of every step, where the core's config asks for reports."""
        self._roots: dict[int, bytes] = {}
        self._targets = Targets()
        self._core = Scheduler(setup.config)
        self.load: Load | None = None
        """As the core said last."""
        self.workers = {
            name: SimulatedWorker(
                name=name,
                info=setup.info,
                cost=setup.cost,
                targets=self._targets,
                link_seconds=setup.link_seconds,
                token_multiple=setup.token_multiple,
            )
            for name in (f"worker-{number}" for number in range(1, setup.workers + 1))
        }

    def run(self, on_turn: Callable[["Simulation"], bool] | None = None) -> bool:
        """Once, until the last request has ended: True. `on_turn` is asked now and then; False ends the run: False."""
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
            # What is seen holds until the next look, so none may be missing before and after a pause.
            if is_idle != was_idle or turns % _LOOK_EVERY_TURNS == 0:
                self._handle(ev.LoadQuery(frontend=_FRONTEND, query=0))
            was_idle = is_idle
            if on_turn is not None and turns % _REPORT_EVERY_TURNS == 0 and not on_turn(self):
                return False
        assert not self.tally.live, f"{self.tally.live} requests live and nothing is left that could happen"
        self._handle(ev.LoadQuery(frontend=_FRONTEND, query=0))
        return True

    def _next_moment(self) -> float | None:
        """When something happens next; None: never."""
        moments = [worker.results[0][0] for worker in self.workers.values() if worker.results]
        if self._coming is not None and self.tally.live < self._concurrency:
            moments.append(self.now if self._is_closed else self._coming.at)
        wake = self._core.next_wake()
        if wake is not None and wake < _NEVER:
            # It asked at this moment already; a hair later is the next.
            moments.append(wake if wake > self.now else math.nextafter(self.now, math.inf))
        return min(moments, default=None)

    def _deliver(self) -> None:
        for worker in self.workers.values():
            while worker.results and worker.results[0][0] <= self.now:
                self._handle(worker.results.popleft()[1])

    def _submit_due(self) -> None:
        while (coming := self._coming) is not None and self.tally.live < self._concurrency:
            if not self._is_closed and coming.at > self.now:
                return
            self._submit(coming)
            self._coming = next(self._arrivals, None)

    def _submit(self, arrival: Arrival) -> None:
        setup, info = self._setup, self._setup.info
        prompt = arrival.prompt
        stream = self.tally.enter(self.now, arrival.tenant)
        self._targets.set(stream & SLOT_MASK, arrival.output_tokens)
        # Nobody asks for more than the model has room for.
        asked = max(arrival.output_tokens, min(setup.ask_tokens, info.max_length - len(prompt)))
        root = self._root(arrival.tenant)
        self._handle(
            ev.Submit(
                frontend=_FRONTEND,
                stream=stream,
                request_id=str(stream),
                prompt=prompt,
                sampling=stream.to_bytes(8, "little"),
                max_new_tokens=asked,
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

    def _root(self, tenant: int) -> bytes:
        root = self._roots.get(tenant)
        if root is None:
            root = self._roots[tenant] = prefix_root(_CACHE_ROOT, f"tenant-{tenant}")
        return root

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
                    self.tally.look(effect.load, self.now)
                case StepReport() if self.on_step is not None:
                    self.on_step(effect)
                case _:
                    pass
