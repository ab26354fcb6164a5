"""`python -m tests.measure.policies`: what each policy of the core gains, and what its constants are worth.

Owns the flags, the order of runs and what is printed. All runs are on virtual time, so the same command prints the same
figures on any machine.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import starmap
from statistics import median

from tests.measure.harness import Measurement
from tests.measure.policies.constants import SWEEPS, sweep
from tests.measure.policies.experiments import EXPERIMENTS
from tests.measure.policies.summary import gains, table, verdict
from tests.measure.policies.trial import Figures, run

SEEDS, QUICK_SEEDS, QUICK_REQUESTS = 3, 1, 300


def main(argv: Sequence[str]) -> int:
    """Returns exit code 0, independent of the results."""
    measurement = Measurement("policies")
    args = _arguments(measurement, argv)
    seeds = args.seeds or (QUICK_SEEDS if args.quick else SEEDS)
    requests = args.requests or (QUICK_REQUESTS if args.quick else 0)
    chosen = [sweep(name) for name in args.constant] if args.constant else [EXPERIMENTS[name] for name in args.only]
    work = [
        (experiment.name, bool(args.constant), s, v, seed, requests)
        for experiment in chosen
        for s in range(len(experiment.scenarios))
        for v in range(len(experiment.variants))
        for seed in range(seeds)
    ]
    results = _results(work, args.jobs)
    for experiment in chosen:
        runs: dict[tuple[str, str], list[Figures]] = {}
        measurement.note(f"\n{experiment.name}: {experiment.claim}")
        for scenario in experiment.scenarios:
            for variant in experiment.variants:
                runs[scenario.name, variant.name] = [next(results) for _ in range(seeds)]
                of_seeds = runs[scenario.name, variant.name]
                middle = {name: median(each[name] for each in of_seeds) for name in of_seeds[0]}
                line = {"experiment": experiment.name, "scenario": scenario.name, "variant": variant.name}
                measurement.line({**line, "median": middle, "seeds": of_seeds}, text="")
            measurement.note(f"\n{table(experiment, scenario, runs)}")
        found = [asdict(each) for each in gains(experiment, runs)]
        text = f"\n{verdict(experiment, runs)}"
        measurement.line({"experiment": experiment.name, "gains": found}, text=text)
    return 0


def _arguments(measurement: Measurement, argv: Sequence[str]) -> argparse.Namespace:
    flag = measurement.flag
    flag("--only", nargs="+", choices=list(EXPERIMENTS), default=list(EXPERIMENTS), metavar="NAME",
         help=f"experiments: {', '.join(EXPERIMENTS)} (all)")  # fmt: skip
    flag("--constant", nargs="+", choices=list(SWEEPS), metavar="NAME",
         help=f"compare values of a constant in place of experiments: {', '.join(SWEEPS)}")  # fmt: skip
    flag("--seeds", type=int, metavar="N", help=f"seeds per run ({SEEDS})")
    flag("--requests", type=int, metavar="N", help="most requests per run")
    flag("--quick", action="store_true", help=f"one seed, {QUICK_REQUESTS} requests: a minute")
    flag("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    return measurement.begin(argv)


# The experiment, whether it is a sweep, the indexes of scenario and variant, the seed, the most requests.
_Job = tuple[str, bool, int, int, int, int]


def _results(work: Sequence[_Job], jobs: int) -> Iterator[Figures]:
    """Yields the results in the order of the work."""
    if jobs < 2:
        yield from starmap(_one, work)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_one, *zip(*work, strict=True))


def _one(experiment: str, is_sweep: bool, scenario: int, variant: int, seed: int, requests: int) -> Figures:
    found = sweep(experiment) if is_sweep else EXPERIMENTS[experiment]
    return run(found.scenarios[scenario], found.variants[variant], seed, requests=requests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
