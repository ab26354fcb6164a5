"""The search brackets the rate from any start."""

import math

import pytest

from scheduler_svc.simulator.command import Probe, find_rate


def probe_of(limit: float):
    def probe(rate: float) -> Probe:
        return Probe(rate=rate, requests=1000, missed=0 if rate <= limit else 11, ttft_p99=0.0, is_whole=True)

    return probe


@pytest.mark.parametrize("start", [0.01, 1.0, 37.0, 37.1, 5000.0])
def test_the_search_brackets_the_rate(start: float) -> None:
    holding, failing, probes = find_rate(probe_of(37.0), start=start, max_probes=40, precision=0.05)
    assert holding <= 37.0 < failing <= 1.05 * holding
    assert [probe.rate for probe in probes] == list(dict.fromkeys(probe.rate for probe in probes))


def test_the_search_ends_if_every_rate_or_no_rate_meets_the_goal() -> None:
    holding, failing, probes = find_rate(probe_of(math.inf), start=1.0, max_probes=100, precision=0.05)
    assert failing == math.inf and holding == probes[-1].rate > 1e8
    holding, failing, probes = find_rate(probe_of(0.0), start=1.0, max_probes=100, precision=0.05)
    assert holding == 0.0 and failing == probes[-1].rate < 1e-5


def test_the_search_stops_at_the_limit_of_probes() -> None:
    holding, failing, probes = find_rate(probe_of(37.0), start=1.0, max_probes=7, precision=0.001)
    assert len(probes) == 7 and holding < 37 < failing


def test_a_rate_meets_the_goal_if_one_percent_of_requests_miss_it() -> None:
    def holds(missed: int, is_whole: bool = True) -> bool:
        return Probe(rate=1.0, requests=1000, missed=missed, ttft_p99=0.0, is_whole=is_whole).holds

    assert (holds(0), holds(10), holds(11), holds(0, is_whole=False)) == (True, True, False, False)
