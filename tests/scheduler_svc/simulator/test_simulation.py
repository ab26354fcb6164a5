"""The real core on virtual time: times computed by hand, and counts that must add up."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from scheduler_svc.simulator.report import figures_of
from scheduler_svc.simulator.simulation import Simulation
from scheduler_svc.simulator.tally import Tally
from scheduler_svc.simulator.workload import Synthetic, parse_lengths
from tests.scheduler_svc.simulator.rig import Flat, arrival, arrivals, setup, simulated


def synthetic(count: int = 150, rate: float = 50.0, **changes: object) -> Synthetic:
    lengths = {"inputs": parse_lengths("uniform:8:64"), "outputs": parse_lengths("uniform:1:20")}
    return Synthetic(num_requests=count, own_rate=rate, **{**lengths, **changes})  # pyright: ignore


def test_the_times_of_one_request_follow_from_its_steps() -> None:
    """A prompt of 300 in chunks of 128, 128 and 44, then 4 more tokens: 7 steps of 10 ms, sent in pairs."""
    simulation = simulated(setup(), iter([arrival(2.0, 300, 5)]))
    tally = simulation.tally
    assert tally.first_at == 2.0 and tally.last_at == pytest.approx(2.07)
    all_requests = tally.all_requests
    assert all_requests.ttft.largest == pytest.approx(0.03)
    assert all_requests.itl.count == 4 and all_requests.itl.largest == pytest.approx(0.01)
    assert all_requests.queue.largest == 0.0
    (worker,) = simulation.workers.values()
    assert worker.steps == 7 and worker.busy_seconds == pytest.approx(0.07)
    assert worker.wanted_tokens == 304  # The last token is sampled but never computed.
    assert worker.padding_tokens == 4  # 44 tokens in tiles of 16.
    assert tally.output_tokens == 5 and tally.discarded_tokens == 0


def test_link_delay_adds_once_each_way_and_overlaps_with_steps() -> None:
    tally = simulated(setup(link_seconds=0.001), iter([arrival(0.0, 16, 5)])).tally
    assert tally.all_requests.ttft.largest == pytest.approx(0.012)
    assert tally.last_at == pytest.approx(0.052)


def test_eos_ends_a_sequence_and_its_token_in_flight_is_discarded() -> None:
    exact = simulated(setup(), iter([arrival(0.0, 16, 5)])).tally
    asked = simulated(setup(ask_tokens=100), iter([arrival(0.0, 16, 5)])).tally
    assert (dict(exact.ends), dict(asked.ends)) == ({"length": 1}, {"eos": 1})
    assert exact.output_tokens == asked.output_tokens == 5
    assert (exact.discarded_tokens, asked.discarded_tokens) == (0, 1)


def test_every_request_gets_the_tokens_of_the_workload() -> None:
    workload = synthetic()
    wanted = list(arrivals(workload))
    for ask in (0, 500):
        tally = simulated(setup(ask_tokens=ask), iter(wanted)).tally
        assert tally.finished == tally.submitted == 150 and tally.live == 0
        assert tally.prompt_tokens == sum(len(each.prompt) for each in wanted)
        assert tally.output_tokens == sum(each.output_tokens for each in wanted)
        assert tally.all_requests.ttft.count == 150
        assert tally.all_requests.itl.count == tally.output_tokens - 150


def test_equal_setups_give_equal_figures() -> None:
    made = setup(num_pages=40, ask_tokens=100, cost=Flat(fixed=0.004, each=1e-5))
    first, second = (figures_of(simulated(made, arrivals(synthetic(prefix_groups=2, prefix_tokens=48))), made)
                     for _ in range(2))  # fmt: skip
    assert first == second
    other = figures_of(simulated(made, arrivals(synthetic(seed=1))), made)
    assert other["ttft_seconds"] != first["ttft_seconds"]


def test_shared_prefixes_are_cached_and_save_steps() -> None:
    def run(prefix_groups: int, *, shares: bool = True, tenants: int = 1) -> Tally:
        workload = synthetic(200, prefix_groups=prefix_groups, prefix_tokens=512, num_tenants=tenants)
        return simulated(setup(shares_prefixes=shares), arrivals(workload)).tally

    shared, alone, salted = run(1), run(1, shares=False), run(1, tenants=100)
    assert alone.cached_tokens == 0
    # All requests but the first find the prefix's 32 pages cached.
    assert shared.cached_tokens / shared.prompt_tokens > 0.85
    assert 0 < salted.cached_tokens < 0.7 * shared.cached_tokens
    assert shared.last_at < 0.7 * alone.last_at


def test_concurrency_keeps_a_fixed_number_of_requests_live() -> None:
    seen, tally = list[int](), Tally()

    def feed():
        for each in arrivals(synthetic(100, rate=0.001)):
            seen.append(tally.live)
            yield each

    simulation = Simulation(setup(), feed(), tally, concurrency=3)
    assert simulation.run()
    assert simulation.tally.finished == 100
    assert simulation.tally.last_at < 20  # Arrival times, a thousand seconds apart, are ignored.
    assert max(point.running + point.waiting for point in simulation.tally.timeline) == 3
    assert max(seen) == 3


def test_two_workers_halve_the_time() -> None:
    workload = synthetic(400, rate=1e6)
    one, two = (simulated(setup(workers=workers), arrivals(workload)) for workers in (1, 2))
    assert one.tally.last_at / two.tally.last_at == pytest.approx(2, rel=0.1)
    shares = [worker.busy_seconds for worker in two.workers.values()]
    assert min(shares) > 0.8 * max(shares)


def test_with_too_few_pages_every_request_still_finishes() -> None:
    workload = synthetic(100, rate=1e6, inputs=parse_lengths("16"), outputs=parse_lengths("uniform:1:200"))
    made = setup(num_pages=33, ask_tokens=400)
    simulation = simulated(made, arrivals(workload))
    tally, figures = simulation.tally, figures_of(simulation, made)
    assert tally.finished == 100 and tally.pages_used_max <= 32
    assert figures["pages"]["total"] == 32 and 8 < figures["pages"]["used_mean"] <= 32
    assert (figures["preemptions"] > 0) == (tally.preempted_requests > 0)
    roomy = simulated(setup(ask_tokens=400), arrivals(workload)).tally
    assert roomy.last_at <= tally.last_at and roomy.preempted_requests == 0


def test_rejected_requests_are_counted() -> None:
    tally = simulated(setup(max_waiting=10), (arrival(0.0, 16, 50) for _ in range(40))).tally
    assert tally.ends["rejected: queue full"] == tally.rejected == tally.missed > 0
    assert tally.finished + tally.rejected == 40
    long = simulated(setup(), iter([arrival(0.0, 5000, 1), arrival(0.0, 16, 1)])).tally
    assert long.rejected == 1 and long.finished == 1


def test_late_first_tokens_are_counted() -> None:
    tally = Tally(ttft_limit=0.015)
    # The second request's prompt is computed in the second and third step.
    coming = iter([arrival(0.0, 128, 1), arrival(0.0, 256, 1, first=500)])
    assert Simulation(setup(), coming, tally).run()
    assert tally.missed == 1


def test_a_run_ends_when_on_turn_returns_false() -> None:
    simulation = Simulation(setup(), arrivals(synthetic(10_000)), Tally())
    assert simulation.run(lambda running: running.tally.finished < 100) is False
    assert 100 <= simulation.tally.finished < 2000


def test_the_first_tenant_has_figures_separate_from_the_others() -> None:
    workload = synthetic(200, num_tenants=5, greedy_share=0.6)
    made = setup()
    simulation = simulated(made, arrivals(workload), tenants=5)
    first, others = simulation.tally.groups
    assert first.ttft.count + others.ttft.count == 200 and 90 < first.ttft.count < 150
    assert first.itl.count + others.itl.count == simulation.tally.all_requests.itl.count
    figures = figures_of(simulation, made)
    assert figures["first_tenant"]["total_seconds"]["max"] <= figures["total_seconds"]["max"]


def test_tables_of_live_requests_grow_and_their_slots_are_reused() -> None:
    """More requests are live at once than the tables first have room for, twice."""
    coming = (arrival(second, 16, 2, first=i) for second, i in itertools.product((0.0, 1e4), range(2100)))
    tally = simulated(setup(max_waiting=5000, max_rows=64, token_budget=2048), coming).tally
    assert tally.finished == 4200 and tally.all_requests.itl.count == 4200
    assert max(point.waiting for point in tally.timeline) > 2000


def test_a_timeline_stays_small_and_evenly_spaced() -> None:
    tally, load = Tally(), SimpleNamespace(pages_used=0, pages_cached=0, running=0, waiting=0)
    for i in range(100_000):
        tally.observe(load, i * 0.1)  # pyright: ignore
    at = np.array([point.at for point in tally.timeline])
    assert 128 <= len(at) <= 513
    assert at[-1] > 9_500 and np.diff(at).max() < 4 * np.median(np.diff(at))


def test_means_are_weighted_by_time() -> None:
    """One request takes 10 steps in one page, then the core idles as long, then another request runs."""
    tally = simulated(setup(), iter([arrival(0.0, 6, 10), arrival(0.2, 6, 10, first=100)])).tally
    used, _, running = tally.means()
    assert running == pytest.approx(2 / 3, abs=0.05) and used == pytest.approx(2 / 3, abs=0.05)
