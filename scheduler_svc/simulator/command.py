"""`tandem simulate`: one simulation, a comparison of policies or the search for the highest rate.

Owns the order of the work and what is printed. Wrong options and files raise errors of one sentence. Progress goes to
stderr: each phase and how long it took. Nothing that is simulated reads the wall clock.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from scheduler_svc.recording.steps_file import StepsFile
from scheduler_svc.simulator.cost import FittedCost
from scheduler_svc.simulator.options import PROGRAM, Options, Workload, setup_of, workload_of
from scheduler_svc.simulator.report import Figures, comparison_table, duration, figures_of, summary, table
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.tally import Tally
from scheduler_svc.simulator.traces import REQUESTS, Trace, write_trace
from tandem_contract.plural import counted

LATE_SHARE = 0.01
"""The share of requests that may miss the goal, because the goal is a p99."""
_MIN_RATE, _MAX_RATE = 1e-6, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One simulation at one rate.

    `missed` counts requests that got their first token too late or never. `is_whole` is False if the simulation was
    stopped because more requests had missed than may.
    """

    rate: float
    requests: int
    missed: int
    ttft_p99: float
    is_whole: bool

    @property
    def holds(self) -> bool:
        """Whether the goal is met."""
        return self.is_whole and self.missed <= LATE_SHARE * self.requests


def find_rate(
    probe: Callable[[float], Probe], *, start: float, max_probes: int, precision: float
) -> tuple[float, float, list[Probe]]:
    """Doubles or halves from `start` until one rate holds and one fails, then halves the gap on a log scale.

    Returns the highest rate that held, 0 without one, the lowest that failed, inf without one, and all probes.
    """
    holding, failing = 0.0, math.inf
    probes: list[Probe] = []
    rate = start
    while len(probes) < max_probes and _MIN_RATE <= rate <= _MAX_RATE and failing > holding * (1 + precision):
        probes.append(probe(rate))
        if probes[-1].holds:
            holding = rate
        else:
            failing = rate
        rate = holding * 2 if failing == math.inf else failing / 2 if holding == 0.0 else math.sqrt(holding * failing)
    return holding, failing, probes


_SECONDS_BETWEEN_LINES = 5.0


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def phase(name: str) -> Generator[None]:
    """Prints how long the phase took, unless it raised."""
    begun = time.monotonic()
    yield
    note(f"{time.monotonic() - begun:8.2f} s  {name}")


class Progress:
    """The progress of one simulation of `num_requests` requests."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._begun = self._noted = time.monotonic()

    def __call__(self, simulation: Simulation) -> bool:
        """Prints a line if the last one is old enough. Returns True, so that the simulation continues."""
        now = time.monotonic()
        if now - self._noted < _SECONDS_BETWEEN_LINES:
            return True
        self._noted = now
        tally = simulation.tally
        steps = sum(worker.steps for worker in simulation.workers.values())
        ended = tally.finished + tally.rejected
        seconds = now - self._begun
        note(
            f"{seconds:8.0f} s  {ended / self._num_requests:4.0%}: {ended:,} of "
            f"{counted(self._num_requests, 'request')} ended, "
            f"{tally.live:,} live; {simulation.now:,.0f} s of virtual time, {counted(steps, 'step')}"
        )
        return True


def run(options: Options) -> int:
    """Returns exit code 0. Raises ValueError and OSError with a sentence for the terminal."""
    if options.write_trace is not None:
        requests = options.requests or REQUESTS
        with phase(f"wrote {counted(requests, 'request')} to {options.write_trace}"):
            write_trace(options.write_trace, requests=requests, seed=options.seed)
        return 0
    _check(options)
    setup = setup_of(options)
    if isinstance(setup.cost, FittedCost):
        note(setup.cost.verdict)
    with phase("requests read" if options.trace else "requests described"):
        workload = workload_of(options)
    if isinstance(workload, Trace):
        note(workload.description)
    if options.find_rate:
        _search(options, setup, workload)
    else:
        _simulate(options, setup, workload)
    return 0


def _check(options: Options) -> None:
    if options.find_rate is not (options.ttft_p99 is not None):
        raise ValueError("--find-rate needs --ttft-p99 SECONDS, and --ttft-p99 needs --find-rate")
    if options.compare and (options.find_rate or options.steps):
        raise ValueError("--compare cannot be combined with --find-rate or --steps")
    if options.compare == "spread" and options.cells == 1:
        raise ValueError("--compare spread needs several services: --cells is 1")
    if options.find_rate and (options.concurrency or options.steps):
        raise ValueError("--find-rate cannot be combined with --concurrency or --steps")


def _title(setup: Setup, workload: Workload, how: str) -> str:
    workers = f", {setup.workers} workers" if setup.workers > 1 else ""
    cells = f", {setup.cells} cells by {setup.spread}" if setup.cells > 1 else ""
    return f"{setup.cost.name}{workers}{cells}: {workload.name} {how}"


def _simulate(options: Options, setup: Setup, workload: Workload) -> None:
    """Runs one simulation, or one for each value of the policy to compare."""
    columns: list[tuple[str, Figures]] = []
    title = ""
    for name, variant in options.variants():
        setup = setup_of(variant) if name else setup
        with phase(f"simulated: {name}" if name else "simulated"):
            columns.append((name, _run(variant, setup, workload)))
        title = _title(setup, workload, _pace(options, workload))
        if options.as_json:
            what = {"what": title, "variant": name} if name else {"what": title}
            print(json.dumps({**what, "seed": options.seed, **columns[-1][1]}), flush=True)
    if not options.as_json:
        figures = columns[0][1]
        print(comparison_table(columns) if options.compare else table(figures))
        print()
        end = f"; {options.compare} compared" if options.compare else f": {summary(figures)}"
        print(f"{PROGRAM}: {title}{end}; seed {options.seed}")


def _pace(options: Options, workload: Workload) -> str:
    if options.concurrency:
        return f"with {options.concurrency} at once"
    # Requests that arrive at the same moment have no gaps to scale.
    return f"at {options.rate or workload.own_rate:.4g}/s" if workload.own_rate else "all at once"


def _run(options: Options, setup: Setup, workload: Workload) -> Figures:
    tally = Tally(tenants=workload.num_tenants)
    arrivals = workload.arrivals(options.rate or workload.own_rate, setup.info.vocab_size)
    simulation = Simulation(setup, arrivals, tally, concurrency=options.concurrency or 0)
    steps = StepsFile(options.steps, clock=lambda: simulation.now) if options.steps else None
    if steps is not None:
        for cell in simulation.cells:
            cell.on_step = steps.add
    simulation.run(Progress(workload.num_requests))
    if steps is not None:
        steps.close()
    return figures_of(simulation, setup)


def _search(options: Options, setup: Setup, workload: Workload) -> None:
    goal = options.ttft_p99
    assert goal is not None
    if not workload.own_rate:
        raise ValueError("--find-rate: all requests of the trace arrive at once, so they have no rate")
    show = note if options.as_json else partial(print, flush=True)

    def probe(rate: float) -> Probe:
        made = _probe(setup, workload, rate, goal)
        missed = f"{made.missed:,} of {made.requests:,} too late" + ("" if made.is_whole else ", stopped there")
        p99 = f"TTFT p99 {duration(made.ttft_p99)}, " if made.is_whole else ""
        show(f"{rate:12.4g} requests/s  {'holds' if made.holds else 'fails'}  {p99}{missed}")
        return made

    with phase("searched"):
        start = options.rate or workload.own_rate
        highest, lowest, probes = find_rate(probe, start=start, max_probes=options.probes, precision=options.precision)
    if options.as_json:
        tried = [
            {"rate": probed.rate, "holds": probed.holds, "ttft_p99": probed.ttft_p99 if probed.is_whole else None}
            for probed in probes
        ]
        failing = lowest if lowest < math.inf else None
        print(json.dumps({"goal_ttft_p99": goal, "rate": highest, "fails_at": failing, "probes": tried}))
        return
    print()
    title = _title(setup, workload, f"with TTFT p99 under {duration(goal)}")
    print(f"{PROGRAM}: {title}: {_answer(highest, lowest)}; seed {options.seed}")


def _answer(highest_holding: float, lowest_failing: float) -> str:
    if not highest_holding:
        return f"no rate that was tried, the lowest {lowest_failing:.4g} requests/s"
    if lowest_failing == math.inf:
        return f"{highest_holding:.4g} requests/s and more"
    return f"{highest_holding:.4g} requests/s ({lowest_failing:.4g} fail)"


def _probe(setup: Setup, workload: Workload, rate: float, ttft_limit: float) -> Probe:
    """Runs one simulation at this rate and stops it as soon as the goal is missed."""
    tally = Tally(tenants=1, ttft_limit=ttft_limit)
    progress = Progress(workload.num_requests)
    may_miss = LATE_SHARE * workload.num_requests
    simulation = Simulation(setup, workload.arrivals(rate, setup.info.vocab_size), tally)
    is_whole = simulation.run(lambda simulation: progress(simulation) and tally.missed <= may_miss)
    return Probe(
        rate=rate,
        requests=workload.num_requests,
        missed=tally.missed,
        ttft_p99=tally.all_requests.ttft.percentile(99),
        is_whole=is_whole,
    )
