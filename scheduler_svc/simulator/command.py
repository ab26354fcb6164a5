"""`tandem simulate`: one simulation, or the search for the highest rate, from flags to what is printed.

Owns the order of things. Everything that is wrong with flags and files ends in one sentence.
"""

import argparse
import json
from functools import partial

from scheduler_svc.recording.steps_file import StepsFile
from scheduler_svc.simulator.cost.fitted import FittedCost
from scheduler_svc.simulator.progress import Progress, phase, tell
from scheduler_svc.simulator.report.comparison import comparison_table, variants
from scheduler_svc.simulator.report.tables import Figures, duration, figures_of, last_line, table
from scheduler_svc.simulator.report.tally import Tally
from scheduler_svc.simulator.search import LATE_SHARE, Found, Probe, find_rate
from scheduler_svc.simulator.setup import SetupError, setup_of, workload_of
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.workload.mooncake_like import REQUESTS, write_trace
from scheduler_svc.simulator.workload.request_source import Workload
from scheduler_svc.simulator.workload.traces import Trace


def run(args: argparse.Namespace) -> int:
    """Exit code 0. Raises ValueError and OSError with one sentence for people."""
    if args.write_trace is not None:
        requests = args.requests or REQUESTS
        with phase(f"wrote {requests:,} requests to {args.write_trace}"):
            write_trace(args.write_trace, requests=requests, seed=args.seed)
        return 0
    if args.find_rate is not (args.ttft_p99 is not None):
        raise SetupError("--find-rate and --ttft-p99 SECONDS go together")
    if args.compare and (args.find_rate or args.steps):
        raise SetupError("--compare takes several runs: it takes neither --find-rate nor --steps")
    if args.find_rate and (args.concurrency or args.steps):
        raise SetupError("--find-rate finds the rate by several runs: it takes neither --concurrency nor --steps")
    setup = setup_of(args)
    if isinstance(setup.cost, FittedCost):
        tell(setup.cost.verdict)
    with phase("requests read" if args.trace else "requests described"):
        workload = workload_of(args)
    if isinstance(workload, Trace):
        tell(_described(workload))
    if args.find_rate:
        _search(args, setup, workload)
    elif args.compare:
        _compare(args, workload)
    else:
        _simulate(args, setup, workload)
    return 0


def _described(trace: Trace) -> str:
    return (
        f"{trace.name}: {trace.num_requests:,} requests in {trace.at[-1]:,.0f} s; {trace.inputs.mean():,.0f} tokens in "
        f"and {trace.outputs.mean():,.0f} out on average; {trace.shared_blocks:.1%} of its blocks stood before"
    )


def _what(setup: Setup, workload: Workload, how: str) -> str:
    workers = f", {setup.workers} workers" if setup.workers > 1 else ""
    return f"{setup.cost.name}{workers}: {workload.name} {how}"


def _simulate(args: argparse.Namespace, setup: Setup, workload: Workload) -> None:
    with phase("simulated"):
        figures = _run(args, setup, workload)
    what = _what(setup, workload, _how(args, workload))
    if args.json:
        print(json.dumps({"what": what, "seed": args.seed, **figures}))
        return
    print(table(figures))
    print()
    print(last_line(what, figures, args.seed))


def _compare(args: argparse.Namespace, workload: Workload) -> None:
    columns: list[tuple[str, Figures]] = []
    what = ""
    for name, flags in variants(args):
        setup = setup_of(flags)
        with phase(f"simulated: {name}"):
            columns.append((name, _run(flags, setup, workload)))
        what = _what(setup, workload, _how(args, workload))
        if args.json:
            print(json.dumps({"what": what, "variant": name, "seed": args.seed, **columns[-1][1]}), flush=True)
    if not args.json:
        print(comparison_table(columns))
        print()
        print(f"tandem simulate: {what}; {args.compare} compared; seed {args.seed}")


def _how(args: argparse.Namespace, workload: Workload) -> str:
    if args.concurrency:
        return f"with {args.concurrency} at once"
    # Requests of one moment have no gaps to shorten.
    return f"at {args.rate or workload.own_rate:.4g}/s" if workload.own_rate else "all at once"


def _run(args: argparse.Namespace, setup: Setup, workload: Workload) -> Figures:
    tally = Tally(tenants=workload.num_tenants)
    progress = Progress(workload.num_requests)

    def on_turn(simulation: Simulation) -> bool:
        progress(simulation)
        return True

    arrivals = workload.arrivals(args.rate or workload.own_rate, setup.info.vocab_size)
    simulation = Simulation(setup, arrivals, tally, concurrency=args.concurrency or 0)
    if args.steps is None:
        simulation.run(on_turn)
    else:
        steps = StepsFile(args.steps, clock=lambda: simulation.now)
        simulation.on_step = steps.add
        simulation.run(on_turn)
        steps.close()
    return figures_of(simulation, setup)


def _search(args: argparse.Namespace, setup: Setup, workload: Workload) -> None:
    if not workload.own_rate:
        raise SetupError("--find-rate: all requests of the trace come at once, so they have no rate")
    say = tell if args.json else partial(print, flush=True)

    def probe(rate: float) -> Probe:
        made = _probe(setup, workload, rate, args.ttft_p99)
        missed = f"{made.missed:,} of {made.requests:,} too late" + ("" if made.is_whole else ", stopped there")
        p99 = f"TTFT p99 {duration(made.ttft_p99)}, " if made.is_whole else ""
        say(f"{rate:12.4g} requests/s  {'holds' if made.holds else 'fails'}  {p99}{missed}")
        return made

    with phase("searched"):
        start = args.rate or workload.own_rate
        found, probes = find_rate(probe, start=start, most_probes=args.probes, precision=args.precision)
    if args.json:
        tried = [
            {"rate": each.rate, "holds": each.holds, "ttft_p99": each.ttft_p99 if each.is_whole else None}
            for each in probes
        ]
        failing = found.least_failing if found.least_failing < float("inf") else None
        print(json.dumps({"goal_ttft_p99": args.ttft_p99, "rate": found.best, "fails_at": failing, "probes": tried}))
        return
    what = _what(setup, workload, f"with TTFT p99 under {duration(args.ttft_p99)}")
    print()
    print(f"tandem simulate: {what}: {_answer(found)}; seed {args.seed}")


def _answer(found: Found) -> str:
    if not found.best:
        return f"no rate that was tried, the lowest {found.least_failing:.4g} requests/s"
    if found.least_failing == float("inf"):
        return f"{found.best:.4g} requests/s and more"
    return f"{found.best:.4g} requests/s ({found.least_failing:.4g} fail)"


def _probe(setup: Setup, workload: Workload, rate: float, ttft_limit: float) -> Probe:
    """One simulation at this rate, ended early once it cannot hold any more."""
    tally = Tally(tenants=1, ttft_limit=ttft_limit)
    progress = Progress(workload.num_requests)
    may_miss = LATE_SHARE * workload.num_requests

    def on_turn(simulation: Simulation) -> bool:
        progress(simulation)
        return tally.missed <= may_miss

    simulation = Simulation(setup, workload.arrivals(rate, setup.info.vocab_size), tally)
    is_whole = simulation.run(on_turn)
    return Probe(
        rate=rate,
        requests=workload.num_requests,
        missed=tally.missed,
        ttft_p99=tally.everybody.ttft.percentile(99),
        is_whole=is_whole,
    )
