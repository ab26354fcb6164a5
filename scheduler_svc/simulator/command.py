"""`tandem simulate`: one simulation, a comparison of policies or the search for the highest rate.

Owns the order of the work and what is printed. Wrong options and files raise errors of one sentence.
"""

import json
from functools import partial

from scheduler_svc.recording.steps_file import StepsFile
from scheduler_svc.simulator.cost.fitted import FittedCost
from scheduler_svc.simulator.options import PROGRAM, Options
from scheduler_svc.simulator.progress import Progress, note, phase
from scheduler_svc.simulator.report.comparison import comparison_table
from scheduler_svc.simulator.report.tables import Figures, duration, figures_of, summary, table
from scheduler_svc.simulator.search import LATE_SHARE, Probe, RateRange, find_rate
from scheduler_svc.simulator.setup import SetupError, setup_of, workload_of
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.tally import Tally
from scheduler_svc.simulator.workload.mooncake_like import REQUESTS, write_trace
from scheduler_svc.simulator.workload.request_source import Workload
from scheduler_svc.simulator.workload.traces import Trace


def run(options: Options) -> int:
    """Returns exit code 0. Raises ValueError and OSError with a sentence for the terminal."""
    if options.write_trace is not None:
        requests = options.requests or REQUESTS
        with phase(f"wrote {requests:,} requests to {options.write_trace}"):
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
    elif options.compare:
        _compare(options, workload)
    else:
        _simulate(options, setup, workload)
    return 0


def _check(options: Options) -> None:
    if options.find_rate is not (options.ttft_p99 is not None):
        raise SetupError("--find-rate needs --ttft-p99 SECONDS, and --ttft-p99 needs --find-rate")
    if options.compare and (options.find_rate or options.steps):
        raise SetupError("--compare cannot be combined with --find-rate or --steps")
    if options.compare == "spread" and options.cells == 1:
        raise SetupError("--compare spread needs several services: --cells is 1")
    if options.find_rate and (options.concurrency or options.steps):
        raise SetupError("--find-rate cannot be combined with --concurrency or --steps")


def _title(setup: Setup, workload: Workload, how: str) -> str:
    workers = f", {setup.workers} workers" if setup.workers > 1 else ""
    cells = f", {setup.cells} cells by {setup.spread}" if setup.cells > 1 else ""
    return f"{setup.cost.name}{workers}{cells}: {workload.name} {how}"


def _simulate(options: Options, setup: Setup, workload: Workload) -> None:
    with phase("simulated"):
        figures = _run(options, setup, workload)
    title = _title(setup, workload, _pace(options, workload))
    if options.as_json:
        print(json.dumps({"what": title, "seed": options.seed, **figures}))
        return
    print(table(figures))
    print()
    print(f"{PROGRAM}: {title}: {summary(figures)}; seed {options.seed}")


def _compare(options: Options, workload: Workload) -> None:
    columns: list[tuple[str, Figures]] = []
    title = ""
    for name, variant in options.variants():
        setup = setup_of(variant)
        with phase(f"simulated: {name}"):
            columns.append((name, _run(variant, setup, workload)))
        title = _title(setup, workload, _pace(options, workload))
        if options.as_json:
            print(json.dumps({"what": title, "variant": name, "seed": options.seed, **columns[-1][1]}), flush=True)
    if not options.as_json:
        print(comparison_table(columns))
        print()
        print(f"{PROGRAM}: {title}; {options.compare} compared; seed {options.seed}")


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
        simulation.watch_steps(steps.add)
    simulation.run(Progress(workload.num_requests))
    if steps is not None:
        steps.close()
    return figures_of(simulation, setup)


def _search(options: Options, setup: Setup, workload: Workload) -> None:
    goal = options.ttft_p99
    assert goal is not None
    if not workload.own_rate:
        raise SetupError("--find-rate: all requests of the trace arrive at once, so they have no rate")
    show = note if options.as_json else partial(print, flush=True)

    def probe(rate: float) -> Probe:
        made = _probe(setup, workload, rate, goal)
        missed = f"{made.missed:,} of {made.requests:,} too late" + ("" if made.is_whole else ", stopped there")
        p99 = f"TTFT p99 {duration(made.ttft_p99)}, " if made.is_whole else ""
        show(f"{rate:12.4g} requests/s  {'holds' if made.holds else 'fails'}  {p99}{missed}")
        return made

    with phase("searched"):
        start = options.rate or workload.own_rate
        found, probes = find_rate(probe, start=start, max_probes=options.probes, precision=options.precision)
    if options.as_json:
        tried = [
            {"rate": each.rate, "holds": each.holds, "ttft_p99": each.ttft_p99 if each.is_whole else None}
            for each in probes
        ]
        failing = found.lowest_failing if found.lowest_failing < float("inf") else None
        print(json.dumps({"goal_ttft_p99": goal, "rate": found.highest_holding, "fails_at": failing, "probes": tried}))
        return
    print()
    title = _title(setup, workload, f"with TTFT p99 under {duration(goal)}")
    print(f"{PROGRAM}: {title}: {_answer(found)}; seed {options.seed}")


def _answer(found: RateRange) -> str:
    if not found.highest_holding:
        return f"no rate that was tried, the lowest {found.lowest_failing:.4g} requests/s"
    if found.lowest_failing == float("inf"):
        return f"{found.highest_holding:.4g} requests/s and more"
    return f"{found.highest_holding:.4g} requests/s ({found.lowest_failing:.4g} fail)"


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
