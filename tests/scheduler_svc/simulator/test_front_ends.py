"""Front ends that take time: what a request and a message cost, when tokens are merged, and when it is too much."""

from dataclasses import replace

import pytest

from scheduler_svc.frontend.streaming.stream import StreamLimits
from scheduler_svc.simulator.cell import BUSY_TOKENS, MERGE_SECONDS
from scheduler_svc.simulator.report import figures_of, table
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.workload import Synthetic, parse_lengths
from tests.scheduler_svc.simulator.rig import Flat, arrival, arrivals, setup, simulated

ROWS, STEP_SECONDS = 32, 0.002
# All at once, so that each step decodes many rows.
LONG_OUTPUTS = Synthetic(
    num_requests=ROWS, own_rate=1e6, inputs=parse_lengths("8"), outputs=parse_lengths("uniform:100:300")
)


def busy(message_seconds: float, count: int = 1) -> Setup:
    made = setup(max_rows=ROWS, token_budget=1024, cost=Flat(fixed=STEP_SECONDS))
    return replace(made, front_ends=count, message_seconds=message_seconds)


def run(made: Setup, workload: Synthetic = LONG_OUTPUTS) -> Simulation:
    simulation = simulated(made, arrivals(workload))
    tally = simulation.tally
    assert tally.finished == tally.submitted == ROWS
    assert tally.output_tokens == sum(each.output_tokens for each in arrivals(workload))
    return simulation


def test_the_limits_are_those_of_the_service() -> None:
    limits = StreamLimits()
    assert limits.busy_tokens_per_second == BUSY_TOKENS and limits.merge_seconds == MERGE_SECONDS


def test_front_ends_that_cost_nothing_change_nothing_below_the_load_of_merging() -> None:
    made = setup(workers=2)
    free = replace(made, front_ends=3)
    workload = replace(LONG_OUTPUTS, own_rate=20.0, outputs=parse_lengths("uniform:1:40"))
    without, within = (figures_of(simulated(each, arrivals(workload)), each) for each in (made, free))
    fronts = within.pop("front_ends")
    assert fronts == {"count": 3, "busiest": 0.0, "tokens_per_message": 1.0}
    # Sums of times round differently.
    assert within.pop("itl_seconds") == pytest.approx(without.pop("itl_seconds"))
    assert within == without


def test_a_request_and_each_message_take_their_time() -> None:
    """A prompt of one chunk and 4 more tokens in steps of 10 ms."""
    made = setup(front_ends=1, message_seconds=0.002, request_seconds=0.001)
    simulation = simulated(made, iter([arrival(0.0, 16, 5)]))
    latencies = simulation.tally.all_requests
    assert latencies.ttft.largest == pytest.approx(0.001 + 0.010 + 0.002)
    assert latencies.itl.mean == pytest.approx(0.010)
    assert latencies.total.largest == pytest.approx(0.050 + 0.002)
    fronts = simulation.cells[0].front_ends
    assert [each.busy_seconds for each in fronts] == [pytest.approx(0.011)]


def test_requests_wait_for_each_other_in_a_front_end() -> None:
    made = setup(front_ends=1, request_seconds=0.050)
    requests = [arrival(0.0, 16, 1, first=number) for number in range(3)]
    one = simulated(made, iter(requests)).tally.all_requests.ttft
    assert one.largest == pytest.approx(3 * 0.050 + 0.010)
    three = simulated(replace(made, front_ends=3), iter(requests)).tally.all_requests.ttft
    assert three.largest == pytest.approx(0.050 + 0.010)


def test_tokens_of_a_busy_front_end_are_merged() -> None:
    """16,000 tokens per second in steps of 2 ms: a message waits for 15 ms, so it carries 8 tokens."""
    made = busy(message_seconds=1e-6)
    # Longer than the tenth of a second after which the load is known.
    figures = figures_of(run(made, replace(LONG_OUTPUTS, outputs=parse_lengths("1000"))), made)
    assert figures["itl_seconds"]["p50"] == pytest.approx(0.016, rel=0.05)
    assert figures["front_ends"]["busiest"] < 0.01


def test_a_front_end_that_cannot_keep_up_sends_larger_messages_and_says_so() -> None:
    """32 streams, of which a message each takes 32 ms or more."""
    full, half, free = (busy(message_seconds=0.001, count=count) for count in (1, 2, 32))
    figures = [figures_of(run(made), made) for made in (full, half, free)]
    assert figures[0]["front_ends"]["busiest"] > 0.9
    assert "it cannot keep up, so messages become larger" in table(figures[0])
    assert figures[0]["itl_seconds"]["p50"] == pytest.approx(0.032, rel=0.1)
    assert figures[1]["itl_seconds"]["p50"] == pytest.approx(0.016, rel=0.2)
    shares = [each["front_ends"]["busiest"] for each in figures]
    assert shares[2] < shares[1] and "it cannot keep up" not in table(figures[2])
    sizes = [each["front_ends"]["tokens_per_message"] for each in figures]
    assert sizes[0] > sizes[1] > sizes[2]
