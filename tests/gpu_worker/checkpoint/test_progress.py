"""Progress: a line every few seconds in a log, one line kept up to date on a terminal."""

import logging

import pytest

from gpu_worker.checkpoint.loading import Progress

GIB = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_log_gets_a_line_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpu_worker.checkpoint.loading")
    clock = Clock()
    progress = Progress(10 * GIB, now=clock)
    for _ in range(80):
        clock.seconds += 0.125
        progress.add(GIB // 8)
    progress.close()
    assert [record.getMessage() for record in caplog.records] == [
        "weights: 30 %, 3.00 of 10.00 GiB, 1.00 GiB/s",
        "weights: 60 %, 6.00 of 10.00 GiB, 1.00 GiB/s",
        "weights: 90 %, 9.00 of 10.00 GiB, 1.00 GiB/s",
    ]


def test_a_terminal_gets_one_line_that_is_cleared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpu_worker.checkpoint.loading")
    clock, drawn = Clock(), list[str]()
    progress = Progress(2 * GIB, draw=drawn.append, now=clock)
    for _ in range(2):
        clock.seconds += 0.5
        progress.add(GIB)
    progress.close()
    lines = "".join(drawn).split("\r\x1b[K")
    assert lines == [
        "",
        f"weights [{'#' * 15}{'-' * 15}]  50 %, 1.00 of 2.00 GiB, 2.00 GiB/s",
        f"weights [{'#' * 30}] 100 %, 2.00 of 2.00 GiB, 2.00 GiB/s",
        "",
    ]
    assert not caplog.records


def test_progress_never_exceeds_the_total() -> None:
    clock, drawn = Clock(), list[str]()
    progress = Progress(0, draw=drawn.append, now=clock)
    clock.seconds += 1
    progress.add(5)
    assert "100 %" in drawn[0]
