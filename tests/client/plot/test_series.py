"""The points and bins that are drawn."""

from pathlib import Path

import numpy as np
import pytest

from tandem_client.plot import data
from tests.client.plot.step_logs import LANES, decode_steps, written


@pytest.fixture
def log(tmp_path: Path) -> data.StepsLog:
    return data.read_steps(written(tmp_path / "steps.csv"))


def points(band: data.Band) -> list[tuple[float, float]]:
    return [(round(float(x), 6), round(float(y), 6)) for x, y in zip(band.x, band.mean, strict=True)]


def test_levels_over_steps_are_the_values_of_the_lines(log: data.StepsLog) -> None:
    found = data.levels(log, by_time=False)
    assert points(found.running) == [
        (0, 0), (1, 1), (2, 2), (3, 2), (3, 0), (3, 0), (4, 2), (5, 2), (6, 1), (6, 0),
    ]  # fmt: skip
    assert points(found.waiting) == [(0, 0), (1, 1), (2, 0), (3, 0), (3, 2), (3, 2), (4, 0), (5, 0), (6, 0)]


def test_levels_over_time_fill_the_time_without_a_plan(log: data.StepsLog) -> None:
    found = data.levels(log, by_time=True)
    # The values of the last step hold until the reset; nothing runs in the idle second.
    assert points(found.running)[3:] == [
        (0.25, 2), (0.3, 2), (0.3, 0), (2.3, 0), (2.3, 0), (2.4, 2), (2.44, 2), (3.46, 0), (3.5, 1), (3.5, 0),
    ]  # fmt: skip
    assert (2.3, 2) in points(found.waiting)
    # Cached pages remain while nothing runs.
    assert points(found.used)[-3:] == [(3.46, 0), (3.5, 5), (3.5, 0)]
    assert points(found.used_or_cached)[-3:] == [(2.44, 60), (3.46, 60), (3.5, 50)]


def test_pages_are_percent_of_the_pages_of_all_workers(tmp_path: Path) -> None:
    found = data.levels(data.read_steps(written(tmp_path / "steps.csv", LANES)), by_time=False)
    assert points(found.used)[3] == (2, pytest.approx(20))
    assert points(found.used_or_cached)[8] == (6, pytest.approx(35))


@pytest.mark.parametrize("by_time", [False, True], ids=["by step", "by time"])
def test_rounded_times_do_not_make_gaps(tmp_path: Path, by_time: bool) -> None:
    """Each plan is sent when the result before it is read, but the file rounds both times."""
    lines = [
        f"{i},{i / 300:.6f},decode,,9,0,9,0,9,9,9,1,20,0,1,1,3.000,{1000 / 300:.3f},1,9,9,1,20" for i in range(1, 300)
    ]
    running = data.levels(data.read_steps(written(tmp_path / "steps.csv", lines)), by_time=by_time).running
    assert running.mean.tolist() == [9] * 299 + [0]


def test_merged_points_keep_least_mean_and_greatest() -> None:
    x = np.arange(10.0 * data.MOST_POINTS)
    values = x % 10
    band = data.banded(x, values)
    assert len(band.x) == data.MOST_POINTS
    assert (band.low.min(), band.high.max()) == (0, 9)
    assert band.mean.mean() == pytest.approx(values.mean())


def test_a_series_of_few_points_is_not_changed() -> None:
    x = np.arange(5.0)
    band = data.banded(x, x)
    assert band.mean is band.low is band.high is x


def test_equal_times_give_one_bin() -> None:
    x = np.ones(data.MOST_POINTS + 1)
    assert data.banded(x, x).x.tolist() == [1.0]


@pytest.mark.parametrize("by_time", [False, True], ids=["by step", "by time"])
def test_a_hundred_thousand_steps_keep_their_extremes(tmp_path: Path, by_time: bool) -> None:
    lines = decode_steps(100_000, odd=54_321, odd_running=999)
    log = data.read_steps(written(tmp_path / "steps.csv", lines))
    running = data.levels(log, by_time=by_time).running
    assert len(running.x) <= data.MOST_POINTS + 1
    assert running.high.max() == 999
    _, shares = data.kind_shares(log, log.seconds if by_time else log.step, by_time=by_time)
    assert shares[2].mean() == pytest.approx(0.08 if by_time else 0.1, rel=0.05)


def test_shares_over_steps_are_of_the_bin_s_steps(log: data.StepsLog) -> None:
    edges, shares = data.kind_shares(log, log.step, by_time=False)
    assert edges.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert shares.tolist() == [[1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0]]


def test_shares_over_time_are_of_the_bin_s_seconds(log: data.StepsLog) -> None:
    edges, shares = data.kind_shares(log, log.seconds, by_time=True)
    assert (shares * np.diff(edges)).sum(axis=1) == pytest.approx([0.17, 0.05, 0.06])


def test_output_rates_count_all_tokens(tmp_path: Path) -> None:
    log = data.read_steps(written(tmp_path / "steps.csv", decode_steps(1000)))
    for by_time, x in ((False, log.step), (True, log.seconds)):
        edges, rates = data.output_rates(log, x, by_time=by_time)
        assert len(rates) == 150
        # Five tokens each 10 ms.
        assert np.median(rates) == pytest.approx(500, rel=0.2)
    assert (rates * np.diff(edges)).sum() == pytest.approx(5000)


def test_stepping_seconds_count_overlapping_steps_once(tmp_path: Path) -> None:
    both = [f"{i},1.1,decode,,1,0,1,0,1,1,4,0,20,0,{i},{i},{ms},90.0,2,2,8,0,40" for i, ms in ((1, 80), (2, 50))]
    assert data.stepping_seconds(data.read_steps(written(tmp_path / "both.csv", both))) == pytest.approx(0.08)
    # The worker starts a plan while the one before it still runs.
    early = [f"{i},{1 + i / 100},decode,,1,0,1,0,1,1,4,0,20,0,1,1,19,19,1,1,4,0,20" for i in range(1, 101)]
    assert data.stepping_seconds(data.read_steps(written(tmp_path / "early.csv", early))) == pytest.approx(1.009)


def test_intervals_without_a_worker_last_until_the_next_joins(log: data.StepsLog, tmp_path: Path) -> None:
    assert data.without_worker(log) == [(pytest.approx(0.3), pytest.approx(2.3))]
    assert data.without_worker(data.read_steps(written(tmp_path / "lanes.csv", LANES))) == []
