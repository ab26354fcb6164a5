"""Several services on one virtual clock, a core that takes time, and workers that die."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.simulator.report import figures_of, table
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.workload import Router, Spread, Synthetic, parse_lengths
from tests.scheduler_svc.simulator.rig import Flat, arrival, arrivals, setup, simulated

# 32 prefixes of 16 pages; the pages of a worker hold a fraction of them beside its rows.
PREFIXES = Synthetic(
    num_requests=600, own_rate=120.0, inputs=parse_lengths("uniform:8:64"), outputs=parse_lengths("uniform:1:20"),
    prefix_groups=32, prefix_tokens=256,
)  # fmt: skip


def fleet(cells: int, workers: int, spread: Spread = Spread.HASH, **changes: float) -> Setup:
    made = setup(workers=workers, num_pages=700, max_rows=16, cost=Flat(fixed=0.002, each=1e-5), max_waiting=10_000)
    return replace(made, cells=cells, spread=spread, **changes)


def run(made: Setup, workload: Synthetic = PREFIXES) -> Simulation:
    simulation = simulated(made, arrivals(workload))
    assert simulation.tally.finished == simulation.tally.submitted == workload.num_requests
    return simulation


def hit_rate(simulation: Simulation) -> float:
    return simulation.tally.cached_tokens / simulation.tally.prompt_tokens


@pytest.mark.long
def test_cells_chosen_by_the_beginning_hit_as_often_as_one_core() -> None:
    one, cells, random = (run(fleet(*size)) for size in ((1, 4), (4, 1), (4, 1, Spread.RANDOM)))
    assert hit_rate(cells) >= 0.95 * hit_rate(one)
    assert hit_rate(random) < 0.9 * hit_rate(cells)
    assert min(cells.num_submitted) > 0


def test_the_least_loaded_cell_is_chosen_if_asked_for() -> None:
    router = Router(Spread.LEAST, 3, seed=0)
    assert router.choose(np.arange(4, dtype=np.int32), 0, [2, 1, 1]) == 1
    # Ties go to the first.
    assert router.choose(np.arange(4, dtype=np.int32), 0, [2, 2, 2]) == 0


@pytest.mark.parametrize("spread", list(Spread))
def test_a_router_is_repeatable_and_one_cell_takes_all(spread: Spread) -> None:
    prompts = [np.arange(each, each + 300, dtype=np.int32) for each in range(50)]

    def choices(cells: int, live: Sequence[int]) -> list[int]:
        router = Router(spread, cells, seed=3)
        return [router.choose(prompt, 0, live) for prompt in prompts]

    assert choices(4, [0] * 4) == choices(4, [0] * 4)
    assert set(choices(1, [99])) == {0}


def test_equal_beginnings_and_tenants_stay_together_until_a_cell_has_more_than_its_share() -> None:
    router = Router(Spread.HASH, 4, seed=0)
    shared = np.arange(256, dtype=np.int32)
    prompts = [np.append(shared, last).astype(np.int32) for last in range(5)]
    [home] = {router.choose(prompt, 0, [0] * 4) for prompt in prompts}
    live = [0] * 4
    # Of 9 requests with the new one, 1.25 times a quarter is 3.
    live[home] = 8
    assert router.choose(prompts[0], 0, live) != home
    live = [2] * 4
    live[home] = 3
    assert router.choose(prompts[0], 0, live) == home
    live[home] = 5
    assert router.choose(prompts[0], 0, live) != home
    assert len({router.choose(shared, tenant, [0] * 4) for tenant in range(40)}) == 4


def test_a_core_that_takes_time_delays_each_step_and_says_when_it_is_full() -> None:
    """A prompt of one chunk and 4 more tokens: the request and 5 results, 1 ms each, beside steps of 10 ms."""
    [alone] = [simulated(replace(setup(), core_seconds=0.001), iter([arrival(0.0, 16, 5)]))]
    assert alone.cells[0].core_seconds == pytest.approx(0.006)
    assert alone.tally.all_requests.ttft.largest == pytest.approx(0.012)
    busy = fleet(1, 8, core_seconds=0.002)
    simulation = run(busy, replace(PREFIXES, num_requests=150))
    figures = figures_of(simulation, busy)
    assert figures["cells"]["busiest_core"] > 0.9
    assert "it cannot steer its workers" in table(figures)
    free = figures_of(run(fleet(1, 8), replace(PREFIXES, num_requests=150)), fleet(1, 8))
    assert figures["ttft_seconds"]["p99"] > free["ttft_seconds"]["p99"]
    assert "cells" not in free and "deaths" not in free


def test_deaths_cost_time_and_no_token() -> None:
    workload = replace(PREFIXES, num_requests=200)
    wanted = sum(each.output_tokens for each in arrivals(workload))
    made = fleet(2, 2, kill_seconds=0.5, restart_seconds=0.2)
    simulation = run(made, workload)
    assert simulation.num_deaths >= 3
    assert simulation.tally.output_tokens == wanted
    assert simulation.tally.recomputed_tokens > 0
    figures = figures_of(simulation, made)
    assert figures["deaths"] == simulation.num_deaths and "workers were killed" in table(figures)
    assert figures == figures_of(run(made, workload), made)


def test_requests_wait_while_every_worker_is_away() -> None:
    made = replace(setup(), kill_seconds=0.035, restart_seconds=1.0)
    requests = itertools.chain([arrival(0.0, 16, 8)])
    tally = simulated(made, requests).tally
    assert tally.finished == 1 and tally.output_tokens == 8
    assert tally.all_requests.itl.largest > 1.0
