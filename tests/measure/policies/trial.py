"""One run of a scenario under a variant with a seed.

Owns how flags, constants and changes are applied, and which figures a run yields.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from scheduler_svc.simulator import options
from scheduler_svc.simulator.options import setup_of, workload_of
from scheduler_svc.simulator.report import figures_of
from scheduler_svc.simulator.simulation import Simulation
from scheduler_svc.simulator.traces import write_trace
from tests.measure.policies.fairness import jain_index
from tests.measure.policies.observed import Observed
from tests.measure.policies.scenario import Scenario, Variant

Figures = dict[str, float]
_CORE = "scheduler_svc.core."


def run(scenario: Scenario, variant: Variant, seed: int, *, requests: int = 0) -> Figures:
    """Returns the figures, which the arguments determine. `requests` above 0 lowers the scenario's number."""
    requests = min(requests, scenario.requests) if requests else scenario.requests
    flags = [*shlex.split(scenario.flags), *shlex.split(variant.flags), f"--requests={requests}", f"--seed={seed}"]
    with TemporaryDirectory(prefix="tandem-policies-") as folder:
        if scenario.trace_requests:
            path = Path(folder) / "trace.jsonl"
            write_trace(path, requests=scenario.trace_requests, seconds=scenario.trace_seconds, seed=seed)
            flags.append(f"--trace={path}")
        chosen = options.read(flags)
        workload = workload_of(chosen)
    setup = setup_of(chosen)
    at_once = chosen.concurrency or 0
    tally = Observed(tenants=workload.num_tenants, requests=requests, at_once=at_once)
    coming = tally.watch(workload.arrivals(chosen.rate or workload.own_rate, setup.info.vocab_size))
    with constants(variant.constants), variant.change():
        simulation = Simulation(setup, coming, tally, concurrency=at_once)
        simulation.run()
    found = figures_of(simulation, setup)
    computed = found["waste"]["computed_tokens"] - found["waste"]["padding_tokens"]
    seconds = tally.window_seconds or found["seconds"]
    figures = {
        "tokens_per_second": tally.window_outputs / seconds,
        "requests_per_second": found["throughput"]["requests_per_second"],
        "ttft_p50": found["ttft_seconds"]["p50"],
        "ttft_p99": found["ttft_seconds"]["p99"],
        "itl_p99": found["itl_seconds"]["p99"],
        "total_mean": found["total_seconds"]["mean"],
        "preemptions": float(found["preemptions"]),
        "recomputed": found["waste"]["recomputed_tokens"] / computed,
        "hit_rate": found["hit_rate"],
        "page_use": tally.page_seconds / (seconds * found["pages"]["total"]),
        "rejected": float(found["requests"]["rejected"]),
        "served_tokens": float(tally.served.sum()),
        "window_seconds": seconds,
    }
    if workload.num_tenants > 1:
        figures |= {
            "small_ttft_p50": found["other_tenants"]["ttft_seconds"]["p50"],
            "small_ttft_p99": found["other_tenants"]["ttft_seconds"]["p99"],
            "greedy_ttft_p99": found["first_tenant"]["ttft_seconds"]["p99"],
            "small_served": float(tally.window_served[1:].sum() / max(1.0, tally.window_asked[1:].sum())),
            "jain": jain_index(tally.window_served, tally.window_asked),
        }
    return figures


@contextmanager
def constants(values: Mapping[str, float]) -> Iterator[None]:
    """Replaces constants of the core while the context lasts, in every module that has imported them."""
    changed: list[tuple[object, str, object]] = []
    for name, value in values.items():
        holders = [module for key, module in sys.modules.items() if key.startswith(_CORE) and hasattr(module, name)]
        if not holders:
            raise ValueError(f"the core has no constant {name}")
        changed += [(module, name, getattr(module, name)) for module in holders]
        for module in holders:
            setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
