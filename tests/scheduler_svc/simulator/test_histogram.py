"""The histogram's percentiles equal those of the values, to a quarter of a percent."""

import numpy as np
import pytest

from scheduler_svc.simulator.tally import Histogram


def test_percentiles_equal_those_of_numpy() -> None:
    values = np.random.default_rng(0).lognormal(-3, 2, 20_000)
    histogram = Histogram()
    for part in np.split(values[:15_000], 100):
        histogram.add(part)
    for value in values[15_000:].tolist():
        histogram.add_one(value)
    assert histogram.count == 20_000
    assert histogram.mean == pytest.approx(values.mean()) and histogram.largest == values.max()
    for percent in (1, 50, 90, 99, 99.9):
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert histogram.percentile(percent) == pytest.approx(exact, rel=0.003)
    assert histogram.percentile(100) == pytest.approx(values.max(), rel=0.003)


def test_equal_values_and_values_out_of_range_are_counted() -> None:
    histogram = Histogram()
    histogram.add(np.full(7, 0.02))
    assert histogram.percentile(50) == pytest.approx(0.02, rel=0.003)
    histogram.add(np.array([0.0, 1e9]))
    histogram.add_one(0.0)
    assert histogram.percentile(1) < 2e-6 and histogram.percentile(100) > 9e5
    assert histogram.count == 10 and histogram.largest == 1e9


def test_an_empty_histogram_yields_zeros() -> None:
    histogram = Histogram()
    histogram.add(np.zeros(0))
    assert (histogram.count, histogram.mean, histogram.percentile(99)) == (0, 0.0, 0.0)
