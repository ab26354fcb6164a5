"""The sums of a step log and the table of them."""

from pathlib import Path

import pytest

from tandem_client.plot.data import Summary, read_steps, summarize, table
from tests.client.plot.step_logs import LANES, LINES, written


def summary_of(folder: Path, lines: tuple[str, ...] = LINES) -> Summary:
    return summarize(read_steps(written(folder / "steps.csv", lines)))


def test_the_table_has_a_row_per_kind(tmp_path: Path) -> None:
    lines = list(table(summary_of(tmp_path)))
    assert lines[0].split() == ["kind", "steps", "seconds", "share", "median", "ms", "tokens", "output", "tokens"]
    assert [row.split() for row in lines[1:5]] == [
        ["prefill", "2", "0.17", "61%", "85.00", "166", "3"],
        ["decode", "3", "0.05", "18%", "20.00", "5", "5"],
        ["mixed", "1", "0.06", "21%", "60.00", "33", "2"],
        ["all", "6", "0.28", "100%", "40.00", "204", "10"],
    ]
    assert lines[5] == (
        "0.28 of 3.50 s spent stepping, 35.7 output tokens/s while stepping; 1 worker lost, 2.0 s without a worker"
    )


def test_the_table_has_a_row_per_lane_if_several_serve(tmp_path: Path) -> None:
    assert [row.split() for row in list(table(summary_of(tmp_path, LANES)))[3:6]] == [
        ["lane", "1", "5", "0.12", "42%", "20.00", "68", "5"],
        ["lane", "2", "2", "0.10", "34%", "50.00", "4", "4"],
        ["lane", "3", "1", "0.07", "24%", "70.00", "90", "3"],
    ]


def test_the_table_lists_the_lanes_with_the_most_steps(tmp_path: Path) -> None:
    steps = tuple(f"{i},1.{i:03d},decode,,1,0,1,0,1,1,1,0,20,0,{i % 30},1,1,1,9,9,9,0,180" for i in range(1, 100))
    lanes = summary_of(tmp_path, steps).lanes
    assert [lane.name for lane in lanes] == [f"lane {i}" for i in range(1, 9)]
    assert {lane.steps for lane in lanes} == {4}


def test_a_worker_that_joins_again_does_not_count_as_a_second(tmp_path: Path) -> None:
    summary = summary_of(tmp_path)
    assert (summary.num_workers, summary.lanes) == (1, ())


def test_idle_time_does_not_lower_the_rate(tmp_path: Path) -> None:
    idle = (*LINES, "7,3604.500000,decode,,1,0,1,0,1,1,1,9,20,1,2,3,10.000,40.000,1,1,1,9,20")
    summary = summary_of(tmp_path, idle)
    assert summary.stepping_seconds == pytest.approx(0.29)
    assert summary.wall_seconds > 3600
    assert summary.tokens_per_second == pytest.approx(11 / 0.29)


def test_lane_resets_without_a_lost_worker_are_counted_separately(tmp_path: Path) -> None:
    failed = LINES[4].replace("worker lost", "step failed").replace("0,0,0,0,0", "1,0,0,0,20")
    summary = summary_of(tmp_path, (*LINES, failed, failed))
    assert (summary.workers_lost, summary.resets) == (1, 2)
    assert summary.losses.endswith(", 2 lane resets")


def test_a_step_of_zero_seconds_gives_no_rate(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, ("1,0.0,decode,,1,0,1,0,1,1,1,0,20,0,1,1,0.0,0.0,1,1,1,0,20",))
    assert (summary.tokens_per_second, summary.all.share) == (0.0, 0.0)
