"""Owns what the core's process measures, and the sums of all front ends' reports, also of front ends that are gone.

Measured are steps and turns as they happen, and a look at the core once a second. The core's thread writes, the thread
of the page reads; no number needs a lock. What a sum of reports is made of changes by one assignment, so that no
counter goes back while a process's numbers move to those of processes that are gone. Decides nothing and changes
nothing. Knows no sockets.
"""

import time
from collections.abc import Callable, Container
from itertools import islice

import numpy as np
import numpy.typing as npt
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.core.messages.events import StepDone, StepStatus
from scheduler_svc.core.messages.reports import SERVICE_REASONS, WorkerState
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.status import state_of
from scheduler_svc.metrics import catalogue
from scheduler_svc.metrics.catalogue import Histogram, Metric, Samples
from tandem_contract.bounds import WireError
from tandem_contract.plural import numbered

# Processes with a last report that is kept. Reports of older ones, which are gone, are one sum.
_MAX_PROCESSES = 256
_MAX_TENANTS = 10_000
# Stands for the number of all processes that are gone.
_GONE = -1

Cells = npt.NDArray[np.float64]


class FrontTotals:
    """What the front ends have reported."""

    def __init__(self) -> None:
        self._of_process: dict[int, Cells] = {_GONE: np.zeros(catalogue.NUM_CELLS)}
        # Each connected front end's backlog, by its name.
        self._backlogs: dict[str, int] = {}
        self._of_tenant: dict[str, dict[int, tuple[int, int]]] = {}

    def take(self, frontend: str, report: frontend_pb2.MetricsReport) -> None:
        """Takes a front end's report. Raises WireError if it does not have the numbers of this version."""
        if len(report.values) != 8 * catalogue.NUM_CELLS:
            raise WireError(
                f"its metrics have {numbered(len(report.values), 'byte')} instead of {8 * catalogue.NUM_CELLS}"
            )
        cells = np.frombuffer(report.values, "<f8")
        if not np.isfinite(cells).all() or (cells < 0).any():
            raise WireError("its metrics have a number that is negative or not finite")
        if report.process not in self._of_process and len(self._of_process) > _MAX_PROCESSES:
            self._fold(next(process for process in self._of_process if process != _GONE))
        self._of_process[report.process] = cells
        self._backlogs[frontend] = report.backlog_bytes
        for use in report.tenants:
            if use.tenant in self._of_tenant or len(self._of_tenant) < _MAX_TENANTS:
                self._of_tenant.setdefault(use.tenant, {})[report.process] = use.prompt_tokens, use.generation_tokens

    def _fold(self, process: int) -> None:
        """Adds a process's numbers to those of processes that are gone."""
        kept = dict(self._of_process)
        folded = kept.pop(process)
        kept[_GONE] = kept[_GONE] + folded
        self._of_process = kept
        for tenant, uses in self._of_tenant.items():
            if process in uses:
                others = dict(uses)
                use, before = others.pop(process), others.get(_GONE, (0, 0))
                others[_GONE] = before[0] + use[0], before[1] + use[1]
                self._of_tenant[tenant] = others

    def keep(self, frontends: Container[str]) -> None:
        """Forgets the backlogs of all other front ends."""
        self._backlogs = {name: size for name, size in self._backlogs.items() if name in frontends}

    def cells(self) -> Cells:
        """Returns the sums, float64[NUM_CELLS]."""
        return np.sum([*self._of_process.values()], axis=0)

    @property
    def backlog_bytes(self) -> int:
        """The sum over the connected front ends."""
        return sum(self._backlogs.values())

    def of_tenants(self, names: Container[str]) -> dict[str, tuple[int, int]]:
        """Returns prompt and output tokens of those of these tenants that have called."""
        tokens: dict[str, tuple[int, int]] = {}
        for name, uses in list(self._of_tenant.items()):
            if name in names:
                of_processes = list(uses.values())
                tokens[name] = sum(one[0] for one in of_processes), sum(one[1] for one in of_processes)
        return tokens

    def samples(self, tenants: Container[str]) -> dict[Metric, Samples]:
        """Returns the samples of all metrics of front ends; of tenants, those of these names."""
        cells, samples = iter(self.cells().tolist()), dict[Metric, Samples]()
        for metric in catalogue.FRONTEND_METRICS:
            samples[metric] = metric.samples(*islice(cells, metric.num_cells))
        samples[catalogue.BACKLOG] = catalogue.BACKLOG.samples(self.backlog_bytes)
        uses = self.of_tenants(tenants).items()
        for idx, metric in enumerate((catalogue.TENANT_PROMPT, catalogue.TENANT_OUTPUT)):
            samples[metric] = [((name,), use[idx]) for name, use in uses]
        return samples


_LOOK_SECONDS = 1.0
# Indices of `catalogue.STEP_KINDS`.
_PREFILL, _DECODE, _MIXED = range(3)


class CoreMeter:
    """All numbers of the page. `clock` is the core's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.fronts = FrontTotals()
        # The core at one moment, replaced as a whole: all its metrics but histograms. Counts are since its start.
        self.last_look: dict[Metric, Samples] = {
            metric: metric.samples(*[0.0] * metric.num_cells)
            for metric in catalogue.CORE_METRICS
            if not metric.buckets and (metric.values or not metric.labels)
        }
        self.frontend_deaths = 0
        """Front ends that were lost. The loop counts them."""
        metrics = (catalogue.STEP_TOKENS, catalogue.PLAN_TO_RESULT, catalogue.CORE_STEP)
        self.histograms = {metric: Histogram(metric.buckets) for metric in metrics}
        self.steps: dict[int, tuple[Histogram, ...]] = {}
        """One histogram per kind of step, by the worker's place."""
        # By the number of a lane, which is never used twice: the place of its worker.
        self._places: dict[int, int] = {}
        self._clock = clock
        self._has_read_step = False
        self._look_at = float("-inf")
        # The core's clock and Unix time since which no request is computed.
        self._since = (0.0, 0.0)

    def step_arrived(self, event: StepDone, core: Scheduler) -> None:
        """Measures a step before the core reads its result; results of void plans do not count."""
        self._has_read_step = True
        lane = core.lanes.get(event.worker)
        if lane is None or event.generation != lane.generation or event.status is not StepStatus.OK:
            return
        plans = lane.in_flight
        if not plans or plans[0].step != event.step:
            return
        plan = plans[0]
        num_prefill, num_decode = plan.prefill_tokens, plan.decode_tokens
        kind = (_MIXED if num_decode else _PREFILL) if num_prefill else _DECODE
        place = self._place_of(lane, core)
        if place not in self.steps:
            self.steps[place] = tuple(Histogram(catalogue.STEP_SECONDS.buckets) for _ in catalogue.STEP_KINDS)
        self.steps[place][kind].observe(event.compute_us / 1e6)
        self.histograms[catalogue.PLAN_TO_RESULT].observe(self._clock() - plan.sent_at)
        self.histograms[catalogue.STEP_TOKENS].observe(num_prefill + num_decode)

    def turned(self, core: Scheduler, began: float) -> None:
        """Measures a turn of the core's thread that is over, if it read a step; looks at the core once a second."""
        if self._has_read_step:
            self._has_read_step = False
            self.histograms[catalogue.CORE_STEP].observe(self._clock() - began)
        if began >= self._look_at:
            self._look_at = began + _LOOK_SECONDS
            self._look(core)

    def _place_of(self, lane: Lane, core: Scheduler) -> int:
        """The smallest number that is free: a worker that replaces another takes over its series."""
        if lane.number not in self._places:
            present = {one.number for one in core.lanes.values()}
            self._places = {number: taken for number, taken in self._places.items() if number in present}
            taken = set(self._places.values())
            self._places[lane.number] = next(free for free in range(len(taken) + 1) if free not in taken)
        return self._places[lane.number]

    def _look(self, core: Scheduler) -> None:
        self.fronts.keep(core.frontends)
        lanes, counters = list(core.lanes.values()), core.counters
        seated = [lane for lane in lanes if lane.phases.counts]
        value = core.availability.value
        if value is not None and value.since != self._since[0]:
            self._since = value.since, time.time() - (self._clock() - value.since)
        states = [state_of(lane)[0] for lane in lanes]
        values: dict[Metric, float] = {
            catalogue.RUNNING: sum(lane.rows.num_seated for lane in seated),
            catalogue.WAITING: core.queue.num_waiting,
            catalogue.CACHE_QUERIES: counters.prompt_tokens,
            catalogue.CACHE_HITS: counters.cached_prompt_tokens,
            catalogue.PREEMPTIONS: counters.preemptions,
            catalogue.NOT_SERVING_SINCE: 0.0 if value is None else self._since[1],
            catalogue.WORKERS: core.availability.num_workers,
            catalogue.STANDBY_WORKERS: states.count(WorkerState.STANDBY),
            catalogue.FRONTENDS: len(core.frontends),
        }
        reasons = [float(value is not None and value.reason is reason) for reason in SERVICE_REASONS]
        self.last_look = {
            **{metric: metric.samples(number) for metric, number in values.items()},
            catalogue.NOT_SERVING: catalogue.NOT_SERVING.samples(*reasons),
            catalogue.RESETS: catalogue.RESETS.samples(*counters.resets_by_cause.values()),
            catalogue.KV_USAGE: [
                ((str(self._place_of(lane, core)),), lane.pool.num_used / lane.info.usable_pages) for lane in seated
            ],
        }

    def samples(self, tenants: Container[str]) -> dict[Metric, Samples]:
        """Returns the samples of each metric of the page. For any thread."""
        return {
            **self.fronts.samples(tenants),
            **self.last_look,
            catalogue.DEATHS: catalogue.DEATHS.samples(self.frontend_deaths),
            **{metric: metric.samples(*histogram.cells()) for metric, histogram in self.histograms.items()},
            catalogue.STEP_SECONDS: [
                ((str(place), kind), histogram.cells())
                for place, kinds in list(self.steps.items())
                for kind, histogram in zip(catalogue.STEP_KINDS, kinds, strict=True)
            ],
        }
