"""`tandem plot`: what it reads, what it refuses and why, what it prints, and what stands in the picture."""

import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner, Result

from tandem_client.cli.__main__ import app
from tandem_client.cli.commands import plot
from tandem_client.plot.chart import figure_of
from tandem_client.plot.data import KINDS, STEP_KINDS, StepsFileError, StepsLog, read_steps
from tandem_client.plot.lanes import lanes_of
from tandem_client.plot.levels import levels_by_time
from tandem_client.plot.scales import KIND_COLOURS
from tandem_client.plot.series import MOST_POINTS, banded
from tandem_client.plot.summary import summarize, table

ROOT = Path(__file__).resolve().parents[3]
# As the service writes it; tests/system/test_steps.py holds the service to the same.
HEADER = (
    "step,at_seconds,kind,cause,running,waiting,tokens,prefill_tokens,decode_tokens,output_tokens,"
    "pages_used,pages_cached,pages_total,preemptions,lane,generation,ms,span_ms"
)
# Two prompts, a worker's death in the middle, an idle second before the last request.
LINES = (
    "0,1.000000,joined,,0,0,0,0,0,0,0,0,20,0,1,1,0.000,0.000",
    "1,1.100000,prefill,,1,1,64,64,0,1,4,0,20,0,1,1,80.000,100.000",
    "2,1.200000,mixed,,2,0,33,32,1,2,6,1,20,0,1,1,60.000,150.000",
    "3,1.250000,decode,,2,0,2,0,2,2,10,3,20,1,1,1,20.000,90.000",
    "3,1.300000,reset,worker lost,0,2,4,0,4,0,0,2,20,1,1,2,0.000,60.000",
    "3,3.300000,joined,,0,2,0,0,0,0,0,0,20,1,2,3,0.000,0.000",
    "4,3.400000,prefill,,2,0,102,102,0,2,7,2,20,1,2,3,90.000,100.000",
    "5,3.440000,decode,,2,0,2,0,2,2,7,5,20,1,2,3,20.000,130.000",
    "6,4.500000,decode,,1,0,1,0,1,1,1,9,20,1,2,3,10.000,40.000",
)

# Two workers; the second falls idle and dies, and comes back as a third lane while the first waits for work.
LANES = (
    "0,1.000000,joined,,0,0,0,0,0,0,0,0,20,0,1,1,0.000,0.000",
    "0,1.050000,joined,,0,0,0,0,0,0,0,0,40,0,2,2,0.000,0.000",
    "1,1.100000,prefill,,1,3,64,64,0,1,4,0,20,0,1,1,45.000,45.000",
    "2,1.200000,decode,,2,0,2,0,2,2,8,2,40,0,2,2,40.000,60.000",
    "3,1.250000,decode,,1,0,1,0,1,1,4,0,20,0,1,1,20.000,150.000",
    "4,1.300000,decode,,2,0,2,0,2,2,8,4,40,0,2,2,60.000,100.000",
    "5,1.400000,decode,,1,0,1,0,1,1,4,1,20,0,1,1,20.000,150.000",
    "5,1.500000,reset,worker lost,0,0,0,0,0,0,0,0,40,0,2,3,0.000,0.000",
    "6,1.600000,decode,,1,2,1,0,1,1,6,1,20,0,1,1,20.000,200.000",
    "6,1.700000,joined,,0,2,0,0,0,0,0,0,40,0,3,4,0.000,0.000",
    "7,1.800000,prefill,,3,0,90,90,0,3,10,0,40,0,3,4,70.000,80.000",
    "8,1.900000,decode,,1,0,1,0,1,1,5,2,20,0,1,1,20.000,120.000",
)


def written(path: Path, lines: Iterable[str] = LINES, *, header: str = HEADER, end: str = "\n") -> Path:
    path.write_text("\n".join([header, *lines]) + end)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "steps.csv")


def figure(path: Path, *, by_time: bool = False) -> Figure:
    log = read_steps(path)
    drawn = figure_of(log, summarize(log), by_time=by_time)
    drawn.canvas.draw()
    return drawn


def panels(drawn: Figure) -> tuple[Axes, ...]:
    """Sequences, strip of kinds, pages, milliseconds, shares, spread."""
    assert len(drawn.axes) == 6
    return tuple(drawn.axes)


def line(axes: Axes, label: str) -> list[tuple[float, float]]:
    [found] = [one for one in axes.lines if one.get_label() == label]
    return [(round(float(x), 6), round(float(y), 6)) for x, y in zip(*found.get_data(), strict=True)]


def held(points: list[tuple[float, float]], moment: float) -> float:
    """What holds at the moment: up to a point, its value."""
    return next(y for x, y in points if x > moment)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


# The picture -----------------------------------------------------------------------------------------------------


def test_running_and_waiting_stand_at_their_steps(file: Path) -> None:
    sequences = panels(figure(file))[0]
    assert line(sequences, "running") == [
        (0, 0), (1, 1), (2, 2), (3, 2), (3, 0), (3, 0), (4, 2), (5, 2), (6, 1), (6, 0),
    ]  # fmt: skip
    assert line(sequences, "waiting") == [(0, 0), (1, 1), (2, 0), (3, 0), (3, 2), (3, 2), (4, 0), (5, 0), (6, 0)]
    # A step's value holds from its begin to its end.
    assert {one.get_drawstyle() for one in sequences.lines if one.get_label() in ("running", "waiting")} == {
        "steps-pre"
    }
    assert line(sequences, "preemption") == [(3, 0.015)]


def test_over_time_nothing_runs_where_no_plan_was_out(file: Path) -> None:
    sequences, _, pages, *_ = panels(figure(file, by_time=True))
    running = line(sequences, "running")
    # What ran up to the reset falls at the reset, not at the last result before it; the idle second is empty.
    assert (0.3, 2.0) in running
    assert running.index((0.3, 2.0)) < running.index((0.3, 0.0))
    assert running[-4:] == [(2.44, 2.0), (3.46, 0.0), (3.5, 1.0), (3.5, 0.0)]
    assert (2.3, 2.0) in line(sequences, "waiting")
    assert (3.46, 0.0) in line(pages, "pages used")
    # What the last step before used or kept is kept while nobody is there.
    kept = line(pages, "pages used or kept")
    assert kept[-3:] == [(2.44, 60.0), (3.46, 60.0), (3.5, 50.0)]
    [band] = [patch for patch in sequences.patches if patch.get_label() == "no worker"]
    assert [round(float(edge), 6) for edge in (band.get_x(), band.get_x() + band.get_width())] == [0.3, 2.3]


def test_the_strip_has_each_step_s_kind(file: Path) -> None:
    strip = panels(figure(file))[1]
    shown = {
        patch.get_label(): [
            index + 1 for index, share in enumerate(patch.get_data().values - patch.get_data().baseline) if share
        ]
        for patch in strip.patches
    }
    assert shown == {"prefill": [1, 4], "mixed": [2], "decode": [3, 5, 6]}
    assert {patch.get_label(): to_hex(patch.get_facecolor()).upper() for patch in strip.patches} == KIND_COLOURS


def test_the_strip_over_time_has_each_kind_s_seconds(file: Path) -> None:
    strip = panels(figure(file, by_time=True))[1]
    seconds = {}
    for patch in strip.patches:
        shares = patch.get_data()
        seconds[patch.get_label()] = float(((shares.values - shares.baseline) * np.diff(shares.edges)).sum())
    assert seconds == pytest.approx({"prefill": 0.17, "decode": 0.05, "mixed": 0.06})


def test_running_and_used_pages_end_at_zero_with_the_last_step(tmp_path: Path) -> None:
    """Nine requests end in the last step, so no later line says that they are gone."""
    long = [f"{i},{i / 100:.6f},decode,,9,0,9,0,9,9,9,1,20,0,1,1,8.000,9.000" for i in range(1, 5_001)]
    for lines in (LINES, LANES, long):
        for by_time in (False, True):
            sequences, _, pages, *_ = panels(figure(written(tmp_path / "steps.csv", lines), by_time=by_time))
            for points in (line(sequences, "running"), line(pages, "pages used")):
                assert points[-2][0] == points[-1][0] and points[-2][1] > 0 and points[-1][1] == 0


def test_a_lost_worker_s_mark_says_when_another_joined(file: Path) -> None:
    sequences, _, pages, times, *_ = panels(figure(file))
    for axes in (sequences, pages, times):
        [mark] = axes.collections
        [segment] = mark.get_segments()
        assert segment[:, 0].tolist() == [3, 3]
    [words] = [text.get_text() for text in sequences.texts]
    assert words == "worker lost\nanother joined 2.0 s later"


def test_a_mark_says_only_what_the_file_knows(tmp_path: Path) -> None:
    """A lost worker without a replacement, a reset of a lane that continued, and a late replacement."""
    failed = LINES[4].replace("worker lost", "step failed")
    for lines, expected in (
        ([*LINES[:5]], "worker lost"),
        ([*LINES[:4], failed, LINES[6].replace(",2,3,", ",1,2,")], "step failed\nnext step done 2.1 s later"),
        ([*LINES[:5], LINES[5].replace("3.300000", "79.300000")], "worker lost\nanother joined 78 s later"),
    ):
        [words] = [text.get_text() for text in panels(figure(written(tmp_path / "steps.csv", lines)))[0].texts]
        assert words == expected


def test_the_rate_counts_the_time_in_which_a_worker_steps(tmp_path: Path) -> None:
    """An hour without requests does not lower it, and two workers that step at once do not count twice."""
    idle = [*LINES, "7,3604.500000,decode,,1,0,1,0,1,1,1,9,20,1,2,3,10.000,40.000"]
    summary = summarize(read_steps(written(tmp_path / "idle.csv", idle)))
    assert summary.stepping_seconds == pytest.approx(0.29) and summary.wall_seconds > 3600
    assert summary.tokens_per_second == pytest.approx(11 / 0.29)
    both = [f"{i},1.100000,decode,,1,0,1,0,1,1,4,0,20,0,{i},{i},{ms}.000,90.000" for i, ms in ((1, 80), (2, 50))]
    summary = summarize(read_steps(written(tmp_path / "both.csv", both)))
    assert (summary.step_seconds, summary.stepping_seconds, summary.busy_seconds) == pytest.approx((0.13, 0.08, 0.13))
    # One worker that starts a plan while the one before still runs.
    early = [f"{i},{1 + i / 100},decode,,1,0,1,0,1,1,4,0,20,0,1,1,19.000,19.000" for i in range(1, 101)]
    summary = summarize(read_steps(written(tmp_path / "early.csv", early)))
    assert (summary.step_seconds, summary.busy_seconds) == pytest.approx((1.9, 1.009))


def test_the_title_gives_the_rate_while_stepping(file: Path) -> None:
    title = figure(file)._suptitle
    assert title is not None
    assert "10 output tokens  ·  36 tokens/s while stepping  ·  1 worker lost" in title.get_text()


def test_many_resets_are_marked_and_not_told(tmp_path: Path) -> None:
    lines = [LINES[0], LINES[1]]
    for _ in range(20):
        lines.append("1,2.000000,reset,step failed,0,1,4,0,4,0,0,0,20,0,1,2,0.000,60.000")
    sequences = panels(figure(written(tmp_path / "steps.csv", lines)))[0]
    assert len(sequences.collections[0].get_segments()) == 20
    assert list(sequences.texts) == []


def test_milliseconds_have_the_colour_of_their_kind(file: Path) -> None:
    times = panels(figure(file))[3]
    assert line(times, "prefill") == [(1, 80), (4, 90)]
    assert line(times, "decode") == [(3, 20), (5, 20), (6, 10)]
    assert {one.get_label(): one.get_color() for one in times.lines} == KIND_COLOURS
    assert times.get_yscale() == "log"


def test_time_per_kind_is_seconds_and_share(file: Path) -> None:
    shares, spread = panels(figure(file))[4:]
    assert [round(bar.get_width(), 6) for bar in shares.patches] == [0.17, 0.05, 0.06]
    assert [text.get_text().split("\n")[0] for text in shares.texts] == [
        "61%  (0.17 s)",
        "18%  (0.05 s)",
        "21%  (0.06 s)",
    ]
    assert "0.3 s busy, 3.2 s idle" in shares.get_title()
    assert [label.get_text() for label in spread.get_yticklabels()] == [
        "prefill\n85.00 ms",
        "decode\n20.00 ms",
        "mixed\n60.00 ms",
    ]


def test_legend_and_units_are_there(file: Path) -> None:
    sequences, _, pages, times, shares, spread = panels(figure(file, by_time=True))
    legend = sequences.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "running",
        "waiting",
        "preemption",
        "no worker",
        "prefill step",
        "decode step",
        "mixed step",
    ]
    assert [axes.get_ylabel() for axes in (sequences, pages, times)] == ["sequences", "pages, %", "ms per step"]
    assert [axes.get_xlabel() for axes in (times, shares, spread)] == [
        "seconds",
        "seconds of the worker",
        "ms per step",
    ]


def test_what_several_lanes_run_is_summed(tmp_path: Path) -> None:
    sequences, _, pages, *_ = panels(figure(written(tmp_path / "steps.csv", LANES), by_time=True))
    moments = {
        0.02: (0, 0, 0.0, 0.0),
        0.07: (1, 3, 100 * 4 / 60, 100 * 4 / 60),
        0.12: (1, 0, 100 * 4 / 60, 100 * 4 / 60),  # the second lane's first plan is not sent yet
        0.16: (3, 0, 100 * 12 / 60, 100 * 14 / 60),
        0.27: (3, 0, 100 * 12 / 60, 100 * 17 / 60),
        0.35: (1, 0, 100 * 4 / 60, 100 * 17 / 60),  # the second lane has nothing left to do
        0.45: (1, 0, 100 * 6 / 60, 100 * 19 / 60),
        0.55: (1, 2, 100 * 6 / 20, 100 * 7 / 20),  # only the first one is there
        0.65: (0, 2, 0.0, 100 * 7 / 20),
        0.71: (0, 2, 0.0, 100 * 7 / 60),
        0.75: (3, 0, 100 * 10 / 60, 100 * 17 / 60),
        0.79: (4, 0, 100 * 15 / 60, 100 * 17 / 60),
        0.85: (1, 0, 100 * 5 / 60, 100 * 17 / 60),
    }
    drawn = [line(sequences, "running"), line(sequences, "waiting")]
    drawn += [line(pages, "pages used"), line(pages, "pages used or kept")]
    assert {moment: tuple(held(points, moment) for points in drawn) for moment in moments} == {
        moment: pytest.approx(values) for moment, values in moments.items()
    }
    assert "of all on the workers that serve, at most 60" in pages.get_title("left")


def test_a_step_of_one_lane_stands_beside_what_the_others_run(tmp_path: Path) -> None:
    sequences, _, pages, *_ = panels(figure(written(tmp_path / "steps.csv", LANES)))
    assert line(sequences, "running") == [
        (0, 0), (0, 0), (1, 1), (2, 3), (3, 3), (4, 3), (5, 1), (5, 1), (6, 1), (6, 0), (7, 4), (8, 1), (8, 0),
    ]  # fmt: skip
    assert line(pages, "pages used")[3] == (2, pytest.approx(100 * 12 / 60))


def test_lanes_are_named_where_several_serve(tmp_path: Path) -> None:
    drawn = figure(written(tmp_path / "steps.csv", LANES), by_time=True)
    sequences, strip, *_, shares, spread = panels(drawn)
    assert [text.get_text() for text in sequences.texts] == ["lane 2: worker lost", "lane 3: joined"]
    assert "2 workers" in drawn.get_suptitle()
    assert [patch for patch in sequences.patches if patch.get_label() == "no worker"] == []
    assert [label.get_text() for label in spread.get_yticklabels()] == [
        "prefill\n57.50 ms",
        "decode\n20.00 ms",
        "lane 1\n20.00 ms",
        "lane 2\n50.00 ms",
    ]
    # 0.9 s of the first, 0.45 of the second, 0.2 of the third.
    assert "0.3 s busy, 1.3 s idle" in shares.get_title()
    # Where both serve, one that is busy all the time takes half of the strip.
    top = max(float((patch.get_data().values - patch.get_data().baseline)[100]) for patch in strip.patches)
    assert top == pytest.approx(0.5)


def test_words_of_marks_that_are_close_stand_below_one_another(tmp_path: Path) -> None:
    lines = [*LANES, *(f"8,1.9{i}0000,joined,,0,0,0,0,0,0,0,0,40,0,{i + 4},{i + 5},0.000,0.000" for i in range(4))]
    drawn = figure(written(tmp_path / "steps.csv", lines), by_time=True)
    boxes = [text.get_window_extent() for text in panels(drawn)[0].texts]
    assert len(boxes) == 6
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_one_worker_that_comes_back_is_no_second(file: Path) -> None:
    summary = summarize(read_steps(file))
    assert (summary.num_workers, summary.lanes, summary.worker_seconds) == (1, (), summary.wall_seconds)


def serving(log: StepsLog, lane: float, moment: float) -> tuple[float, float, float, float]:
    """By the definition: running, pages used, used or kept and all of the lane at the moment."""
    lines = [i for i in range(len(log.lane)) if log.lane[i] == lane]
    before = [i for i in lines if log.at_seconds[i] < moment]
    after = [i for i in lines if log.at_seconds[i] >= moment]
    if not before or (not after and log.kinds[before[-1]] == KINDS.index("reset")):
        return 0, 0, 0, 0
    last = before[-1]
    running = used = 0.0
    if after and log.at_seconds[after[0]] - log.span_ms[after[0]] / 1e3 < moment:
        # A mark tells what is left after it, so what its last step said holds until then.
        told = after[0] if log.kinds[after[0]] < len(STEP_KINDS) else last
        if log.kinds[told] < len(STEP_KINDS):
            running, used = log.running[told], log.pages_used[told]
    is_step = bool(after) and log.kinds[after[0]] < len(STEP_KINDS)
    telling = after[0] if running and is_step else last
    return running, used, log.pages_used[telling] + log.pages_cached[telling], log.pages_total[last]


def random_lanes(seed: int) -> list[str]:
    """Four places for workers; each lane serves for a while, is reset, falls idle, dies and comes back as another."""
    rng = random.Random(seed)
    events: list[tuple[int, str]] = []
    number = 0
    for _ in range(4):
        now = rng.randrange(2000)
        while now < 60_000:
            number += 1
            total = rng.choice([50, 90])
            events.append((now, f"joined,,0,0,0,0,0,0,0,0,{total},0,{number},{number},0.000,0.000"))
            sent = now + rng.randrange(1, 300)
            for _ in range(rng.randrange(1, 12)):
                now = sent + rng.randrange(50, 400)
                kind = rng.choice(["decode", "decode", "prefill", "reset,step failed"])
                is_step = "reset" not in kind
                running, used = (rng.randrange(1, 9), rng.randrange(1, 30)) if is_step else (0, 0)
                comma = "," if is_step else ""
                events.append((now, f"{kind},{comma}{running},0,1,0,1,1,{used},{rng.randrange(20)},{total},0,{number},"
                    f"{number},1.000,{now - sent}.000"))  # fmt: skip
                # Sent before the result, or after a pause.
                sent = now + rng.choice([-40, -10, 120, 3000])
            now = max(now, sent) + 1
            span = rng.choice([0, 30])
            events.append((now, f"reset,worker lost,0,0,1,0,1,0,0,0,{total},0,{number},{number},0.000,{span}.000"))
            now += rng.randrange(1, 3000)
    return [f"{i},{at / 1e3:.6f},{rest}" for i, (at, rest) in enumerate(sorted(events), 1)]


@pytest.mark.parametrize("seed", range(4))
def test_the_sums_are_those_of_the_definition(tmp_path: Path, seed: int) -> None:
    log = read_steps(written(tmp_path / "steps.csv", random_lanes(seed)))
    levels = levels_by_time(log, np.frombuffer(log.at_seconds), lanes_of(log))
    lanes = set(log.lane)
    x = levels.running.x
    assert len(lanes) > 10
    for i in range(1, len(x)):
        if x[i] - x[i - 1] < 1e-4:
            continue
        parts = [serving(log, lane, (x[i] + x[i - 1]) / 2) for lane in lanes]
        running, used, kept, total = (sum(column) for column in zip(*parts, strict=True))
        found = levels.running.mean[i], levels.pages.mean[i], levels.kept.mean[i]
        assert found == pytest.approx((running, 100 * used / max(total, 1), 100 * kept / max(total, 1)))


@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("lines", [LINES, LANES])
def test_no_words_leave_the_picture(tmp_path: Path, lines: tuple[str, ...], by_time: bool) -> None:
    drawn = figure(written(tmp_path / "steps.csv", lines), by_time=by_time)
    legend = drawn.axes[0].get_legend()
    assert legend is not None and drawn._suptitle is not None
    words = [drawn._suptitle, *legend.get_texts()]
    for axes in drawn.axes:
        words += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
    words = [text for text in words if text.get_text()]
    assert len(words) > 15
    for text in words:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0, text.get_text()
        assert box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1, text.get_text()


@pytest.mark.parametrize("by_time", [False, True])
def test_a_hundred_thousand_steps_keep_their_extremes(tmp_path: Path, by_time: bool) -> None:
    number, odd = 100_000, 54_321
    lines = [
        f"{i},{i / 100:.6f},{'decode' if i % 10 else 'mixed'},,{999 if i == odd else 5},0,5,0,5,5,9,1,20,0,1,1,"
        f"{700 if i == odd else 8}.000,9.000"
        for i in range(1, number + 1)
    ]
    sequences, strip, _, times, *_ = panels(figure(written(tmp_path / "steps.csv", lines), by_time=by_time))
    running = line(sequences, "running")
    assert len(running) <= MOST_POINTS + 1
    assert sequences.dataLim.y1 == 999
    assert times.dataLim.y1 == 700
    assert sum(len(one.get_xdata()) for one in times.lines) <= 2 * MOST_POINTS
    share = next(patch for patch in strip.patches if patch.get_label() == "mixed").get_data()
    assert (share.values - share.baseline).mean() == pytest.approx(0.1 if not by_time else 0.08, rel=0.05)


def test_what_is_put_together_keeps_least_mean_and_most() -> None:
    x = np.arange(10.0 * MOST_POINTS)
    values = x % 10
    band = banded(x, values)
    assert band.is_thinned
    assert len(band.x) == MOST_POINTS
    assert band.low.min() == 0
    assert band.high.max() == 9
    assert band.mean.mean() == pytest.approx(values.mean())
    few = banded(x[:5], values[:5])
    assert few.mean is few.low
    assert not few.is_thinned


@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("lines", [LINES[1:2], LINES[:2], ["1,0.000000,decode,,1,0,1,0,1,1,1,0,20,0,1,1,0.000,0.000"]])
def test_one_step_is_enough(tmp_path: Path, lines: list[str], by_time: bool) -> None:
    sequences = panels(figure(written(tmp_path / "steps.csv", lines), by_time=by_time))[0]
    assert line(sequences, "running")[-2][1] == 1


# The command -----------------------------------------------------------------------------------------------------


def test_it_prints_a_table_and_the_path(file: Path) -> None:
    result = run(file)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["kind", "steps", "seconds", "share", "median", "ms", "tokens", "output", "tokens"]
    assert [row.split() for row in lines[1:5]] == [
        ["prefill", "2", "0.17", "61%", "85.00", "166", "3"],
        ["decode", "3", "0.05", "18%", "20.00", "5", "5"],
        ["mixed", "1", "0.06", "21%", "60.00", "33", "2"],
        ["all", "6", "0.28", "100%", "204", "10"],
    ]
    assert lines[5] == "0.28 of 3.50 s spent stepping, 35.7 output tokens/s while stepping; 1 worker lost"
    assert lines[-1] == str(file.with_suffix(".png"))
    with Image.open(lines[-1]) as image:
        assert (image.format, image.size) == ("PNG", (1600, 1000))


def test_it_prints_what_each_of_several_lanes_did(tmp_path: Path) -> None:
    result = run(written(tmp_path / "steps.csv", LANES))
    assert result.exit_code == 0, result.stderr
    assert [row.split() for row in result.stdout.splitlines()[4:8]] == [
        ["lane", "served", "s", "steps", "seconds", "busy", "decode", "ms", "output", "tokens"],
        ["1", "0.90", "5", "0.12", "14%", "20.00", "5"],
        ["2", "0.45", "2", "0.10", "22%", "50.00", "4"],
        ["3", "0.20", "1", "0.07", "35%", "0.00", "3"],
    ]


def test_it_prints_no_more_lanes_than_one_can_read(tmp_path: Path) -> None:
    steps = [f"{i},1.{i:03d}000,decode,,1,0,1,0,1,1,1,0,20,0,{i % 30},1,1.000,1.000" for i in range(1, 100)]
    lines = run(written(tmp_path / "steps.csv", steps)).stdout.splitlines()
    assert len(lines) == 23
    assert lines[-3] == "and 14 lanes with fewer steps"


def test_output_and_width_are_the_caller_s(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "other.png"
    target.write_text("what stood there")
    result = run(file, "--output", target, "--width", "800", "--by-time")
    assert result.stdout.splitlines()[-1] == str(target)
    with Image.open(target) as image:
        assert image.size == (800, 500)


def test_it_never_draws_over_what_it_reads(tmp_path: Path) -> None:
    file = written(tmp_path / "steps.png")
    before = file.read_text()
    result = run(file)
    assert (result.exit_code, "is the file of steps itself" in result.stderr) == (2, True)
    assert file.read_text() == before


@pytest.mark.parametrize("cut", ["", "7,4.6", "7,4.600000,decode,,1,0,1,0,1,1,1,0,20,1,2,3,10.000,4"])
def test_a_file_that_is_still_written_is_read_up_to_its_last_whole_line(tmp_path: Path, cut: str) -> None:
    file = written(tmp_path / "steps.csv", [*LINES, cut], end="")
    log = read_steps(file)
    assert (log.num_steps, log.left_out) == (6, 1 if cut else 0)
    result = run(file)
    assert result.exit_code == 0
    assert ("cut short" in result.stdout) == bool(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (HEADER + "\n", "has no step yet"),
        (HEADER + "\n" + LINES[0] + "\n", "has no step yet"),
        (HEADER, "has no step yet"),
        ("a,b,c\n1,2,3\n", "line 1: there is no column step"),
        (HEADER.replace("waiting", "wating") + "\n", "line 1: there is no column waiting"),
        (f"{HEADER}\n{LINES[1]}\n1,2,3\n", "line 3: it has 3 columns, the header 18"),
        (f"{HEADER}\n{LINES[1]}\n\n{LINES[2]}\n", "line 3: it has 1 columns, the header 18"),
        (f"{HEADER}\n{LINES[1].replace('prefill', 'refill')}\n", "line 2, column kind: 'refill' is none of prefill"),
        (f"{HEADER}\n{LINES[1].replace('80.000', 'x')}\n", "line 2, column ms: 'x' is no number"),
        (f"{HEADER}\n{LINES[1].replace('80.000', 'nan')}\n", "line 2, column ms: 'nan' is not within 0 to 1e+15"),
        (f"{HEADER}\n{LINES[1].replace('80.000', '-1')}\n", "line 2, column ms: '-1' is not within"),
        (f"{HEADER}\n{LINES[1].replace('80.000', '1e300')}\n", "line 2, column ms: '1e300' is not within"),
        (f"{HEADER}\n{LINES[1].replace('1,1.100000', '9e14,9e14')}\n", "line 2: its numbers are too large together"),
        ("\x89PNG\r\n\x1a\n\0\0", "line 1: there is no column step"),
        ("x" * 100_000, "line 1: there is no column step"),
        (f"{HEADER}\n{'1,' * 100_000}\n", "line 2: it has "),
    ],
)
def test_another_file_is_refused_with_line_and_column(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "steps.csv"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(StepsFileError):
        read_steps(file)
    result = run(file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {file}")
    assert message in result.stderr
    assert len(result.stderr) < 400
    assert not file.with_suffix(".png").exists()


def test_files_that_are_not_there_are_named(tmp_path: Path, file: Path) -> None:
    missing = run(tmp_path / "none.csv")
    assert (missing.exit_code, missing.stderr) == (1, f"error: {tmp_path / 'none.csv'}: No such file or directory\n")
    target = tmp_path / "no folder" / "a.png"
    nowhere = run(file, "-o", target)
    assert (nowhere.exit_code, nowhere.stderr) == (1, f"error: {target}: No such file or directory\n")


@pytest.mark.parametrize("name", [".", "/", "x" * 300])
def test_paths_that_are_no_files_are_refused_in_a_line(name: str) -> None:
    result = run(name)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: {name}")


def test_a_disk_that_is_full_is_told_with_the_picture_s_path(file: Path) -> None:
    full = run(file, "-o", "/dev/full")
    assert (full.exit_code, full.stderr) == (1, "error: /dev/full: No space left on device\n")


def test_names_and_causes_are_shown_as_they_are(tmp_path: Path) -> None:
    lines = [LINES[1], LINES[4].replace("worker lost", "$x_{$" + "w" * 500)]
    drawn = figure(written(tmp_path / "a$x_{$b.csv", lines))
    assert "a$x_{$b.csv" in drawn.get_suptitle()
    [words] = [text.get_text() for text in panels(drawn)[0].texts]
    assert words == "$x_{$" + "w" * 35


def test_columns_of_a_later_service_do_not_matter(tmp_path: Path) -> None:
    file = written(tmp_path / "steps.csv", [f"new,{line}" for line in LINES], header=f"later,{HEADER}")
    assert "\n".join(table(summarize(read_steps(file)))) == "\n".join(
        table(summarize(read_steps(written(tmp_path / "old.csv"))))
    )


BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
sys.meta_path.insert(0, Blocked())
sys.argv = ["tandem", "plot", sys.argv[1]]
from tandem_client.cli.__main__ import main
main()
"""


def test_without_matplotlib_it_says_what_to_install(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK, str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client"), str(ROOT / ".stubs")])},
        check=False,
    )
    line = "error: tandem plot needs matplotlib, which is not installed: make install\n"
    assert (done.returncode, done.stderr) == (1, line)


@pytest.mark.parametrize(("known", "name"), [("1.2.3", "1.2.3-py3-none-any"), ("unknown", "…")])
def test_outside_a_checkout_the_wheel_s_file_is_named(monkeypatch: pytest.MonkeyPatch, known: str, name: str) -> None:
    """Never a name on the package index: what it has under a similar name is not ours."""
    monkeypatch.setattr(plot, "missing_programs", lambda modules: list(modules))
    monkeypatch.setattr(plot, "version", lambda: known)
    assert plot._install() == f"pip install 'dist/tandem_inference-{name}.whl[plot]'"


def test_other_commands_never_load_matplotlib() -> None:
    probe = "import sys, tandem_client.cli.__main__; print('matplotlib' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client"), str(ROOT / ".stubs")])},
        check=True,
    )
    assert done.stdout == "False False\n"
